"""From the settings of `executor=...` to an executor.

An executor's package is imported only where it was chosen.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from attnres.errors import UserError
from sweeps.executor import Executor, LocalExecutor
from sweeps.executor_config import ExecutorConfig, RayConfig, SlurmConfig
from sweeps.ray_executor import RayExecutor
from sweeps.slurm_executor import SlurmExecutor
from sweeps.slurm_queue import check_commands
from sweeps.study import Study
from sweeps.trial_process import PRELOAD

_PACKAGES = {"slurm": "submitit", "ray": "ray"}
# What W&B's client imports only once a run begins or ends: a second of every trial, if not loaded before.
# The fork server passes over a module that another version of the client does not have.
_WANDB = ("wandb", "wandb.sdk.launch", "pandas")


def check_installed(settings: ExecutorConfig) -> None:
    """UserError if an executor lacks its package or its commands. Imports nothing."""
    package = _PACKAGES.get(settings.name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(f"executor={settings.name}: needs pip install -e '.[{settings.name}]'")
    if settings.name == "slurm":
        check_commands()


def open_executor(study: Study) -> Executor[Any]:
    """The executor that the study was told to use. UserError if it cannot work here."""
    settings = study.config.executor
    if isinstance(settings, SlurmConfig):
        return SlurmExecutor(settings, study)
    if isinstance(settings, RayConfig):
        return RayExecutor(settings, study)
    return LocalExecutor(study.threads, study.config.launch.grace_seconds, preload=preload(study))


def preload(study: Study) -> tuple[str, ...]:
    """Modules that the fork server loads once for all trials."""
    tracked = any(planned.trial.config.tracking.wandb != "disabled" for planned in study.trials)
    return (*PRELOAD, *_WANDB) if tracked else PRELOAD
