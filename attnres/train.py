"""Train one model: `python -m attnres.train model=cpu_50k residual=attnres_block seed=1`; --help says more.

Everything of a run is in its folder, runs_dir/study_name/<trial id>. The record is written when the trial has
ended (finished, diverged or failed); until then the checkpoint lets any later run of the same command
continue it.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attnres import multirun
from attnres.cli import help_text, reject_options, run_command, take_option, wants_help
from attnres.compose import compose_trial
from attnres.config import TrialConfig
from attnres.data import sampler
from attnres.data.corpus import PackedCorpus, open_corpus
from attnres.distributed import launched
from attnres.distributed.bystander import NoReporter, NoStatus
from attnres.distributed.group import Group, is_lost_connection, open_group
from attnres.distributed.parent import ProcessesFailed, train_in_processes
from attnres.errors import UserError
from attnres.evaluate import evaluation_row, open_validation, summarise
from attnres.folder import finished_record, prepare_folder
from attnres.lock import TrialLock, is_locked
from attnres.notice import warn
from attnres.origin import origin_of
from attnres.outcome import make_record, record_failure, summary
from attnres.record import RECORD_FILE, write_record
from attnres.reporting import Reporter
from attnres.resume import check_same, read_config
from attnres.run_state import Diverged, RunState
from attnres.status import StatusFile
from attnres.stop import Cancelled, Preempted, StopSignals, cancel_asked, forget_cancel
from attnres.trial import Trial, resolve
from attnres.wandb_service import start_service, wait_for_start

EXIT_CODES = {"finished": 0, "failed": 1, "diverged": 3}


def train(trial: Trial, corpus: PackedCorpus) -> dict[str, Any]:
    """Train a trial, from its checkpoint if it has one, and return its record (finished or diverged).

    A trial that has such a record already is not trained again. Raises TrialBusy if another process trains
    it, Preempted (Cancelled) after a signal (a cancel file) and a checkpoint; any other exception leaves a
    record with status failed, which does not stop a later run.

    A trial of several processes starts them, unless this is one of them, and raises ProcessesFailed if one
    fails. In all of them this returns the record; what only the first one meets is LostProcess in the others.
    """
    if trial.config.runtime.processes > 1 and not launched.inside_torchrun():
        return train_in_processes(trial, corpus)
    with (
        open_group(trial) as group,
        ExitStack() as stack,
        StopSignals(trial.folder, group.stop_wish) as signals,
    ):

        def begin() -> tuple[dict[str, Any] | None, bool]:
            stack.enter_context(TrialLock(trial.folder))
            stack.callback(wait_for_start)  # also if the model cannot be built: the folder is others' then
            done = finished_record(trial.folder)
            cancelled = cancel_asked(trial.folder)  # while it waited in a queue
            if not done and not cancelled:
                prepare_folder(trial)
            return done, cancelled

        done, cancelled = group.shared(begin)
        if done:
            return done
        if cancelled:
            raise Cancelled
        status = StatusFile(trial.folder, trial.steps) if group.main else NoStatus()
        state = RunState()
        status.update()  # seen as running from here on, and counted as an attempt
        try:
            record = _train(trial, corpus, state, status, signals, group)
        except Preempted as error:
            status.end(error.state, str(error), step=state.step)
            raise
        except Exception as error:
            lost = is_lost_connection(error)
            if isinstance(status, StatusFile) and not lost:
                record_failure(trial, corpus, state, status, _in_words(error), origin_of(error))
            group.tell_failure(_in_words(error), "lost" if lost else origin_of(error), state)
            raise
        loss_nats = record["validation"]["loss_nats"] if record["validation"] else None
        status.end(record["status"], record["reason"], step=state.step, loss_nats=loss_nats)
        return record


def _train(
    trial: Trial,
    corpus: PackedCorpus,
    state: RunState,
    status: StatusFile | NoStatus,
    signals: StopSignals,
    group: Group,
) -> dict[str, Any]:
    """Start, the training loop, and the end. `state` fills as it goes, so that a failure can say how far it
    came.
    """
    # Imported here: a mistyped setting, or a trial that is done already, must not wait for torch.
    from attnres.checkpoint import Checkpoints, save_weights
    from attnres.environment import describe
    from attnres.learner import Learner
    from attnres.probe_file import ProbeFile, probe_steps
    from attnres.probes import measure

    config, clock = trial.config, state.clock
    with clock.measure("startup"):
        if group.main:
            start_service(trial)
        learner = Learner(trial, group)  # first: it refuses a device that is not there
        state.environment = describe(trial)
        train_tokens, validation = corpus.train(), open_validation(trial, corpus)
        checkpoints = Checkpoints(trial.folder, trial.id)
        tensors: dict[str, Any] = {}  # of the checkpoint; only the main process reads it

        def load() -> dict[str, Any] | None:
            saved = checkpoints.load()
            if saved:
                tensors.update(saved.pop("learner"))
            return saved

        if saved := group.shared(load):
            learner.load_state(tensors)
            state.load(saved["run"])
        status.saved(state.step if saved else None)
        probed_steps = probe_steps(trial)
        probe_file = ProbeFile(trial, state.step) if group.main else None
        probed = group.shared(lambda: set(probe_file.rows) if probe_file else set())
        reporter: Reporter | NoReporter = NoReporter()
        if isinstance(status, StatusFile):
            reporter = Reporter(trial, state, status, saved["metrics"] if saved else None)

    def batch() -> sampler.Batch:
        model = config.model
        return sampler.batch(train_tokens, config.seed, state.step, model.batch_size, model.context)

    def evaluate(final: bool) -> None:
        def after_each() -> None:
            reporter.heartbeat(learner.microbatch_size * group.size)
            signals.check()

        with clock.measure("evaluation"):
            inputs, targets = validation.part(final)
            evaluation = summarise(learner.window_losses(inputs, targets, after_each), targets)
        state.evaluations.append(evaluation_row(evaluation, state.step, state.step * trial.batch_tokens))
        state.validation = vars(evaluation) if final else None
        reporter.evaluation(state.evaluations[-1])
        if final:
            state.check_final(evaluation.loss_nats)

    def probe() -> None:
        with clock.measure("probe"):
            windows = max(1, config.tracking.probe_tokens // config.model.context)
            part = validation.inputs[:windows], validation.targets[:windows]
            probes = measure(learner, *part)
            probed.add(state.step)
            if probe_file is not None:
                probe_file.add(state.step, probes)

    def save() -> None:
        with clock.measure("checkpoint"):
            learned = learner.state()
            if isinstance(reporter, Reporter):
                metrics = reporter.metrics_state()
                if checkpoints.save({"learner": learned, "run": state.to_dict(), "metrics": metrics}):
                    status.saved(state.step)

    def close(
        status_word: str, reason: str | None, weights: dict[str, Any] | None, peak_memory_bytes: int
    ) -> dict[str, Any]:
        assert isinstance(reporter, Reporter) and isinstance(status, StatusFile)
        record = make_record(trial, corpus, state, status_word, reason, status)
        record["timing"]["metrics_rows_missing"] = reporter.metrics_rows_missing
        record["timing"]["peak_memory_bytes"] = peak_memory_bytes
        if weights is not None:
            save_weights(trial, weights)
        write_record(trial.folder, record)
        checkpoints.remove()
        reporter.outcome = summary(record), EXIT_CODES[status_word]
        return record

    with reporter:
        # A package's kernels are compiled, tuned and compared at their first use.
        if config.runtime.compile or getattr(config.residual, "implementation", None) == "kernel":
            with clock.measure("startup"):
                learner.warm_up(*batch())
        saved_at = time.monotonic()
        status_word, reason = "finished", None
        try:
            while True:
                if state.step in trial.evaluation_steps and not state.evaluated(state.step):
                    evaluate(final=state.step == trial.steps)
                if state.step in probed_steps and state.step not in probed:
                    probe()
                if state.step == trial.steps:
                    break
                signals.check()
                with clock.measure_step():
                    result = learner.step(state.step + 1, *batch())
                    state.finish_step(result.loss_nats)
                with clock.measure("train"):
                    reporter.step(result)
                if group.any(time.monotonic() - saved_at >= config.runtime.checkpoint_seconds):
                    save()
                    saved_at = time.monotonic()
        except Diverged as error:
            status_word, reason = "diverged", str(error)
            reporter.diverged(reason)
        except Preempted:
            save()
            raise
        kept = config.runtime.keep_weights and status_word == "finished"
        weights = learner.state()["model"] if kept else None
        peak_memory_bytes = learner.peak_memory_bytes()
        return group.shared(lambda: close(status_word, reason, weights, peak_memory_bytes))


def _in_words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def run(config: TrialConfig, folder: Path | None = None) -> int:
    """Open the corpus, resolve, train, and say what came out. Returns the exit code of the trial.

    UserError if it is not the trial of `folder`, where that is given.
    """
    corpus = open_corpus(
        config.data, config.model.context, lambda line: print(line, file=sys.stderr, flush=True)
    )
    trial = resolve(config, corpus)
    if folder is not None:
        check_same(folder, trial)
    first = launched.rank() == 0
    for warning in trial.warnings if first else ():
        warn(warning)
    if first and not is_locked(trial.folder):
        forget_cancel(trial.folder)  # whoever asks for the trial by name wants it
    try:
        record = train(trial, corpus)
    except Preempted as error:
        if first:
            print(f"{trial.name}: {error} after a checkpoint; the same command continues", file=sys.stderr)
        # torchrun ends all processes with the first that fails: that is not to be one that only follows.
        return error.exit_code if first else 0
    except ProcessesFailed as error:
        print(f"{trial.name}: {error}; the same command tries again", file=sys.stderr)
        return error.exit_code
    if not first:
        return 0
    print(f"record: {trial.folder / RECORD_FILE}")
    print(f"{trial.name}: {record['status']}{_result(record)}")
    return EXIT_CODES[record["status"]]


def _result(record: dict[str, Any]) -> str:
    if record["validation"] is None:
        return f": {record['reason']}"
    validation = record["validation"]
    error = validation["standard_error"]
    spread = f" ± {error:.4f}" if error is not None else ""
    return (
        f", validation loss {validation['loss_nats']:.4f}{spread} nats per token, "
        f"{validation['bits_per_byte']:.4f} bits per byte, after {record['tokens']:,} tokens"
    )


_USAGE = """
usage: python -m attnres.train [key=value ...] [--config-dir DIR]
       python -m attnres.train -m key=value1,value2 ...
       python -m attnres.train --resume FOLDER

Train one model, or with -m every combination, one after the other in this process. A trial that has a record
is not trained again; one that was stopped continues from its checkpoint. Exit code: 0 finished, 3 diverged, 2
a mistake in the settings, 1 failed, 143 or 130 stopped by a signal after a checkpoint, 76 by sweeps.cancel.

  --config-dir DIR   a folder of your own with group/name.yaml files
  --resume FOLDER    the trial of this folder, from its config.yaml and its checkpoint, whatever stopped it
  -m, --multirun     several values per key; --cfg job, --info and Hydra's other flags work too (--hydra-help)
"""
_GROUPS = ("model", "residual", "data", "optim", "schedule", "budget", "runtime", "tracking")
_EXAMPLES = (
    "python -m attnres.train",
    "python -m attnres.train model=cpu_100k residual=attnres_block residual.num_blocks=4 seed=1",
    "python -m attnres.train budget=tokens budget.tokens=500_000 tracking=none",
    "python -m attnres.train data=text_files data.path=my_texts",
    "python -m attnres.train --resume runs/single/0123456789ab",
    "python -m attnres.train -m residual=prenorm,attnres_full seed=0,1",
)


def main(argv: list[str]) -> int:
    """`python -m attnres.train`; see --help."""
    if wants_help(argv):
        print(help_text(_USAGE, _GROUPS, _EXAMPLES))
        return 0
    if multirun.wants_hydra(argv):
        return multirun.run_hydra(argv, run)
    extra_dir, folder = take_option(argv, "--config-dir"), take_option(argv, "--resume")
    reject_options(argv)
    if folder is not None:
        if argv:
            raise UserError(f"--resume={folder}: is all that is needed; {argv[0]} would make another trial")
        return run(read_config(Path(folder)), Path(folder))
    return run(compose_trial(argv, extra_dir))


if __name__ == "__main__":
    code = run_command(main)
    if launched.inside_torchrun():
        launched.leave(code)
    raise SystemExit(code)
