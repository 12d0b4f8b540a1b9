"""What this process was told by torchrun, and by the trial's own process that started torchrun.

Torch-free.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from attnres.config import RuntimeConfig
from attnres.errors import ConfigError

# Set by the trial's own process: where the messages between it and its processes are, and who it is.
FOLDER_VARIABLE, PARENT_VARIABLE = "ATTNRES_PROCESSES_FOLDER", "ATTNRES_PARENT_PID"
STOP_FILE = "stop"  # the number of the signal that the trial's own process received
_PR_SET_PDEATHSIG = 1  # sys/prctl.h


def inside_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return int(os.environ["RANK"]) if inside_torchrun() else 0


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"]) if inside_torchrun() else 1


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def number(variable: str) -> int | None:
    """A number from the environment, if it is there."""
    text = os.environ.get(variable)
    return int(text) if text else None


def messages_folder() -> Path | None:
    """Where the trial's own process looks for messages; None where the user started torchrun."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder and inside_torchrun() else None


def check_world_size(runtime: RuntimeConfig) -> None:
    """Raise ConfigError if torchrun has started another number of processes than the trial asks for."""
    if not inside_torchrun() or world_size() == runtime.processes:
        return
    started = f"torchrun has started WORLD_SIZE={world_size()} processes"
    if runtime.parallel == "none":
        raise ConfigError("runtime.parallel", "none", f"{started}; choose runtime=ddp or runtime=fsdp")
    raise ConfigError("runtime.processes", runtime.processes, f"{started}; the two must be equal")


def die_with_parent(parent_pid: int | None = None) -> None:
    """From now on this process is killed when its parent has died, however that died.

    `parent_pid`, if known, is the parent's number: one that is gone already is noticed too.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(expected,), daemon=True).start()
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)


def leave(code: int) -> NoReturn:
    """End this process with what it has registered for its end, but without the destructors of C++ libraries.

    Seen on a busy machine, after the trial had ended well: torch's threads and its destructors race, the
    process aborts ("terminate called without an active exception"), and torchrun takes that for a failure.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(code)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
