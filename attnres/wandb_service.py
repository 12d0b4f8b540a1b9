"""The process that W&B's client starts (wandb-core): when it starts, with which settings, how it is ended."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attnres.errors import UserError
from attnres.trial import Trial

# WANDB_MODE as the user may write it -> what this project calls it. "dryrun" and "run" are W&B's old names.
MODES = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
FOLDER_VARIABLES = {"WANDB_CACHE_DIR": "cache", "WANDB_DATA_DIR": "data", "WANDB_CONFIG_DIR": "config"}
PROBE_BYTES = 256 * 1024  # a run file buffers 32 kB blocks; with less room than some of them, rows are lost

_ahead: list[threading.Thread] = []  # at most one, of the trial that this process trains


def choose_mode(configured: str) -> str:
    """ "online", "offline" or "disabled": the user's WANDB_MODE wins over the configuration."""
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
        return "disabled"
    wanted = os.environ.get("WANDB_MODE") or configured
    if wanted not in MODES:
        raise UserError(f"WANDB_MODE={wanted}: one of {', '.join(MODES)}")
    return MODES[wanted]


def start_service(trial: Trial) -> None:
    """Start W&B's own process in a thread: it takes a fifth of a second, in which a model can be built
    and trained.

    Whatever goes wrong here goes wrong again in `attnres.tracking.open_wandb`, which waits for this and
    tells it. A trial that ends before that has to wait for it as well: it writes into the trial's folder.
    """
    if choose_mode(trial.config.tracking.wandb) == "offline":
        thread = threading.Thread(target=_start_service, args=(trial.folder,), daemon=True)
        with suppress(RuntimeError):  # no more threads here: it is started where it is used
            thread.start()
            _ahead.append(thread)


def is_starting() -> bool:
    """Whether what `start_service` began is still going on."""
    return any(thread.is_alive() for thread in _ahead)


def wait_for_start() -> None:
    """Until what `start_service` began has ended, well or not."""
    while _ahead:
        _ahead.pop().join()


def _start_service(folder: Path) -> None:
    with suppress(Exception), quiet_logging():
        set_up(folder, "offline")


def set_up(folder: Path, mode: str) -> Path:
    """Folders and settings of the client; returns the folder in which it makes its own."""
    root = Path(os.environ.get("WANDB_DIR", folder))
    (root / "wandb").mkdir(parents=True, exist_ok=True)
    probe(root / "wandb")
    for variable, name in FOLDER_VARIABLES.items():
        os.environ.setdefault(variable, str((folder / "wandb" / name).resolve()))

    import wandb

    # The client's own settings: from them it decides whether to report on itself over the network.
    own: dict[str, Any] = {"mode": mode}
    wandb.setup(wandb.Settings(**own))
    return root


def probe(folder: Path) -> None:
    """Raise OSError if the folder has no room for W&B's next rows: the client drops them in silence."""
    path = folder / f".room-{os.getpid()}"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):  # not on macOS: there the room is not known in advance
            os.posix_fallocate(handle, 0, PROBE_BYTES)
    finally:
        os.close(handle)
        path.unlink(missing_ok=True)


def tear_down() -> None:
    """Forget W&B's process, so that a later trial of this process gets a living one."""
    try:
        import wandb

        with quiet_logging():
            wandb.teardown(exit_code=1)
    except Exception:  # it is gone already, which is why we are here; a warning has been printed
        return


@contextmanager
def quiet_logging() -> Iterator[None]:
    """W&B's log handlers print a traceback for every line that a full disk refuses; one warning of ours is
    enough.
    """
    before = logging.raiseExceptions
    logging.raiseExceptions = False
    try:
        yield
    finally:
        logging.raiseExceptions = before
