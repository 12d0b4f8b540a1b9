"""What is known of a trial's time and memory on this machine, by shape.

It was measured once (sweeps.timing) and is kept in the cache folder. Records of the study's own finished
trials are better still.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnres.config import to_mapping
from attnres.data.cache import cache_root
from attnres.errors import RecordError
from attnres.json_file import Check, check_fields, is_count, is_number, or_null, read_object
from attnres.record import RECORD_FILE, read_record
from sweeps.capacity import capacity
from sweeps.machine_memory import visible_gpus
from sweeps.study import PlannedTrial, Study

_NOT_IN_SHAPE = {
    "model": ("name", "learning_rate"),
    "runtime": ("checkpoint_seconds", "progress", "log_every_steps"),
}


@dataclass(frozen=True)
class Calibration:
    """Cost of one shape on this machine, in seconds and bytes."""

    seconds_per_step: float
    evaluation_seconds_per_window: float
    startup_seconds: float
    peak_memory_bytes: int | None  # of the process on a CPU, allocated on a GPU; None: of an older record

    def trial_seconds(self, planned: PlannedTrial) -> float:
        """Wall time of the whole trial."""
        steps = planned.trial.steps * self.seconds_per_step
        return self.startup_seconds + steps + evaluation_windows(planned) * self.evaluation_seconds_per_window


_CHECKS: Mapping[str, Check] = {
    "seconds_per_step": is_number,
    "evaluation_seconds_per_window": is_number,
    "startup_seconds": is_number,
    "peak_memory_bytes": or_null(is_count),
}


def evaluation_windows(planned: PlannedTrial) -> int:
    """Validation windows that a trial reads: the whole set at its end, the first part of it before."""
    trial = planned.trial
    data, context = trial.config.data, trial.config.model.context
    interim = (len(trial.evaluation_steps) - 1) * (data.interim_validation_tokens // context)
    return interim + data.validation_tokens // context


def known(study: Study) -> dict[str, Calibration]:
    """Calibrations by cell, from finished records and the cache; nothing is measured."""
    side_by_side = capacity(study).side_by_side
    found: dict[str, Calibration] = {}
    for planned in study.trials:
        if planned.cell not in found and (calibration := _from_record(planned)):
            found[planned.cell] = calibration
    for planned in study.trials:
        has = found.get(planned.cell)
        if has is None or has.peak_memory_bytes is None:
            cached = _from_cache(planned, side_by_side)
            if has and cached:
                found[planned.cell] = replace(has, peak_memory_bytes=cached.peak_memory_bytes)
            elif cached:
                found[planned.cell] = cached
    return found


def makespan(seconds: Sequence[float], workers: int) -> float:
    """Wall time of trials started in this order, each on the worker that is free first."""
    free = [0.0] * workers
    for duration in seconds:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


@functools.cache
def machine() -> dict[str, Any]:
    """What makes this machine's times its own."""
    return {"cpu": _processor(), "cores": os.cpu_count(), "torch": importlib.metadata.version("torch")}


def timed_on(device: str) -> str:
    """The device of this machine that a calibration is of, in words."""
    if device == "cuda":
        return visible_gpus()[0].name if visible_gpus() else "GPU"
    return _processor()


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cache_key(planned: PlannedTrial, workers: int) -> str:
    """Hash of everything that changes the time of a step."""
    mapping = to_mapping(planned.trial.config)
    shape: dict[str, Any] = {group: mapping[group] for group in ("model", "residual", "runtime")}
    for group, keys in _NOT_IN_SHAPE.items():
        shape[group] = {key: value for key, value in shape[group].items() if key not in keys}
    optim = mapping["optim"]  # its rates, decay and clipping take the same time whatever their values
    shape["optim"] = [optim["name"], optim.get("ns_steps")]
    shape |= {"vocabulary": planned.trial.vocabulary, "device": planned.trial.device, "workers": workers}
    if planned.trial.device == "cuda":
        shape["gpus"] = [gpu.name for gpu in visible_gpus()[:1]]
    return hashlib.sha256(json.dumps(shape | machine(), sort_keys=True).encode()).hexdigest()[:24]


def _processes(planned: PlannedTrial) -> int:
    return planned.trial.config.runtime.processes


def cache_path(planned: PlannedTrial, workers: int) -> Path:
    return (
        cache_root(planned.trial.config.data.cache_dir)
        / "calibration"
        / f"{cache_key(planned, workers)}.json"
    )


def _from_cache(planned: PlannedTrial, workers: int) -> Calibration | None:
    path = cache_path(planned, workers)
    try:
        numbers = read_object(path)
        if numbers is not None:
            check_fields(numbers, _CHECKS, str(path))
            return Calibration(**numbers)
    except (RecordError, TypeError):
        pass  # torn or of an older version: measured again
    return None


def _from_record(planned: PlannedTrial) -> Calibration | None:
    """What this very trial took, if it has finished on this kind of processor."""
    try:
        record = read_record(planned.trial.folder / RECORD_FILE)
    except RecordError:
        return None
    if record["status"] != "finished" or record["environment"].get("cpu") != _processor():
        return None
    timing: Mapping[str, Any] = record["timing"]
    if record["config"].get("runtime", {}).get("processes", 1) != _processes(planned):
        return None
    if timing.get("attempts") != 1:
        return None  # its times hold the attempts that were cut off
    train, evaluation, wall = (timing.get(f"{part}_seconds") for part in ("train", "evaluation", "wall"))
    if train is None or evaluation is None or wall is None or record["steps"] < 1:
        return None  # of an older version
    startup = max(0.0, wall - train - evaluation)
    evaluation_seconds = evaluation / max(1, evaluation_windows(planned))
    return Calibration(train / record["steps"], evaluation_seconds, startup, timing.get("peak_memory_bytes"))
