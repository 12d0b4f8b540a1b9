"""The cache folder: where it is, who may write in it, and how a finished build appears in it at once."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attnres.data.packing import sync_folder
from attnres.errors import DataError

_LOCK_FILE = "lock"
_BUILD_PREFIX = ".build-"
_RETIRED_PREFIX = ".retired-"


def cache_root(configured: str | None) -> Path:
    """data.cache_dir if given, else attnres/ in $XDG_CACHE_HOME, else in ~/.cache. It need not exist."""
    try:
        if configured is not None:
            return Path(configured).expanduser().absolute()
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification says that a relative value is invalid and to be ignored.
        return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "attnres"
    except RuntimeError as error:  # no home folder, or an unknown user in ~name
        raise DataError(
            f"data.cache_dir={configured or 'null'}: {error}; set data.cache_dir to a folder"
        ) from None


@contextmanager
def using(root: Path) -> Iterator[None]:
    """Turn a full disk, a read-only folder and the like into a DataError that names the cache folder."""
    try:
        yield
    except BrokenPipeError:  # not of the folder: whoever read the progress has gone
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError(f"data.cache_dir={root}: the cache folder cannot be used: {why}") from error


@contextmanager
def build_lock(root: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Let one process at a time build in this cache; the lock ends with the process, however it ends."""
    root.mkdir(parents=True, exist_ok=True)
    handle = os.open(root / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that builds in {root}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def build_folder(root: Path) -> Iterator[Path]:
    """A folder to build in, gone afterwards unless `publish` has moved it. Hold the lock."""
    _remove_leftovers(root)
    folder = root / f"{_BUILD_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(build: Path, final: Path) -> None:
    """Give a finished build its name. What had the name (a damaged cache) moves away first. Hold the lock."""
    retired = None
    if final.exists():
        retired = final.with_name(f"{_RETIRED_PREFIX}{build.name}")
        os.rename(final, retired)
    os.rename(build, final)
    sync_folder(final.parent)
    if retired is not None:
        shutil.rmtree(retired, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    """Remove what killed builds left. Whoever holds the lock is the only builder, so nobody is using it."""
    for prefix in (_BUILD_PREFIX, _RETIRED_PREFIX):
        for leftover in root.glob(f"{prefix}*"):
            # What another user of a shared cache left may not be ours to remove; it costs space only.
            shutil.rmtree(leftover, ignore_errors=True)
