"""Time left for a launch, from each trial's own estimate, calibrations, and what finished trials took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sweeps.jobs import Job, Progress
from sweeps.state import TrialState


class StudyEta:
    """Evaluations count: they are in a trial's own estimate, in calibrations, and in the time trials took."""

    def __init__(self, seconds: Mapping[str, float], workers: int | None) -> None:
        self.seconds = seconds  # by trial id, estimated before
        self.workers = workers  # None: a cluster's queue decides; as many as run at this moment

    def left(self, progress: Progress[Any], states: Mapping[str, TrialState]) -> float | None:
        """Seconds until all trials of this launch are done, also those that others train; None: not known."""
        rate = self._seconds_per_flop(progress, states)
        running, elsewhere = (
            [self._left(job, states.get(job.planned.trial.id), rate) for job in jobs]
            for jobs in (progress.running, progress.elsewhere)
        )
        pending = [self._left(job, None, rate) for job in progress.pending]
        if None in (*running, *elsewhere, *pending):
            return None
        ours = [seconds for seconds in (*running, *pending) if seconds is not None]
        alone = [seconds for seconds in (*running, *elsewhere) if seconds is not None]  # one cannot be shared
        at_work = (states.get(job.planned.trial.id) for job in progress.running)
        workers = self.workers or sum(state is not None and state.at_work for state in at_work)
        return max([sum(ours) / max(1, workers), *alone])

    def _left(self, job: Job[Any], state: TrialState | None, rate: float | None) -> float | None:
        if state is not None and state.eta_seconds is not None:
            return state.eta_seconds
        whole = self.seconds.get(job.planned.trial.id)
        if whole is None and rate is not None:
            whole = rate * job.planned.flops
        if whole is None or state is None or state.step is None:
            return whole
        return whole * (1 - state.step / job.planned.trial.steps)

    def _seconds_per_flop(self, progress: Progress[Any], states: Mapping[str, TrialState]) -> float | None:
        seconds = flops = 0.0
        for job in progress.done:
            took = job.state and (job.state.wall_seconds or job.state.train_seconds)
            if took:
                seconds, flops = seconds + took, flops + job.planned.flops
        for job in progress.running:
            state = states.get(job.planned.trial.id)
            whole = _whole_seconds(state) if state is not None else None
            if whole is not None:
                seconds, flops = seconds + whole, flops + job.planned.flops
        return seconds / flops if flops else None


def _whole_seconds(state: TrialState) -> float | None:
    """Of a running trial: what is left over the part of the steps that is left."""
    if state.eta_seconds is None or state.step is None or not state.steps or state.step >= state.steps:
        return None
    return state.eta_seconds / (1 - state.step / state.steps)
