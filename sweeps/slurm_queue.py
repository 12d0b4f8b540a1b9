"""Slurm's own commands: what is in the queue, how long an array may be, cancelling.

The queue says only whether a job is still there. What became of its trial is in the trial's folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping

from attnres.errors import UserError

# A job in one of these does not come back, unless somebody requeues it. Any other state is still on its way.
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
ENDED |= {"PREEMPTED", "REVOKED", "TIMEOUT"}
COMMAND_SECONDS = 60
_IDS_AT_ONCE = 500  # of one command line


class SlurmQueue:
    """The user's jobs, looked at no more often than every `poll_seconds`."""

    def __init__(self, poll_seconds: float) -> None:
        self.poll_seconds = poll_seconds
        check_commands()
        try:
            text = _output("scontrol", "show", "config")
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(f"executor=slurm: {reason(error)}") from None
        pairs = (line.partition("=") for line in text.splitlines())
        settings = {name.strip(): value.strip() for name, _, value in pairs}
        self.cluster = settings.get("ClusterName", "")
        # The largest index is one less; arrays are switched off where it is 0.
        self.max_array = max(1, int(settings.get("MaxArraySize", "1")))
        self._states: Mapping[str, str] = {}
        self._asked = self.seen = -float("inf")  # seconds of time.monotonic: last try, last success

    def states(self, since: float) -> Mapping[str, str] | None:
        """Job id (`7`, or `7_3` in an array) -> state, as seen after the moment `since` of time.monotonic.

        None where nothing so recent is known: it is too early to ask again, or Slurm does not answer. A job
        that Slurm has forgotten is missing.
        """
        if time.monotonic() - self._asked >= self.poll_seconds:
            self._asked = asked = time.monotonic()
            try:
                self._states = _squeue()
                self.seen = asked
            except (OSError, subprocess.SubprocessError):
                pass  # a controller that restarts; its jobs go on, and the next look tells
        return self._states if self.seen > since else None

    def fresh(self) -> Mapping[str, str] | None:
        """As `states`, of a moment at most some `poll_seconds` ago."""
        return self.states(time.monotonic() - 2 * self.poll_seconds - 1)


def check_commands() -> None:
    """UserError on a host that cannot submit jobs."""
    if shutil.which("sbatch") is None:
        raise UserError("executor=slurm: there is no sbatch here; launch on a host that submits jobs")


def is_active(state: str | None) -> bool:
    """Whether a job of this state waits, runs, or will do so again."""
    return state is not None and state not in ENDED


def cancel(jobs: Collection[str], kill: bool = False) -> None:
    """TERM, and after the cluster's KillWait KILL; with `kill` at once. Jobs that are gone do not matter."""
    options = ["--quiet", *(["--signal=KILL"] if kill else [])]
    names = list(jobs)
    for start in range(0, len(names), _IDS_AT_ONCE):
        command = ["scancel", *options, *names[start : start + _IDS_AT_ONCE]]
        subprocess.run(command, capture_output=True, timeout=COMMAND_SECONDS)


def reason(error: Exception) -> str:
    """What a command of Slurm said when it failed, on one line."""
    said = getattr(error, "stderr", None) or getattr(error, "output", None) or str(error)
    if isinstance(said, bytes):
        said = said.decode(errors="replace")
    return " ".join(said.split())[:300]


def _squeue() -> dict[str, str]:
    user = f"--user={os.getuid()}"
    text = _output("squeue", "--noheader", "--array", "--states=all", user, "--format=%i|%T")
    rows = (line.strip().partition("|") for line in text.splitlines() if "|" in line)
    return {job: state for job, _, state in rows}


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True)
    return done.stdout
