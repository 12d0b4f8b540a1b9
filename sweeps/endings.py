"""How an attempt ended: from its exit code, what it wrote and the last words of its log."""

from __future__ import annotations

import signal

from attnres.cli import EXIT_USER_ERROR
from attnres.origin import Origin
from sweeps.study import PlannedTrial
from sweeps.trial_process import LOG_FILE

EXIT_LOST = 255  # multiprocessing's, where the fork server died and took the exit code with it
_LOG_TAIL_BYTES = 4096


def from_outside(code: int) -> str | None:
    """Why an attempt ended, if the reason lies outside of it and another attempt may fare better."""
    if code == -signal.SIGKILL:
        return "killed by SIGKILL (out of memory?)"
    if code < 0:
        return f"killed by {_signal_name(-code)}"
    if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        return "stopped from outside"
    if code in (128 + signal.SIGKILL, 128 + signal.SIGSEGV, 128 + signal.SIGBUS, 128 + signal.SIGABRT):
        return f"one of its processes was killed by {_signal_name(code - 128)}"
    if code == EXIT_LOST:
        return "lost"
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def last_words(planned: PlannedTrial, code: int) -> tuple[str, Origin]:
    """Reason and origin of an attempt that ended before it could write why: the last line of its log.

    A mistake in the settings would come again. What keeps a trial from writing a word is the machine's.
    """
    path = planned.trial.folder / LOG_FILE
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if code == EXIT_USER_ERROR:
        if said.startswith("error: "):
            return said.removeprefix("error: "), "own"
        return f"exit code {code}: {said[:300]} (see {path})", "own"
    return f"exit code {code}" + (f": {said[:300]}" if said else "") + f" (see {path})", "outside"
