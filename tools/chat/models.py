"""The models of talk.py: those that write responses, and the one that scores them."""

import contextlib
import io
import itertools
import json
import os
import re
from pathlib import Path

import huggingface_hub
import torch
from transformers.utils import find_adapter_config_file

import common
import ppo
from machinery import flags, folders, formats, ranks, rows, tokens
from machinery.refused import Refused

CHAT = "chat"  # the template that stands for the tokenizer's own
DIALOGUE = formats.HUMAN + "{}" + formats.ASSISTANT


# ---- How a prompt is written ----
def own_prompts(path):
    """Returns the unique prompts in samples.jsonl of a run, [] if it cannot be read.

    ema/ and best/ have the samples of the folder above.
    """
    folder = Path(path).parent if Path(path).name in ("ema", "best") else Path(path)
    with contextlib.suppress(Exception), open(folder / "samples.jsonl") as lines:
        found = [json.loads(line)["prompt"] for line in itertools.islice(lines, 100)]
        return list(dict.fromkeys(prompt for prompt in found if isinstance(prompt, str)))
    return []


def found_template(prompts):
    """Returns how prompts of one kind are written: CHAT, or text with {}; None if it is unknown.

    "{}" stands for the question: what differs between the prompts.
    """
    if prompts and all(prompt.startswith('[{"') for prompt in prompts):
        return CHAT
    return around(prompts) if len(prompts) > 1 else None


def questions(prompts, template):
    r"""Returns the questions, of one line each, in the prompts that are written so.

    >>> questions(["Q: How?\nA:", "Q: Why so?\nA:", "else"], "Q: {}\nA:")
    ['How?', 'Why so?']
    """
    before, after = map(re.escape, template.split("{}"))
    found = [re.fullmatch(f"{before}(.+){after}", prompt) for prompt in prompts]
    return [match[1] for match in found if match]


def around(prompts):
    r"""Returns what texts have in common at both ends, with {} between.

    The first part ends with a line break or ": ", the last one begins with a line break.

    >>> around(["Q: How?\nA:", "Q: How many?\nA:"])
    'Q: {}\nA:'
    """
    start = os.path.commonprefix(prompts)
    end = os.path.commonprefix([prompt[::-1] for prompt in prompts])[::-1]
    start = re.match(r"(?s)(.*(?:\n|: ))?", start)[0]
    return start + "{}" + "".join(end.partition("\n")[1:])


def written(prompt, template):
    """Returns a prompt as `template` has it: text, or with CHAT messages.

    prompt: text, which stays as it is, or a list of messages.
    """
    if isinstance(prompt, str) or template == CHAT:
        return prompt
    parts, between = [], "" if template.startswith("\n") else "\n"
    for message in prompt:
        text = message["content"]
        if message["role"] == "user":
            text = (between if parts else "") + template.replace("{}", text)
        elif message["role"] == "assistant" and not text[:1].isspace():
            text = " " + text
        parts.append(text)
    return "".join(parts)


# ---- Models ----
def on_disk(path):
    """Returns `path`; of adapters on the hub, the folder that they are fetched to."""
    with contextlib.suppress(Exception):  # what is wrong is said when the model is loaded
        if not Path(path).exists() and find_adapter_config_file(path):
            return huggingface_hub.snapshot_download(path)
    return path


class Model:
    """A model and its tokenizer, from a folder or the hub, checked before it is loaded."""

    head = None  # the name of the value head, of a reward model

    def __init__(self, args, path):
        self.name, path = path, on_disk(path)
        config = folders.load_config(path, args.trust_remote_code)
        own = "fp32" if config.dtype == torch.float32 else flags.fast_dtype()
        self.dtype = args.dtype if "dtype" in args.declared.given else own
        # max_seq_len 0: prompt() cuts to the positions that the model has
        changes = dict(model_name_or_path=path, dtype=self.dtype, zero_stage=0, max_seq_len=0)
        args = flags.with_flags(args, **changes)
        folders.refuse_other_kind(self.name, config, scores=bool(self.head))
        folders.has_weights(path, needed=True)
        self.tokenizer = folders.load_tokenizer(path, args)
        self.model = common.frozen_model(args, 1, self.tokenizer, self.head)
        text = config.get_text_config()
        self.positions = getattr(text, "max_position_embeddings", None) or 2**31 - 1

    def tokenise(self, prompt):
        """Returns a prompt as this model reads it, text or messages, and its token ids."""
        if self.tokenizer.chat_template:  # a dialogue that is text becomes messages, as in a run
            prompt, _ = formats.as_chat(prompt, [])
        with self.refusing(prompt):
            ids = tokens.tokenise_prompt(self.tokenizer, prompt)
            if not ids:
                raise formats.LeftOut("nothing is left of it in tokens")
        return prompt, ids

    @contextlib.contextmanager
    def refusing(self, prompt):
        """Says in words why a prompt, or a response to it, cannot be turned into tokens."""
        try:
            yield
        except (formats.LeftOut, Refused) as error:
            shown = formats.as_text(prompt)[:300]
            words = f"{self.name} cannot be given a prompt: {str(error).rstrip('.')}.\n  {shown}"
            raise Refused("prompt-refused", words) from error


class Writer(Model):
    """A language model that writes responses, sampled by ppo.py's own function."""

    def __init__(self, args, path):
        super().__init__(args, path)
        own = CHAT if self.tokenizer.chat_template else DIALOGUE
        prompts = own_prompts(path)
        self.template = args.template or found_template(prompts) or own
        self.questions = [] if self.template == CHAT else questions(prompts, self.template)

    def prompt(self, args, number, prompt, extra="{}"):
        """Returns the row of a prompt (text or messages) for `answers`: a dict.

        number: of the row, on which its random numbers depend. extra: the row's other columns, as
        JSON. A prompt that is too long keeps its end.
        """
        text, ids = self.tokenise(written(prompt, self.template))
        room = self.positions - self.answer_length(args)
        row = {"row": number, "sample": 0, "asked": prompt, "extra": extra}
        row.update(prompt=formats.as_text(text), chat=isinstance(text, list))
        kept = tokens.keep_end(self.tokenizer, ids, room)
        return {**row, "prompt_ids": kept, "cut": len(ids) > room}

    def answer_length(self, args):
        """Returns how many tokens a response may have: --max_answer_seq_len, if they fit."""
        return min(args.max_answer_seq_len, self.positions // 2)

    def answers(self, args, prompts, step, show=None):
        """Returns the rows with response_ids, text and ended, in their order.

        They depend on (seed, step, number of the row) alone, so all models are given the same
        random numbers. show(text), if given, gets the text of the first row as it grows.
        """
        args = flags.with_flags(args, max_answer_seq_len=self.answer_length(args))
        by_length = sorted(prompts, key=lambda row: len(row["prompt_ids"]))
        size = args.per_device_eval_batch_size
        with self.shown(show) if show else contextlib.nullcontext():
            found = ppo.roll_out(args, self.model, self.tokenizer, by_length, step, size)
        return sorted(found, key=lambda row: row["row"])

    @contextlib.contextmanager
    def shown(self, show):
        """Calls show(text) when the model takes a token as input: one step after it was sampled.

        A bar of progress would move the cursor of the screen, so there is none meanwhile.
        """
        taken = []  # the inputs of each forward; the first is the prompt
        ends = folders.ends_of(self.model, self.tokenizer)

        def note(model, inputs):
            taken.append(inputs[0][0].tolist())
            if ids := sum(taken[1:], []):
                show(tokens.as_text(self.tokenizer, ids, ends))

        hook = self.model.register_forward_pre_hook(note)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                yield
        finally:
            hook.remove()


class Judge(Model):
    """A reward model."""

    head = "score"

    def scores(self, args, writer, responses):
        """Returns the score of each response of `writer`, as ppo.py gives it: a list of numbers.

        With the writer's vocabulary it reads the tokens that were sampled, else their text.
        """
        both = self.tokenizer, writer.tokenizer
        mine, theirs = ((each.eos_token_id, each.get_vocab()) for each in both)
        same = mine == theirs
        pairs = [
            (row["prompt_ids"], row["response_ids"]) if same else self.read(writer, row)
            for row in responses
        ]
        return self.score_ids(args, pairs)

    def read(self, writer, row):
        """Returns the token ids of a prompt and its response in this model's own vocabulary."""
        chats = self.tokenizer.chat_template or writer.template != CHAT
        given = written(row["asked"], writer.template if chats else DIALOGUE)
        prompt, prompt_ids = self.tokenise(given)
        # Special tokens of another vocabulary mean nothing here.
        text = writer.tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        text = text if prompt is given else text.strip()  # as formats.as_chat has it
        with self.refusing(prompt):
            ids, _ = tokens.tokenise_turn(self.tokenizer, prompt, text)
        return prompt_ids, ids[: None if row["ended"] else -1]

    @torch.no_grad()
    def score_ids(self, args, pairs):
        """Returns the score of each pair of token ids (prompt, response): a list of numbers.

        Equal pairs are scored once: with other padding the last digit would differ.
        """
        sequences = []
        for prompt, response in pairs:
            prompt, [response] = rows.cut(self.tokenizer, prompt, [response], self.positions)
            sequences.append((*prompt, *response))
        unique = sorted(set(sequences), key=len)
        scores, size = {}, args.per_device_eval_batch_size
        for start in range(0, len(unique), size):
            part = unique[start : start + size]
            padded = common.pad(part, self.tokenizer.pad_token_id)  # (B, T), ends on the right
            ids, mask = (x.to(ranks.device()) for x in padded)
            values = self.model(ids, mask, common.position_ids(mask))  # (B, T)
            scores |= dict(zip(part, values[:, -1].tolist()))
        return [scores[sequence] for sequence in sequences]
