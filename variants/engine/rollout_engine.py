"""Rollouts by another process, which gets the actor's weights through a folder in shared memory.

    the run (ppo.py), its rank 0                     the other process (this file)
    writes the actor to the folder        -- files -->
    {"step": 3, "requests": [...], ...}   -- a line -->  loads the folder, samples
                                         <-- a line --   [{"response_ids": [...], ...}, ...]

The other process ends, and takes the folder away, when the run closes the pipe, however it ends.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from transformers import AutoModelForCausalLM

import common
from machinery import folders, launch, ranks, saving

SENT = "prompt_ids", "row", "sample", "turn"  # of a request: its tokens, and what the draws need


class RolloutEngine:
    """The other process, as the run sees it. Rank 0 starts one, which samples for all ranks."""

    def __init__(self, args):
        self.folder = self.process = self.answers = None
        if ranks.get_rank() == 0:
            memory = "/dev/shm" if Path("/dev/shm").exists() else None  # files in memory, on Linux
            self.folder = tempfile.mkdtemp(prefix="rollouts-", dir=memory)
            reads, writes = os.pipe()  # for its answers: libraries print to stdout
            self.process = subprocess.Popen(
                [sys.executable, __file__, self.folder, str(writes)],
                stdin=subprocess.PIPE,
                stdout=2,  # to stderr
                pass_fds=[writes],
                text=True,
                env={**os.environ, "RANK": "1"},  # so that it shows no progress bars
                start_new_session=True,  # Ctrl-C is for the run, which ends its step and saves
            )
            os.close(writes)  # so that the pipe ends with the process
            self.answers = os.fdopen(reads)
            self.send({name: value for name, value in vars(args).items() if name != "declared"})

    def roll_out(self, args, engine, tokenizer, requests, step, batch_size):
        """Takes and returns what ppo.roll_out does, which the other process calls.

        All ranks call it. The weights are written each time: an update may have moved them.
        """
        saving.save_model(engine, tokenizer, self.folder or "", merge=True)  # gathers under ZeRO-3
        sent = [{name: one[name] for name in SENT if name in one} for one in requests]
        of_ranks = ranks.all_gather_objects([sent])
        answers = []
        if self.process:
            of_all = [one for part in of_ranks for one in part]
            self.send({"step": step, "batch_size": batch_size, "requests": of_all})
            answers = [self.receive()]
        [answers] = ranks.all_gather_objects(answers)  # on all ranks, also an error's words
        if isinstance(answers, str):
            raise RuntimeError(answers)
        start = sum(map(len, of_ranks[: ranks.get_rank()]))
        mine = answers[start : start + len(requests)]
        return [{**request, **new} for request, new in zip(requests, mine)]

    def send(self, message):
        """Writes a line to the other process, if it is there: `receive` says so if it is not."""
        try:
            print(json.dumps(message), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass

    def receive(self):
        """Returns what the other process answers; if it has ended, a text that says so."""
        if line := self.answers.readline():
            return json.loads(line)
        code = self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # where it was killed it could not do so
        why = "It was killed, perhaps as memory ran out" if code < 0 else "Its error is above"
        return f"the process that samples the responses has ended with code {code}. {why}."


def serve(folder, answers):
    """The other process: reads the run's flags, then answers each request."""
    import ppo  # which imports this file

    launch.silence_libraries()
    args = SimpleNamespace(**json.loads(sys.stdin.readline()))
    dtype, trust = common.DTYPES[args.dtype], args.trust_remote_code
    for line in sys.stdin:
        asked = json.loads(line)
        tokenizer = folders.load_tokenizer(folder, args)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trust)
        model = model.to(ranks.device()).eval()
        sizes = asked["step"], asked["batch_size"]
        responses = ppo.roll_out(args, model, tokenizer, asked["requests"], *sizes)
        new = [{name: one[name] for name in one.keys() - SENT} for one in responses]
        print(json.dumps(new), file=answers, flush=True)


if __name__ == "__main__":
    try:
        serve(sys.argv[1], os.fdopen(int(sys.argv[2]), "w"))
    finally:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
