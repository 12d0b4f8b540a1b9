"""What runs inside a Ray worker: one attempt at one trial."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from attnres.data.corpus import PackedCorpus
from attnres.errors import UserError
from attnres.trial import Trial
from sweeps.cluster_attempt import run_attempt
from sweeps.trial_process import Target


def run_task(target: Target, trial: Trial, corpus: PackedCorpus, threads: int, folder: Path) -> int:
    """A Ray task; the worker process ends after it. Returns the trial's exit code.

    Cancelling the task interrupts this thread, which the trial takes for Ctrl-C: it saves and stops.
    """
    # Ray interrupts by SIGINT, which its processes ignore if a shell has started them in the background.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    host = socket.gethostname()
    try:
        os.chdir(folder)  # runs_dir and data.path may be relative to where the launch was made
    except OSError as error:
        why = f"{error.strerror} on {host}: the nodes must share the folder of the launch"
        raise UserError(f"{folder}: {why}") from None
    return run_attempt(target, trial, corpus, threads, f" on {host}")
