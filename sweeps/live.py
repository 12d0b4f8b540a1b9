"""Watching a launch: one live table on a terminal, one line per interval on a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sweeps.launches import LaunchFile
from sweeps.runner import Job, Progress, View
from sweeps.state import TrialState, read_state
from sweeps.table import duration

REFRESH_SECONDS = 1.0


class StudyEta:
    """Time left for a study, from each trial's own ETA, calibrations, and what finished trials took."""

    def __init__(self, seconds: Mapping[str, float], workers: int | None) -> None:
        self.seconds = seconds  # by trial id, estimated before
        self.workers = workers  # None: a cluster's queue decides; as many as run at this moment

    def left(self, progress: Progress[Any], states: Mapping[str, TrialState]) -> float | None:
        """Seconds until all that this launch runs is done; None while nothing is known."""
        rate = self._seconds_per_flop(progress, states)
        parts = [self._left(job, states.get(job.planned.trial.id), rate) for job in progress.running]
        parts += [self._left(job, None, rate) for job in progress.pending]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        workers = self.workers or sum(state.state == "running" for state in states.values())
        return max([sum(known) / max(1, workers), *known[: len(progress.running)]], default=0.0)

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
            if job.state is not None and job.state.train_seconds:
                seconds, flops = seconds + job.state.train_seconds, flops + job.planned.flops
        for job in progress.running:
            state = states.get(job.planned.trial.id)
            if state is not None and state.tokens_per_second:
                trial = job.planned.trial
                seconds, flops = seconds + trial.tokens / state.tokens_per_second, flops + job.planned.flops
        return seconds / flops if flops else None


class Lines:
    """Events as they come, and where the study is at an interval."""

    def __init__(self, eta: StudyEta, seconds: float) -> None:
        self.eta, self.seconds = eta, seconds
        self._printed = time.monotonic()

    def say(self, line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    def update(self, progress: Progress[Any]) -> None:
        if time.monotonic() - self._printed < self.seconds:
            return
        self._printed = time.monotonic()
        states = running_states(progress)
        running = [_brief(job, states[job.planned.trial.id]) for job in progress.running]
        self.say("; ".join([headline(progress, self.eta.left(progress, states)), *running]))

    def close(self) -> None:
        pass


class LiveTable:
    """A table of the running trials that redraws itself; events scroll above it."""

    def __init__(self, eta: StudyEta, console: Console | None = None) -> None:
        self.eta = eta
        self._live = Live(console=console or Console(), auto_refresh=False, transient=True)
        self._drawn = 0.0
        self._live.start()

    def say(self, line: str) -> None:
        self._live.console.print(Text(f"{time.strftime('%H:%M:%S')} {line}"))

    def update(self, progress: Progress[Any]) -> None:
        if time.monotonic() - self._drawn < REFRESH_SECONDS:
            return
        self._drawn = time.monotonic()
        self._live.update(self.render(progress), refresh=True)

    def render(self, progress: Progress[Any]) -> Group:
        states = running_states(progress)
        table = Table(header_style="bold")
        for column in ("running", "step", "", "loss", "tokens/s", "left"):
            table.add_column(column, justify="left" if column == "running" else "right")
        for job in progress.running:
            table.add_row(*map(Text, _row(job, states[job.planned.trial.id])))
        return Group(table, Text(headline(progress, self.eta.left(progress, states))))

    def close(self) -> None:
        self._live.stop()


class NotedView:
    """A view that also keeps the launch's note, for `sweeps.status` and `sweeps.cancel`."""

    def __init__(self, view: View, note: LaunchFile, eta: StudyEta) -> None:
        self.view, self.note, self.eta = view, note, eta

    def say(self, line: str) -> None:
        self.view.say(line)

    def update(self, progress: Progress[Any]) -> None:
        if self.note.due():
            left = self.eta.left(progress, running_states(progress))
            lists = {name: _ids(getattr(progress, name)) for name in ("pending", "running", "elsewhere")}
            self.note.write(**lists, done=len(progress.done), eta_seconds=left)
        self.view.update(progress)

    def close(self) -> None:
        self.view.close()


def _ids(jobs: Iterable[Job[Any]]) -> list[str]:
    return [job.planned.trial.id for job in jobs]


def open_watch(eta: StudyEta, seconds: float) -> View:
    """The live table if stdout is a terminal, lines if not."""
    return LiveTable(eta) if sys.stdout.isatty() else Lines(eta, seconds)


def running_states(progress: Progress[Any]) -> dict[str, TrialState]:
    return {job.planned.trial.id: read_state(job.planned.trial.folder) for job in progress.running}


def headline(progress: Progress[Any], left: float | None) -> str:
    """`3 of 9 done, 2 running, 4 waiting; about 2.1 min left`."""
    parts = (len(progress.done), len(progress.running), len(progress.pending), len(progress.elsewhere))
    done, running, pending, elsewhere = parts
    counts = [f"{done} of {sum(parts)} done", f"{running} running", f"{pending} waiting"]
    if elsewhere:
        counts.append(f"{elsewhere} trained by another process")
    if progress.failures:
        counts.append(f"{len(progress.failures)} failed or diverged")
    return ", ".join(counts) + (f"; about {duration(left)} left" if left is not None else "")


def _row(job: Job[Any], state: TrialState) -> list[str]:
    steps = job.planned.trial.steps
    if state.step is None:
        return [job.planned.trial.name, f"0/{steps:,}", "", "", "", ""]
    return [
        job.planned.trial.name,
        f"{state.step:,}/{steps:,}",
        f"{state.step / steps:.0%}",
        "" if state.loss_nats is None else f"{state.loss_nats:.3f}",
        "" if state.tokens_per_second is None else f"{state.tokens_per_second:,.0f}",
        "" if state.eta_seconds is None else duration(state.eta_seconds),
    ]


def _brief(job: Job[Any], state: TrialState) -> str:
    name, _, share, loss, *_ = _row(job, state)
    return f"{name} {share or '0%'}" + (f" loss {loss}" if loss else "")
