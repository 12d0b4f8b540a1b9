"""The child's side of a launch: what runs in a trial's own process, around the training.

Imports no torch itself: the fork server has already loaded it (see `sweeps.executor`), so a trial starts
fast.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from attnres.cli import EXIT_USER_ERROR
from attnres.data.corpus import PackedCorpus
from attnres.distributed.parent import ProcessesFailed
from attnres.errors import RecordError, UserError
from attnres.lock import EXIT_BUSY, TrialBusy, TrialLock, make_folder
from attnres.origin import Origin, origin_of
from attnres.output import hide_in_output
from attnres.status import note_failure, read_status
from attnres.stop import Preempted
from attnres.trial import Trial

TRAINING_MODULE = "attnres.train"  # by name: this package imports neither the model nor torch
# What the fork server loads once for all trials: the training, and what that imports when it starts.
PRELOAD = (
    "sweeps.fork_server",
    TRAINING_MODULE,
    *(f"attnres.{name}" for name in ("learner", "checkpoint", "environment", "probe_file", "probes")),
    "sweeps.live",
)
LOG_FILE = "log.txt"

# What a trial's process calls; it returns the process' exit code. Must be importable by name in the child.
Target = Callable[[Trial, PackedCorpus], int]


def train_trial(trial: Trial, corpus: PackedCorpus) -> int:
    """Train for real. Exit codes are those of `python -m attnres.train`."""
    training = importlib.import_module(TRAINING_MODULE)
    try:
        record = training.train(trial, corpus)
    except Preempted as error:
        print(f"{trial.name}: {error} after a checkpoint", file=sys.stderr)
        return error.exit_code
    except ProcessesFailed as error:
        print(f"{trial.name}: {error}", file=sys.stderr)
        return error.exit_code
    return int(training.EXIT_CODES[record["status"]])


def main(target: Target, trial: Trial, corpus: PackedCorpus, grace_seconds: float) -> None:
    """Run `target` as the whole of this process, and end with its exit code."""
    # A session of its own: Ctrl-C in the launcher's terminal reaches only the launcher, which then asks
    # the trial to stop; and whatever the trial starts (W&B's service) can be ended with it.
    os.setsid()
    redirect(trial.folder / LOG_FILE)
    threading.Thread(target=_follow_launcher, args=(grace_seconds,), daemon=True).start()
    try:
        code = attempt(target, trial, corpus)
    finally:
        atexit._run_exitfuncs()  # a forked process skips them; W&B's ends its service there
    sys.exit(code)


def attempt(target: Target, trial: Trial, corpus: PackedCorpus, where: str = "") -> int:
    """Announce the attempt in the log and run `target`; what it refuses becomes an exit code."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"--- {trial.name}: process {os.getpid()}{where}, {when}", flush=True)
    try:
        return target(trial, corpus)
    except TrialBusy as error:
        print(f"busy: {error}", file=sys.stderr)
        return EXIT_BUSY
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except Exception as error:
        if not _has_told(trial):  # it came before the training, which records its own failures
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            leave_word(trial, reason, origin_of(error), attempts=1)
        raise


def leave_word(trial: Trial, reason: str, origin: Origin, attempts: int = 0) -> None:
    """Why a trial failed, where it could not say it itself, for `sweeps.status` and the next launch."""
    with suppress(TrialBusy, RecordError, OSError), TrialLock(trial.folder):  # somebody says it anyway
        note_failure(trial.folder, trial.steps, reason, origin, attempts)


def _has_told(trial: Trial) -> bool:
    try:
        status = read_status(trial.folder)
    except RecordError:
        return False
    return status is not None and status["state"] == "failed" and status.get("pid") == os.getpid()


def open_log(log: Path) -> int:
    """A descriptor that appends to the log. Raises OSError for a folder that cannot be written."""
    make_folder(log.parent)
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def redirect(log: Path) -> None:
    """stdin from nowhere (nothing may wait for an answer), stdout and stderr to the trial's log."""
    nowhere, output = os.open(os.devnull, os.O_RDONLY), open_log(log)
    os.dup2(nowhere, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nowhere)
    os.close(output)
    hide_in_output()


def _follow_launcher(grace_seconds: float) -> None:
    """When the launcher is gone, however it went, stop as if asked to: save, and leave nothing behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    print("the launcher is gone; stopping", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_seconds)
    os.killpg(os.getpid(), signal.SIGKILL)
