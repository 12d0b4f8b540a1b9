"""What the tests on Slurm share: whether there is one, settings, and launches whose trials are held."""

from __future__ import annotations

import importlib.util
import json

from held_trial import is_held
from kill_launch import Launch
from slurm_lab import why_not
from sweeps_support import Workplace, wait_until

from sweeps.executor_config import SlurmConfig
from sweeps.slurm_executor import NOTE_FILE, SlurmExecutor
from sweeps.state import read_state
from sweeps.study import Study
from sweeps.trial_process import Target, train_trial

NO_SUBMITIT = "submitit is not installed: make setup-clusters, or pip install -e '.[slurm]'"
WHY_NOT = why_not() or (NO_SUBMITIT if importlib.util.find_spec("submitit") is None else None)
SLURM = ("executor=slurm", "executor.poll_seconds=0.5", "executor.signal_seconds=30")
ONE = ("study.sizes=[tiny_a]", "study.rules=[prenorm]")


def executor(study: Study, target: Target = train_trial) -> SlurmExecutor:
    settings = study.config.executor
    assert isinstance(settings, SlurmConfig)
    return SlurmExecutor(settings, study, target)


def job_of(study: Study, index: int = 0) -> str:
    note = study.trials[index].trial.folder / NOTE_FILE
    return str(json.loads(note.read_text())["job"])


def losses(study: Study) -> list[float | None]:
    return [read_state(planned.trial.folder).loss_nats for planned in study.trials]


def start(workplace: Workplace, *more: str, held: int = 1) -> tuple[Launch, Study]:
    """A launcher in a process of its own, once so many trials are held in the middle of their training."""
    study = workplace.study(*SLURM, *more)
    launch = Launch(workplace.root, workplace.arguments(*SLURM, *more), "held_trial")
    folders = [planned.trial.folder for planned in study.trials]
    here = wait_until(lambda: sum(map(is_held, folders)) >= held, 300)
    assert here, (workplace.root / "launch.log").read_text()
    return launch, study
