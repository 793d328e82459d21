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
    const own = `#curves g[id^="run${box.dataset.run}."], #curves [data-of-run="${box.dataset.run}"]`;
    for (const curve of $$(own)) curve.classList.toggle("off", !box.checked);
  });
}

const digits = (x) => (x === null || x === undefined ? "none" : String(Number(x.toPrecision(4))));
const nearest = (steps, step) => {
  let best = 0;
  for (let i = 1; i < steps.length; i++) if (Math.abs(steps[i] - step) < Math.abs(steps[best] - step)) best = i;
  return best;
};

// A chart says its numbers where one points, and as a slider that the arrow keys move.
function readable(chart) {
  const plot = $(".plot", chart), [left, right, from, to] = JSON.parse(chart.dataset.span);
  const items = $$("[data-curve]", chart);
  const curves = items.map((item) => JSON.parse(item.dataset.curve));
  const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  const [name, ...ends] = plot.getAttribute("aria-label").split(".\n");
  const mark = made("span", { class: "mark", hidden: "" });
  const at = $(".at", chart);
  let place = steps.length - 1;
  plot.append(mark);

  function show(i) {
    place = Math.max(0, Math.min(steps.length - 1, i));
    const said = curves.map((curve, k) => {
      const j = nearest(curve.steps, steps[place]);
      const mean = curve.smooth.length ? ` (smoothed ${digits(curve.smooth[j])})` : "";
      const where = curve.steps[j] === steps[place] ? "" : ` at ${digits(curve.steps[j])}`;
      $("b", items[k]).textContent = digits(curve.values[j]) + mean + where;
      return items[k].classList.contains("off") ? "" : items[k].textContent.trim().replace(/\s+/g, " ");
    });
    const share = left + ((right - left) * (steps[place] - from)) / (to - from);
    mark.style.left = `${100 * share}%`;
    mark.hidden = false;
    at.textContent = `at step ${digits(steps[place])}`;
    plot.setAttribute("aria-valuenow", steps[place]);
    plot.setAttribute("aria-valuetext", [`step ${digits(steps[place])}`, ...said].filter(Boolean).join(", "));
  }

  const own = { role: "slider", tabindex: 0, "aria-label": name, "aria-description": ends.join("; "),
    "aria-valuetext": "arrow keys read the numbers",
    "aria-valuemin": steps[0], "aria-valuemax": steps.at(-1), "aria-valuenow": steps.at(-1) };
  for (const [key, value] of Object.entries(own)) plot.setAttribute(key, value);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width - left) / (right - left);
    show(nearest(steps, from + share * (to - from)));
  });
  plot.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(steps.length / 10));
    const move = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: far, PageDown: -far };
    const next = { Home: 0, End: steps.length - 1 }[event.key] ?? place + move[event.key];
    if (Number.isNaN(next)) return;
    event.preventDefault();
    show(next);
  });
}
// Each when it comes into sight: a page of a hundred charts opens at once.
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((one) => one.isIntersecting)) {
    seen.unobserve(entry.target);
    readable(entry.target);
  }
}, { rootMargin: "600px" });
for (const chart of $$(".chart")) seen.observe(chart);

// ---- Samples ----
const FIRST = 30, FURTHER = 100; // rows of a table: a phone has no use for 400 at once
function searchable(block) {
  const table = $("table", block), field = $("[type=search]", block), more = $(".more", block);
  const all = $$("tbody tr", table);
  let most = FIRST;

  function show() {
    const words = field.value.toLowerCase();
    const hits = $$("tbody tr", table).filter((row) => row.textContent.toLowerCase().includes(words));
    const shown = new Set(hits.slice(0, most));
    for (const row of all) row.hidden = !shown.has(row);
    const found = hits.length ? `${shown.size} of ${hits.length} shown` : "no row has these words";
    $("[role=status]", block).textContent = hits.length || words ? found : "";
    more.hidden = shown.size === hits.length;
    more.textContent = `more: ${Math.min(FURTHER, hits.length - shown.size)} of ${hits.length - shown.size}`;
  }

  function sortBy(head) {
    const isNumber = head.classList.contains("number"), before = head.getAttribute("aria-sort");
    const down = before ? before === "ascending" : isNumber; // numbers begin with the largest
    for (const other of $$("th", table)) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.children[head.cellIndex];
      return isNumber ? cell.dataset.value : cell.textContent.trim();
    };
    const blank = (row) => key(row) === undefined || key(row) === "";
    const compare = (a, b) => {
      if (blank(a) || blank(b)) return blank(a) - blank(b); // at the end, in both directions
      const order = isNumber ? key(a) - key(b) : key(a).localeCompare(key(b));
      return down ? -order : order;
    };
    $("tbody", table).append(...all.sort(compare));
    show();
  }

  field.addEventListener("input", () => {
    most = FIRST;
    show();
  });
  more.addEventListener("click", () => {
    const next = $$("tbody tr:not([hidden])", table).length;
    most += FURTHER;
    show();
    const row = $$("tbody tr", table).filter((one) => !one.hidden)[next];
    row?.setAttribute("tabindex", -1);
    row?.focus({ preventScroll: true }); // the keyboard goes on with the first new row
  });
  for (const button of $$("[data-sort]", table)) button.addEventListener("click", () => sortBy(button.closest("th")));
  show();
}
$$(".searched").forEach(searchable);

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

const MEASURES = { // title, and what its colours say; in this order they are offered
  advantage: ["advantage", "Was this token better (orange) or worse (blue) than expected? What the update makes more likely, or less; before whitening."],
  kl_k3: ["KL", "How far from the reference's is the probability of this token? k3, never < 0"],
  reward: ["reward", "What a token earns: the score on the last one, less kl_coef times KL on each."],
  value: ["value", "The critic's guess, before this token, of the reward still to come."],
  return: ["return", "What the critic is to learn: advantage plus value."],
  entropy: ["entropy", "How many ways to go on were open here, in nats."],
  kl: ["log-prob ratio", "log-prob minus the reference's: orange is likelier than before training. k1, the KL that the reward pays for by default."],
};

function choice(name, texts, change) {
  const select = made("select", { "data-choice": name });
  texts.forEach((text, i) => select.append(made("option", { value: i }, text)));
  select.addEventListener("change", change);
  const label = made("label", {}, name + " ", select);
  label.hidden = texts.length < 2;
  return [select, label];
}

// For each token of one text the place of the same token in another, along their longest common
// part; a hole where there is none.
function aligned(one, other) {
  const width = other.length + 1, longest = new Uint16Array((one.length + 1) * width);
  for (let i = one.length - 1; i >= 0; i--) {
    for (let j = other.length - 1; j >= 0; j--) {
      const [down, right] = [longest[(i + 1) * width + j], longest[i * width + j + 1]];
      longest[i * width + j] = one[i] === other[j] ? longest[(i + 1) * width + j + 1] + 1 : Math.max(down, right);
    }
  }
  const partners = Array.from(one, () => undefined);
  for (let i = 0, j = 0; i < one.length && j < other.length; ) {
    if (one[i] === other[j]) partners[i++] = j++;
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++;
    else j++;
  }
  return partners;
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
  const ends = data.runs.flatMap((one) => {
    const own = one.lines.map((line) => line.step);
    return [...new Set([own[0], own.at(-1)])].map((step) => ({ name: `${one.name}, step ${step}`, lines: one.lines, step }));
  });
  const [beside, besideLabel] = choice("beside it", ["nothing", ...ends.map((end) => end.name)], draw);
  if (data.runs.length > 1) beside.value = ends.findLastIndex((end) => end.lines === data.runs[1].lines) + 1;
  const scaleLabel = made("span", {}, least, " ", scale, " ", most);
  const choices = made("div", { class: "choices" }, runLabel, stepLabel, besideLabel, measureLabel, scaleLabel);
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
    const held = Object.keys(MEASURES).filter((name) => run.lines.some((l) => l.tokens[name]));
    measures.replaceChildren(...held.map((name) => made("option", { value: name }, MEASURES[name][0])));
    // of two responses side by side it is first shown which tokens have become likelier
    const compares = groupsOf(run.lines.filter((line) => line.step === all.at(-1))).some((b) => b[1]);
    const first = kept ?? (data.runs.length > 1 ? "reward" : compares ? "kl" : held[0]);
    if (held.includes(first)) measures.value = first;
    measureLabel.hidden = false;
    draw();
  }

  function draw() {
    measure = measures.value;
    const step = Number(steps.selectedOptions[0].textContent);
    lines = run.lines.filter((line) => line.step === step).map(paired);
    const compared = Number(beside.value) > 0;
    const numbers = compared ? lines.flatMap((line) => line.moved) : run.lines.flatMap((line) => line.tokens[measure] || []);
    const sizes = numbers.filter((x) => x !== null).map((x) => Math.abs(x));
    sizes.sort((a, b) => a - b); // the colours end at the 98th of 100: one token does not pale all
    top = sizes[Math.floor(0.98 * (sizes.length - 1))] || 1;
    const negative = numbers.some((x) => x < 0);
    least.textContent = negative ? digits(-top) : "0";
    most.textContent = digits(top);
    const eighths = Array.from({ length: 9 }, (_, i) => (negative ? i / 4 - 1 : i / 8) * top);
    const colours = eighths.map(colour).join(", ");
    scale.style.background = `linear-gradient(to right, ${colours})`;
    about.textContent = MEASURES[measure][1] + (measure === "advantage" ? ` (${run.about})` : "");
    if (compared) about.textContent += " Colours: this run minus the other, where both have the same token. Dashed: the other has none.";
    const blocks = groupsOf(lines);
    const shown = blocks.map((block) => made("div", { class: "sides" }, ...block.map(answer)));
    answers.replaceChildren(...shown);
    show(blocks[0][0], 0);
  }

  // A line with the other model's response to its prompt, and how far each token's number moved.
  function paired(line) {
    const end = ends[beside.value - 1];
    const alike = (one) => one.step === end.step && one.prompt === line.prompt && one.sample === line.sample;
    const other = end?.lines.find(alike);
    if (!other) return { ...line, partners: [], moved: [] };
    const partners = aligned(line.tokens.text, other.tokens.text);
    const moved = partners.map((j, i) => {
      const [here, there] = [line.tokens[measure]?.[i], other.tokens[measure]?.[j]];
      return here === undefined || there === undefined || here === null || there === null ? null : here - there;
    });
    return { ...line, other, partners, moved };
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
      const x = line.other ? line.moved[i] : line.tokens[measure]?.[i];
      if (x !== null && x !== undefined) token.style.backgroundColor = colour(x);
      token.classList.toggle("alone", Boolean(line.other) && line.partners[i] === undefined);
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
    const parts = [prompt, list, made("p", { class: "scores" }, words.join(" · "))];
    if (line.other) parts.push(...besides(line));
    return made("div", { class: "answer" }, ...parts);
  }

  // The other model's response, and which token's number moved most.
  function besides(line) {
    const sizes = line.moved.map((x) => Math.abs(x ?? 0)), i = sizes.indexOf(Math.max(...sizes));
    const [name, other] = [MEASURES[measure][0], ends[beside.value - 1].name];
    let words = `${name}: no token that both have moved`;
    if (sizes[i]) {
      const [there, here] = [line.other.tokens[measure][line.partners[i]], line.tokens[measure][i]];
      words = `${name} moved most at token ${i + 1}, ${JSON.stringify(line.tokens.text[i])}: `;
      words += `here ${digits(here)}, the other ${digits(there)}`;
    }
    const text = made("p", { class: "other text", dir: "auto" }, `${other}: ${line.other.tokens.text.join("")}`);
    return [text, made("p", { class: "scores" }, words)];
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
    for (const [name, title] of Object.entries(NAMES).filter(([name]) => line.tokens[name])) {
      const cells = [made("td", { class: "number", "data-number": name }, digits(line.tokens[name][i]))];
      const there = line.other?.tokens[name]?.[line.partners[i]];
      if (line.other) cells.push(made("td", { class: "number" }, there === undefined ? "" : digits(there)));
      table.append(made("tr", { class: name === measure ? "on" : null }, made("th", { scope: "row" }, title), ...cells));
    }
    if (line.other) table.prepend(made("tr", {}, made("td"), ...["here", "other"].map((x) => made("th", { scope: "col" }, x))));
    const text = JSON.stringify(line.tokens.text[i]);
    const head = made("p", {}, `token ${i + 1} of ${line.tokens.text.length}: ${text}`);
    const penalty = line.kl_coef ? `−${digits(line.kl_coef)} × KL, + ` : "";
    const rule = line.kl_coef === undefined ? "" : `reward = ${penalty}the score at the end`;
    lens.replaceChildren(head, table, made("p", { class: "scores" }, rule));
  }

  openRun();
}
if (data) magnify($("#microscope"));
