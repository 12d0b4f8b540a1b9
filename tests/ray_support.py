"""What the tests on Ray share: whether there is one, executors, and launches whose trials are held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster_support import parents, trial_pid
from held_trial import is_held
from kill_launch import Launch
from ray_lab import RayLab, raylet, why_not
from sweeps_support import Workplace, wait_until

from sweeps.executor_config import RayConfig
from sweeps.ray_executor import RayExecutor
from sweeps.study import Study
from sweeps.trial_process import Target, train_trial

WHY_NOT = why_not()


def executor(study: Study, target: Target = train_trial) -> RayExecutor:
    settings = study.config.executor
    assert isinstance(settings, RayConfig)
    return RayExecutor(settings, study, target)


def on(cluster: RayLab) -> tuple[str, str]:
    return "executor=ray", f"executor.address={cluster.address}"


def start(workplace: Workplace, *more: str, held: int = 1) -> tuple[Launch, Study]:
    """A launcher in a process of its own, once so many trials are held in the middle of their training."""
    study = workplace.study(*more)
    launch = Launch(workplace.root, workplace.arguments(*more), "held_trial")
    folders = [planned.trial.folder for planned in study.trials]
    here = wait_until(lambda: sum(map(is_held, folders)) >= held, 300)
    assert here, (workplace.root / "launch.log").read_text()
    return launch, study


def node_of(cluster: RayLab, folder: Path) -> Any:
    """The node that trains the trial of this folder."""
    above = parents(trial_pid(folder))
    return next(node for node in cluster.nodes if raylet(node) in above)
