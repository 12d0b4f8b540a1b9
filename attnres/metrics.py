"""metrics.jsonl: one JSON object per line, appended while a trial runs and cut back when it resumes. Torch-
free.

Rows have "kind" ("train", "evaluation" or "diverged"), "step", "tokens" and "flops" (trained so far), and:
  train        loss_nats, learning_rate, grad_norm, tokens_per_second (since the last such row), train_seconds
  evaluation   loss_nats, standard_error, bits_per_byte, tokens_evaluated
  diverged     reason
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnres.notice import warn
from attnres.record import write_text_atomic
from attnres.words import counted

METRICS_FILE = "metrics.jsonl"
TIMING_KEYS = ("tokens_per_second", "train_seconds")  # may differ between two runs of one trial


class MetricsFile:
    """Appends rows; a row that the disk refuses is kept, and tried again with the next one.

    `state` goes into the checkpoint: rows after it belong to steps that a resumed run does again.
    """

    def __init__(self, folder: Path, resume: Mapping[str, Any] | None) -> None:
        self.path = folder / METRICS_FILE
        self._pending: list[str] = list(resume["pending"]) if resume else []
        self._good_bytes = keep_whole_rows(self.path, int(resume["bytes"])) if resume else 0
        self._warned = False
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._cut()

    @property
    def missing_rows(self) -> int:
        """Rows that are not in the file because the disk refused them."""
        return len(self._pending)

    def rows(self) -> list[dict[str, Any]]:
        """All rows, with those that the disk has not taken yet."""
        return [*read_rows(self.path), *(json.loads(line) for line in self._pending)]

    def write(self, row: Mapping[str, Any]) -> None:
        self._pending.append(json.dumps(row, allow_nan=False) + "\n")
        self._flush()

    def state(self) -> dict[str, Any]:
        """Where the file ends now, on the disk for good, and the rows that are not yet in it."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            self._complain(error)
        return {"bytes": self._good_bytes, "pending": list(self._pending)}

    def close(self) -> None:
        if self._pending:
            self._flush()
        if self._pending:
            warn(f"{self.path}: not written: {counted(len(self._pending), 'row')}")
        os.close(self._handle)

    def _flush(self) -> None:
        data = "".join(self._pending).encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._handle, data[written:])
        except OSError as error:
            self._complain(error)
            self._cut()  # no half rows: what is in the file is whole
            return
        self._good_bytes += len(data)
        self._pending.clear()

    def _cut(self) -> None:
        # A device such as /dev/full cannot be cut or moved in; then there is nothing half written in it
        # either.
        try:
            os.ftruncate(self._handle, self._good_bytes)
            os.lseek(self._handle, self._good_bytes, os.SEEK_SET)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._warned:
            warn(f"{self.path}: {error.strerror}: training goes on; rows are kept and tried again")
        self._warned = True


def keep_whole_rows(path: Path, size: int) -> int:
    """Take torn rows out of the first `size` bytes, with a warning; returns how many bytes are left.

    A disk that lost power may keep a file's length and not its content.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(size)
    except FileNotFoundError:
        data = b""
    whole = b"".join(line + b"\n" for line in data.split(b"\n")[:-1] if _is_row(line))
    if len(whole) < size:
        warn(
            f"{path}: {len(whole)} bytes of the {size} that the checkpoint knows are whole rows; "
            "the other rows are gone, the record is not touched by this"
        )
    if whole != data:
        write_text_atomic(path, whole.decode())
    return len(whole)


def _is_row(line: bytes) -> bool:
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and "step" in row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a metrics file; a last line that a kill cut short is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]
