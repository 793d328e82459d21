"""PTX: text, mixed into the actor's updates, so that it keeps what it knew.  [Ouyang 2022] eq. 2

loss = PPO's + unsup_coef * (cross entropy of a token of the text)
"""

import functools

import numpy as np

import common
import sft  # its layout and its loss
from machinery import batching, flags, ranks, rows


class TextMix:
    """The text of --unsup_data_path, and its part in each update. Without the flag it is empty."""

    def __init__(self, args, tokenizer):
        self.args, self.backwards = args, 1  # of each micro-batch of the actor
        if args.unsup_data_path:
            text = dict(data_path=args.unsup_data_path, data_split=[1, 0, 0], columns=None)
            own = flags.with_flags(args, **text)
            sources = rows.open_sources(own, "sft")
            self.train, self.held_out = rows.load_rows(own, sources, tokenizer, args.max_seq_len)
            self.collate = functools.partial(sft.collate, pad_id=tokenizer.pad_token_id)
            self.backwards = 2

    def draw(self, *numbers):
        """Draws this rank's text of an optimizer step; `numbers` and the seed say which."""
        if self.backwards == 2:
            args, count = self.args, ranks.data_parallel_size()
            shape = args.gradient_accumulation_steps, count, args.per_device_training_batch_size
            drawn = np.random.default_rng((args.seed, *numbers)).choice(len(self.train), shape)
            text, mine = batching.Rows(self.train), drawn[:, ranks.data_parallel_rank()].tolist()
            self.batches = [self.collate([text[i] for i in one]).to(ranks.device()) for one in mine]
            self.tokens = ranks.all_sum(sum(batch.loss_mask.sum() for batch in self.batches)).item()

    def backward(self, actor):
        """Runs backward on a micro-batch of text, after that of the policy loss."""
        if self.backwards == 2:
            actor.step()  # ends the policy's micro-step; the update's last step() moves the weights
            batch = self.batches.pop()
            logprobs = common.response_logprobs(actor, batch, batch.loss_mask)  # (B, R)
            loss = self.args.unsup_coef * sft.sft_loss_sum(logprobs, batch.loss_mask)
            actor.backward(loss * common.mean_factor(actor, self.tokens))

    def evaluate(self, actor):
        """Returns {"eval_text_loss": the loss per token of the held-out text}, if there is any."""
        if self.backwards == 1:
            return {}
        found = sft.evaluate(self.args, actor, self.held_out, self.collate)
        return {"eval_text_loss": found["eval_loss"]}
