"""Output of a process into which no W&B key gets, not even in a traceback. Torch-free."""

from __future__ import annotations

import io
import sys

from attnres.wandb_key import hide


class HidingStream(io.TextIOWrapper):
    """A text stream onto a descriptor that is open as this number; what is written passes `hide`."""

    def __init__(self, number: int, errors: str) -> None:
        raw = io.FileIO(number, "w", closefd=False)
        super().__init__(io.BufferedWriter(raw), "utf-8", errors, line_buffering=True)

    def write(self, text: str) -> int:
        return super().write(hide(text))


def hide_in_output() -> None:
    """stdout and stderr, to wherever 1 and 2 lead, from here on; of a process whose output goes to a log."""
    sys.stdout, sys.stderr = HidingStream(1, "replace"), HidingStream(2, "backslashreplace")
