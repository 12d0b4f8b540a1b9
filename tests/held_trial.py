"""Real training that waits in the middle until it is told to go on, so that a fault meets it on any machine.

    python -m held_trial ARGUMENTS

is `sweeps.launch` on a cluster with such trials, and a launcher that believes in ends sooner than usual.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from attnres.cli import run_command
from attnres.data.corpus import PackedCorpus
from attnres.stop import StopSignals
from attnres.trial import Trial
from sweeps import executors, launch, slurm_attempt
from sweeps.study import Study
from sweeps.trial_process import train_trial

SLOW_STEPS, SLOW_STEP_SECONDS = 20, 0.02  # long enough for a checkpoint; then the trial waits
# The study `tiny` of one size and rule, with so much to do that a trial is held in the middle of it.
HELD = ("study.sizes=[tiny_a]", "study.rules=[prenorm]", "runtime.checkpoint_seconds=0.1")
GO = "go"  # the file, in the study's folder


def train_held(trial: Trial, corpus: PackedCorpus) -> int:
    check, go = StopSignals.check, trial.folder.parent / GO
    steps = 0

    def check_and_wait(signals: StopSignals) -> None:
        nonlocal steps
        steps += 1
        check(signals)
        while steps > SLOW_STEPS and not go.exists():
            time.sleep(0.05)
            check(signals)
        if not go.exists():
            time.sleep(SLOW_STEP_SECONDS)

    StopSignals.check = check_and_wait  # type: ignore[method-assign]
    return train_trial(trial, corpus)


def is_held(folder: Path) -> bool:
    """Whether the trial of this folder is some steps into its training, and has saved a checkpoint."""
    return (folder / "checkpoint.pt").exists()


def go_on(study: Study) -> None:
    """From here on the study's trials train at full speed."""
    study.folder.mkdir(parents=True, exist_ok=True)
    (study.folder / GO).touch()


def main() -> int:
    from held_trial import train_held  # by this name, not __main__'s: the cluster's processes import it

    for name in ("SlurmExecutor", "RayExecutor"):
        setattr(executors, name, partial(getattr(executors, name), target=train_held))
    slurm_attempt.CONFIRM_SECONDS = slurm_attempt.ENDED_SECONDS = 3.0
    return run_command(launch.main)


if __name__ == "__main__":
    sys.exit(main())
