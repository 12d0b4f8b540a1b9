"""The loop of a launch: keeps the executor busy until every trial of a study has ended or cannot.

One trial's failure never stops the rest. Only what came from outside (a signal, the memory killer) is
retried: an exception or a diverged loss would come again. A trial that another process is training is left
to it, and taken over if that process dies.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

from attnres.cli import EXIT_USER_ERROR
from attnres.errors import RecordError
from attnres.lock import TrialBusy, TrialLock
from attnres.status import StatusFile
from sweeps.executor import Executor
from sweeps.state import TrialState, read_state
from sweeps.study import PlannedTrial
from sweeps.trial_process import EXIT_BUSY, EXIT_CANCELLED, LOG_FILE

POLL_SECONDS = 0.25
ELSEWHERE_SECONDS = 1.0  # between two looks at a trial that another process is training

Handle = TypeVar("Handle")


@dataclass
class Job(Generic[Handle]):
    """A trial on its way through the launch."""

    planned: PlannedTrial
    handle: Handle | None = None
    attempts: int = 0  # of this launch
    started: float = 0.0  # unix seconds, of the last attempt
    state: TrialState | None = None  # once it has ended


@dataclass
class Progress(Generic[Handle]):
    """Where a launch is. Every job is in exactly one of the lists."""

    pending: deque[Job[Handle]] = field(default_factory=deque)
    running: list[Job[Handle]] = field(default_factory=list)
    elsewhere: list[Job[Handle]] = field(default_factory=list)  # being trained by another process
    done: list[Job[Handle]] = field(default_factory=list)

    def count(self, *states: str) -> int:
        return sum(job.state is not None and job.state.state in states for job in self.done)

    @property
    def failures(self) -> list[Job[Handle]]:
        return [job for job in self.done if job.state is None or job.state.state != "finished"]


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


class Runner(Generic[Handle]):
    """Runs what has no finished or diverged record."""

    def __init__(
        self, executor: Executor[Handle], view: View, workers: int, max_retries: int, grace_seconds: float
    ) -> None:
        self.executor = executor
        self.view = view
        self.workers = workers
        self.max_retries = max_retries
        self.grace_seconds = grace_seconds
        self.progress: Progress[Handle] = Progress()
        self._looked = 0.0
        self._interrupts = 0

    def run(self, trials: Sequence[PlannedTrial], interrupted: Callable[[], int]) -> Progress[Handle]:
        """Run the trials. `interrupted` says how many times the user asked to stop; once is enough."""
        self.progress = Progress(pending=deque(Job(planned) for planned in trials))
        progress = self.progress
        try:
            while progress.pending or progress.running or progress.elsewhere:
                if interrupted():
                    break
                self._fill()
                self.view.update(progress)
                self.executor.wait(self._handles(), POLL_SECONDS)
                self._collect()
                self._look_elsewhere()
        finally:
            self._stop_all(interrupted)
            self.executor.close()
        self.view.update(progress)
        return progress

    def _fill(self) -> None:
        progress = self.progress
        while progress.pending and len(progress.running) < self.workers:
            job = progress.pending.popleft()
            folder = job.planned.trial.folder
            state = read_state(folder)
            if state.ended:
                self._end(job, state)
            elif other := self.executor.elsewhere(job.planned):
                self.view.say(f"{job.planned.trial.name}: {other}")
                progress.elsewhere.append(job)
            else:
                self._start(job, state)

    def _start(self, job: Job[Handle], state: TrialState) -> None:
        job.attempts, job.started = job.attempts + 1, time.time()
        try:
            job.handle = self.executor.submit(job.planned)
        except OSError as error:
            self._fail(job, f"could not be started: {error}")
            return
        self.progress.running.append(job)
        why = f" ({state.reason})" if state.reason else ""
        done = "submitted" if self.executor.queues else "started"
        self.view.say(f"{job.planned.trial.name}: {done}{why}")

    def _collect(self) -> None:
        for job in list(self.progress.running):
            assert job.handle is not None
            code = self.executor.poll(job.handle)
            if code is not None:
                self.progress.running.remove(job)
                job.handle = None
                self._settle(job, code)

    def _settle(self, job: Job[Handle], code: int) -> None:
        """An attempt has ended: done, to be tried again, or failed. The record outweighs the exit code."""
        folder, name = job.planned.trial.folder, job.planned.trial.name
        state = read_state(folder)
        if state.ended:
            self._end(job, state)
        elif code == EXIT_BUSY:
            job.attempts -= 1
            self.progress.elsewhere.append(job)
        elif code == EXIT_CANCELLED:
            self._end(job, replace(state, reason="its job was cancelled; a launch submits it again"))
        elif cause := _from_outside(code):
            if job.attempts <= self.max_retries:
                self.view.say(f"{name}: {cause}; tried again")
                self.progress.pending.appendleft(job)
            else:
                self._fail(job, cause + (f", {job.attempts} times" if job.attempts > 1 else ""))
        elif code == 0:
            self._fail(job, "its process ended without an error and without a finished record")
        elif state.state == "failed" and state.written >= job.started:
            self._end(job, state)
        else:
            self._fail(job, _last_words(job, code))

    def _fail(self, job: Job[Handle], reason: str) -> None:
        """Only the launcher knows this reason: leave it where `sweeps.status` finds it."""
        _write_failure(job.planned, reason)
        self._end(job, _failed(reason))

    def _end(self, job: Job[Handle], state: TrialState) -> None:
        job.state = state
        self.progress.done.append(job)
        if job.attempts or state.state != "finished":
            loss = f", loss {state.loss_nats:.4f}" if state.state == "finished" else ""
            reason = f": {state.reason}" if state.reason else ""
            self.view.say(f"{job.planned.trial.name}: {state.state}{loss}{reason}")

    def _look_elsewhere(self) -> None:
        """Trials of other processes: finished, or free to be taken over."""
        if time.monotonic() - self._looked < ELSEWHERE_SECONDS:
            return
        self._looked = time.monotonic()
        for job in list(self.progress.elsewhere):
            if self.executor.elsewhere(job.planned) is None:
                self.progress.elsewhere.remove(job)
                self.progress.pending.append(job)

    def _stop_all(self, interrupted: Callable[[], int]) -> None:
        """Ask every attempt to write its checkpoint and end; kill what does not within the grace time."""
        handles = self._still_running()
        if not handles:
            return
        for handle in handles:
            self.executor.stop(handle)
        # Only now: if nobody listens any more, the trials at least have been told.
        self.view.say(f"stopping: {len(handles)} trials save their checkpoints (interrupt again to kill)")
        deadline = time.monotonic() + self.grace_seconds
        asked = interrupted()
        while self._still_running():
            if time.monotonic() > deadline or interrupted() > max(asked, 1):
                for handle in self._still_running():
                    self.executor.stop(handle, force=True)
                deadline = float("inf")
            self.executor.wait(self._still_running(), POLL_SECONDS)

    def _handles(self) -> list[Handle]:
        return [job.handle for job in self.progress.running if job.handle is not None]

    def _still_running(self) -> list[Handle]:
        return [handle for handle in self._handles() if self.executor.poll(handle) is None]


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP while it is entered; remembers the first, for the exit code.

    A signal that is ignored already stays ignored: that is how nohup works.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.signals = signals
        self.count = 0
        self.first: int | None = None

    def __enter__(self) -> Interrupts:
        heeded = [number for number in self.signals if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number

    def __call__(self) -> int:
        return self.count


def _from_outside(code: int) -> str | None:
    """Why an attempt ended, if the reason lies outside of it and another attempt may fare better."""
    if code == -signal.SIGKILL:
        return "killed by SIGKILL (out of memory?)"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        return "stopped from outside"
    if code == 255:  # the fork server died and took the exit code with it
        return "lost"
    return None


def _failed(reason: str) -> TrialState:
    return TrialState("failed", reason)


def _last_words(job: Job[Any], code: int) -> str:
    """The last line of the log, for an attempt that ended before it could write why."""
    path = job.planned.trial.folder / LOG_FILE
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if code == EXIT_USER_ERROR and said.startswith("error: "):
        return said.removeprefix("error: ")
    return f"exit code {code}" + (f": {said[:300]}" if said else "") + f" (see {path})"


def _write_failure(planned: PlannedTrial, reason: str) -> None:
    folder = planned.trial.folder
    try:
        with TrialLock(folder):
            StatusFile(folder, planned.trial.steps).end("failed", reason)
    except (TrialBusy, RecordError, OSError):
        pass  # the launcher says it anyway; the file is a courtesy to a later sweeps.status
