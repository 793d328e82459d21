"""The frame of all three scripts: it starts a run, deals out its steps, logs them and saves."""

import gc
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from machinery.base import modules, progress, ranks
from machinery.data import batching
from machinery.data.rows import fingerprint
from machinery.engine import config_file, throughput, zero3
from machinery.flags import declaring
from machinery.models import model_card, model_folders, saving
from machinery.run import best, checkpoints, crash, launch, logs, output_folder

STOPS = {  # signals that are noted, and what they do without us
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


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
        self.phase, self.legend_shown = crash.Phase(), False
        self.notes = {}  # what else the saved model's config.json says, of the last evaluation
        self.signals = []  # SIGTERM, SIGHUP, SIGINT as they come; looked at between two steps
        self.step = 0  # the one that is being made
        self.unwritten = []  # the records of the steps since the last line of the log
        self.best_step = None  # that of the model in best/, with --keep_best
        launch.fill_environment()
        self.folder = output_folder.OutputFolder(args)
        sys.excepthook = self.phase.report
        launch.join_ranks(args)
        advice = "Start the same command, with the same libraries, on all machines."
        ranks.fail_unless_alike(output_folder.started_with(args), "the ranks differ", advice)
        transformers.set_seed(args.seed)  # Python's, numpy's and torch's generators
        self.phase.note("reading data, loading models")

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
        self.facts = {"rows_per_step": self.rows_per_step, "data_rows": len(self.train)}
        self.facts["data_fingerprint"] = fingerprint(self.train) + fingerprint(self.held_out)
        seen = {**self.facts, "held_out": len(self.held_out), "steps": self.last_step}
        advice = "All machines must read the same files, or the same version of the hub's."
        ranks.fail_unless_alike(seen, "the ranks read different data", advice)
        self.facts["frozen_models"] = checkpoints.frozen_models(args)
        self.folder.take(self.facts)
        self.monitor = config_file.opened(args)
        self.print_banner()
        torch.manual_seed(args.seed + ranks.data_parallel_rank())  # dropout differs by rank
        ranks.barrier()
        done = 0  # steps
        if args.resume:
            done, saved = checkpoints.load(args, engines, self.state, self.facts, self.last_step)
            self.state.update(saved["state"])
            self.notes.update(saved["notes"])
            self.unwritten, self.best_step = saved["unwritten"], saved.get("best_step")
            self.folder.note()
        else:
            self.phase.note("at the first evaluation")
            record = {"step": 0, "epoch": 0.0, **evaluate(0)}
            best.refuse_unknown_metric(args, record)
            self.write(record)
        if self.last_step == 0:  # --max_steps 0: that was all
            logs.draw_curves(args)
            self.finish()
        # Only now: before, a signal of the launcher must end the ranks of a run that is refused.
        noted = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]  # nohup
        for number in noted:
            signal.signal(number, self.note_signal)
        # What a user's function forks is ended by them as it would be without us.
        os.register_at_fork(
            after_in_child=lambda: [signal.signal(number, STOPS[number]) for number in noted]
        )
        # Garbage is no longer looked for among what is there by now. DeepSpeed (0.19.8) looks when
        # --offload_states moves states to the CPU, and would walk over all that was imported.
        gc.collect()
        gc.freeze()
        self.started = time.monotonic()  # of the step: loading its rows is a part of it
        to_come = range(done + 1, self.last_step + 1)
        with progress.bar(self.last_step, "steps", done) as bar:
            for step, micro_batches in zip(to_come, self.draw(done, collate)):
                self.step = step
                self.notes.clear()  # those of an evaluation before are of other weights
                self.phase.note(f"at step {step}")
                yield step, micro_batches
                left = [e.micro_steps % e.gradient_accumulation_steps() for e in engines.values()]
                assert not any(left), "each micro-batch needs one engine.step()"
                bar.update()
                self.save_or_stop()

    def print_banner(self):
        """Prints model, batch and data."""
        args, engine = self.args, self.engine
        path = getattr(args, "actor_model_name_or_path", None) or args.model_name_or_path
        scratch = "" if model_folders.has_weights(path) else ", from scratch"
        model = modules.unwrap_model(engine)
        count, training = (modules.count_parameters(model, part) / 1e6 for part in (False, True))
        rest = len(self.train) % self.rows_per_step  # an update all the same, and a noisy one
        short = 0 < rest < self.rows_per_step / 2 and self.last_step >= self.steps_per_epoch
        ranks.say(
            f"{self.title}   (preset {args.preset}, seed {args.seed}, output {args.output_dir})\n"
            f"{declaring.recipe_note(args)}"
            f"  model    {path}: {count:,.2f} M parameters ({training:,.3f} M of them train), "
            f"{args.dtype}, ZeRO stage {engine.zero_optimization_stage()}, "
            f"{ranks.get_world_size()} x {ranks.device().type}{scratch}\n"
            f"  batch    {self.batch_size} per device x {self.micro_steps} accumulation "
            f"x {ranks.data_parallel_size()} ranks = {self.rows_per_step} rows per step"
            f"{declaring.rows_note(args, self.rows_per_step)}\n"
            f"  data     {len(self.train):,} rows, {len(self.held_out):,} held out, "
            f"{self.last_step:,} steps ({args.num_warmup_steps} of warm-up)"
            f"{f'; one step of each epoch has {rest} rows' if short else ''}"
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
        self.signals.append(number)
        if self.signals.count(signal.SIGINT) > 1:
            os._exit(1)

    def save_or_stop(self):
        """Saves a checkpoint when one is due, and leaves if any rank was told to stop."""
        args, step = self.args, self.step
        stop = ranks.all_sum(len(self.signals)).item() > 0 and step < self.last_step
        if stop or (args.save_steps and step % args.save_steps == 0):
            where = checkpoints.folder_of(args) / f"step-{step}"
            self.phase.note(f"writing {where}")
            saved = {
                "state": self.state,
                "facts": self.facts,
                "unwritten": self.unwritten,
                "best_step": self.best_step,
                "notes": self.notes,  # this and the next for tools/export.py
                "eos_token": self.tokenizer.eos_token,
            }
            checkpoints.save(args, self.engines, step, saved)
            self.started = time.monotonic()
        if stop:
            ranks.say(f"interrupted after step {step}: saved to {where}. Go on with --resume.")
            self.finish(code=1)

    # What the body of a step calls

    def log(self, metrics, micro_batches, passes=None):
        """Logs a step, and evaluates when that is due. Nothing that trains comes after it.

        A line of the log is of all steps since the one before (logs.joined).
        metrics: {name: number}, the same on all ranks. micro_batches: what the step trained on.
        passes: throughput.Pass of each model that took them; by default of one forward and
        backward.
        """
        args, step, engine = self.args, self.step, self.engine
        passes = passes or [throughput.Pass(engine, trains=1)]
        tokens, flops = throughput.work(micro_batches, passes, args.gradient_checkpointing)
        began, self.started = self.started, time.monotonic()  # what follows counts to the next step
        speed = throughput.speed(tokens, flops, self.started - began)
        record = {"step": step, "epoch": step / self.steps_per_epoch, **metrics, **speed}
        for name, each in self.engines.items():
            of = "" if each is engine else f"{name}_"
            record[f"{of}learning_rate"] = throughput.learning_rate(each)
            record[f"{of}grad_norm"] = throughput.grad_norm(args, each)
        self.stop_unless_finite(record, micro_batches)
        due = step == self.last_step or step % (args.eval_steps or self.steps_per_epoch) == 0
        if due:
            found = self.evaluate(step)
            record.update(found)
            self.folder.record["evaluation"] = {"step": step, **found}  # for the model's card
        self.unwritten.append(record)
        if due or step % args.log_steps == 0:
            self.write(logs.joined(self.unwritten))
            self.unwritten.clear()
        if due:
            best.keep(self, record)
            logs.draw_curves(args)
            self.started = time.monotonic()  # an evaluation is no part of a step

    def write(self, record):
        """Writes one line of the log, under the legend if it is the first."""
        logs.write_record(self.args, record, self.columns, not self.legend_shown, self.monitor)
        self.legend_shown = True

    def stop_unless_finite(self, values, micro_batches):
        """Stops the run if one of `values`, {name: number}, is NaN or infinite on any rank.

        The micro-batches' texts are then written down.
        """
        texts = (text for batch in micro_batches for text in batch.texts(self.tokenizer))
        crash.stop_if_not_finite(self.args, {"step": self.step, **values}, texts)

    # The end

    def save(self, engine, tokenizer, folder=None, full_tensor=zero3.full_tensor):
        """Saves a model, by default in the output folder (saving.save_model)."""
        folder = Path(folder or self.args.output_dir)
        self.phase.note(f"writing {folder}")
        facts = saving.save_model(engine, tokenizer, folder, full_tensor, self.notes)
        if facts:  # on rank 0
            model_card.write_card(self.args, self.folder.record, self.title, folder, **facts)

    def finish(self, code=0):
        """Leaves the other ranks in order, and ends the program with the exit code `code`."""
        crash.finish(self.args, code)
