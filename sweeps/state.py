"""What a trial's folder says about it: finished, diverged, failed, running, preempted, stale or missing.

Read from the record, the status file and the lock only: never from exit codes, console text or W&B. A torn
file is named in the reason and otherwise ignored; nothing here raises for what a crash can leave behind.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attnres.errors import RecordError
from attnres.lock import is_locked
from attnres.record import RECORD_FILE, read_trial_record
from attnres.status import read_status

# Longer than any evaluation or checkpoint of the shipped studies; otherwise a trial writes every two seconds.
STALE_SECONDS = 120.0

State = Literal["finished", "diverged", "failed", "running", "preempted", "stale", "missing"]
STATES: tuple[State, ...] = ("finished", "diverged", "failed", "running", "preempted", "stale", "missing")
ENDED = ("finished", "diverged")  # a launch does not run these again


@dataclass(frozen=True)
class TrialState:
    """One moment of a trial. What is not known is None."""

    state: State
    reason: str | None = None
    step: int | None = None
    steps: int | None = None
    loss_nats: float | None = None  # validation loss of a finished trial, else of the last training step
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    train_seconds: float | None = None
    attempts: int | None = None
    written: float = 0.0  # unix seconds, of the file that says so

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def read_state(folder: Path) -> TrialState:
    """The state of the trial that lives in this folder."""
    problems = []
    record = status = None
    try:
        record = read_trial_record(folder) if (folder / RECORD_FILE).exists() else None
    except RecordError as error:
        problems.append(str(error))
    if record is not None and record["status"] in ENDED:
        return _from_record(record, folder)
    try:
        status = read_status(folder)
    except RecordError as error:
        problems.append(str(error))
    if is_locked(folder):
        return _running(status or {}, problems)
    if record is not None:
        return _from_record(record, folder)
    return _unfinished(status, problems)


def foreign_trials(study_folder: Path, planned: Iterable[str]) -> list[str]:
    """Names of trial folders in a study's folder that the plan does not have (of another budget, say)."""
    known = set(planned)
    if not study_folder.is_dir():
        return []
    paths = [path for pattern in ("*/config.yaml", f"*/{RECORD_FILE}") for path in study_folder.glob(pattern)]
    return sorted({path.parent.name for path in paths} - known)


def _from_record(record: dict[str, Any], folder: Path) -> TrialState:
    validation, timing = record["validation"] or {}, record["timing"]
    return TrialState(
        state=record["status"],
        reason=record["reason"],
        step=record["steps"],
        steps=record["planned_steps"],
        loss_nats=validation.get("loss_nats"),
        tokens_per_second=timing.get("tokens_per_second"),
        train_seconds=timing.get("train_seconds"),
        attempts=timing.get("attempts"),
        written=(folder / RECORD_FILE).stat().st_mtime,
    )


def _running(status: dict[str, Any], problems: list[str]) -> TrialState:
    age = time.time() - status.get("heartbeat", time.time())
    if age > STALE_SECONDS:
        problems.append(f"no heartbeat for {age:,.0f} s")
    if status.get("state") not in (None, "running"):
        status = {}  # the last words of an earlier attempt; this one has not spoken yet
    return _from_status("running", status, problems)


def _unfinished(status: dict[str, Any] | None, problems: list[str]) -> TrialState:
    if status is None:
        return _from_status("missing", {}, problems)
    where = f"step {status.get('step')} of {status.get('steps')}"
    reasons: dict[str, tuple[State, str]] = {
        "preempted": ("preempted", f"stopped at {where}; a launch goes on from there"),
        "failed": ("failed", status.get("reason") or "no reason given"),
        "running": ("stale", f"its process ended at {where} without a record"),
    }
    said = status["state"]
    state, reason = reasons.get(said, ("failed", f"its status says {said}, but it has no readable record"))
    return _from_status(state, status, list(dict.fromkeys([*problems, reason])))


def _from_status(state: State, status: dict[str, Any], problems: list[str]) -> TrialState:
    return TrialState(
        state=state,
        reason="; ".join(problems) or None,
        step=status.get("step"),
        steps=status.get("steps"),
        loss_nats=status.get("loss_nats"),
        tokens_per_second=status.get("tokens_per_second"),
        eta_seconds=status.get("eta_seconds"),
        attempts=status.get("attempts"),
        written=status.get("heartbeat", 0.0),
    )
