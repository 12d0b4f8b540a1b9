"""Being told to stop: a signal, or a file in the trial's folder, ends a trial after the step in hand and a
checkpoint. Torch-free.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from attnres.record import write_text_atomic

# SIGUSR2 is what queue systems send before they preempt a job.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
# In a trial's folder: somebody wants it to stop. A file works on every executor, over a shared file system.
CANCEL_FILE = "cancel"
EXIT_CANCELLED = 76
SECONDS_BETWEEN_LOOKS = 1.0  # for the file
CANCEL_WISH = 1000  # beside the numbers of signals


class Preempted(Exception):
    """The trial stopped after a checkpoint because a signal asked for it."""

    state: Literal["preempted", "cancelled"] = "preempted"

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.wish = signal_number
        # SIGUSR2 asks for the same as SIGTERM, and launchers know that code.
        self.exit_code = 130 if signal_number == signal.SIGINT else 143


class Cancelled(Preempted):
    """The trial stopped after a checkpoint because its folder has a file that asks for it."""

    state = "cancelled"

    def __init__(self) -> None:
        Exception.__init__(self, "cancelled")
        self.wish = CANCEL_WISH
        self.exit_code = EXIT_CANCELLED


def stopped(wish: int) -> Preempted:
    """The exception for a signal's number, or for CANCEL_WISH."""
    return Cancelled() if wish == CANCEL_WISH else Preempted(wish)


class StopSignals:
    """Context manager: the first stop signal is noted and `check` raises Preempted; a second one acts as
    usual.

    `check` also raises Cancelled once the folder has a cancel file. Python delivers signals to the main
    thread only; elsewhere they do nothing. `agree` is given this process' wish (0 for none) at every check;
    where several processes train together it says what any of them wishes.
    """

    def __init__(self, folder: Path, agree: Callable[[int], int] = int) -> None:
        self.folder = folder
        self._agree = agree
        self._received: int | None = None
        self._before: dict[int, Any] = {}
        self._looked = -SECONDS_BETWEEN_LOOKS

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # ignored on purpose, as by nohup
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def check(self) -> None:
        """Raise Preempted if a signal has asked to stop, Cancelled if a file has."""
        if wish := self._agree(self._wish()):
            raise stopped(wish)

    def _wish(self) -> int:
        if self._received is not None:
            return self._received
        if time.monotonic() - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            return CANCEL_WISH if cancel_asked(self.folder) else 0
        return 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def ask_to_cancel(folder: Path) -> None:
    """Leave the file that asks the trial of this folder to stop, and a launch not to start it."""
    write_text_atomic(folder / CANCEL_FILE, "")


def cancel_asked(folder: Path) -> bool:
    return (folder / CANCEL_FILE).exists()


def forget_cancel(folder: Path) -> None:
    """The trial is wanted again."""
    if (folder / CANCEL_FILE).exists():  # a read-only folder refuses even what is not there
        (folder / CANCEL_FILE).unlink(missing_ok=True)
