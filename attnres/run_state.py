"""What a training run knows of itself besides its parameters: position, losses, evaluations, time.

Torch-free. All of it goes through the checkpoint: a resumed run writes the record of an undisturbed one.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

# Steps of the running loss, and of the last training loss that a record names. Below 50 the noise between
# batches shows; far above, a diverged run wastes its machine. A healthy run never spends 50 steps above its
# start: the start is the loss of a model that knows nothing, and the first steps already learn how frequent
# each token is.
RECENT_STEPS = 50
# A model at its start scatters by some 0.01 nats between batches: a margin, or a long slow warm-up
# could trip.
DIVERGENCE_MARGIN_NATS = 0.1


class Diverged(Exception):
    """Training went wrong in its numbers; the text is the record's reason."""


Activity = Literal["startup", "train", "evaluation", "checkpoint", "probe"]


class Clock:
    """Seconds by activity, summed over attempts. Work that a kill threw away is not in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(get_args(Activity), 0.0)
        # Of every training step, without its report; a busy moment of the machine does not move their median.
        self.step_seconds: list[float] = []
        self._wall_before = 0.0
        self._started = time.monotonic()
        self._inside = 0.0  # seconds of other activities within the present one

    @contextmanager
    def measure(self, activity: Activity) -> Iterator[None]:
        """Count the seconds of a block. What is measured within it counts once, as what it is."""
        start, before, self._inside = time.perf_counter(), self._inside, 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds[activity] += seconds - self._inside
            self._inside = before + seconds

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        before = self.seconds["train"]
        with self.measure("train"):
            yield
        self.step_seconds.append(self.seconds["train"] - before)

    @property
    def wall_seconds(self) -> float:
        return self._wall_before + time.monotonic() - self._started

    @property
    def attempt_seconds(self) -> float:
        """Wall-clock seconds of this attempt."""
        return time.monotonic() - self._started

    def median_step_seconds(self) -> float | None:
        return statistics.median(self.step_seconds) if self.step_seconds else None

    def to_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "step_seconds": self.step_seconds, "wall_seconds": self.wall_seconds}

    def add_earlier(self, saved: Mapping[str, Any]) -> None:
        """Add the seconds of the attempts that a checkpoint stands for."""
        for activity, seconds in saved["seconds"].items():
            self.seconds[activity] += seconds
        self.step_seconds = list(saved["step_seconds"]) + self.step_seconds
        self._wall_before = saved["wall_seconds"]


@dataclass
class RunState:
    """`step` optimizer steps are done; `evaluations` holds the record's rows so far."""

    step: int = 0
    first_loss_nats: float | None = None
    recent_losses: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    validation: dict[str, Any] | None = None  # the final evaluation, as the record has it
    environment: dict[str, Any] = field(default_factory=dict)  # of this attempt; not in the checkpoint
    clock: Clock = field(default_factory=Clock)

    def finish_step(self, loss_nats: float) -> None:
        """Count a step with its (finite) training loss. Raises Diverged if the loss has been high for too
        long.
        """
        self.step += 1
        if self.first_loss_nats is None:
            self.first_loss_nats = loss_nats
        self.recent_losses.append(loss_nats)
        if len(self.recent_losses) < RECENT_STEPS:
            return
        recent = self.recent_loss_nats
        if recent > self.first_loss_nats + DIVERGENCE_MARGIN_NATS:
            raise Diverged(
                f"mean training loss of the {RECENT_STEPS} steps up to step {self.step} is {recent:.3f}, "
                f"above the {self.first_loss_nats:.3f} of the first step"
            )

    def check_final(self, validation_loss_nats: float) -> None:
        """Raises Diverged for a run that ends knowing less than it did at its start, however short it was."""
        assert self.first_loss_nats is not None
        if validation_loss_nats > self.first_loss_nats + DIVERGENCE_MARGIN_NATS:
            raise Diverged(
                f"final validation loss is {validation_loss_nats:.4g}, "
                f"above the {self.first_loss_nats:.3f} of the first training step"
            )

    @property
    def recent_loss_nats(self) -> float:
        """Mean training loss of the last RECENT_STEPS steps, or of as many as there were."""
        return sum(self.recent_losses) / len(self.recent_losses)

    def evaluated(self, step: int) -> bool:
        return any(row["step"] == step for row in self.evaluations)

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "first_loss_nats": self.first_loss_nats,
            "recent_losses": list(self.recent_losses),
            "evaluations": self.evaluations,
            "validation": self.validation,
            "clock": self.clock.to_dict(),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        self.step = saved["step"]
        self.first_loss_nats = saved["first_loss_nats"]
        self.recent_losses.extend(saved["recent_losses"])
        self.evaluations = list(saved["evaluations"])
        self.validation = saved["validation"]
        self.clock.add_earlier(saved["clock"])
