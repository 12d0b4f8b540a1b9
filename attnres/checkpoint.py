"""Checkpoints: one file, replaced atomically, read back without running any code that it might contain."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attnres.errors import UserError
from attnres.folder import CHECKPOINT_FILE, WEIGHTS_FILE
from attnres.notice import warn
from attnres.trial import Trial

FORMAT = 2
DIGEST_BYTES = 32  # SHA-256 of the rest of the file: torch itself reads a flipped bit as another weight
# What torch raises for a foreign or unsafe file.
_UNREADABLE = (
    *(RuntimeError, EOFError, ValueError, KeyError, IndexError, pickle.UnpicklingError),
    *(TypeError, AttributeError),  # what it allows to be called, with arguments that this does not take
)


class Checkpoints:
    """The checkpoint of one trial in its folder."""

    def __init__(self, folder: Path, trial_id: str) -> None:
        self.path = folder / CHECKPOINT_FILE
        self.trial_id = trial_id
        self._warned = False

    def save(self, state: Mapping[str, Any]) -> bool:
        """Write tensors and plain values; the old checkpoint stays until the new one is on the disk.

        A disk that is full now may have room later, so failing to write warns once and returns False.
        """
        try:
            content = serialise({"format": FORMAT, "trial_id": self.trial_id, **state})
            write_bytes_atomic(self.path, hashlib.sha256(content).digest() + content)
        except OSError as error:
            if not self._warned:
                warn(f"{self.path}: {error.strerror}: training goes on with the checkpoint that there was")
            self._warned = True
            return False
        return True

    def load(self) -> dict[str, Any] | None:
        """The state that was saved, or None. A damaged file is moved aside, with a warning.

        Raises UserError for a checkpoint of another trial: the user put it there and may want it.
        """
        try:
            saved = self.path.read_bytes()
        except FileNotFoundError:
            return None
        digest, content = saved[:DIGEST_BYTES], saved[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            self._set_aside("its content is not what was written")
            return None
        try:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except _UNREADABLE as error:
            self._set_aside(str(error))
            return None
        if not isinstance(state, dict) or state.get("format") != FORMAT or "trial_id" not in state:
            self._set_aside("not a checkpoint of this version")
            return None
        if state["trial_id"] != self.trial_id:
            raise UserError(
                f"{self.path}: belongs to trial {state['trial_id']}, not to {self.trial_id}; move it away"
            )
        return state

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _set_aside(self, why: str) -> None:
        aside = self.path.with_suffix(".damaged")
        os.replace(self.path, aside)
        first_line = why.strip().partition("\n")[0]
        warn(f"{self.path}: cannot be read ({first_line}); it is now {aside.name}; starting from step 0")


def serialise(value: Any) -> bytes:
    """torch.save in memory: its own file writer turns a full disk into a RuntimeError without the reason."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """`path` holds the old content or the new, never a part. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def save_weights(trial: Trial, model: Mapping[str, Any]) -> None:
    """weights.pt: trial_id and the model's state, for probes. A disk that is full costs the weights, not the
    record.
    """
    path = trial.folder / WEIGHTS_FILE
    try:
        content = serialise({"format": FORMAT, "trial_id": trial.id, "model": model})
        write_bytes_atomic(path, content)
    except OSError as error:
        warn(f"{path}: {error.strerror}: the weights are not kept")
