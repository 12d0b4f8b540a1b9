"""Where a trial runs. `Executor` is the seam: the launcher knows only these verbs, and the trial decides
itself whether it is already done or being trained elsewhere.

Locally a trial is a process of its own, forked from a server that has torch loaded: a killed trial costs only
itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol, TypeVar

from attnres.lock import is_locked
from sweeps.endings import EXIT_LOST
from sweeps.study import PlannedTrial
from sweeps.trial_process import LOG_FILE, PRELOAD, Target, main, open_log, train_trial

Handle = TypeVar("Handle")

STARTS = 3  # of the fork server, for one attempt at a trial
_SERVER_ENDS_SECONDS = 0.2  # from its last word until it is known to have ended


class ServerLost(OSError):
    """An attempt could not be started, through no fault of its trial's: another one may be."""


class Executor(Protocol[Handle]):
    """Runs trials. A handle stands for one attempt at one trial."""

    @property
    def queues(self) -> bool:
        """Whether attempts wait in a queue of the executor's own: it is given all trials at once."""

    @property
    def outlives_launch(self) -> bool:
        """Whether attempts go on when the launcher dies."""

    def elsewhere(self, planned: PlannedTrial) -> str | None:
        """What another launch has in hand for this trial, in words; None if nobody is at it."""

    def submit(self, planned: PlannedTrial) -> Handle:
        """Start an attempt; returns at once. Raises OSError, or ServerLost, if that cannot be done."""

    def poll(self, handle: Handle) -> int | None:
        """None while it runs; then its exit code, negative for the signal that ended it."""

    def cause(self, handle: Handle) -> str | None:
        """Why an attempt was ended from outside, in words; None where the exit code says it all."""

    def wait(self, handles: Iterable[Handle], seconds: float) -> None:
        """Return when one of them may have ended, or after so many seconds."""

    def stop(self, handle: Handle, force: bool = False) -> None:
        """Ask the attempt to write a checkpoint and end; with force, end it and all that it started now."""

    def withdraw(self, handle: Handle) -> None:
        """As `stop`, also where that leaves jobs in a cluster's queue: nobody wants this attempt."""

    def close(self) -> None:
        """End what the executor itself started. No attempt runs any more."""


class LocalExecutor:
    """A process per trial on this machine."""

    queues = False
    outlives_launch = False

    def __init__(
        self,
        threads: int,
        grace_seconds: float,
        target: Target = train_trial,
        preload: Sequence[str] = PRELOAD,
    ) -> None:
        self.grace_seconds = grace_seconds
        self.target = target
        # Read by the numerical libraries when the fork server loads them.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[name] = str(threads)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._swept: set[int | None] = set()  # processes that have ended, with all that they started

    def elsewhere(self, planned: PlannedTrial) -> str | None:
        return in_training(planned)

    def submit(self, planned: PlannedTrial) -> ForkServerProcess:
        # The process could tell nobody that it has no log: try here.
        os.close(open_log(planned.trial.folder / LOG_FILE))
        arguments = (self.target, planned.trial, planned.corpus, self.grace_seconds)
        for _ in range(STARTS):
            process = self._context.Process(target=main, args=arguments, name=planned.trial.name)
            try:
                process.start()
                return process
            except (EOFError, ConnectionError):  # the fork server died meanwhile: start() makes another
                time.sleep(_SERVER_ENDS_SECONDS)
        raise ServerLost(f"the process that trials are forked from died {STARTS} times (out of memory?)")

    def poll(self, handle: ForkServerProcess) -> int | None:
        if handle.exitcode is None or _goes_on_alone(handle):
            return None
        if handle.pid not in self._swept:
            self._swept.add(handle.pid)
            _kill_group(handle)  # what it started and did not take along
        return handle.exitcode

    def cause(self, handle: ForkServerProcess) -> str | None:
        return None

    def wait(self, handles: Iterable[ForkServerProcess], seconds: float) -> None:
        sentinels = [handle.sentinel for handle in handles if not _goes_on_alone(handle)]
        if sentinels:
            wait(sentinels, seconds)
        else:
            time.sleep(seconds)

    def stop(self, handle: ForkServerProcess, force: bool = False) -> None:
        if force:
            _kill_group(handle)
            handle.kill()
        elif _goes_on_alone(handle):
            assert handle.pid is not None
            with suppress(ProcessLookupError):
                os.kill(handle.pid, signal.SIGTERM)
        else:
            handle.terminate()

    def withdraw(self, handle: ForkServerProcess) -> None:
        self.stop(handle)

    def close(self) -> None:
        """The fork server ends by itself with this process."""


def in_training(planned: PlannedTrial) -> str | None:
    """Whoever holds the trial's lock is training it, on whichever machine."""
    return "another process is training it" if is_locked(planned.trial.folder) else None


def _goes_on_alone(process: ForkServerProcess) -> bool:
    """Whether the fork server has died and this trial, whose exit code it would have told, has not."""
    if process.exitcode != EXIT_LOST:
        return False
    assert process.pid is not None
    try:
        return os.getsid(process.pid) == process.pid and not _is_zombie(process.pid)
    except ProcessLookupError:
        return False


def _is_zombie(pid: int) -> bool:
    """Whether it has ended and nobody collects it: in a container whose first process is no init."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == ["Z"]


def _kill_group(process: ForkServerProcess) -> None:
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
