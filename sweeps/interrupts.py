"""Signals of a user who wants a launch to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


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


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """While nothing runs yet that must be asked to stop: TERM and HUP end the process as Ctrl-C does, so that
    what has been started (Ray's own processes) is ended too.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
