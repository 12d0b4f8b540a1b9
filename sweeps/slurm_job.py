"""What runs inside a Slurm job: one attempt at one trial, and the way back into the queue.

The trial decides itself whether it is already done or trained elsewhere: Slurm runs even a finished job again
when it is told to requeue it. And Slurm requeues only what it has to kill: a job that saves and ends within
the grace time of a preemption, or after the signal before its time limit, has to requeue itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from attnres.data.corpus import PackedCorpus
from attnres.lock import is_locked
from attnres.record import write_text_atomic
from attnres.trial import Trial
from sweeps.cluster_attempt import run_attempt
from sweeps.trial_process import Target

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
REQUEUE_SECONDS = 60  # Slurm ends the job well before


@dataclass(frozen=True)
class SlurmJob:
    """Picklable: what a job calls."""

    target: Target
    trial: Trial
    corpus: PackedCorpus
    threads: int
    exit_file: Path  # how the last attempt of this job ended, for the launcher
    requeues: int

    def __call__(self) -> None:
        # submitit ignores TERM and requeues at USR2. While the trial trains it heeds both itself; before
        # and after, nothing is lost by ending at once. A time limit that comes while a job starts is no
        # failure: it requeues as well.
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)
        try:
            self.exit_file.unlink(missing_ok=True)
            code = run_attempt(self.target, self.trial, self.corpus, self.threads, f", job {_job_id()}")
        except _Stopped:
            code = 128 + signal.SIGTERM
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        # After scancel, or at the time limit itself, Slurm does not call the job running any more.
        stopped = code in (128 + signal.SIGTERM, 128 + signal.SIGINT)
        if stopped and _restarts() < self.requeues and _is_running() and _requeue():
            return
        self.exit_file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self.exit_file, f"{code}\n")
        if code:
            sys.exit(code)  # the queue shows it as FAILED; submitit would call it completed

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Where the trial does not listen: before and after the training, or once it has been told.

        Slurm and srun both send TERM at the end of a job. The second one must not end a trial that saves its
        checkpoint; Slurm's own KILL comes soon enough.
        """
        if not is_locked(self.trial.folder):
            raise _Stopped


class _Stopped(BaseException):
    """A signal came while there was nothing to save."""


def _job_id() -> str:
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array else os.environ.get("SLURM_JOB_ID", "?")


def _restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _is_running() -> bool:
    """Whether Slurm means the job to run, although it was told to stop."""
    command = ["squeue", "--noheader", "--format=%T", f"--jobs={os.environ['SLURM_JOB_ID']}"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.strip() == "RUNNING"


def _requeue() -> bool:
    """Put this job back into the queue; Slurm then ends it. False where Slurm refuses."""
    command = ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"not requeued: {done.stderr.strip()}", file=sys.stderr, flush=True)
        return False
    time.sleep(REQUEUE_SECONDS)
    return True
