"""A launch that outlives the shell: in the background, in a session of its own, its output in a file."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from attnres.errors import UserError
from attnres.output import hide_in_output

LOG_FILE = "launch.log"


class Detached:
    """The launch in the background, and its line to the command that started it.

    The command waits until the launch has begun, or has said why it cannot: mistakes are still one line.
    """

    def __init__(self, line: int, lock: int) -> None:
        self._line, self._lock = line, lock

    def started(self) -> None:
        """The launch has begun: the command that started it may end."""
        self._tell({"pid": os.getpid()})

    def failed(self, why: str) -> None:
        """It cannot begin."""
        self._tell({"error": why})

    def _tell(self, message: object) -> None:
        if self._line >= 0:
            with suppress(OSError):  # nobody waits any more
                os.write(self._line, json.dumps(message).encode())
            os.close(self._line)
            self._line = -1


def detach(study_folder: Path, study: str) -> Detached | int:
    """Fork. In the background: Detached. In the foreground, once that has begun: its process number.

    UserError if it cannot begin, or if a launch of the study is in the background already.
    """
    study_folder.mkdir(parents=True, exist_ok=True)
    log = study_folder / LOG_FILE
    lock = os.open(log, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        why = f"a launch of study {study} is in the background already; watch it by sweeps.status --watch"
        raise UserError(f"--detach: {why}, stop it by sweeps.cancel study={study}") from None
    sys.stdout.flush()
    sys.stderr.flush()
    ear, line = os.pipe()
    child = os.fork()
    if child:
        os.close(line)
        os.close(lock)  # the child has it
        os.waitpid(child, 0)
        return _outcome(ear, log)
    os.close(ear)
    os.setsid()  # no terminal, and none of its signals
    if os.fork():
        os._exit(0)  # so that the launch leads no session, and can get no terminal
    _redirect(log)
    print(
        f"--- launch: process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {_command()}", flush=True
    )
    return Detached(line, lock)


def _outcome(ear: int, log: Path) -> int:
    with os.fdopen(ear, encoding="utf-8") as file:
        text = file.read()
    if not text:
        raise UserError(f"--detach: the launch ended before it began; {log} says why")
    message = json.loads(text)
    if "error" in message:
        raise UserError(message["error"])
    return int(message["pid"])


def _redirect(log: Path) -> None:
    nowhere = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)  # the lock is the other descriptor's alone
    for number, target in ((nowhere, 0), (output, 1), (output, 2)):
        os.dup2(number, target)
    for number in (nowhere, output):
        if number > 2:
            os.close(number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    hide_in_output()


def _command() -> str:
    return " ".join(["sweeps.launch", *sys.argv[1:]])
