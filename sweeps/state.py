"""What a trial's folder says about it: pending, running, finished, diverged, failed, preempted, cancelled or
stale.

Read from the record, the status file, the cancel file and the lock only: never from exit codes, console text
or W&B. A torn file is named in the reason and otherwise ignored; nothing here raises for what a crash can
leave behind, and nobody is stopped or started because a clock says that a heartbeat is old.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attnres.errors import RecordError
from attnres.lock import is_locked
from attnres.origin import Origin
from attnres.record import RECORD_FILE, read_trial_record
from attnres.status import boot_id, heartbeat_age_seconds, read_status
from attnres.stop import cancel_asked

# Longer than any evaluation or checkpoint of the shipped studies; otherwise a trial writes every two seconds.
STALE_SECONDS = 120.0

State = Literal["finished", "diverged", "failed", "running", "preempted", "cancelled", "stale", "pending"]
STATES: tuple[State, ...] = (
    "finished",
    "diverged",
    "failed",
    "running",
    "preempted",
    "cancelled",
    "stale",
    "pending",
)
ENDED = ("finished", "diverged")  # a launch does not run these again
# What reasons end with, for who looks; a launch that does it need not say so.
_NEXT = {"preempted": "a launch goes on from there", "cancelled": "a new launch goes on with it"}


@dataclass(frozen=True)
class TrialState:
    """One moment of a trial. What is not known is None."""

    state: State
    reason: str | None = None
    origin: Origin | None = None  # of a failure: the trial's own, or from outside
    step: int | None = None
    steps: int | None = None
    loss_nats: float | None = None  # validation loss of a finished trial, else of the last training step
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    train_seconds: float | None = None
    wall_seconds: float | None = None
    attempts: int | None = None
    host: str | None = None  # of the last attempt that has spoken
    pid: int | None = None
    heartbeat: float | None = None  # unix seconds, by the clock of that host
    locked: bool = False  # some process that shares locks with this one has it in hand

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def past(self) -> str:
        """The reason without what the next launch does; for that launch itself. May be empty."""
        reason = self.reason or ""
        for said in _NEXT.values():
            reason = reason.removesuffix(said).removesuffix("; ")
        return reason

    @property
    def at_work(self) -> bool:
        """Whether a process has it in hand, hung or not."""
        return self.locked or self.state == "running"


def read_state(folder: Path) -> TrialState:
    """The state of the trial that lives in this folder."""
    try:
        return _read_state(folder)
    except OSError as error:  # a folder that may not be entered, a plain file in its place
        return TrialState("pending", f"{error.filename or folder}: cannot be read ({error.strerror})")


def _read_state(folder: Path) -> TrialState:
    problems = []
    record = status = None
    try:
        record = read_trial_record(folder) if (folder / RECORD_FILE).exists() else None
    except RecordError as error:
        problems.append(str(error))
    if record is not None and record["status"] in ENDED:
        return _from_record(record)
    try:
        status = read_status(folder)
    except RecordError as error:
        problems.append(str(error))
    if is_locked(folder):
        return _locked(status or {}, problems)
    if cancel_asked(folder):
        reason = f"{_place(status)}{_NEXT['cancelled']}"
        return _from_status("cancelled", status or {}, [*problems, reason])
    if record is not None:
        return _from_record(record)
    return _unlocked(status, problems)


def foreign_trials(study_folder: Path, planned: Iterable[str]) -> list[str]:
    """Names of trial folders in a study's folder that the plan does not have (of another budget, say)."""
    known = set(planned)
    if not study_folder.is_dir():
        return []
    paths = [path for pattern in ("*/config.yaml", f"*/{RECORD_FILE}") for path in study_folder.glob(pattern)]
    return sorted({path.parent.name for path in paths} - known)


def _from_record(record: dict[str, Any]) -> TrialState:
    validation, timing = record["validation"] or {}, record["timing"]
    origin = record.get("origin")
    return TrialState(
        state=record["status"],
        reason=record["reason"],
        origin=origin if origin in ("own", "outside") else None,
        step=record["steps"],
        steps=record["planned_steps"],
        loss_nats=validation.get("loss_nats"),
        tokens_per_second=timing.get("tokens_per_second"),
        train_seconds=timing.get("train_seconds"),
        wall_seconds=timing.get("wall_seconds"),
        attempts=timing.get("attempts"),
    )


def _locked(status: dict[str, Any], problems: list[str]) -> TrialState:
    """Somebody has it in hand. Silence is shown, no more: a hung process may wake, and it has the lock."""
    if status.get("state") not in (None, "running"):
        status = {}  # the last words of an earlier attempt; this one has not spoken yet
    age = heartbeat_age_seconds(status) if status else 0.0
    if age <= STALE_SECONDS:
        return _from_status("running", status, problems, locked=True)
    process = f"process {status.get('pid')} on {status.get('host')}"
    silent = (
        f"no heartbeat for {age:,.0f} s, but {process} holds its lock (hung, suspended, or in a long step)"
    )
    return _from_status("stale", status, [*problems, silent], locked=True)


def _unlocked(status: dict[str, Any] | None, problems: list[str]) -> TrialState:
    if status is None:
        return _from_status("pending", {}, problems)
    said = status["state"]
    if said == "running" and _is_alive_elsewhere(status):
        seen = f"by its heartbeat from {status.get('host')}, whose locks are not seen here"
        return _from_status("running", status, [*problems, seen])
    reasons: dict[str, tuple[State, str]] = {
        "preempted": ("preempted", f"{_place(status)}{_NEXT['preempted']}"),
        "cancelled": ("cancelled", f"{_place(status)}{_NEXT['cancelled']}"),
        "failed": ("failed", status.get("reason") or "no reason given"),
        "running": ("stale", f"its process ended at {_where(status)} without a record{_checkpoint(status)}"),
    }
    state, reason = reasons.get(said, ("failed", f"its status says {said}, but it has no readable record"))
    return _from_status(state, status, list(dict.fromkeys([*problems, reason])))


def _is_alive_elsewhere(status: dict[str, Any]) -> bool:
    """Between processes of one kernel the lock tells. Another machine may not share its locks with this."""
    boot = status.get("boot_id")
    return boot is not None and boot != boot_id() and heartbeat_age_seconds(status) <= STALE_SECONDS


def _where(status: dict[str, Any]) -> str:
    step, steps = status.get("step"), status.get("steps")
    return "an unknown step" if step is None else f"step {step:,}" + (f" of {steps:,}" if steps else "")


def _checkpoint(status: dict[str, Any]) -> str:
    """From where the next attempt goes on, where the killed one has said so."""
    step = status.get("saved_step")
    return "" if step is None else f"; its checkpoint is of step {step:,}"


def _place(status: dict[str, Any] | None) -> str:
    return f"stopped at {_where(status)}; " if status is not None else ""


def _from_status(
    state: State, status: dict[str, Any], problems: list[str], locked: bool = False
) -> TrialState:
    return TrialState(
        state=state,
        reason="; ".join(problems) or None,
        origin=status.get("origin") if state == "failed" else None,
        step=status.get("step"),
        steps=status.get("steps"),
        loss_nats=status.get("loss_nats"),
        tokens_per_second=status.get("tokens_per_second"),
        eta_seconds=status.get("eta_seconds"),
        attempts=status.get("attempts"),
        host=status.get("host"),
        pid=status.get("pid"),
        heartbeat=status.get("heartbeat"),
        locked=locked,
    )
