"""One attempt at a trial in a process that a cluster started: the trial's log, threads, exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnres.data.corpus import PackedCorpus
from attnres.trial import Trial
from sweeps.trial_process import LOG_FILE, Target, attempt, redirect

# Read by the numerical libraries when they are loaded, which is after this.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run_attempt(target: Target, trial: Trial, corpus: PackedCorpus, threads: int, where: str) -> int:
    """Run `target` with its output in the trial's log. Returns the exit code that a process of its own would
    have.
    """
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)
    with _output_to(trial.folder / LOG_FILE):
        try:
            return attempt(target, trial, corpus, where)
        except Exception:
            traceback.print_exc()
            return 1


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """The cluster's own output goes on where it was, afterwards."""
    streams, saved = (sys.stdout, sys.stderr), [os.dup(number) for number in range(3)]
    redirect(log)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams
        for number, copy in enumerate(saved):
            os.dup2(copy, number)
            os.close(copy)
