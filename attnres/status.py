"""status.json: what a trial is doing now, for launchers and tables. Torch-free.

Rewritten atomically while the trial works, so a reader sees one moment, never half of two. A trial that was
killed cannot say so: its state stays "running" while its heartbeat ages and its lock is free.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attnres.errors import RecordError
from attnres.notice import warn
from attnres.record import write_text_atomic

STATUS_FILE = "status.json"
SECONDS_BETWEEN_WRITES = 2.0

State = Literal["running", "finished", "diverged", "failed", "preempted"]


class StatusFile:
    """The trial's own status. `update` may be called at every step; it writes at most every two seconds."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.path = folder / STATUS_FILE
        before = _earlier(folder)
        self.attempts = int(before["attempts"]) + 1 if before else 1
        now = time.time()
        self._fields: dict[str, Any] = {
            "state": "running",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": now,  # of this attempt; unix seconds, as heartbeat is
            "first_started": before["first_started"] if before else now,
            "heartbeat": now,
            "step": 0,
            "steps": steps,
            "tokens": 0,
            "loss_nats": None,
            "tokens_per_second": None,
            "eta_seconds": None,
            "reason": None,
            "attempts": self.attempts,
        }
        self._written = -SECONDS_BETWEEN_WRITES
        self._warned = False

    @property
    def first_started(self) -> float:
        """Unix seconds at which the first attempt began."""
        return float(self._fields["first_started"])

    def update(self, **fields: Any) -> None:
        """Note new values (keys of the file) and the heartbeat; write if the last write is old enough."""
        self._note(fields)
        if time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES:
            self._write()

    def end(self, state: State, reason: str | None = None, **fields: Any) -> None:
        """The last word of this attempt, written at once."""
        self._note({**fields, "state": state, "reason": reason, "eta_seconds": None})
        self._write()

    def _note(self, fields: Mapping[str, Any]) -> None:
        unknown = fields.keys() - self._fields.keys()
        assert not unknown, unknown
        self._fields.update(fields, heartbeat=time.time())

    def _write(self) -> None:
        self._written = time.monotonic()
        try:
            write_text_atomic(self.path, json.dumps(self._fields, allow_nan=False) + "\n")
        except OSError as error:  # a full disk must not end the training; the record tells what came out
            if not self._warned:
                warn(f"{self.path}: {error.strerror}: the trial goes on, its status is not shown")
            self._warned = True


def _earlier(folder: Path) -> dict[str, Any] | None:
    """The status of an earlier attempt. A torn one is worth a warning, not a stop: it will be overwritten."""
    try:
        return read_status(folder)
    except RecordError as error:
        warn(f"{error}; it is written anew")
        return None


def read_status(folder: Path) -> dict[str, Any] | None:
    """The trial's last status, or None if it never started. Raises RecordError for a file that is not a
    status.
    """
    path = folder / STATUS_FILE
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RecordError(f"{path}: not a status file ({error})") from None
    if (
        not isinstance(status, dict)
        or not isinstance(status.get("state"), str)
        or not isinstance(status.get("attempts"), int)
        or not isinstance(status.get("first_started"), (int, float))
    ):
        raise RecordError(f"{path}: not a status file")
    return status
