"""Trials as tasks of a Ray cluster, or of Ray on this machine.

Ray places the tasks; the runner alone retries. Each task has a worker process of its own, which ends with it:
a trial that is killed costs only itself. Ray ends the tasks of a launcher that dies; their trials go on from
their last checkpoint in the next launch.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnres.errors import UserError
from attnres.notice import warn
from attnres.wandb_key import hide
from sweeps.config import available_cores
from sweeps.executor import in_training
from sweeps.executor_config import RayConfig
from sweeps.ray_job import run_task
from sweeps.study import PlannedTrial, Study
from sweeps.trial_process import LOG_FILE, Target, train_trial

CONNECT_SECONDS = 10.0
_STOPPED, _KILLED, _LOST, _FAILED = 143, -9, 255, 1  # exit codes of the same ends on this machine


@dataclass(eq=False)
class RayAttempt:
    """One task."""

    planned: PlannedTrial
    reference: Any  # ray.ObjectRef of its exit code
    code: int | None = None
    cause: str | None = None  # of an end from outside, in words


class RayExecutor:
    """A task per trial."""

    queues = True
    outlives_launch = False

    def __init__(self, settings: RayConfig, study: Study, target: Target = train_trial) -> None:
        # Ray would send figures about its use over the network unless told otherwise.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray = importlib.import_module("ray")
        self.target, self.threads = target, study.threads
        gpus = study.processes if any(p.trial.device == "cuda" for p in study.trials) else 0
        asked = task_options(settings, study.cores, gpus)
        self._connect(settings, asked)
        # A worker of its own for each trial, and no retries but the runner's.
        self._task = self._ray.remote(max_calls=1, max_retries=0, **asked)(run_task)

    def elsewhere(self, planned: PlannedTrial) -> str | None:
        return in_training(planned)

    def submit(self, planned: PlannedTrial) -> RayAttempt:
        arguments = (self.target, planned.trial, planned.corpus, self.threads, Path.cwd())
        return RayAttempt(planned, self._task.options(name=planned.trial.name).remote(*arguments))

    def poll(self, handle: RayAttempt) -> int | None:
        if handle.code is None and self._ray.wait([handle.reference], timeout=0)[0]:
            handle.code = self._exit_code(handle)
        return handle.code

    def cause(self, handle: RayAttempt) -> str | None:
        return handle.cause

    def wait(self, handles: Iterable[RayAttempt], seconds: float) -> None:
        references = [handle.reference for handle in handles]
        if references:
            self._ray.wait(references, num_returns=1, timeout=seconds)

    def stop(self, handle: RayAttempt, force: bool = False) -> None:
        self._ray.cancel(handle.reference, force=force)

    def withdraw(self, handle: RayAttempt) -> None:
        self.stop(handle)

    def close(self) -> None:
        """Leave the cluster; Ray that was started here ends."""
        self._ray.shutdown()

    def _exit_code(self, attempt: RayAttempt) -> int:
        errors = self._ray.exceptions
        try:
            return int(self._ray.get(attempt.reference))
        except errors.TaskCancelledError:
            return _STOPPED
        except errors.WorkerCrashedError:
            return _KILLED
        except errors.OutOfMemoryError:
            attempt.cause = "ended by Ray, as its node ran out of memory"
            return _KILLED
        except (errors.NodeDiedError, errors.LocalRayletDiedError, errors.ObjectLostError):
            attempt.cause = "its node failed"
            return _LOST
        except errors.RayError as error:  # it never came to the trial: what it said is found in the log
            _append(attempt.planned.trial.folder / LOG_FILE, _last_line(error))
            return _FAILED

    def _connect(self, settings: RayConfig, asked: Mapping[str, Any]) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if settings.address is None:
            options |= {"address": "local", "num_cpus": available_cores(), "include_dashboard": False}
        else:
            _check_reachable(settings.address)
            options |= {"address": settings.address}
        try:
            self._ray.init(**options)
        except Exception as error:  # Ray raises just that for a node that does not come up in half a minute
            self._ray.shutdown()
            where = "executor=ray" if settings.address is None else f"executor.address={settings.address}"
            raise UserError(f"{where}: {_last_line(error)}") from None
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        wanted = {"CPU": asked["num_cpus"], "GPU": asked["num_gpus"], **asked.get("resources", {})}
        if not any(all(node.get(name, 0) >= value for name, value in wanted.items()) for node in nodes):
            needs = ", ".join(f"{value:g} {name}" for name, value in wanted.items() if value)
            why = f"no node has what a trial asks for ({needs})"
            if settings.address is None:
                self._ray.shutdown()
                raise UserError(f"executor=ray: {why}")
            warn(f"executor=ray: {why}; it waits until one comes")


def task_options(settings: RayConfig, cores: int, gpus: int) -> dict[str, Any]:
    """What Ray is asked to set aside for every trial."""
    options: dict[str, Any] = {
        "num_cpus": settings.cpus if settings.cpus is not None else cores,
        "num_gpus": settings.gpus if settings.gpus is not None else gpus,
    }
    if settings.memory_bytes is not None:
        options["memory"] = settings.memory_bytes
    if settings.amounts:
        options["resources"] = settings.amounts
    return options


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:  # `auto`, `local`: Ray looks on this machine, and at once
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"executor.address={address}: cannot be reached: {_last_line(error)}") from None


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _append(log: Path, line: str) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(hide(line) + "\n")
