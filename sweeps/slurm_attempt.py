"""One job of Slurm: what became of it, from its exit file, the queue and its trial's folder."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attnres.lock import is_locked
from attnres.stop import EXIT_CANCELLED
from sweeps.slurm_queue import is_active
from sweeps.state import read_state
from sweeps.study import PlannedTrial

CONFIRM_SECONDS = 10.0  # a job that left without a word may come back, and its file may be late
# So long a job may run although nobody holds its trial's lock: while it starts or goes back into the
# queue, and after the trial's end.
IDLE_SECONDS = 600.0
ENDED_SECONDS = 30.0
STOPPED = 143  # as after SIGTERM
LOST = 255
# What Slurm saw -> the exit code that the same end would have had on this machine, and why in words.
_ENDS: Mapping[str, tuple[int, str]] = {
    "OUT_OF_MEMORY": (-9, "its job needed more memory than it asked for"),
    "TIMEOUT": (STOPPED, "its job came to its time limit"),
    "DEADLINE": (STOPPED, "its job came to its deadline"),
    "PREEMPTED": (LOST, "its job was preempted"),
    "NODE_FAIL": (LOST, "its node failed"),
    "BOOT_FAIL": (LOST, "its node failed"),
}
# The same as Slurm's daemons say it in the job's stderr, where the queue says FAILED; the first that fits.
_WORDS = (
    (re.compile(r"exceeded .*memory limit|oom.kill", re.IGNORECASE), _ENDS["OUT_OF_MEMORY"]),
    (re.compile(r"DUE TO PREEMPTION"), _ENDS["PREEMPTED"]),
    (re.compile(r"DUE TO NODE FAILURE"), _ENDS["NODE_FAIL"]),
    (re.compile(r"DUE TO TIME LIMIT"), _ENDS["TIMEOUT"]),
    (re.compile(r"srun: error: .*: Killed"), (-9, "killed by SIGKILL")),
)
_LAST_LINES = 6


@dataclass(eq=False)
class SlurmAttempt:
    """One job, from the wish to submit it to its exit code."""

    planned: PlannedTrial
    exit_file: Path
    job: str | None = None  # once Slurm has taken it
    errors: Path | None = None  # what Slurm and the job say on stderr
    submitted: float = 0.0  # seconds of time.monotonic
    looked: float = 0.0  # the look at the queue after which the trial's folder was asked
    gone_since: float | None = None
    code: int | None = None
    cause: str | None = None  # of an end from outside, in words

    def settle(self, state: str | None) -> None:
        """Set the exit code if the job has ended and does not come back. `state` is what the queue says; None
        for a job that it has forgotten.
        """
        if is_active(state):
            self.gone_since = None
        elif state == "CANCELLED":
            self.code = EXIT_CANCELLED
        elif (said := _read_code(self.exit_file)) is not None and state in ("COMPLETED", "FAILED", None):
            self.code = said
        elif self.gone_since is None:
            self.gone_since = time.monotonic()
        elif time.monotonic() - self.gone_since >= CONFIRM_SECONDS:
            code, self.cause = _ENDS.get(state or "") or _last_words(self.errors)
            self.code = code if said is None else said

    def give_up(self) -> None:
        """Slurm still calls the job running, and is wrong."""
        self.code, self.cause = LOST, f"job {self.job} runs, but nobody trains the trial"


class IdleJobs:
    """Jobs that Slurm calls running while nobody trains their trials.

    Kill a job's slurmstepd, and Slurm does not notice: the job runs on, to its time limit if it has one.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # seconds of time.monotonic, by job

    def has(self, job: str, state: str | None, folder: Path) -> bool:
        """Whether this job does nothing any more for the trial of this folder."""
        if state != "RUNNING" or is_locked(folder):
            self._since.pop(job, None)
            return False
        since = self._since.setdefault(job, time.monotonic())
        allowed = ENDED_SECONDS if read_state(folder).ended else IDLE_SECONDS
        return time.monotonic() - since > allowed


def _read_code(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _last_words(errors: Path | None) -> tuple[int, str | None]:
    """Exit code and cause, by the last lines of a job's stderr (earlier ones are of earlier ends)."""
    try:
        lines = errors.read_text(errors="replace").splitlines()[-_LAST_LINES:] if errors else []
    except OSError:
        lines = []
    for pattern, end in _WORDS:
        if any(pattern.search(line) for line in lines):
            return end
    return LOST, None
