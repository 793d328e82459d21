"""PTX (--unsup_data_path): plain text, mixed into the actor's updates. [Ouyang 2022] eq. 2"""

import numpy as np
import torch

import common
from machinery.base import ranks, refused
from machinery.data import rows, sources

HELD_OUT = 20  # each so-many-th text is held out, for eval_text_loss; with fewer texts none


class TextMix:
    """The text, and its part in each update. Without --unsup_data_path it does nothing."""

    def __init__(self, args, tokenizer):
        self.args, self.pad_id = args, tokenizer.pad_token_id
        texts = read_text(args, tokenizer) if args.unsup_data_path else []
        held_out = range(0, len(texts), HELD_OUT) if len(texts) >= HELD_OUT else ()
        self.held_out = [{"ids": texts[i]} for i in held_out]
        self.texts = [{"ids": ids} for i, ids in enumerate(texts) if i not in held_out]
        self.backwards = 2 if self.texts else 1  # for each micro-batch of the actor
        self.batches = []  # of text, still to come in this update

    def backward(self, actor, update):
        """Runs backward() on a micro-batch of text, after that of a policy loss.

        update: (step, number in the step) of the optimizer step; they and the seed draw its text.
        """
        if not self.texts:
            return
        if not self.batches:
            self.draw(update)
        actor.step()  # ends the policy's backward; the update's last step() moves the weights
        loss = self.args.unsup_coef * text_loss_sum(actor, self.batches.pop())
        micro_steps = 2 * self.args.gradient_accumulation_steps
        actor.backward(loss * common.loss_scale(self.tokens, micro_steps))

    def draw(self, update):
        """Draws this rank's text of an optimizer step."""
        args, count = self.args, ranks.data_parallel_size()
        shape = args.gradient_accumulation_steps, count, args.per_device_training_batch_size
        drawn = np.random.default_rng((args.seed, *update)).choice(len(self.texts), shape)
        dealt = common.Rows(self.texts)
        for numbers in drawn[:, ranks.data_parallel_rank()]:
            batch = self.collate([dealt[i] for i in numbers])
            self.batches.append(ranks.to_device(batch))
        self.tokens = ranks.all_sum(sum(batch["covered"].sum() for batch in self.batches)).item()

    def collate(self, rows):
        """Lays texts out -> ids, mask: (B, T); covered: (B, T-1), 1 where a token is before."""
        ids, mask = common.pad([row["ids"] for row in rows], self.pad_id)
        weight = torch.tensor([row["row_weight"] for row in rows])
        return {"ids": ids, "mask": mask, "covered": mask[:, :-1] * weight[:, None]}

    @torch.no_grad()
    def evaluate(self, actor):
        """Returns {"eval_text_loss": loss a token of the held-out text}, {} if there is none."""
        if not self.held_out:
            return {}
        total = tokens = 0.0
        for batch in common.eval_loader(self.args, self.held_out, self.collate):
            total += text_loss_sum(actor, batch)
            tokens += batch["covered"].sum()
        total, tokens = ranks.all_sum(total, tokens).tolist()
        return {"eval_text_loss": total / tokens}


def read_text(args, tokenizer):
    """Returns the ids of each `text` of --unsup_data_path, cut to a prompt and a response long."""
    texts = []
    for path in args.unsup_data_path:
        source, columns = sources.read_source(path, "--unsup_data_path")
        if "text" not in columns:
            found = ", ".join(columns)
            refused.fail(f"--unsup_data_path {path} needs a column text; it has {found}.")
        texts += [sources.parse(row).get("text") for row in source["train"]]
    kept = [text for text in texts if isinstance(text, str) and text.strip()]
    if dropped := len(texts) - len(kept):
        ranks.say(f"--unsup_data_path: dropped {dropped} of {len(texts)} rows: no text")
        if args.strict:
            refused.fail("--strict: rows without text would be dropped.")
    if not kept:
        refused.fail(f"--unsup_data_path {' '.join(args.unsup_data_path)} holds no text.")
    return [rows.tokenise_response(tokenizer, text)[: args.max_seq_len] for text in kept]


def text_loss_sum(actor, batch):
    """Cross entropy, summed over the tokens that have another before them: see `collate`."""
    return -common.last_logprobs(actor, batch["ids"], batch["mask"], batch["covered"]).sum()
