"""`python -m sweeps.launch study=NAME`: run what has no finished record. Call it again to go on."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from attnres.cli import help_text, reject_options, run_command, take_flag, take_option, wants_help
from attnres.errors import ConfigError, UserError
from attnres.stop import forget_cancel
from attnres.words import counted
from sweeps.calibration import known
from sweeps.capacity import capacity
from sweeps.config import SweepConfig
from sweeps.detach import LOG_FILE, Detached, detach
from sweeps.executor import Executor
from sweeps.executors import check_installed, open_executor
from sweeps.interrupts import Interrupts, signals_as_exit
from sweeps.jobs import FailurePolicy, Progress, View, launch_order
from sweeps.launches import LaunchFile
from sweeps.live import NotedView, Watch, open_screen
from sweeps.memory_need import memory_warnings
from sweeps.plan import GROUPS, say, warnings
from sweeps.runner import Runner
from sweeps.state import TrialState, read_state
from sweeps.study import PlannedTrial, Study, load_study, write_study
from sweeps.study_eta import StudyEta
from sweeps.table import duration
from sweeps.trial_ids import choose

USAGE = """
usage: python -m sweeps.launch study=NAME [key=value ...] [options]

Runs the trials of a study that have no finished record, each in a process of its own. One failure does not
stop the others. Stop it at any moment, even with kill -9: the same command goes on from the last
checkpoints. Two launches of one study at once share the work. Exit code 0: all trials have finished;
1: some failed, diverged, were cancelled or are left; 2: a mistake in the settings; 130 or 143: stopped by a
signal. docs/launching.md has more.

  study.KEY=VALUE   changes the study: study.seeds=[0,1] study.sizes=[cpu_50k]
  launch.workers=N  trials at once (default: cores / those of a trial, runtime.threads * processes)
  executor=NAME     where trials run: local (here, the default), slurm or ray, with executor.KEY=VALUE;
                    docs/executors.md says what each needs and what stopping does there
  rates=NAME        learning rates from DIR/rates/NAME.yaml (docs/hyperparameters.md)
  runs_dir=DIR      where records are (default: runs)
  anything else     an override of every trial: budget=tokens budget.tokens=1e6 tracking=none
  --trial ID[,ID]   these trials alone, whatever became of them: ids, unambiguous beginnings of them, or names
  --retry-failed    also trials that failed of their own (an exception) before; else they are left as they are
  --on-failure W    continue (the default), or stop: the running trials save a checkpoint and the launch ends
                    (the same as launch.on_failure=W)
  --max-failures N  start no more after N failed trials; those that run go on to their end
                    (the same as launch.max_failures=N)
  --detach          in the background, beyond the end of this shell: returns once it has begun
  --config-dir DIR  your own YAML files, DIR/study/NAME.yaml among them
"""
EXAMPLES = (
    "python -m sweeps.launch study=smoke",
    "python -m sweeps.launch study=scaling_law launch.workers=4 tracking=none",
    "python -m sweeps.launch study=mine --config-dir my_configs",
    "python -m sweeps.launch study=scaling_law --detach",
    "python -m sweeps.launch study=smoke --trial 3f9a,8c21",
    "python -m sweeps.launch study=paper executor=slurm executor.partition=gpu executor.time_minutes=240",
    "python -m sweeps.launch study=smoke executor=ray executor.address=auto",
)

SPELLINGS = {"--on-failure": "launch.on_failure", "--max-failures": "launch.max_failures"}


def launch(
    study: Study,
    executor: Executor[Any],
    watch: View,
    interrupts: Interrupts,
    trials: Sequence[PlannedTrial] | None = None,
    retry_failed: bool = False,
    background: Detached | None = None,
) -> Progress[Any]:
    """Run a study's trials, or some of them, on an executor, watched. Writes study.json first."""
    trials = study.trials if trials is None else trials
    write_study(study)
    for planned in trials:
        forget_cancel(planned.trial.folder)  # they are wanted again; what is cancelled from here on is not
    settings = study.config.launch
    policy = FailurePolicy(settings.on_failure, settings.max_failures, retry_failed)
    workers = _workers(study, executor) or len(study.trials)
    started = background.started if background else lambda: None
    with LaunchFile(study.folder, study.config.executor.name, background is not None) as note:
        ids = [planned.trial.id for planned in trials]
        note.write(pending=ids, running=[], elsewhere=[], done=0, eta_seconds=None)
        noted = NotedView(watch, note, _eta(study, executor), started)
        runner = Runner(executor, noted, workers, settings.max_retries, settings.grace_seconds, policy)
        progress = runner.run(launch_order(trials), interrupts)
    started()
    return progress


def main(argv: list[str]) -> int:
    if wants_help(argv):
        print(help_text(USAGE, GROUPS, EXAMPLES))
        return 0
    config_dir, words = take_option(argv, "--config-dir"), take_option(argv, "--trial")
    retry_failed = take_flag(argv, "--retry-failed") or words is not None
    for option, key in SPELLINGS.items():
        if (value := take_option(argv, option)) is not None:
            argv.append(f"{key}={value}")
    detached = take_flag(argv, "--detach")
    reject_options(argv)
    sys.stdout.write("")  # a closed stdout is an error now, not after an hour
    started = time.monotonic()
    study = load_study(argv, config_dir, say, check=_begin)
    trials = chosen_trials(study, words)
    for warning in (*warnings(study), *memory_warnings(study, known(study), capacity(study))):
        say(f"warning: {warning}")
    background = detach(study.folder, study.name) if detached else None
    if isinstance(background, int):
        _print_detached(study, background)
        return 0
    try:
        with signals_as_exit():
            executor = open_executor(study)
        with Interrupts(heeded(executor)) as interrupts:
            eta = _eta(study, executor)
            watch = Watch(open_screen(study.config.launch.report_seconds), eta)
            try:
                progress = launch(study, executor, watch, interrupts, trials, retry_failed, background)
            finally:
                watch.close()
    except UserError as error:
        if background:
            background.failed(str(error))
        raise
    return report(study, time.monotonic() - started, interrupts.first, progress, trials)


def _begin(config: SweepConfig) -> None:
    """Before anything slow: what is missing is said, else what is being prepared."""
    check_installed(config.executor)
    say(f"study {config.study.name}: preparing its trials and their corpus")


def _print_detached(study: Study, pid: int) -> None:
    where = _where(study)
    print(f"study {study.name}: launched in the background, process {pid}; log: {study.folder / LOG_FILE}")
    print(f"watch it: python -m sweeps.status study={study.name}{where} --watch")
    print(f"stop it:  python -m sweeps.cancel study={study.name}{where}   (the trials save checkpoints)")


def _where(study: Study) -> str:
    """As a word of a command that can be pasted into a shell."""
    runs_dir = study.config.runs_dir
    return "" if runs_dir == "runs" else f" {shlex.quote(f'runs_dir={runs_dir}')}"


def chosen_trials(study: Study, words: str | None) -> Sequence[PlannedTrial]:
    """The trials that `--trial` names, or all. UserError for a name that no trial has."""
    if words is None:
        return study.trials
    named = [(planned.trial.id, planned.trial.name) for planned in study.trials]
    given = [word.strip() for word in words.split(",")]
    if not all(given):
        raise ConfigError("--trial", words, "names an empty trial; write ID, or ID,ID without more commas")
    ids = choose(named, given, study.name)
    return [planned for planned in study.trials if planned.trial.id in ids]


def heeded(executor: Executor[Any]) -> tuple[signal.Signals, ...]:
    """Signals that stop the trials. Closing the terminal does not take jobs out of a cluster's queue."""
    kept = (signal.SIGHUP,) if executor.outlives_launch else ()
    return tuple(number for number in Interrupts.SIGNALS if number not in kept)


def _workers(study: Study, executor: Executor[Any]) -> int | None:
    """Trials at once, where the launcher decides it and not a queue."""
    return study.config.launch.workers if executor.queues else study.workers


def report(
    study: Study,
    seconds: float,
    interrupted_by: int | None,
    progress: Progress[Any] | None = None,
    trials: Sequence[PlannedTrial] | None = None,
) -> int:
    """Say where the study, or what was launched of it, stands and what to do next; return the exit code."""
    trials = study.trials if trials is None else trials
    states = [(planned, read_state(planned.trial.folder)) for planned in trials]
    finished = sum(state.state == "finished" for _, state in states)
    outcome = f"{finished} of {counted(len(states), 'trial')} finished"
    print(f"{outcome}, {duration(seconds)}. Records: {study.folder}{os.sep}")
    bad = [(planned, state) for planned, state in states if state.state in ("failed", "diverged")]
    _print_failures(bad)
    if interrupted_by is not None:
        print("stopped; the same command goes on from the checkpoints")
        return 128 + interrupted_by
    for line in _left(study, states, progress):
        print(line)
    if len(states) == len(study.trials) and all(state.ended for _, state in states):
        one = len({planned.rule for planned in study.trials}) == 1 and study.config.study.report != "rates"
        if one:  # a report would have nothing to compare
            print("one rule alone: a report compares two or more (study.rules), launched together")
        else:
            print(f"next: python -m analysis.report study={study.name}{_where(study)}")
    return 0 if finished == len(states) else 1


def _left(
    study: Study, states: Sequence[tuple[PlannedTrial, TrialState]], progress: Progress[Any] | None
) -> Iterator[str]:
    """Why trials were left undone, beyond their own reasons."""
    if progress is None:
        return
    settings = study.config.launch
    if progress.failed_before:
        yield (
            counted(
                progress.failed_before,
                "trial had failed of its own before and was left as it is; --retry-failed tries it again",
                "trials had failed of their own before and were left as they are; "
                "--retry-failed tries them again",
            )
        )
    if settings.on_failure == "stop" and progress.failed_now:
        again = "the same command goes on with the others, --retry-failed with what failed of its own too"
        yield f"stopped after a failure (launch.on_failure=stop); {again}"
    elif progress.left:
        yield (
            f"{counted(len(progress.left), 'trial was', 'trials were')} not started after "
            f"{counted(progress.failed_now, 'failure')} "
            f"(launch.max_failures={settings.max_failures}); the same command goes on"
        )
    if cancelled := sum(state.state == "cancelled" for _, state in states):
        one, many = "trial was cancelled; the same command goes on with it", "trials were cancelled; "
        yield counted(cancelled, one, f"{many}the same command goes on with them")


def _print_failures(bad: Sequence[tuple[PlannedTrial, TrialState]]) -> None:
    for planned, state in bad:
        print(f"  {planned.title}: {state.state}: {state.reason} ({planned.trial.folder})")


def _eta(study: Study, executor: Executor[Any]) -> StudyEta:
    calibrations = known(study)
    seconds = {
        planned.trial.id: calibrations[planned.cell].trial_seconds(planned)
        for planned in study.trials
        if planned.cell in calibrations
    }
    return StudyEta(seconds, _workers(study, executor))


if __name__ == "__main__":
    sys.exit(run_command(main))
