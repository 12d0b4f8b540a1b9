"""The trials of a launch on their way through it, and what the rest of the launcher knows of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from sweeps.state import TrialState
from sweeps.study import PlannedTrial

Handle = TypeVar("Handle")


@dataclass(frozen=True)
class FailurePolicy:
    """What a failed trial means for the rest of a launch. A diverged one is a result."""

    on_failure: Literal["continue", "stop"] = "continue"  # stop: the running trials save and stop, too
    max_failures: int | None = None  # so many failed: no more is started, what runs goes on to its end
    retry_failed: bool = False  # also trials that failed of their own in an earlier launch


@dataclass
class Job(Generic[Handle]):
    """A trial on its way through the launch."""

    planned: PlannedTrial
    handle: Handle | None = None
    attempts: int = 0  # of this launch
    attempts_before: int = 0  # that the trial itself knew of when the last one was started
    state: TrialState | None = None  # once it has ended
    cancelled_at: float | None = None  # monotonic seconds
    withdrawn: bool = False  # its attempt was told to end because the launch starts no more


@dataclass
class Progress(Generic[Handle]):
    """Where a launch is. Every job is in exactly one of the lists."""

    pending: deque[Job[Handle]] = field(default_factory=deque)
    running: list[Job[Handle]] = field(default_factory=list)
    elsewhere: list[Job[Handle]] = field(default_factory=list)  # being trained by another process
    done: list[Job[Handle]] = field(default_factory=list)
    left: list[Job[Handle]] = field(default_factory=list)  # not started any more
    queues: bool = False  # running ones may be in a cluster's queue still

    def count(self, *states: str) -> int:
        return sum(job.state is not None and job.state.state in states for job in self.done)

    @property
    def failures(self) -> list[Job[Handle]]:
        return [job for job in self.done if job.state is None or job.state.state in ("failed", "diverged")]

    @property
    def failed_now(self) -> int:
        """Trials that failed in this launch."""
        return sum(job.attempts > 0 for job in self._failed())

    @property
    def failed_before(self) -> int:
        """Trials that failed of their own in an earlier launch and are left as they are."""
        return sum(job.attempts == 0 for job in self._failed())

    def _failed(self) -> list[Job[Handle]]:
        return [job for job in self.done if job.state is not None and job.state.state == "failed"]


class View(Protocol):
    """Who watches a launch."""

    def say(self, line: str) -> None:
        """Something happened."""

    def update(self, progress: Progress[Any]) -> None:
        """Called a few times a second."""

    def close(self) -> None:
        """There is no more to see."""


def launch_order(trials: Sequence[PlannedTrial]) -> list[PlannedTrial]:
    """Seed by seed, in each the longest first.

    A study that is stopped early has whole ladders of its first seeds; and no long trial is left for the
    end, when the other workers would wait for it.
    """
    seeds = list(dict.fromkeys(planned.seed for planned in trials))
    return sorted(trials, key=lambda planned: (seeds.index(planned.seed), -planned.flops))
