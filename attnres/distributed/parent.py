"""The trial's own process, where the trial has several: it starts torchrun, waits, and says what came out.

To whoever started it, it is a trial like any other: the same record, exceptions and exit codes, the same
signals. Torch-free.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from attnres.config import to_mapping
from attnres.data.corpus import PackedCorpus
from attnres.distributed import launched, messages
from attnres.errors import ConfigError, UserError
from attnres.folder import finished_record
from attnres.lock import TrialBusy, TrialLock
from attnres.outcome import record_failure
from attnres.record import RECORD_FILE, read_trial_record
from attnres.run_state import RunState
from attnres.status import StatusFile, note_failure
from attnres.stop import Cancelled, Preempted, StopSignals, cancel_asked, stopped
from attnres.trial import Trial

POLL_SECONDS = 0.1
EXIT_LOST = 255
# More make no sense, and each has the whole of torch in memory. Tests have several to a core.
PROCESSES_PER_CORE = 16
_SOURCES = Path(__file__).resolve().parents[2]


class ProcessesFailed(Exception):
    """A process of the trial failed or was killed; the folder says so already.

    `exit_code` is 1 after an exception, 128 + the number of the signal that killed it, or 255 where all that
    is known is that it was lost.
    """

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def train_in_processes(trial: Trial, corpus: PackedCorpus) -> dict[str, Any]:
    """`attnres.train.train` for a trial of several processes on this machine.

    Raises what that raises, ProcessesFailed, and ConfigError for far more processes than cores.
    """
    processes, cores = trial.config.runtime.processes, os.cpu_count() or 1
    if processes > PROCESSES_PER_CORE * cores:
        why = f"this machine has {cores} cores, and takes at most {PROCESSES_PER_CORE} processes for each"
        raise ConfigError("runtime.processes", processes, why)
    with TrialLock(trial.folder):  # known at once, not after so many processes have started
        if done := finished_record(trial.folder):
            return done
        if cancel_asked(trial.folder):
            raise Cancelled
    with StopSignals(trial.folder) as signals, tempfile.TemporaryDirectory(prefix="attnres-") as name:
        folder = Path(name)
        messages.write(folder, messages.CONFIG_FILE, to_mapping(trial.config))
        agent = _start(trial, folder)
        try:
            asked = _wait(agent, signals, folder)
        finally:
            if agent.poll() is None:
                agent.kill()  # its processes end with it
                agent.wait()
        return _result(trial, corpus, folder, agent.returncode, asked)


def _start(trial: Trial, folder: Path) -> subprocess.Popen[bytes]:
    runtime = trial.config.runtime
    paths = [str(_SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "OMP_NUM_THREADS": str(runtime.threads),
        "PYTHONPATH": os.pathsep.join(paths),  # the same code, wherever the command was given
        launched.FOLDER_VARIABLE: str(folder),
        launched.PARENT_VARIABLE: str(os.getpid()),
    }
    command = [sys.executable, "-m", "attnres.distributed.agent", str(folder), str(runtime.processes)]
    sys.stdout.flush()
    sys.stderr.flush()
    return subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL)


def _wait(agent: subprocess.Popen[bytes], signals: StopSignals, folder: Path) -> Preempted | None:
    """Wait for torchrun's end. Returns what asked to stop meanwhile, which the processes are told once."""
    asked: Preempted | None = None
    while agent.poll() is None:
        try:
            signals.check()
        except Preempted as error:
            if asked is None:
                asked = error
                messages.write(folder, launched.STOP_FILE, error.wish)
        try:
            agent.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    return asked


def _result(
    trial: Trial, corpus: PackedCorpus, folder: Path, agent_code: int, asked: Preempted | None
) -> dict[str, Any]:
    """The record, or the exception that the same end would be in a trial of one process."""
    told = [messages.read(folder, path.name) for path in sorted(folder.glob(messages.FAILURE_FILES))]
    own = next((failure for failure in told if failure["origin"] != "lost"), None)
    if killed := _killed(trial, folder, agent_code, asked is not None, own is not None):
        (trial.folder / RECORD_FILE).unlink(missing_ok=True)  # the first process took it for its own failure
        _note(trial, killed[0])
        raise ProcessesFailed(*killed)
    outcome = messages.read(folder, messages.OUTCOME_FILE) or {}
    match outcome.get("kind"):
        case "record":
            return read_trial_record(trial.folder)
        case "stopped":
            raise stopped(outcome["wish"])
        case "busy":
            raise TrialBusy(trial.folder, outcome["pid"])
        case "mistake":
            raise UserError(outcome["text"])
    if asked is not None:  # before the processes listened
        raise asked
    if own is not None:
        raise _failed(trial, corpus, own)
    reason = told[0]["reason"] if told else f"torchrun ended with exit code {agent_code}"
    _note(trial, reason)
    raise ProcessesFailed(reason, EXIT_LOST if told else 1)


def _killed(trial: Trial, folder: Path, agent_code: int, asked: bool, failed: bool) -> tuple[str, int] | None:
    """Which process was killed by which signal, in words, and the exit code that says so.

    Once a process has `failed`, torchrun ends the others by SIGTERM and, in the end, by SIGKILL.
    """
    failures = messages.read(folder, messages.AGENT_FILE) or []
    codes = {failure["code"]: failure["rank"] for failure in reversed(failures) if failure["code"] < 0}
    by_torchrun = {-signal.SIGTERM, *([-signal.SIGKILL] if failed else [])}
    if asked or failed or codes.keys() - by_torchrun:
        codes = {code: rank for code, rank in codes.items() if code not in by_torchrun}
    for code, rank in codes.items():
        who = f"process {rank} of {trial.config.runtime.processes}"
        return f"{who} was killed by {_name(-code)}", 128 - code
    if agent_code < 0:
        return f"torchrun was killed by {_name(-agent_code)}", 128 - agent_code
    return None


def _name(number: int) -> str:
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def _failed(trial: Trial, corpus: PackedCorpus, told: dict[str, Any]) -> ProcessesFailed:
    """An exception in a process, which has told how far it was; recorded here if it is not yet."""
    reason = f"process {told['rank']} of {trial.config.runtime.processes}: {told['reason']}"
    if told["rank"]:
        state = RunState(environment=told["environment"])
        state.load(told["state"])
        with TrialLock(trial.folder):
            status = StatusFile(trial.folder, trial.steps, new_attempt=False)
            record_failure(trial, corpus, state, status, reason, told["origin"])
    return ProcessesFailed(reason, 1)


def _note(trial: Trial, reason: str) -> None:
    """Nobody else can leave the reason in status.json any more."""
    with TrialLock(trial.folder):
        note_failure(trial.folder, trial.steps, reason, "outside")
