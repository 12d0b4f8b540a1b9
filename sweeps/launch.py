"""`python -m sweeps.launch study=NAME`: run what has no finished record. Call it again to go on."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from attnres.cli import help_text, reject_options, run_command, take_option, wants_help
from sweeps.calibration import known
from sweeps.capacity import capacity
from sweeps.executor import Executor
from sweeps.executors import open_executor
from sweeps.live import StudyEta, open_watch
from sweeps.memory_need import memory_warnings
from sweeps.plan import GROUPS, say, warnings
from sweeps.runner import Interrupts, Progress, Runner, View, launch_order
from sweeps.state import TrialState, read_state
from sweeps.study import PlannedTrial, Study, load_study, write_study
from sweeps.table import duration

USAGE = """
usage: python -m sweeps.launch study=NAME [key=value ...] [--config-dir DIR]

Runs the trials of a study that have no finished record, each in a process of its own. One failure does not
stop the others. Stop it at any moment, even with kill -9: the same command goes on from the last
checkpoints. Two launches of one study at once share the work. Exit code 0: all trials have finished;
1: some failed or diverged; 2: a mistake in the settings; 130 or 143: stopped by a signal.

  study.KEY=VALUE   changes the study: study.seeds=[0,1] study.sizes=[cpu_50k]
  launch.workers=N  trials at once (default: cores / runtime.threads)
  executor=NAME     where trials run: local (here, the default), slurm or ray, with executor.KEY=VALUE;
                    docs/executors.md says what each needs and what stopping does there
  runs_dir=DIR      where records are (default: runs)
  anything else     an override of every trial: budget=tokens budget.tokens=1e6 tracking=none
  --config-dir DIR  your own YAML files, DIR/study/NAME.yaml among them
"""
EXAMPLES = (
    "python -m sweeps.launch study=smoke",
    "python -m sweeps.launch study=scaling_law launch.workers=4 tracking=none",
    "python -m sweeps.launch study=mine --config-dir my_configs",
    "python -m sweeps.launch study=paper executor=slurm executor.partition=gpu executor.time_minutes=240",
    "python -m sweeps.launch study=smoke executor=ray executor.address=auto",
)


def launch(study: Study, executor: Executor[Any], watch: View, interrupts: Interrupts) -> Progress[Any]:
    """Run a study's trials on an executor, watched. Writes study.json first."""
    write_study(study)
    settings = study.config.launch
    workers = _workers(study, executor) or len(study.trials)
    runner = Runner(executor, watch, workers, settings.max_retries, settings.grace_seconds)
    return runner.run(launch_order(study.trials), interrupts)


def main(argv: list[str]) -> int:
    if wants_help(argv):
        print(help_text(USAGE, GROUPS, EXAMPLES))
        return 0
    config_dir = take_option(argv, "--config-dir")
    reject_options(argv)
    started = time.monotonic()
    study = load_study(argv, config_dir, say)
    for warning in (*warnings(study), *memory_warnings(study, known(study), capacity(study))):
        say(f"warning: {warning}")
    executor = open_executor(study)
    with Interrupts(heeded(executor)) as interrupts:
        watch = open_watch(_eta(study, executor), study.config.launch.report_seconds)
        try:
            launch(study, executor, watch, interrupts)
        finally:
            watch.close()
    return report(study, time.monotonic() - started, interrupts.first)


def heeded(executor: Executor[Any]) -> tuple[signal.Signals, ...]:
    """Signals that stop the trials. Closing the terminal does not take jobs out of a cluster's queue."""
    kept = (signal.SIGHUP,) if executor.outlives_launch else ()
    return tuple(number for number in Interrupts.SIGNALS if number not in kept)


def _workers(study: Study, executor: Executor[Any]) -> int | None:
    """Trials at once, where the launcher decides it and not a queue."""
    return study.config.launch.workers if executor.queues else study.workers


def report(study: Study, seconds: float, interrupted_by: int | None) -> int:
    """Say where the study stands and what to do next; return the exit code."""
    states = [(planned, read_state(planned.trial.folder)) for planned in study.trials]
    finished = sum(state.state == "finished" for _, state in states)
    print(
        f"{finished} of {len(states)} trials finished, {duration(seconds)}. Records: {study.folder}{os.sep}"
    )
    bad = [(planned, state) for planned, state in states if state.state in ("failed", "diverged")]
    _print_failures(bad)
    if interrupted_by is not None:
        print("stopped; the same command goes on from the checkpoints")
        return 128 + interrupted_by
    where = "" if study.config.runs_dir == "runs" else f" runs_dir={study.config.runs_dir}"
    if finished:
        print(f"next: python -m analysis.report study={study.name}{where}")
    return 0 if finished == len(states) else 1


def _print_failures(bad: Sequence[tuple[PlannedTrial, TrialState]]) -> None:
    for planned, state in bad:
        print(f"  {planned.trial.name}: {state.state}: {state.reason} ({planned.trial.folder})")


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
