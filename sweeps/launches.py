"""Launches that are running: a note of each in runs_dir/<study>/launches, which others find.

Whoever holds the lock in a note's folder is alive; a launch that was killed leaves a note that nobody holds,
and the next launch sweeps it away. Trials do not depend on any of this.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnres.errors import RecordError
from attnres.json_file import (
    Check,
    check_fields,
    is_count,
    is_flag,
    is_number,
    is_text,
    is_texts,
    or_null,
    read_object,
)
from attnres.lock import TrialLock, is_locked
from attnres.notice import warn
from attnres.record import write_text_atomic
from attnres.status import boot_id, heartbeat_age_seconds, uptime_seconds
from sweeps.state import STALE_SECONDS

LAUNCHES_FOLDER = "launches"
_NOTE_FILE = "launch.json"
SECONDS_BETWEEN_WRITES = 2.0
_FORGET_SECONDS = 86_400.0  # a silent launch of another machine, whose lock may not be seen here
_CHECKS: Mapping[str, Check] = {
    "pid": is_count,
    "host": is_text,
    "boot_id": or_null(is_text),
    "started": is_number,
    "detached": is_flag,
    "executor": is_text,
    **dict.fromkeys(("pending", "running", "elsewhere"), is_texts),
    "done": is_count,
    "eta_seconds": or_null(is_number),
    "heartbeat": is_number,
    "uptime_seconds": or_null(is_number),
}


@dataclass(frozen=True)
class LaunchNote:
    """A launch that is alive, as its note says."""

    pid: int
    host: str
    started: float  # unix seconds
    detached: bool
    executor: str
    pending: tuple[str, ...]  # ids of trials that it has not started yet
    running: tuple[str, ...]  # that it has started or submitted
    elsewhere: tuple[str, ...]  # that it waits for, in the hands of another process
    done: int
    eta_seconds: float | None
    heartbeat: float  # unix seconds, by the clock of that host
    locked: bool  # its lock is seen here: it is alive for sure

    @property
    def who(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def trials(self) -> tuple[str, ...]:
        """Ids of all that it has not done yet."""
        return (*self.pending, *self.running, *self.elsewhere)


class LaunchFile:
    """Context manager around a launch: its own note."""

    def __init__(self, study_folder: Path, executor: str, detached: bool = False) -> None:
        self.folder = study_folder / LAUNCHES_FOLDER / f"{socket.gethostname()}-{os.getpid()}"
        self._lock = TrialLock(self.folder)
        self._fields: dict[str, Any] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot_id": boot_id(),
            "started": time.time(),
            "detached": detached,
            "executor": executor,
        }
        self._written = -SECONDS_BETWEEN_WRITES
        self._warned = False

    def __enter__(self) -> LaunchFile:
        _sweep(self.folder.parent)
        self._lock.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.__exit__(None, None, None)

    def due(self) -> bool:
        return time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES

    def write(self, **moment: Any) -> None:
        """`pending`, `running`, `elsewhere` (ids), `done` and `eta_seconds`, with a heartbeat."""
        self._written = time.monotonic()
        alive = {"heartbeat": time.time(), "uptime_seconds": uptime_seconds()}
        try:
            write_text_atomic(self.folder / _NOTE_FILE, json.dumps(self._fields | alive | moment) + "\n")
        except OSError as error:  # a full disk: the launch goes on
            if not self._warned:
                warn(f"{self.folder}: {error.strerror}: the launch is not shown to others")
            self._warned = True


def running_launches(study_folder: Path) -> list[LaunchNote]:
    """Launches of a study that are alive, the oldest first. A torn note is passed over."""
    notes = []
    for path in (study_folder / LAUNCHES_FOLDER).glob(f"*/{_NOTE_FILE}"):
        fields = _read(path)
        if fields is None:
            continue
        locked = is_locked(path.parent)
        if locked or _is_alive_elsewhere(fields):
            notes.append(_note(fields | {"locked": locked}))
    return sorted(notes, key=lambda note: note.started)


def _note(fields: Mapping[str, Any]) -> LaunchNote:
    values: dict[str, Any] = {name: fields.get(name) for name in LaunchNote.__dataclass_fields__}
    return LaunchNote(**values | {name: tuple(values[name]) for name in ("pending", "running", "elsewhere")})


def _read(path: Path) -> dict[str, Any] | None:
    """A whole note, or None: a launch writes a new one every two seconds."""
    try:
        fields = read_object(path)
        if fields is not None:
            check_fields(fields, _CHECKS, str(path))
        return fields
    except RecordError:
        return None


def _is_alive_elsewhere(fields: Mapping[str, Any]) -> bool:
    """By its heartbeat, where it is of another machine, whose locks may not be seen here."""
    return fields.get("boot_id") != boot_id() and heartbeat_age_seconds(fields) <= STALE_SECONDS


def _sweep(folder: Path) -> None:
    """Remove notes of launches that are dead for sure."""
    for note in folder.glob("*"):
        if note.is_dir() and not is_locked(note) and _is_over(note):
            shutil.rmtree(note, ignore_errors=True)


def _is_over(note: Path) -> bool:
    fields = _read(note / _NOTE_FILE)
    if fields is None:  # torn, or of a launch that has not written yet
        return time.time() - os.path.getmtime(note) > _FORGET_SECONDS
    return fields.get("boot_id") == boot_id() or heartbeat_age_seconds(fields) > _FORGET_SECONDS
