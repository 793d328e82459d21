"""Makes the rows of a stage: its share of the data, tokenised and cut; train and held-out."""

import contextlib
import hashlib
import json
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import tokenizers
import transformers
from datasets.fingerprint import Hasher
from filelock import FileLock

from machinery import formats, ranks, sources, tokens
from machinery.formats import LeftOut
from machinery.refused import Refused

STAGES = ("sft", "reward", "ppo")  # in the order of --data_split
TEXTS = {"sft": ["response"], "reward": ["chosen", "rejected"], "ppo": []}  # of an Example
MANY = 10_000  # rows that take some ten seconds to tokenise: several processes share the work
MOST_HELD_OUT = 2_000  # rows: a share of them is known to 0.02, and an evaluation takes its time
EMPTY = "empty prompt or response, or no response that is learned"


# ---- One row ----
@contextlib.contextmanager
def reading(row, place):
    """Refuses the row, and names its file and line, else `place`, whatever is raised meanwhile."""
    try:
        yield
    except Refused as error:
        error.add_note(f"In {row.get(sources.PLACE) or place}.")
        raise
    except Exception as error:
        why = error if isinstance(error, formats.BadRow) else repr(error)
        words = f"{row.get(sources.PLACE) or place}: {why}.\n  Mend the row, or take it out."
        raise Refused("bad-row", words) from error


def cut(tokenizer, prompt_ids, responses, limit):
    """Returns a prompt and its responses, each cut to `limit` tokens together with the prompt.

    A long prompt keeps its BOS and its end, half of `limit` or more. Then a long response is cut,
    and so loses its EOS. The room is that of the longest response: the two of a pair keep the same
    prompt.
    """
    room = max(limit // 2, limit - max(map(len, responses), default=0))
    kept = tokens.keep_end(tokenizer, prompt_ids, room)
    return kept, [ids[: limit - len(kept)] for ids in responses]


def read_row(row, stage):
    """Returns the prompt of a stage, the responses, and the Example. Raises formats.BadRow."""
    example = formats.read_row(row)
    texts = [getattr(example, name) for name in TEXTS[stage]]
    for name, text in zip(TEXTS[stage], texts):
        formats.check_text(name, formats.content(text))
    prompt = example.question if stage == "ppo" and example.question else example.prompt
    return prompt, texts, example


def tokenise_row(row, tokenizer, stage, limit, train_on=None, columns=(), names=None):
    """Returns a row of `load_rows`, its `notes` and its `drop`.

    notes: what is to be said of the row, with NUL between. drop: "" or the reason to leave it out.
    columns: the names of those that the source has, for rows that leave some out. names: --columns.
    """
    own = sources.parse(row)
    prompt, texts, example = read_row(sources.parse(own, names), stage)
    others = {name: own.get(name) for name in [*columns, *own] if name != "prompt"}
    ids, mask, responses, notes, drop = [], [], [], {}, ""
    with reading(row, f"{own}"[:200]):
        try:
            text, lost = prompt, ""
            tokenizer = tokens.with_options(tokenizer, own.get("chat_template_kwargs"))
            if tokenizer.chat_template:
                prompt, texts = formats.as_chat(prompt, texts)
            bare = isinstance(prompt, str) and all(texts)  # a text learned whole has none
            whole, mask, answers, found = tokenise(
                tokenizer, stage, prompt, texts, example, train_on
            )
            ids, responses = cut(tokenizer, whole, answers, limit)
            if isinstance(prompt, list):
                lost = tokens.unwritten(tokenizer, prompt, texts, bare=found == tokens.BARE)
            notes = {
                "are dialogues as text, and get the chat template": prompt is not text,
                "are plain text, and get no chat template": tokenizer.chat_template and bare,
                found: found,
                f"{tokens.UNWRITTEN}{lost}": lost,
                "lose the beginning of a long prompt": ids != whole,
                "lose the end of a long response": responses != answers,
                "have a column system or tools, which no model sees": (
                    own.get("system") or own.get("tools")
                ),
            }
            if not ids:  # a normaliser, or the template, has left nothing of it
                raise LeftOut(EMPTY)
            if stage == "reward" and responses[0] == responses[1]:
                raise LeftOut("chosen equals rejected, or does once it is cut")
        except LeftOut as why:
            drop, notes = str(why), {f"are dropped: {why}": True}
    return {
        "prompt": formats.as_text(prompt),
        "chat": isinstance(prompt, list),
        "prompt_ids": ids,
        "prompt_loss_mask": mask[len(mask) - len(ids) :],
        "responses": responses,
        "length": len(ids) + sum(map(len, responses)),
        "extra": json.dumps(others, default=str),
        "place": row.get(sources.PLACE, ""),
        "notes": "\0".join(note for note in notes if notes[note]),
        "drop": drop,
    }


def tokenise(tokenizer, stage, prompt, texts, example, asked):
    """Returns the ids of a prompt, their mask, and the ids of its responses; and what was found.

    asked: --train_on, or None. found: CHANGED, BARE (tokens.py) or "". Raises LeftOut; refuses the
    run where `asked` are turns that the chat template changes.
    """
    whole = example.train_on == "everything"  # a prompt to be learned, with an empty response
    train_on = example.train_on if whole else asked or example.train_on
    written = [formats.as_text(prompt or ""), *([] if whole else map(formats.content, texts))]
    if not all(text and text.strip() for text in written):
        raise LeftOut(EMPTY)
    if stage == "sft" and train_on == "all":
        chat = isinstance(prompt, list)
        turns_of = tokens.tokenise_turns if chat else tokens.tokenise_dialogue
        ids, mask, response, found = turns_of(tokenizer, prompt, *texts)
        if found and asked:
            words = "the chat template changes turns when others follow."
            raise Refused("chat-template", f"{words} Use --train_on last.")
        return ids, mask, [response], found
    ids = tokens.tokenise_prompt(tokenizer, prompt)
    mask = [int(train_on == "everything")] * len(ids)
    turns = [tokens.tokenise_turn(tokenizer, prompt, text) for text in texts]
    return ids, mask, [turn for turn, _ in turns], "".join({found for _, found in turns})


# ---- Sources ----
@dataclass
class Source:
    """A file, folder or hub dataset whose rows the stage can read."""

    path: str
    parts: dict  # {"train": Dataset}, and "test" if it has one
    read_as: dict  # how `tokenise_row` is to read its rows
    prompts: dict  # {part: [the prompts of SFT and of step 3, as text, for each row]}
    trained_on: list  # the numbers of the rows of "train" whose prompts are not held out
    is_chat: bool


@dataclass
class Sources:
    """What --data_path names, read and checked, but not yet tokenised."""

    stage: str
    each: list
    hold_chats: bool  # the tokenizer then ends responses as its chat template ends a turn


def open_sources(args, stage):
    """Returns the Sources of a stage: "sft", "reward" or "ppo".

    No tokenizer is needed for it: the rows themselves say whether they are chats, and that decides
    which EOS the tokenizer is loaded with.
    """
    each = [open_source(args, path, stage) for path in args.data_path]
    return Sources(stage, each, any(source.is_chat for source in each))


def open_source(args, path, stage):
    """Returns a Source. Refuses columns and rows that the stage cannot read."""
    with ranks.unhurried():  # a download may take an hour
        parts, columns = sources.read_source(path)
    names = sources.names_in(args, path, columns)
    refuse_unknown_columns(path, sources.parse(dict.fromkeys(columns), names), stage)
    prompts = {part: [] for part in parts}
    for part in parts:
        for number, row in enumerate(parts[part], 1):
            with reading(row, f"{path}, {part}, row {number}"):
                example = read_row(sources.parse(row, names), stage)[-1]
            both = example.prompt, example.question or example.prompt
            prompts[part].append(tuple(map(formats.as_text, both)))
    first = read_row(sources.parse(parts["train"][0], names), stage)
    chat, _ = formats.as_chat(*first[:2])  # as it will be where the tokenizer has a template
    read_as = {"stage": stage, "columns": columns, "names": names}
    asked = [key for key, _ in prompts["train"]]
    held_out = set() if "test" in parts else a_twentieth(asked)
    trained_on = [i for i, key in enumerate(asked) if key not in held_out]
    return Source(path, parts, read_as, prompts, trained_on, is_chat=isinstance(chat, list))


# ---- Rows ----
def load_rows(args, opened, tokenizer, limit):
    """Returns the train and held-out datasets of a stage's Sources, tokenised.

    prompt            text; chat messages as JSON where `chat` is true
    prompt_ids        its tokens; with a response at most `limit`
    prompt_loss_mask  1 on the prompt's tokens that the loss of sft covers (--train_on)
    responses         lists of ids: the response; chosen and rejected; none for ppo
    length, extra     tokens of all of them; the row's other columns, as JSON
    place             the file and its line; "" for a row of the hub's, or of a .parquet file

    Each stage takes its own share of every source's rows (--data_split). Held out is the source's
    own test split, or a twentieth of the prompts, by hash; in all at most MOST_HELD_OUT, or
    --num_eval_prompts if that is more. Neither share nor split depends on --seed: stages with
    different seeds must not share rows.
    """
    trained_on = set()  # the prompts that any stage trains on, in any source
    for source in opened.each:
        trained_on.update(*(source.prompts["train"][i] for i in source.trained_on))
    options = {"tokenizer": tokenizer, "limit": limit, "train_on": vars(args).get("train_on")}
    most = max(MOST_HELD_OUT, vars(args).get("num_eval_prompts", 0)) // len(opened.each)
    split, train, test = ",".join(f"{part:g}" for part in args.data_split), [], []
    for source in opened.each:
        held_out = "test" if "test" in source.parts else "train"
        asked = source.prompts[held_out]
        unseen = [i for i, both in enumerate(asked) if trained_on.isdisjoint(both)]
        few = drawn(unseen, 0, most)
        share = share_of(source.trained_on, args.data_split, opened.stage)
        ranks.say(
            f"{source.path}: {len(share):,} of {len(source.trained_on):,} rows "
            f"(--data_split {split}), {len(few):,} of {len(unseen):,} held-out rows"
        )
        train += tokenise_rows(source, "train", share, options, "train")
        test += tokenise_rows(source, held_out, few, options, "test")
    if not (train and test):
        which = "held-out" if train else "train"
        why = "dropped, another step's (--data_split), or of prompts in the other part"
        raise Refused("no-rows-left", f"no {which} rows are left: they are {why}.")
    return datasets.concatenate_datasets(train), datasets.concatenate_datasets(test)


def serves(columns, stage):
    """Returns whether the stage can make rows of these columns."""
    able = [need for need, stages in formats.FORMATS.items() if stage in stages.split()]
    return any({*need.split()} <= {*columns} for need in able)


def refuse_unknown_columns(path, columns, stage, flag="--data_path"):
    """Refuses columns of which the stage cannot make its rows."""
    if not serves(columns, stage):
        known = "".join(f"\n    {need}  ({steps})" for need, steps in formats.FORMATS.items())
        known += "\n  Other names: --columns prompt=question,response=answer"
        what = f"{flag} {path} has the columns {', '.join(columns)}.\n  Known (of the steps):"
        raise Refused("unknown-columns", what + known)


def drawn(numbers, start, end):
    """Returns those from `start` to `end` of a draw, sorted.

    The draw does not depend on --seed, in which stages may differ.
    """
    return np.sort(np.random.default_rng(0).permutation(numbers)[start:end]).astype(int)


def share_of(numbers, data_split, stage):
    """Returns the stage's share of the rows' numbers, in their order. The shares are disjoint."""
    ends = np.cumsum([0, *data_split]) / (sum(data_split) or 1) * len(numbers)
    i = STAGES.index(stage)
    return drawn(numbers, *ends.round().astype(int)[i : i + 2])


def a_twentieth(prompts):
    """Returns the set of those that are held out, by hash: the same ones in all stages."""
    by_hash = sorted(dict.fromkeys(prompts), key=lambda prompt: zlib.crc32(prompt.encode()))
    return set(by_hash[: max(1, len(by_hash) // 20)])


def tokenise_rows(source, part, numbers, options, title):
    """Returns the tokenised rows of a part of a source, in a list; [] if all are dropped.

    numbers: of the rows. options: arguments of `tokenise_row`. Says, with the title, what was done
    to how many rows, and how many are dropped, and why.
    """
    rows, options = source.parts[part].select(numbers), {**options, **source.read_as}
    if not len(rows):
        return []
    # What the token ids depend on, by which that cache knows them again.
    versions = [transformers.__version__, tokenizers.__version__]
    known_by = Hasher.hash([rows._fingerprint, options, sources.own_code(), versions])
    # The first rank of a machine fills the cache, and the others wait for it, as long as it takes.
    lock = Path(datasets.config.HF_DATASETS_CACHE, f"tokenising-{known_by}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with ranks.unhurried(), FileLock(lock):
        made = rows.map(
            tokenise_row,
            fn_kwargs=options,
            remove_columns=rows.column_names,
            num_proc=4 if len(rows) >= MANY else None,
            new_fingerprint=known_by,
        )
    for note, count in Counter("\0".join(made["notes"]).split("\0")).items():
        if note:
            ranks.say(f"{source.path}, {title}: {count} of {len(made)} rows {note}")
    kept = made.select([i for i, why in enumerate(made["drop"]) if not why])
    return [kept.remove_columns(["drop", "notes"])] if len(kept) else []


def fingerprint(rows):
    """Returns a digest of the texts of the rows of `load_rows`, wherever they were read from.

    Not of their tokens: a chat template may write today's date there.
    """
    texts = "\0".join([*rows["prompt"], *rows["extra"]])  # with the other columns: responses
    return hashlib.blake2b(texts.encode(), digest_size=8).hexdigest()
