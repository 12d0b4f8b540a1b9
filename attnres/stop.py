"""Being told to stop: signals end a trial after the step in hand and a checkpoint. Torch-free."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# SIGUSR2 is what queue systems send before they preempt a job.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Preempted(Exception):
    """The trial stopped after a checkpoint because a signal asked for it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        # SIGUSR2 asks for the same as SIGTERM, and launchers know that code.
        self.exit_code = 130 if signal_number == signal.SIGINT else 143


class StopSignals:
    """Context manager: the first stop signal is noted and `check` raises Preempted; a second one acts as
    usual.

    Python delivers signals to the main thread only; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._before: dict[int, Any] = {}

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
        """Raise Preempted if a signal has asked to stop."""
        if self._received is not None:
            raise Preempted(self._received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
