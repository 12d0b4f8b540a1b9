"""Watching trials: one live table on a terminal, one line per interval on a pipe.

A `Moment` is what there is to see; a launch makes it of its own progress, `sweeps.status --watch` of what is
in the study's folder.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from attnres.cli import one_line
from attnres.words import counted
from sweeps.jobs import Job, Progress, View
from sweeps.launches import LaunchFile
from sweeps.state import TrialState, read_state
from sweeps.study_eta import StudyEta
from sweeps.table import duration

REFRESH_SECONDS = 1.0
_FILES_A_SECOND = 50  # that a table asks a file system for
_AROUND_TABLE = 8  # lines of a terminal besides the rows
_BESIDE_NAMES = 60  # characters of a row besides the name, and frames
_NARROWEST_NAME = 12


@dataclass(frozen=True)
class Moment:
    """A study at one moment."""

    running: tuple[tuple[str, TrialState], ...]  # name and state of trials that somebody trains
    done: int  # ended, failed or cancelled
    finished: int  # of these
    failed: int  # of these: failed or diverged
    queued: int  # in a cluster's queue
    waiting: int  # in a launch
    elsewhere: int  # trained by another process than the launch
    left: int  # nobody is about to start them
    eta_seconds: float | None

    @property
    def trials(self) -> int:
        return self.done + len(self.running) + self.queued + self.waiting + self.elsewhere + self.left


def moment_of(progress: Progress[Any], eta: StudyEta) -> Moment:
    """A launch, now."""
    states = running_states(progress)
    rows = [(job.planned.trial.name, states[job.planned.trial.id]) for job in progress.running]
    shown = [row for row in rows if row[1].at_work or not progress.queues]
    return Moment(
        running=tuple(shown),
        done=len(progress.done),
        finished=sum(job.state is not None and job.state.state == "finished" for job in progress.done),
        failed=len(progress.failures),
        queued=len(rows) - len(shown),
        waiting=len(progress.pending),
        elsewhere=len(progress.elsewhere),
        left=len(progress.left),
        eta_seconds=eta.left(progress, states),
    )


def running_states(progress: Progress[Any]) -> dict[str, TrialState]:
    """Of the trials that are being trained, here or elsewhere, by id."""
    jobs = (*progress.running, *progress.elsewhere)
    return {job.planned.trial.id: read_state(job.planned.trial.folder) for job in jobs}


class Screen(Protocol):
    """Where moments are shown, each at its time."""

    def due(self, trials: int = 1) -> bool:
        """Whether it is time for another moment, of so many running trials."""

    def show(self, moment: Moment) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    """Events as they come, and where the study is at an interval."""

    def __init__(self, seconds: float, at_once: bool = False) -> None:
        self.seconds = seconds
        self._printed = -seconds if at_once else time.monotonic()

    def due(self, trials: int = 1) -> bool:
        return time.monotonic() - self._printed >= self.seconds

    def show(self, moment: Moment) -> None:
        self._printed = time.monotonic()
        self.say("; ".join([headline(moment), *(_brief(name, state) for name, state in moment.running)]))

    def say(self, line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {one_line(line)}", flush=True)

    def close(self) -> None:
        pass


class LiveTable:
    """A table of the running trials that redraws itself; events scroll above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._live = Live(console=console or Console(), auto_refresh=False, transient=True)
        self._drawn = -REFRESH_SECONDS
        self._live.start()

    def due(self, trials: int = 1) -> bool:
        return time.monotonic() - self._drawn >= max(REFRESH_SECONDS, trials / _FILES_A_SECOND)

    def show(self, moment: Moment) -> None:
        self._drawn = time.monotonic()
        console = self._live.console
        self._live.update(render(moment, console.height, console.width), refresh=True)

    def say(self, line: str) -> None:
        self._live.console.print(Text(f"{time.strftime('%H:%M:%S')} {one_line(line)}"))

    def close(self) -> None:
        self._live.stop()


class Watch:
    """The view of a launch on a screen, and its note for `sweeps.status` and `sweeps.cancel`."""

    def __init__(self, screen: Screen, eta: StudyEta) -> None:
        self.screen, self.eta = screen, eta

    def say(self, line: str) -> None:
        self.screen.say(line)

    def update(self, progress: Progress[Any]) -> None:
        if self.screen.due(len(progress.running)):
            self.screen.show(moment_of(progress, self.eta))

    def close(self) -> None:
        self.screen.close()


class NotedView:
    """A view that also keeps the launch's note, for `sweeps.status` and `sweeps.cancel`."""

    def __init__(
        self, view: View, note: LaunchFile, eta: StudyEta, started: Callable[[], None] = lambda: None
    ) -> None:
        self.view, self.note, self.eta = view, note, eta
        self.started = started  # called once the executor has taken the first trials
        self._updates = 0

    def say(self, line: str) -> None:
        self.view.say(line)

    def update(self, progress: Progress[Any]) -> None:
        if self.note.due():
            left = self.eta.left(progress, running_states(progress))
            lists = {name: _ids(getattr(progress, name)) for name in ("pending", "running", "elsewhere")}
            self.note.write(**lists, done=len(progress.done), eta_seconds=left)
        self.view.update(progress)
        self._updates += 1
        if self._updates == 2:  # a cluster that refuses has said so by now
            self.started()

    def close(self) -> None:
        self.view.close()


def _ids(jobs: Iterable[Job[Any]]) -> list[str]:
    return [job.planned.trial.id for job in jobs]


def open_screen(seconds: float, at_once: bool = False) -> Screen:
    """The live table if stdout is a terminal, lines if not."""
    return LiveTable() if sys.stdout.isatty() else Lines(seconds, at_once)


def render(moment: Moment, height: int, width: int) -> Group:
    """A table of the running trials, as many as a terminal of so many lines has room for, and the sum.

    A name is never cut: trials often differ in its end alone. It takes more lines where it must.
    """
    table = Table(header_style="bold")
    for column in ("running", "step", "", "loss", "tokens/s", "left"):
        is_name = column == "running"
        table.add_column(column, justify="left" if is_name else "right", overflow="fold", no_wrap=not is_name)
    longest = max((len(name) for name, _ in moment.running), default=0)
    lines = math.ceil(longest / max(_NARROWEST_NAME, width - _BESIDE_NAMES)) or 1
    room = max(1, (height - _AROUND_TABLE) // lines)
    for name, state in moment.running[:room]:
        table.add_row(*map(Text, _row(name, state)))
    hidden = len(moment.running) - room
    more = [Text(f"and {counted(hidden, 'more that runs', 'more that run')}")] if hidden > 0 else []
    return Group(*([table] if moment.running else []), *more, Text(headline(moment)))


def headline(moment: Moment) -> str:
    """`2 of 9 finished, 1 failed or diverged, 2 running, 4 waiting; about 2.1 min left`."""
    cancelled = moment.done - moment.finished - moment.failed
    counts = [
        f"{moment.finished} of {moment.trials} finished",
        *([f"{moment.failed} failed or diverged"] if moment.failed else []),
        *([f"{cancelled} cancelled"] if cancelled else []),
        f"{len(moment.running)} running",
        *([f"{moment.queued} queued"] if moment.queued else []),
        f"{moment.waiting} waiting",
    ]
    if moment.elsewhere:
        counts.append(f"{moment.elsewhere} trained by another process")
    if moment.left:
        counts.append(f"{moment.left} not to be started")
    left = moment.eta_seconds
    return ", ".join(counts) + (f"; about {duration(left)} left" if left is not None else "")


def _row(name: str, state: TrialState) -> list[str]:
    if state.step is None or not state.steps:
        return [name, "starting", "", "", "", ""]
    return [
        name,
        f"{state.step:,}/{state.steps:,}",
        f"{state.step / state.steps:.0%}",
        "" if state.loss_nats is None else f"{state.loss_nats:.3f}",
        "" if state.tokens_per_second is None else f"{state.tokens_per_second:,.0f}",
        "" if state.eta_seconds is None else duration(state.eta_seconds),
    ]


def _brief(name: str, state: TrialState) -> str:
    _, _, share, loss, speed, left = _row(name, state)
    figures = [share or "0%", loss and f"loss {loss}", speed and f"{speed} tokens/s", left and f"{left} left"]
    silent = " (stale)" if state.state == "stale" else ""
    return " ".join([name, *filter(None, figures)]) + silent
