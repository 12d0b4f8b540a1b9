"""status.json: what a trial is doing now, for launchers and tables. Torch-free.

Rewritten atomically while the trial works, so a reader sees one moment, never half of two. A trial that was
killed cannot say so: its state stays "running" while its heartbeat ages and its lock is free.

Fields: state; pid, host and boot_id (of the machine's kernel) of the process; started (of this attempt),
first_started and heartbeat in unix seconds; uptime_seconds of the machine at the heartbeat, which no setting
of the clock moves; step, steps, tokens (trained so far); saved_step (of the checkpoint); loss_nats,
tokens_per_second, eta_seconds; reason and origin ("own" or "outside") of what ended it; attempts. A reader
may rely on their types: `read_status` checks every one. What an older version did not write is absent.
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
from attnres.json_file import Check, check_fields, is_count, is_number, is_text, or_null, read_object
from attnres.notice import warn
from attnres.origin import Origin
from attnres.record import write_text_atomic

STATUS_FILE = "status.json"
SECONDS_BETWEEN_WRITES = 2.0

State = Literal["running", "finished", "diverged", "failed", "preempted", "cancelled"]

# Field -> what may be in it, for all that read the file.
_CHECKS: Mapping[str, Check] = {
    "state": is_text,
    "attempts": is_count,
    "first_started": is_number,
    **dict.fromkeys(("pid", "step", "steps", "tokens", "saved_step"), or_null(is_count)),
    **dict.fromkeys(("host", "boot_id", "reason"), or_null(is_text)),
    **dict.fromkeys(("started", "heartbeat", "uptime_seconds"), or_null(is_number)),
    **dict.fromkeys(("loss_nats", "tokens_per_second", "eta_seconds"), or_null(is_number)),
    "origin": or_null(lambda value: value in ("own", "outside")),
}


class StatusFile:
    """The trial's own status. `update` may be called at every step; it writes at most every two seconds."""

    def __init__(self, folder: Path, steps: int, new_attempt: bool = True) -> None:
        self.path = folder / STATUS_FILE
        before = _earlier(folder)
        self.attempts = int(before["attempts"]) + new_attempt if before else 1
        now = time.time()
        self._fields: dict[str, Any] = {
            "state": "running",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot_id": boot_id(),
            "started": now,  # of this attempt; unix seconds, as heartbeat is
            "first_started": before["first_started"] if before else now,
            "heartbeat": now,
            "uptime_seconds": uptime_seconds(),
            "step": 0,
            "steps": steps,
            "tokens": 0,
            "saved_step": before.get("saved_step") if before else None,
            "loss_nats": None,
            "tokens_per_second": None,
            "eta_seconds": None,
            "reason": None,
            "origin": None,
            "attempts": self.attempts,
        }
        self._written = -SECONDS_BETWEEN_WRITES
        self._warned = False

    @property
    def fields(self) -> dict[str, Any]:
        """A copy of what the file says, or will say."""
        return dict(self._fields)

    @property
    def first_started(self) -> float:
        """Unix seconds at which the first attempt began."""
        return float(self._fields["first_started"])

    def update(self, **fields: Any) -> None:
        """Note new values (keys of the file) and the heartbeat; write if the last write is old enough."""
        self._note(fields)
        if time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES:
            self._write()

    def saved(self, step: int | None) -> None:
        """There is a checkpoint of this step, or none. Written at once: a kill may come at any moment."""
        self._note({"saved_step": step})
        self._write()

    def end(
        self, state: State, reason: str | None = None, origin: Origin | None = None, **fields: Any
    ) -> None:
        """The last word of this attempt, written at once. `origin` is that of a failure."""
        self._note({**fields, "state": state, "reason": reason, "origin": origin, "eta_seconds": None})
        self._write()

    def _note(self, fields: Mapping[str, Any]) -> None:
        unknown = fields.keys() - self._fields.keys()
        assert not unknown, unknown
        self._fields.update(fields, heartbeat=time.time(), uptime_seconds=uptime_seconds())

    def _write(self) -> None:
        self._written = time.monotonic()
        try:
            write_text_atomic(self.path, json.dumps(self._fields, allow_nan=False) + "\n")
        except OSError as error:  # a full disk must not end the training; the record tells what came out
            if not self._warned:
                warn(f"{self.path}: {error.strerror}: the trial goes on, its status is not shown")
            self._warned = True


def note_failure(folder: Path, steps: int, reason: str, origin: Origin, attempts: int = 0) -> None:
    """What is known of an attempt that could not say it itself. Hold the trial's lock.

    `attempts` are those that the file does not know of. The heartbeat is not moved. Raises OSError.
    """
    fields = _earlier(folder) or StatusFile(folder, steps).fields | {"attempts": 0}
    fields["attempts"] += attempts
    fields |= {"state": "failed", "reason": reason, "origin": origin, "eta_seconds": None}
    write_text_atomic(folder / STATUS_FILE, json.dumps(fields, allow_nan=False) + "\n")


def boot_id() -> str | None:
    """Which run of which kernel this is: locks always work between processes that share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def uptime_seconds() -> float:
    """Seconds since the machine started, asleep or not. No setting of the clock moves them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def heartbeat_age_seconds(status: Mapping[str, Any]) -> float:
    """How long ago a checked status, or note, gave a sign of life. Of another machine by both clocks: never
    below 0.
    """
    uptime, boot = status.get("uptime_seconds"), status.get("boot_id")
    if uptime is not None and boot is not None and boot == boot_id():
        return max(0.0, uptime_seconds() - uptime)
    heartbeat = status.get("heartbeat")
    return max(0.0, time.time() - heartbeat) if heartbeat is not None else 0.0


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
    status = read_object(path)
    if status is not None:
        check_fields(status, _CHECKS, str(path))
    return status
