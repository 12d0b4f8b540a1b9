"""Whether the trials that run at once fit into the memory that is there: said before any of them starts.

A trial needs what its calibration or its record measured; where neither is, at least what follows from its
shape. The analytic bound is what makes a launch warn without timing anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attnres.peak_memory import training_bytes_at_least
from sweeps.calibration import Calibration
from sweeps.capacity import Capacity
from sweeps.executor_config import ExecutorConfig, RayConfig, SlurmConfig, memory_bytes
from sweeps.machine_memory import Available, available_memory
from sweeps.state import read_state
from sweeps.study import PlannedTrial, Study
from sweeps.table import gigabytes


@dataclass(frozen=True)
class Need:
    """Peak memory of one trial, in bytes."""

    cell: str
    bytes: int
    measured: bool  # else a lower bound

    def __str__(self) -> str:
        return f"{'' if self.measured else 'at least '}{gigabytes(self.bytes)}"


def need(planned: PlannedTrial, calibrations: Mapping[str, Calibration]) -> Need:
    calibration = calibrations.get(planned.cell)
    measured = calibration.peak_memory_bytes if calibration else None
    if measured is not None:
        return Need(planned.cell, measured, True)
    return Need(planned.cell, training_bytes_at_least(planned.trial), False)


def memory_warnings(study: Study, calibrations: Mapping[str, Calibration], capacity: Capacity) -> list[str]:
    """Lines about trials still to be run that will not fit, the most demanding cell by name. Usually none."""
    left = [planned for planned in study.trials if not read_state(planned.trial.folder).ended]
    lines = []
    for device in dict.fromkeys(planned.trial.device for planned in left):
        needs = sorted(
            (need(planned, calibrations) for planned in left if planned.trial.device == device),
            key=lambda one: -one.bytes,
        )
        if capacity.here:
            lines += _at_once(needs, capacity.workers, available_memory(device))
        elif device == "cpu":
            lines += _each(needs, study.config.executor)
    return lines


def _at_once(needs: Sequence[Need], workers: int, available: Available | None) -> list[str]:
    """The most demanding trials might run at the same time."""
    together = needs[:workers]
    total = sum(one.bytes for one in together)
    if available is None or total <= available.bytes:
        return []
    most = together[0]
    has = f"{gigabytes(available.bytes)} available ({available.where})"
    if most.bytes > available.bytes:
        cells = _names(one.cell for one in needs if one.bytes > available.bytes)
        return [
            f"{cells}: a trial takes {most}, more than the {has}: it would run out of memory; "
            "a smaller runtime.microbatch_size or runtime.checkpoint_activations=true needs less"
        ]
    fits = max(n for n in range(1, workers) if sum(one.bytes for one in needs[:n]) <= available.bytes)
    sure = all(one.measured for one in together)
    needed = f"{'' if sure else 'at least '}{gigabytes(total)}"
    return [
        f"{most.cell}: {len(together)} trials at once ({most} each the largest) take {needed}, more than the "
        f"{has}: launch.workers={fits} {'fits' if sure else 'at most'}"
    ]


def _each(needs: Sequence[Need], settings: ExecutorConfig) -> list[str]:
    """A job of a cluster has the memory that it asks for."""
    if not isinstance(settings, (SlurmConfig, RayConfig)) or settings.memory is None:
        return []
    limit = memory_bytes(settings.memory)
    over = [one for one in needs if one.bytes > limit]
    if not over:
        return []
    return [
        f"{_names(one.cell for one in over)}: a trial takes {over[0]}, more than executor.memory="
        f"{settings.memory}: its job would be killed"
    ]


def _names(cells: Iterable[str], most: int = 4) -> str:
    names = list(dict.fromkeys(cells))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
