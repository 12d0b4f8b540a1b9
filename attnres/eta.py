"""How long a trial has still to go, its evaluations and checkpoints counted. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from attnres.trial import Trial

# Of the time of a training step, per sequence: forward is a third of forward and backward. Only until the
# first evaluation has been timed.
FORWARD_SHARE = 1 / 3
_NOT_STEPS = ("checkpoint", "probe")


def windows_of(trial: Trial, step: int) -> int:
    """Validation windows that the evaluation after `step` reads: all at the end, the first part before."""
    data, context = trial.config.data, trial.config.model.context
    final = max(1, data.validation_tokens // context)
    return final if step == trial.steps else min(final, max(1, data.interim_validation_tokens // context))


class Eta:
    """Of one attempt. `seconds` is the clock's, by activity; at first it holds earlier attempts."""

    def __init__(self, trial: Trial, step: int, seconds: Mapping[str, float]) -> None:
        self.trial = trial
        self._seconds, self._before, self._first_step = seconds, dict(seconds), step
        self._windows = 0  # evaluated in this attempt
        self._windows_now = 0  # of an evaluation that is not over

    def evaluating(self, windows: int) -> None:
        """So many more windows of the evaluation in hand are done."""
        self._windows_now += windows

    def evaluated(self, step: int) -> None:
        self._windows, self._windows_now = self._windows + windows_of(self.trial, step), 0

    def left(self, step: int, evaluated: int) -> float | None:
        """Seconds left after `step` steps, where the evaluation at step `evaluated` was the last one done.

        None before the first step of the attempt.
        """
        trial, steps = self.trial, step - self._first_step
        if steps <= 0:
            return None
        of_a_step = self._spent("train") / steps
        besides = sum(map(self._spent, _NOT_STEPS)) / steps
        windows = sum(windows_of(trial, at) for at in trial.evaluation_steps if at > evaluated)
        windows = max(0, windows - self._windows_now)
        return (trial.steps - step) * (of_a_step + besides) + windows * self._of_a_window(of_a_step)

    def _of_a_window(self, of_a_step: float) -> float:
        if self._windows:
            return self._spent("evaluation") / self._windows
        return of_a_step / self.trial.config.model.batch_size * FORWARD_SHARE

    def _spent(self, activity: str) -> float:
        return self._seconds[activity] - self._before[activity]
