"""What a process of a trial reports that is not the first one: nothing. The first one writes all files.

Torch-free.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any


class NoStatus:
    """In place of a StatusFile."""

    attempts, first_started = 0, 0.0

    def update(self, **fields: Any) -> None:
        pass

    def saved(self, step: int | None) -> None:
        pass

    def end(self, *words: Any, **fields: Any) -> None:
        pass


class NoReporter:
    """In place of a Reporter."""

    def step(self, result: Any) -> None:
        pass

    def evaluation(self, row: Any) -> None:
        pass

    def diverged(self, reason: str) -> None:
        pass

    def heartbeat(self, *_: Any) -> None:
        pass

    def __enter__(self) -> NoReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
