"""A W&B run of one attempt at a trial, wherever it was read; attempts -> one outcome for each trial."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnres.errors import RecordError, TornRecordError
from attnres.record import check_record

LOSS_KEY = "validation/loss_nats"
Row = Mapping[str, Any]  # a step's values by name, "_step" among them


@dataclass(frozen=True)
class LoggedRun:
    """`rows` reads the history, in order of steps; `broken` says why a run could not be read to its end."""

    place: str  # a path, or entity/project/id
    name: str
    group: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Callable[[], Sequence[Row]]
    broken: str | None = None

    @property
    def trial_id(self) -> str | None:
        """None for a run that this project has not written; others may have a trial_id too."""
        value, model = self.config.get("trial_id"), self.config.get("model")
        ours = isinstance(value, str) and isinstance(model, Mapping) and "study_name" in self.config
        return value if ours else None

    @property
    def attempt(self) -> int:
        value = self.config.get("attempt")
        return value if isinstance(value, int) else 1

    @property
    def study(self) -> str:
        return str(self.config.get("study_name", ""))

    def record(self) -> dict[str, Any] | None:
        """The record in the run's summary, checked; None if it has none. Raises RecordError."""
        text = self.summary.get("record")
        if text is None:
            return None
        try:
            record = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise TornRecordError(f"{self.place}: record: torn or not JSON ({error})") from None
        return check_record(record, self.place)


@dataclass(frozen=True)
class Outcome:
    """What the attempts at a trial come to. Without a record `absent` is missing, failed or torn, `why` says
    more.
    """

    attempts: tuple[LoggedRun, ...]  # the first one first
    chosen: LoggedRun  # the one with the record, or the last
    record: Mapping[str, Any] | None
    absent: str = ""
    why: str = ""

    def history(self) -> list[Row]:
        """Rows of all attempts: of an earlier one those before the first step of a later one."""
        merged: list[Row] = []
        for run in self.attempts[: self.attempts.index(self.chosen) + 1]:
            rows = run.rows()
            if rows:
                merged = [row for row in merged if row["_step"] < rows[0]["_step"]]
            merged += rows
        return merged


def outcome_of(runs: Sequence[LoggedRun]) -> Outcome:
    """Join the attempts at one trial: the latest finished record wins, then the latest of any."""
    attempts = tuple(sorted(runs, key=lambda run: run.attempt))
    torn = [f"{run.place}: {run.broken}" for run in attempts if run.broken]
    records = []
    for run in attempts:
        try:
            record = run.record()
        except RecordError as error:
            torn.append(str(error))
            continue
        if record is not None:
            records.append((record["status"] == "finished", ended(record), run.attempt, run, record))
    if records:
        *_, chosen, record = max(records, key=lambda entry: entry[:3])
        return Outcome(attempts, chosen, record)
    last = attempts[-1]
    if torn:
        return Outcome(attempts, last, None, "torn", torn[-1])
    status = str(last.summary.get("status", "running or killed"))
    return Outcome(attempts, last, None, "failed" if status == "failed" else "missing", status)


def ended(record: Mapping[str, Any]) -> str:
    """When the trial ended, in ISO 8601 at UTC: later is larger."""
    return str(record["timing"].get("ended") or "")


def history_fault(outcome: Outcome, rows: Sequence[Row]) -> str | None:
    """What is wrong with the history of a finished trial, or None.

    It must have as many rows as the run says that it logged, and end with the record's loss.
    """
    record, said = outcome.record, outcome.chosen.summary.get("history_rows")
    assert record is not None
    steps = [row["_step"] for row in rows]
    if len(set(steps)) != len(steps) or len(steps) != said:
        return f"{outcome.chosen.place} has {len(steps)} rows of history, its summary says {said}"
    losses = [row for row in rows if row.get(LOSS_KEY) is not None]
    final = (record["steps"], record["validation"]["loss_nats"])
    last = (losses[-1]["_step"], losses[-1][LOSS_KEY]) if losses else None
    if last != final:
        logged = f"{last[1]} at step {last[0]}" if last else "no validation loss"
        return f"{outcome.chosen.place} ends with {logged}, its record with {final[1]} at step {final[0]}"
    return None


def training_curve(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Tokens and training losses."""
    named = [row for row in rows if row.get("train/loss_nats") is not None and row.get("tokens") is not None]
    return [float(row["tokens"]) for row in named], [float(row["train/loss_nats"]) for row in named]
