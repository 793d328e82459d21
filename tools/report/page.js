"use strict";
const $$ = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const $ = (selector, inside = document) => inside.querySelector(selector);

function made(kind, attributes = {}, ...children) {
  const element = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children); // texts become text, never HTML
  return element;
}

// ---- One prompt ----
$("#asked")?.addEventListener("change", (event) => {
  for (const block of $$("[data-asked]")) block.hidden = block.dataset.asked !== event.target.value;
});

// ---- Curves ----
for (const box of $$("[data-run]")) {
  box.addEventListener("change", () => {
    const curves = $$(`#curves g[id^="run${box.dataset.run}."]`);
    for (const curve of curves) curve.classList.toggle("off", !box.checked);
  });
}

// ---- Samples ----
const rows = $("#rows");
function search() {
  const words = $("#search").value.toLowerCase();
  const all = $$("tbody tr", rows);
  for (const row of all) row.hidden = !row.textContent.toLowerCase().includes(words);
  $("#found").textContent = `${all.filter((row) => !row.hidden).length} of ${all.length}`;
}
function sortBy(place, head) {
  const down = head.getAttribute("aria-sort") !== "descending";
  for (const other of $$("th", rows)) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const isNumber = head.classList.contains("number");
  const key = (row) => {
    const cell = row.children[place];
    return isNumber ? Number(cell.dataset.value ?? -Infinity) : cell.textContent;
  };
  const compare = (a, b) => (isNumber ? key(a) - key(b) : key(a).localeCompare(key(b)));
  const sorted = $$("tbody tr", rows).sort((a, b) => (down ? -1 : 1) * compare(a, b));
  $("tbody", rows).append(...sorted);
}
if (rows) {
  $("#search").addEventListener("input", search);
  for (const button of $$("[data-sort]")) {
    button.addEventListener("click", () => sortBy(Number(button.dataset.sort), button.closest("th")));
  }
  search();
}

// ---- Tokens ----
const data = JSON.parse($("#data").textContent);
const NAMES = {
  logprob: "log-prob", ref_logprob: "reference log-prob", kl: "log-prob ratio (k1)", kl_k3: "KL (k3)",
  entropy: "entropy", reward: "reward", value: "value", return: "return", advantage: "advantage",
};
// The lines of an evaluation, in blocks: of the responses to one prompt the best and the worst.
function groupsOf(lines) {
  const groups = new Map();
  for (const line of lines) groups.set(line.prompt, [...(groups.get(line.prompt) ?? []), line]);
  return [...groups.values()].flatMap((group) => {
    const order = [...group].sort((a, b) => (b.reward ?? 0) - (a.reward ?? 0));
    const [best, worst] = [order[0], order.at(-1)];
    if (!(best.reward > worst.reward)) return group.map((line) => [line]); // none is the best
    return [[{ ...best, side: "best of its group" }, { ...worst, side: "worst of its group" }]];
  });
}
const digits = (x) => (x === null || x === undefined ? "none" : String(Number(x.toPrecision(4))));

function choice(name, texts, change) {
  const select = made("select", { "data-choice": name });
  texts.forEach((text, i) => select.append(made("option", { value: i }, text)));
  select.addEventListener("change", change);
  const label = made("label", {}, name + " ", select);
  label.hidden = texts.length < 2;
  return [select, label];
}

function magnify(box) {
  const lens = made("div", { class: "lens", role: "status" }, "Point at a token.");
  const answers = made("div", { id: "answers" });
  const about = made("p", { class: "about" });
  const least = made("span"), most = made("span"), scale = made("span", { class: "scale" });
  let run, lines, measure, top;

  const [runs, runLabel] = choice("run", data.runs.map((one) => one.name), openRun);
  let [steps, stepLabel] = [null, made("span")];
  const [measures, measureLabel] = choice("colour", [], draw);
  const scaleLabel = made("span", {}, least, " ", scale, " ", most);
  const choices = made("div", { class: "choices" }, runLabel, stepLabel, measureLabel, scaleLabel);
  box.replaceChildren(choices, about, made("div", { class: "magnified" }, answers, lens));

  function openRun() {
    run = data.runs[runs.value || 0];
    const all = [...new Set(run.lines.map((line) => line.step))];
    const [select, label] = choice("evaluation at step", all.map(String), draw);
    steps = select;
    steps.value = all.length - 1;
    label.hidden = false;
    stepLabel.replaceWith(label);
    stepLabel = label;
    const kept = measures.selectedOptions[0]?.value;
    const held = Object.keys(data.measures).filter((name) => run.lines.some((l) => l.tokens[name]));
    measures.replaceChildren(...held.map((name) => made("option", { value: name }, data.measures[name][0])));
    // of two responses side by side it is first shown which tokens have become likelier
    const compares = groupsOf(run.lines.filter((line) => line.step === all.at(-1))).some((b) => b[1]);
    const first = kept ?? (compares ? "kl" : held[0]);
    if (held.includes(first)) measures.value = first;
    measureLabel.hidden = false;
    draw();
  }

  function draw() {
    measure = measures.value;
    const step = Number(steps.selectedOptions[0].textContent);
    lines = run.lines.filter((line) => line.step === step);
    const sizes = run.lines.flatMap((line) => line.tokens[measure] || []).map((x) => Math.abs(x));
    sizes.sort((a, b) => a - b); // the colours end at the 98th of 100: one token does not pale all
    top = sizes[Math.floor(0.98 * (sizes.length - 1))] || 1;
    const negative = run.lines.some((line) => (line.tokens[measure] || []).some((x) => x < 0));
    least.textContent = negative ? digits(-top) : "0";
    most.textContent = digits(top);
    const eighths = Array.from({ length: 9 }, (_, i) => (negative ? i / 4 - 1 : i / 8) * top);
    const colours = eighths.map(colour).join(", ");
    scale.style.background = `linear-gradient(to right, ${colours})`;
    about.textContent = data.measures[measure][1] + (measure === "advantage" ? ` (${run.about})` : "");
    const blocks = groupsOf(lines);
    const shown = blocks.map((block) => made("div", { class: "sides" }, ...block.map(answer)));
    answers.replaceChildren(...shown);
    show(blocks[0][0], 0);
  }

  function colour(x) {
    const strength = Math.sqrt(Math.min(Math.abs(x) / top, 1)) * 0.85; // small ones are seen, too
    return `rgba(var(--${x < 0 ? "minus" : "plus"}), ${strength.toFixed(3)})`;
  }

  function answer(line) {
    const list = made("div", { class: "tokens", role: "group", "aria-label": "tokens of the response" });
    line.tokens.text.forEach((text, i) => {
      const token = made("button", { type: "button", class: "token", tabindex: i ? -1 : 0 });
      token.textContent = text.replaceAll("\n", "↵") || "∅";
      const x = line.tokens[measure]?.[i];
      if (x !== null && x !== undefined) token.style.backgroundColor = colour(x);
      token.addEventListener("mouseenter", () => show(line, i));
      token.addEventListener("focus", () => show(line, i));
      list.append(token);
    });
    list.addEventListener("keydown", walk);
    const scores = ["reward", "gold", "kl"].filter((name) => line[name] !== undefined);
    const words = scores.map((name) => `${{ reward: "score", gold: "gold", kl: "KL" }[name]} ${digits(line[name])}`);
    if (line.ended === 0) words.push("cut off: no EOS");
    if (line.side) words.unshift(line.side);
    const prompt = made("p", { class: "prompt text", dir: "auto" }, line.prompt);
    return made("div", { class: "answer" }, prompt, list, made("p", { class: "scores" }, words.join(" · ")));
  }

  function walk(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const all = [...event.currentTarget.children];
    const place = all.indexOf(event.target) + steps[event.key];
    const next = all[Math.max(0, Math.min(all.length - 1, place))];
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  function show(line, i) {
    const table = made("table");
    for (const [name, title] of Object.entries(NAMES)) {
      const values = line.tokens[name];
      const cell = made("td", { class: "number", "data-number": name }, values ? digits(values[i]) : "none");
      table.append(made("tr", { class: name === measure ? "on" : null }, made("th", { scope: "row" }, title), cell));
    }
    const text = JSON.stringify(line.tokens.text[i]);
    const head = made("p", {}, `token ${i + 1} of ${line.tokens.text.length}: ${text}`);
    const rule = line.kl_coef === undefined ? "" : `reward = −${digits(line.kl_coef)} × KL (+ the score, at the end)`;
    lens.replaceChildren(head, table, made("p", { class: "scores" }, rule));
  }

  openRun();
}
if (data) magnify($("#microscope"));
