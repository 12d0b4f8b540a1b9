"""How far a trial is, for people: a bar on a terminal, lines elsewhere, or nothing. Torch-free."""

from __future__ import annotations

import sys
import time
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

SECONDS_BETWEEN_LINES = 10.0


class ProgressView(Protocol):
    def update(self, step: int, loss_nats: float, tokens_per_second: float, eta_seconds: float) -> None:
        """The state after a step."""

    def say(self, message: str) -> None:
        """A line that stays."""

    def close(self) -> None: ...


class Silence:
    def update(self, step: int, loss_nats: float, tokens_per_second: float, eta_seconds: float) -> None:
        pass

    def say(self, message: str) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """One line at the first step, every ten seconds, and at the last step."""

    def __init__(self, name: str, steps: int, seconds: float = SECONDS_BETWEEN_LINES) -> None:
        self.name, self.steps, self.seconds = name, steps, seconds
        self._printed = -seconds

    def update(self, step: int, loss_nats: float, tokens_per_second: float, eta_seconds: float) -> None:
        if step < self.steps and time.monotonic() - self._printed < self.seconds:
            return
        self._printed = time.monotonic()
        self.say(f"step {step:,}/{self.steps:,} {_figures(loss_nats, tokens_per_second, eta_seconds)}")

    def say(self, message: str) -> None:
        print(f"{self.name}: {message}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class Bar:
    """A bar on stderr. Lines printed meanwhile, warnings too, appear above it."""

    def __init__(self, name: str, steps: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
        self._task = self._progress.add_task(name, total=steps, figures="")
        self._progress.start()

    def update(self, step: int, loss_nats: float, tokens_per_second: float, eta_seconds: float) -> None:
        figures = _figures(loss_nats, tokens_per_second, eta_seconds)
        self._progress.update(self._task, completed=step, figures=figures)

    def say(self, message: str) -> None:
        self._progress.console.print(message, highlight=False, markup=False)

    def close(self) -> None:
        self._progress.stop()


def open_progress(kind: Literal["auto", "bar", "lines", "none"], name: str, steps: int) -> ProgressView:
    """The view that runtime.progress asks for; "auto" is a bar if stderr is a terminal and lines if not."""
    if kind == "none":
        return Silence()
    if kind == "bar" or (kind == "auto" and sys.stderr.isatty()):
        return Bar(name, steps)
    return Lines(name, steps)


def _figures(loss_nats: float, tokens_per_second: float, eta_seconds: float) -> str:
    return f"loss {loss_nats:.3f}  {tokens_per_second:,.0f} tokens/s  {duration(eta_seconds)} left"


def duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    whole = round(seconds)
    hours, minutes, seconds = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
