"""Commands in processes of their own, from several threads; all end when their user is interrupted."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType


class Children:
    """Context manager: when it is left by an exception, what still runs is killed."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._over = False
        self._lock = threading.Lock()

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._over = True
            for process in self._running:
                process.kill()

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """As subprocess.run, without input and with the output captured."""
        with self._lock:
            if self._over:
                return subprocess.CompletedProcess(command, -9, "", "interrupted")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._running.add(process)
        try:
            output, errors = process.communicate()
        finally:
            with self._lock:
                self._running.discard(process)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)
