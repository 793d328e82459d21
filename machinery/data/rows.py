"""Makes the rows of a stage: its share of the data, tokenised and cut; train and held-out."""

import hashlib
import json
import zlib
from collections import Counter

import datasets
import numpy as np
from jinja2 import TemplateError

from machinery.base import ranks, refused
from machinery.data import formats, row_cache, sources, tokens
from machinery.data.data_split import STAGES, default, share_of
from machinery.data.tokens import UncheckedTurns, tokenise_prompt, tokenise_response, tokenise_turns

TEXTS = {"sft": ["response"], "reward": ["chosen", "rejected"], "ppo": []}  # of an Example
PAIRS = [{"chosen", "rejected"}, formats.WEBGPT, formats.SHP]
NEEDS = {  # columns of which a stage can make its rows
    "sft": [
        *({"prompt", "response"}, {"prompt", "completion"}, {"messages"}, {"conversations"}),
        *({"instruction", "output"}, {"chosen"}, formats.WEBGPT, formats.SHP),
    ],
    "reward": PAIRS,
    "ppo": [{"prompt"}, {"messages"}, {"conversations"}, {"instruction"}, *PAIRS],
}
NO_TEMPLATE = """the data holds chats, and the tokenizer has no chat template.
  Use a chat model's tokenizer, or text (prompt, response, chosen, rejected)."""
UNCHECKED = """--train_on all: the chat template writes a turn in another way when it is opened, or
  has messages after it. So the assistant's tokens cannot be told from the others.
  Use --train_on last (the response alone) or everything."""


# ---- One row ----
def cut(prompt_ids, prompt_loss_mask, responses, limit):
    """Cuts a prompt, with its mask, and each of its responses to `limit` tokens together.

    A long prompt keeps its end, half of `limit` or more. Then a long response is cut, and so loses
    its EOS. The room is that of the longest response: the two of a pair keep the same prompt.
    """
    room = max(limit // 2, limit - max(map(len, responses), default=0))
    start = max(0, len(prompt_ids) - room)
    left = limit - len(prompt_ids[start:])
    return prompt_ids[start:], prompt_loss_mask[start:], [ids[:left] for ids in responses]


def read_row(row, stage):
    """Returns the prompt of a stage, the responses, and the Example. Raises formats.BadRow."""
    example = formats.read_row(row)
    texts = [formats.check_text(name, getattr(example, name)) for name in TEXTS[stage]]
    prompt = example.question if stage == "ppo" and example.question else example.prompt
    return prompt, texts, example


def tokenise_row(row, tokenizer, stage, limit, train_on=None, columns=(), names=None, graded=False):
    """Returns a row of `load_rows`, and its `drop`: "" or the reason to leave the row out.

    columns: the names of those that the source has, for rows that leave some out. names: --columns.
    graded: also for sft the other columns are kept, for --gold_fn.
    """
    row = sources.parse(row)
    prompt, texts, example = read_row(sources.rename(row, names), stage)
    made = {"prompt": formats.as_text(prompt), "chat": isinstance(prompt, list), "prompt_ids": []}
    made.update(prompt_loss_mask=[], responses=[], length=0, extra="", drop="")
    if stage == "ppo" or graded:
        others = {**dict.fromkeys(columns), **row}
        others.pop("prompt", None)
        made["extra"] = json.dumps(others, default=str)
    if made["chat"] and tokenizer.chat_template is None:
        return {**made, "drop": NO_TEMPLATE}
    written = texts if made["chat"] else [prompt, *texts]
    if not prompt or not all(isinstance(text, str) and text.strip() for text in written):
        return {**made, "drop": "empty prompt or response"}
    train_on = train_on or ("all" if example.every_turn else "last")
    try:
        if stage == "sft" and train_on == "all":
            ids, mask, *responses = tokenise_turns(tokenizer, prompt, *texts)
        else:
            ids = tokenise_prompt(tokenizer, prompt)
            mask = [int(train_on == "everything")] * len(ids)
            responses = [tokenise_response(tokenizer, text) for text in texts]
    except TemplateError as error:  # "roles must alternate", "no system role"
        return {**made, "drop": f"the chat template refuses it: {error}"}
    except UncheckedTurns:
        return {**made, "drop": UNCHECKED}
    ids, mask, responses = cut(ids, mask, responses, limit)
    if stage == "reward" and responses[0] == responses[1]:
        once_cut = "" if example.chosen == example.rejected else " once cut"
        return {**made, "drop": f"chosen equals rejected{once_cut}"}
    length = len(ids) + sum(map(len, responses))
    made.update(prompt_ids=ids, prompt_loss_mask=mask, responses=responses, length=length)
    return made


# ---- Rows ----
def load_rows(args, tokenizer, stage, limit):
    """Returns the train and held-out datasets of a stage: "sft", "reward" or "ppo".

    prompt            text; chat messages as JSON where `chat` is true
    prompt_ids        its tokens; with a response at most `limit`
    prompt_loss_mask  1 on the prompt's tokens that the loss of sft covers (--train_on)
    responses         lists of ids: the response; chosen and rejected; none for ppo
    length, extra     tokens of all of them; for ppo (or --gold_fn) the row's other columns, as JSON

    Where they hold chats, the tokenizer's EOS becomes the end of turn (tokens.end_as_in_chats).
    Each stage takes its own share of every source's rows (--data_split, which is decided here where
    it is None). Held out is the source's own test split, or a twentieth of the prompts, by hash.
    Neither depends on --seed: stages with different seeds must not share rows.
    """
    parts, shares = {"train": [], "test": []}, []
    trained_on = set()  # the prompts that any stage trains on, in any source
    for path in args.data_path:
        source, columns = sources.read_source(path)
        names = sources.names_in(args, path, columns)
        known = sources.rename(dict.fromkeys(columns), names)
        if args.data_split is None:
            args.data_split = default(args, stage, all(serves(known, each) for each in STAGES))
        split, reader = args.data_split, stage
        if path in sources.SFT_ONLY:
            split, reader = (1, 0, 0), "sft"
        check_columns(path, known, reader)
        prompts = {name: read_prompts(path, name, source[name], reader, names) for name in source}
        source, prompts = hold_out(source, prompts["train"])
        trained_on.update(*prompts)
        source["train"] = share_of(source["train"], split, stage)
        if not len(source["train"]):
            ranks.say(f"{path}: no rows for this step")
            continue
        options = {"tokenizer": tokenizer, "stage": stage, "limit": limit, "columns": columns}
        options |= {"train_on": vars(args).get("train_on"), "names": names}
        options["graded"] = bool(vars(args).get("gold_fn"))
        shares.append((source, options, path))
    if any(holds_chats(*share, stage) for share in shares):
        tokens.end_as_in_chats(tokenizer)
    for source, options, path in shares:
        for name, kept in parts.items():
            if rows := tokenise_rows(args, source[name], options, path, name):
                kept.append(rows)
    for name, kept in parts.items():
        if not kept:
            advice = "Add data, or give this stage a larger share in --data_split."
            refused.fail(f"no {name} rows are left of {', '.join(args.data_path)}.\n  {advice}")
    train, test = map(datasets.concatenate_datasets, parts.values())
    return train, drop_known_prompts(args, test, trained_on)


def holds_chats(source, options, path, stage):
    """Returns whether the first prompt of a source is a list of chat messages."""
    row = sources.parse(source["train"][0])
    return isinstance(read_row(sources.rename(row, options["names"]), stage)[0], list)


def serves(columns, stage):
    """Returns whether the stage can make rows of these columns."""
    return any(need <= set(columns) for need in NEEDS[stage])


def check_columns(path, columns, stage, flag="--data_path"):
    """Ends with an error if the stage cannot make rows of these columns."""
    if not serves(columns, stage):
        found = ", ".join(columns) or "(none: it is empty)"
        needs = "; or ".join(" + ".join(sorted(need)) for need in NEEDS[stage])
        known = f"Known formats:{formats.KNOWN_FORMATS}"
        needs = f"This stage needs {needs}. {known}"
        refused.fail(f"{flag} {path} has the columns {found}.\n  {needs}")


def read_prompts(path, name, rows, stage, names):
    """Returns of each row of a part the prompts of SFT and of step 3, as text.

    Ends with an error at the first row that the stage cannot read, and names its place.
    """
    prompts = []
    for number, row in enumerate(rows, 1):
        try:
            example = read_row(sources.rename(sources.parse(row), names), stage)[-1]
        except formats.BadRow as error:
            refuse(row, f"{path}, {name}, row {number}", error)
        prompt = formats.as_text(example.prompt)
        prompts.append((prompt, formats.as_text(example.question) if example.question else prompt))
    return prompts


def refuse(row, place, error):
    """Ends the program because of a row that cannot be read: at `place`, if it does not say so."""
    refused.fail(f"{row.get(sources.PLACE) or place}: {error}.\n  Mend the row, or take it out.")


def hold_out(source, prompts):
    """Returns {"train": rows, "test": rows}, and the prompts of the first.

    prompts: of its rows, from `read_prompts`. All stages hold out the same rows: by SFT's prompts.
    """
    if "test" in source:
        return source, prompts
    rows, keys = source["train"], [key for key, _ in prompts]
    by_hash = sorted(set(keys), key=lambda key: (zlib.crc32(key.encode()), key))
    chosen = set(by_hash[: max(1, len(by_hash) // 20)])
    held_out = np.array([key in chosen for key in keys], bool)
    train, test = rows.select(np.flatnonzero(~held_out)), rows.select(np.flatnonzero(held_out))
    return {"train": train, "test": test}, [pair for pair in prompts if pair[0] not in chosen]


def tokenise_rows(args, rows, options, path, name):
    """Returns the tokenised rows of part `name` of a source; [] if all are dropped.

    options: the arguments of `tokenise_row`.
    """
    if row_cache.pays(rows, options["tokenizer"]):
        content, title = digest_of(rows), f"{path}, {name}"
        made = row_cache.map_once(rows, tokenise_row, options, content, title)
    else:
        shape = {"remove_columns": rows.column_names, "keep_in_memory": True}
        made = rows.map(tokenise_row, fn_kwargs=options, **shape)
    reasons = list(made["drop"]) if len(made) else []  # "" for a row that is kept
    for why in (NO_TEMPLATE, UNCHECKED):
        if why in reasons:
            refused.fail(why)
    for why, count in Counter(filter(None, reasons)).items():
        of_all = f"{count} of {len(made)} rows"
        ranks.say(f"{path}, {name}: dropped {of_all}: {why}")
    kept = [i for i, why in enumerate(reasons) if not why]
    return made.select(kept).remove_columns("drop") if kept else []


def fingerprint(rows):
    """Returns a digest of the rows of `load_rows`, wherever they were read from.

    Of prompts it takes the text, not the tokens: a chat template may write today's date there.
    """
    left_out = {"prompt_ids", "prompt_loss_mask", "length"}
    if len(rows) and rows[0].get("responses"):
        left_out.add("extra")  # of sft: for --gold_fn, which may change
    return digest_of(rows.remove_columns([n for n in rows.column_names if n in left_out]))


def digest_of(rows):
    """Returns a digest of all values of a dataset."""
    digest = hashlib.blake2b(digest_size=8)
    for batch in rows.with_format("arrow").iter(1000):
        for piece in batch.combine_chunks().to_batches():
            # `take` makes the same buffers of equal values, wherever they were cut from.
            digest.update(piece.take(np.arange(len(piece))).serialize())
    return digest.hexdigest()


def drop_known_prompts(args, test, trained_on):
    """Returns the held-out rows whose prompts no stage trains on; says how many are dropped."""
    fresh = [i for i, prompt in enumerate(test["prompt"]) if prompt not in trained_on]
    if len(fresh) == len(test):
        return test
    count = f"{len(test) - len(fresh)} of {len(test)} rows"
    ranks.say(f"held-out: dropped {count}, whose prompts are also trained on")
    if not fresh:
        refused.fail("every held-out prompt is also trained on: give the data a test split.")
    return test.select(fresh)
