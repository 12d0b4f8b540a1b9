"""Trials as jobs of a Slurm cluster, submitted as arrays through submitit.

What becomes of a trial stands in its own folder. The queue is asked only whether a job is still there, and
the accounting database never: many clusters have none. A launcher that dies leaves its jobs; the next one
finds them by the note in each trial's folder and waits for them.
"""

from __future__ import annotations

import importlib
import json
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attnres.data.cache import cache_root
from attnres.errors import UserError
from attnres.notice import warn
from attnres.record import write_text_atomic
from sweeps.executor import in_training
from sweeps.executor_config import SlurmConfig
from sweeps.slurm_attempt import STOPPED, IdleJobs, SlurmAttempt
from sweeps.slurm_job import SlurmJob
from sweeps.slurm_queue import SlurmQueue, cancel, is_active, reason
from sweeps.study import PlannedTrial, Study
from sweeps.trial_process import Target, train_trial

NOTE_FILE = "slurm.json"  # in a trial's folder: the job that has it in hand
AGAIN_SECONDS = 30.0  # between two tries to submit what Slurm did not take


class SlurmExecutor:
    """A job per trial. What is submitted between two looks goes into the queue as one array."""

    queues = True
    outlives_launch = True

    def __init__(self, settings: SlurmConfig, study: Study, target: Target = train_trial) -> None:
        self.settings, self.threads, self.target = settings, study.threads, target
        self.queue = SlurmQueue(settings.poll_seconds)
        default = cache_root(study.trials[0].trial.config.data.cache_dir) / "slurm" / study.name
        self.folder = Path(settings.folder).expanduser().absolute() if settings.folder else default
        self.folder.mkdir(parents=True, exist_ok=True)
        submitit = importlib.import_module("submitit")
        self._refusals = (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError)
        self._submitit = submitit.SlurmExecutor(folder=self.folder)
        gpus = study.processes if any(p.trial.device == "cuda" for p in study.trials) else 0
        self._submitit.update_parameters(**job_parameters(settings, study.name, study.cores, gpus))
        self._waiting: list[SlurmAttempt] = []  # to be submitted
        self._not_before = 0.0  # seconds of time.monotonic
        self._accepted = 0  # jobs that Slurm has taken
        self._unwanted: list[str] = []  # jobs to be cancelled
        self._idle = IdleJobs()
        self._kill = False

    def elsewhere(self, planned: PlannedTrial) -> str | None:
        if training := in_training(planned):
            return training
        job = self._noted_job(planned)
        if job is None:
            return None
        states = self.queue.fresh()
        if states is None:
            return f"job {job} of an earlier launch was in the queue; Slurm does not answer now"
        state = states.get(job)
        if is_active(state) and not self._idle.has(job, state, planned.trial.folder):
            return f"job {job} of an earlier launch is in the queue"
        return None

    def submit(self, planned: PlannedTrial) -> SlurmAttempt:
        attempt = SlurmAttempt(planned, self.folder / f"{planned.trial.id}-{uuid.uuid4().hex[:8]}.exit")
        self._waiting.append(attempt)
        return attempt

    def poll(self, handle: SlurmAttempt) -> int | None:
        self._flush()
        if handle.code is None and handle.job is not None:
            self._settle(handle, handle.job)
        return handle.code

    def cause(self, handle: SlurmAttempt) -> str | None:
        return handle.cause

    def wait(self, handles: Iterable[SlurmAttempt], seconds: float) -> None:
        self._flush()
        time.sleep(seconds)

    def stop(self, handle: SlurmAttempt, force: bool = False) -> None:
        if handle.job is None or self.settings.on_interrupt == "leave":
            self._waiting = [attempt for attempt in self._waiting if attempt is not handle]
            handle.code = STOPPED
        else:
            self._unwanted.append(handle.job)
            self._kill = self._kill or force

    def withdraw(self, handle: SlurmAttempt) -> None:
        if handle.job is None:
            self.stop(handle)
        else:
            self._unwanted.append(handle.job)

    def close(self) -> None:
        """Jobs that were left in the queue go on."""

    def _flush(self) -> None:
        """Hand over to Slurm what has gathered: jobs to submit, jobs to cancel."""
        if self._unwanted:
            cancel(self._unwanted, self._kill)
            self._unwanted = []
        if self._waiting and time.monotonic() >= self._not_before:
            for start in range(0, len(self._waiting), self.queue.max_array):
                if not self._submit(self._waiting[start : start + self.queue.max_array]):
                    break
            self._waiting = [attempt for attempt in self._waiting if attempt.job is None]

    def _submit(self, attempts: Sequence[SlurmAttempt]) -> bool:
        """One job array. False if Slurm does not take it now; UserError if it never took any."""
        jobs = []
        try:
            with self._submitit.batch():
                for attempt in attempts:
                    trial, corpus = attempt.planned.trial, attempt.planned.corpus
                    exit_file, requeues = attempt.exit_file, self.settings.requeues
                    call = SlurmJob(self.target, trial, corpus, self.threads, exit_file, requeues)
                    jobs.append(self._submitit.submit(call))
        except self._refusals as error:
            if not self._accepted:
                raise UserError(f"executor=slurm: {reason(error)}") from None
            warn(f"Slurm took no more jobs ({reason(error)}); tried again in {AGAIN_SECONDS:.0f} s")
            self._not_before = time.monotonic() + AGAIN_SECONDS
            return False
        self._accepted += len(jobs)
        for attempt, job in zip(attempts, jobs, strict=True):
            attempt.job, attempt.submitted = str(job.job_id), time.monotonic()
            attempt.errors = Path(job.paths.stderr)
            self._note(attempt)
        return True

    def _settle(self, attempt: SlurmAttempt, job: str) -> None:
        """Give the attempt its exit code, if its job does nothing for it any more."""
        states = self.queue.states(attempt.submitted)
        if states is None:
            return
        attempt.settle(states.get(job))
        if attempt.code is not None or attempt.looked == self.queue.seen:
            return
        attempt.looked = self.queue.seen  # the lock of a trial is not to be tried more often than needed
        if self._idle.has(job, states.get(job), attempt.planned.trial.folder):
            attempt.give_up()
            self._unwanted.append(job)

    def _note(self, attempt: SlurmAttempt) -> None:
        folder = attempt.planned.trial.folder
        folder.mkdir(parents=True, exist_ok=True)
        note = {"cluster": self.queue.cluster, "job": attempt.job, "submitted": time.time()}
        write_text_atomic(folder / NOTE_FILE, json.dumps(note) + "\n")

    def _noted_job(self, planned: PlannedTrial) -> str | None:
        """The job that an earlier launch submitted for this trial, on this cluster."""
        try:
            note = json.loads((planned.trial.folder / NOTE_FILE).read_text(encoding="utf-8"))
            return str(note["job"]) if note["cluster"] == self.queue.cluster else None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # none, or torn: at worst a second job finds the trial locked or done


def job_parameters(settings: SlurmConfig, study: str, cores: int, gpus: int) -> dict[str, Any]:
    """What submitit is told of every job."""
    cpus = settings.cpus if settings.cpus is not None else cores
    gpus = settings.gpus if settings.gpus is not None else gpus
    return {
        "job_name": f"attnres-{study}",
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "time": settings.time_minutes,
        "cpus_per_task": cpus,
        "gpus_per_node": gpus or None,
        "mem": settings.memory,
        "signal_delay_s": settings.signal_seconds,
        "array_parallelism": settings.at_once or 1_000_000,
        "srun_args": [f"--cpus-per-task={cpus}"],  # srun does not take it over from sbatch any more
        "wckey": None,  # submitit's own would be refused where keys are checked
        "additional_parameters": {"requeue": True, **settings.options},
    }
