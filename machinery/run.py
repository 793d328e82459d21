"""The frame of all three scripts: it starts a run, deals out its steps, logs them and saves."""

import itertools
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import deepspeed.comm as dist
import numpy as np
import torch
import transformers

from machinery import (
    batching,
    checkpoints,
    config_file,
    flags,
    folders,
    launch,
    metrics,
    output_folder,
    ranks,
    saving,
    zero3,
)
from machinery.refused import Refused, read_json
from machinery.rows import fingerprint

LOGS = ("metrics.jsonl", "samples.jsonl", "tokens.jsonl")  # appended to
EVALUATION = "evaluation.json"  # in best/: what its model was found to be
LESS_IS_BETTER = ("loss", "perplexity", "kl")  # the last word of a metric's name
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # signals that are noted
# In this order. What to look at elsewhere, and why: course/clinic/README.md
NOT_FINITE = "Look at: learning rate; --allow_unstable 1; on a GPU --dtype, attention kernel."


class Run:
    """One run of a script, from its flags to its exit code.

    run = Run(args, "step 1: ...")
    steps = run.plan(tokenizer, train, held_out, batch_size, micro_steps)
    for step, micro_batches in run.steps(engines, evaluate, COLUMNS, collate):
        ...
        run.log({"loss": loss}, micro_batches)
    run.save(engine, tokenizer)
    run.finish()
    """

    def __init__(self, args, title):
        """Joins the other ranks. title: the first words on the screen."""
        self.args, self.title = args, title
        self.notes = {}  # what else the saved model's config.json says, of the last evaluation
        self.told_to_stop = False  # by a signal; looked at between two steps
        self.step = 0  # the one that is being made
        self.best = {}  # the evaluation of the model in best/, with --keep_best
        self.best_folder = Path(args.output_dir) / "best"
        launch.fill_environment()
        output_folder.refuse_unusable(args)
        launch.join_ranks(args)
        ranks.fail_unless_alike(output_folder.started_with(args), "the ranks differ")
        transformers.set_seed(args.seed)  # Python's, numpy's and torch's generators
        ranks.go_on()

    def plan(self, tokenizer, train, held_out, batch_size, micro_steps):
        """Notes two datasets, rows of a micro-batch and micro-batches of a step, both on one rank.

        Returns the number of steps of the run.
        """
        self.tokenizer, self.train, self.held_out = tokenizer, train, held_out
        self.batch_size, self.micro_steps = batch_size, micro_steps
        self.rows_per_step = batch_size * micro_steps * ranks.data_parallel_size()
        self.steps_per_epoch = -(-len(train) // self.rows_per_step)
        self.last_step = self.steps_per_epoch * self.args.num_train_epochs
        if self.args.max_steps >= 0:
            self.last_step = self.args.max_steps
        return self.last_step

    # The steps

    def steps(self, engines, evaluate, columns, collate=list, state=None):
        """Yields (step, micro_batches) for each step of the run. The body ends with `log`.

        First it evaluates or resumes. After each body it saves when due, or when told to stop.

        engines: {name: engine}. The metrics of all but the first have their names in front.
        evaluate(step): returns a dict of metrics eval_...
        columns: the metrics that the screen shows.
        collate(rows): makes a micro-batch of `batch_size` rows of data; by default their list.
        state: what the script itself must keep in checkpoints, a dict. It is restored in place.
        """
        args, self.engines, self.engine = self.args, engines, next(iter(engines.values()))
        self.evaluate, self.columns = evaluate, columns
        self.state = {} if state is None else state
        self.facts = {
            "rows_per_step": self.rows_per_step,
            "data_rows": len(self.train),
            "data_fingerprint": fingerprint(self.train) + fingerprint(self.held_out),
            "frozen_models": checkpoints.frozen_models(args),
        }
        ranks.fail_unless_alike(self.facts, "the ranks read different files")
        self.lock = output_folder.take(args)  # held as long as this process lives
        if not args.resume:
            output_folder.note(args, self.facts)
        self.monitor = config_file.opened(args)
        self.print_banner()
        torch.manual_seed(args.seed + ranks.data_parallel_rank())  # dropout differs by rank
        ranks.barrier()
        done = 0  # steps
        if args.resume:
            done, saved = checkpoints.load(args, engines, self.state, self.facts, self.last_step)
            self.notes.update(saved["notes"])
            self.find_best(saved["best"])
            cut_logs(args, saved["logs"])
            output_folder.note(args, self.facts)
        record = {} if args.resume else {"step": 0, "epoch": 0.0, **evaluate(0)}
        show(dict(zip(columns, columns)), columns)  # a legend
        if record:
            refuse_unknown_metric(args, record)
            self.write(record, on_screen=True)
        if self.last_step == 0:  # --max_steps 0: that was all
            self.finish()
        # Only now: before, a signal of the launcher must end the ranks of a run that is refused.
        noted = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]  # nohup
        for number in noted:
            signal.signal(number, self.note_signal)
        # What a user's function forks is ended by them.
        os.register_at_fork(
            after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in noted]
        )
        self.started = time.monotonic()  # of the step: loading its rows is a part of it
        to_come = range(done + 1, self.last_step + 1)
        steps = zip(to_come, self.draw(done, collate))
        for step, micro_batches in ranks.shown(steps, "steps", total=self.last_step, initial=done):
            self.step = step
            self.notes.clear()  # those of an evaluation before are of other weights
            ranks.go_on()
            yield step, micro_batches
            left = [e.micro_steps % e.gradient_accumulation_steps() for e in engines.values()]
            assert not any(left), "each micro-batch needs one engine.step()"
            self.save_or_stop()

    def print_banner(self):
        """Prints model, batch and data."""
        args, engine = self.args, self.engine
        path = getattr(args, "actor_model_name_or_path", None) or args.model_name_or_path
        scratch = "" if folders.has_weights(path) else ", from scratch"
        model = zero3.unwrap_model(engine)
        count, training = (zero3.count_parameters(model, part) / 1e6 for part in (False, True))
        balanced = getattr(model.config.get_text_config(), "output_router_logits", False)
        words = "\n  experts  their balancing loss (output_router_logits) is not used"
        experts = words if balanced else ""
        ranks.say(
            f"{self.title}   (preset {args.preset}, seed {args.seed}, output {args.output_dir})\n"
            f"  model    {path}: {count:,.2f} M parameters ({training:,.3f} M of them train), "
            f"{args.dtype}, ZeRO stage {engine.zero_optimization_stage()}, "
            f"{ranks.get_world_size()} x {ranks.device().type}{scratch}{experts}\n"
            f"  batch    {self.batch_size} per device x {self.micro_steps} accumulation "
            f"x {ranks.data_parallel_size()} ranks = {self.rows_per_step} rows per step"
            f"{flags.rows_note(args, self.rows_per_step)}\n"
            f"  data     {len(self.train):,} rows, {len(self.held_out):,} held out, "
            f"{self.last_step:,} steps ({args.num_warmup_steps} of warm-up)"
        )

    def draw(self, done, collate):
        """Yields the micro-batches of each step after the first `done`, epoch after epoch.

        Which rows a step has follows from the seed and its number alone, also on other ranks or in
        other micro-batches: --resume needs no more than the step.
        """
        args, micro_steps, rows = self.args, self.micro_steps, batching.Rows(self.train)
        lengths = np.asarray(self.train["length"])
        first, taken = divmod(done, self.steps_per_epoch)
        for epoch in itertools.count(first):
            batches = batching.epoch_batches(
                lengths, args.seed, epoch, self.batch_size, micro_steps, args.group_by_length
            )
            for start in range(taken * micro_steps, len(batches), micro_steps):
                numbers = batches[start : start + micro_steps]
                yield [collate([rows[i] for i in batch]) for batch in numbers]
            taken = 0

    def note_signal(self, number, frame):
        """Has the run stop after this step, and at once at a second Ctrl-C.

        A second SIGTERM means nothing: launchers send it after the first signal.
        """
        self.told_to_stop = True
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    def save_or_stop(self):
        """Saves a checkpoint when one is due, and leaves if any rank was told to stop."""
        args, step = self.args, self.step
        stop = ranks.all_sum(self.told_to_stop).item() > 0 and step < self.last_step
        if stop or (args.save_steps and step % args.save_steps == 0):
            saved = {
                "state": self.state,
                "facts": self.facts,
                "logs": sizes_of_logs(args),
                "best": self.best,
                "notes": self.notes,  # this and the next for tools/export.py
                "eos_token": self.tokenizer.eos_token,
            }
            where = checkpoints.save(args, self.engines, step, saved)
            self.started = time.monotonic()
        if stop:
            ranks.say(f"interrupted after step {step}: saved to {where}. Go on with --resume.")
            self.finish(code=1)

    # What the body of a step calls

    def log(self, numbers, micro_batches):
        """Logs a step, and evaluates when that is due. Nothing that trains comes after it.

        Each step is a line of metrics.jsonl. The screen shows every --log_steps-th, and each that
        is evaluated.
        numbers: {name: number}, the same on all ranks. micro_batches: what the step trained on.
        """
        args, step, engine = self.args, self.step, self.engine
        tokens, flops = metrics.work(args, self.engines.values(), micro_batches)
        began, self.started = self.started, time.monotonic()  # what follows counts to the next step
        speed = metrics.speed(tokens, flops, self.started - began)
        record = {"step": step, "epoch": step / self.steps_per_epoch, **numbers, **speed}
        for name, each in self.engines.items():
            of = "" if each is engine else f"{name}_"
            record[f"{of}learning_rate"] = metrics.learning_rate(each)
            record[f"{of}grad_norm"] = metrics.grad_norm(args, each)
        self.stop_unless_finite(record)
        due = step == self.last_step or step % (args.eval_steps or self.steps_per_epoch) == 0
        if due:
            record.update(self.evaluate(step))
        self.write(record, on_screen=due or step % args.log_steps == 0)
        if due:
            self.keep_best(record)
            self.started = time.monotonic()  # an evaluation is no part of a step

    def write(self, record, on_screen):
        """Writes a line to metrics.jsonl, and events to DeepSpeed's monitor.

        on_screen: prints `columns` of it, too.
        """
        self.stop_unless_finite(record)  # an evaluation may have found a number that is not
        numbers = floats_of(record)
        nine_digits = {name: float(f"{value:.9g}") for name, value in numbers.items()}
        append(self.args, "metrics.jsonl", [{**record, **nine_digits}])
        if on_screen:
            show(record, self.columns)
        step = record["step"]  # the monitor writes on rank 0
        self.monitor.write_events([(f"train/{name}", n, step) for name, n in numbers.items()])

    def stop_unless_finite(self, values):
        """Stops the run if one of `values`, {name: number}, is NaN or infinite.

        They are the same on all ranks. The last line of metrics.jsonl then has their names.
        """
        numbers = floats_of(values)
        if wrong := [name for name, value in numbers.items() if not math.isfinite(value)]:
            append(self.args, "metrics.jsonl", [{"step": self.step, "not_finite": wrong}])
            what = f"error: step {self.step}: {', '.join(wrong)} not finite. Stopped"
            ranks.say(f"{what}; the last checkpoint is untouched.\n  {NOT_FINITE}")
            self.finish(code=1)

    # The best model

    def keep_best(self, record):
        """Saves the model that trains in best/ if `record`, an evaluation, is better than its own.

        Like every model that is saved it is whole, or not there.
        """
        name = self.args.keep_best
        if name and name not in record:  # pass_at_k: a reward was neither 0 nor 1
            ranks.say(f"warning: --keep_best: this evaluation has no {name}")
        elif name and improves(self.best.get(name), name, record[name]):
            self.best = {"step": record["step"], name: record[name]}
            if ranks.get_rank() == 0:
                (self.best_folder / EVALUATION).unlink(missing_ok=True)
            self.save(self.engine, self.tokenizer, self.best_folder)
            if ranks.get_rank() == 0:
                (self.best_folder / EVALUATION).write_text(json.dumps(self.best))
            where = f"the model is in {self.best_folder}"
            ranks.say(f"{name} {record[name]:.6g} is the best so far: {where}")

    def find_best(self, before):
        """Takes the model in best/ for the best so far: it may be of a step after the checkpoint.

        before: the best evaluation at the checkpoint.
        """
        whole = saving.is_whole(self.best_folder)
        found = read_json(self.best_folder, EVALUATION) if whole else {}
        self.best = ranks.all_gather_objects([found])[0]
        if before and not self.best:
            ranks.say("warning: best/ is gone: the best from now on is kept")

    # The end

    def save(self, engine, tokenizer, folder=None, full_tensor=zero3.full_tensor):
        """Saves a model, by default in the output folder (saving.save_model)."""
        folder = folder or self.args.output_dir
        saving.save_model(engine, tokenizer, folder, full_tensor, self.notes)

    def finish(self, code=0):
        """Leaves the other ranks in order, and ends the program with the exit code `code`."""
        if code == 0:
            ranks.say(f"done: {self.args.output_dir}")
        ranks.barrier()
        dist.destroy_process_group()
        # gloo's threads now drop their last tensors. If they did so while Python shuts down, a run
        # that has ended well would abort (PyTorch #179291).
        time.sleep(0.1)
        sys.exit(code)


# ---- Logs ----
def append(args, name, rows):
    """Appends dicts to a .jsonl file of the output folder, on rank 0."""
    if ranks.get_rank() == 0:
        with open(Path(args.output_dir) / name, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def sizes_of_logs(args):
    """Returns {name: bytes} of the .jsonl files that grow."""
    paths = [Path(args.output_dir) / name for name in LOGS]
    return {path.name: path.stat().st_size for path in paths if path.exists()}


def cut_logs(args, sizes):
    """Takes off the .jsonl files what was written after a checkpoint, on rank 0.

    sizes: {name: bytes} at the checkpoint. Where a file was changed since, that may be within a
    line: the next one would be joined to what is left of it.
    """
    for name, size in sizes.items() if ranks.get_rank() == 0 else ():
        with open(Path(args.output_dir) / name, "a+b") as file:
            file.seek(0)
            file.truncate(file.read(size).rfind(b"\n") + 1)


def floats_of(record):
    """Returns the metrics of a record that are floats."""
    return {name: value for name, value in record.items() if isinstance(value, float)}


def show(record, columns):
    """Prints the `columns` of a record in a line."""
    short = {name: f"{value:.4g}" for name, value in floats_of(record).items()}
    values = map({**record, **short}.get, columns)
    cells = ["" if value is None else str(value) for value in values]
    ranks.say(" ".join(text.rjust(max(8, len(name))) for text, name in zip(cells, columns)))


def show_sample(row, response, numbers=""):
    """Prints the end of a row's prompt, the beginning of its response, and `numbers` in one line.

    samples.jsonl has all of it, as it is.
    """
    prompt = json.loads(row["prompt"])[-1]["content"] if row.get("chat") else row["prompt"]
    prompt, response = " ".join(prompt.split()), " ".join(response.split())
    ranks.say(f"    {prompt[-60:]} -> {response[:80]} {numbers}".rstrip())


# ---- --keep_best ----
def refuse_unknown_metric(args, record):
    """Refuses --keep_best if the evaluation in `record` has no such metric. It must be a float."""
    found = [name for name in floats_of(record) if name.startswith("eval_")]
    if args.keep_best not in [None, *found]:
        words = f"--keep_best {args.keep_best}: the evaluations have {', '.join(found)}."
        raise Refused("keep-best-unknown", words)


def improves(before, name, value):
    """Returns whether the value of metric `name` is better than `before`, if there is one."""
    if not isinstance(before, (int, float)):  # the first one, or what was written of it is damaged
        return True
    return value < before if name.endswith(LESS_IS_BETTER) else value > before
