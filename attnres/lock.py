"""One process per trial: an advisory lock on the trial's folder. Torch-free.

The kernel drops the lock when its holder ends, however it ends, so a killed trial leaves nothing to clean up.
The lock file itself stays: removing it would let two processes lock two different files of the same name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from attnres.errors import UserError

LOCK_FILE = "lock"
EXIT_BUSY = 75  # another process is training the trial (EX_TEMPFAIL of sysexits.h)
PROBE_SECONDS = 0.5  # `is_locked` holds the lock for an instant: who finds it taken looks again this long


class TrialBusy(UserError):
    """Another process is training this trial. `pid` is 0 if that process has not yet written its number."""

    def __init__(self, folder: Path, pid: int) -> None:
        super().__init__(f"{folder}: process {pid or '(starting)'} is already training this trial")
        self.pid = pid


class TrialLock:
    """Context manager that holds `<folder>/lock`; entering raises TrialBusy if another process holds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handle = -1

    def __enter__(self) -> TrialLock:
        make_folder(self.folder)
        # Not inherited by programs that are started meanwhile (W&B's): they must not keep a dead trial
        # locked.
        handle = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(handle)
        except BlockingIOError:
            holder = os.read(handle, 32).strip()
            os.close(handle)
            raise TrialBusy(self.folder, int(holder) if holder.isdigit() else 0) from None
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)
        self._handle = -1


def make_folder(folder: Path) -> None:
    """Make a trial's folder. Raises OSError, for a symbolic link too: files of a trial stay in its runs."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link; a trial's folder is a real one", str(folder))
    folder.mkdir(parents=True, exist_ok=True)


def _lock(handle: int) -> None:
    """Take the lock, or raise BlockingIOError if it is held for longer than a probe takes."""
    deadline = time.monotonic() + PROBE_SECONDS
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def is_locked(folder: Path) -> bool:
    """Whether some process is training the trial of this folder at this moment. Writes nothing."""
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared: two that look at the same time do not see each other.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
