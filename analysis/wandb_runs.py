"""A W&B run of one attempt at a trial, wherever it was read; attempts -> one outcome for each trial."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnres.errors import RecordError, TornRecordError
from attnres.record import check_record
from attnres.words import counted

LOSS_KEY, TRAIN_LOSS_KEY, TOKENS_KEY = "validation/loss_nats", "train/loss_nats", "tokens"
NUMBERS = (LOSS_KEY, TRAIN_LOSS_KEY, TOKENS_KEY)
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
        check_record(record, self.place)
        if record["trial_id"] != self.trial_id:
            why = f"the record of another trial than the run's, {self.trial_id}"
            raise RecordError(f"{self.place}: record: trial_id={record['trial_id']}: {why}")
        return record


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
    conflict: str = ""  # says so, where records of several runs of the trial do not agree

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
        return Outcome(attempts, chosen, record, conflict=_conflict([entry[3:] for entry in records]))
    last = attempts[-1]
    if torn:
        return Outcome(attempts, last, None, "torn", torn[-1])
    status = str(last.summary.get("status", "running or killed"))
    return Outcome(attempts, last, None, "failed" if status == "failed" else "missing", status)


def _conflict(records: Sequence[tuple[LoggedRun, Mapping[str, Any]]]) -> str:
    """A trial is trained once, and again gives the same on one machine: two results are two trainings."""
    results: dict[tuple[str, Any], str] = {}
    for run, record in records:
        loss = (record["validation"] or {}).get("loss_nats")
        results.setdefault((record["status"], loss), f"{record['status']} at {loss} in {run.place}")
    return f"{records[0][0].name} ({', '.join(results.values())})" if len(results) > 1 else ""


def ended(record: Mapping[str, Any]) -> str:
    """When the trial ended, in ISO 8601 at UTC: later is larger."""
    return str(record["timing"].get("ended") or "")


def history_fault(outcome: Outcome, rows: Sequence[Row]) -> str | None:
    """What is wrong with the history of a finished trial, or None.

    It must have as many rows as the run says that it logged, and end with the record's loss.
    """
    record, said = outcome.record, outcome.chosen.summary.get("history_rows")
    assert record is not None
    for row, key in ((row, key) for row in rows for key in NUMBERS):
        if row.get(key) is not None and not is_number(row[key]):
            return f"{outcome.chosen.place} has {key}={str(row[key])[:40]!r} at step {row['_step']}"
    steps = [row["_step"] for row in rows]
    if len(set(steps)) != len(steps) or len(steps) != said:
        return f"{outcome.chosen.place} has {counted(len(steps), 'row')} of history, its summary says {said}"
    losses = [row for row in rows if row.get(LOSS_KEY) is not None]
    final = (record["steps"], record["validation"]["loss_nats"])
    last = (losses[-1]["_step"], losses[-1][LOSS_KEY]) if losses else None
    if last != final:
        logged = f"{last[1]} at step {last[0]}" if last else "no validation loss"
        return f"{outcome.chosen.place} ends with {logged}, its record with {final[1]} at step {final[0]}"
    return None


def training_curve(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Tokens and training losses."""
    named = [row for row in rows if is_number(row.get(TRAIN_LOSS_KEY)) and is_number(row.get(TOKENS_KEY))]
    return [float(row[TOKENS_KEY]) for row in named], [float(row[TRAIN_LOSS_KEY]) for row in named]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """By step. Raises ValueError for a step that is no whole number: other programs may log such."""
    found = list(rows)
    for row in found:
        if not isinstance(row["_step"], int) or isinstance(row["_step"], bool):
            raise ValueError(f"_step={str(row['_step'])[:40]!r}")
    return sorted(found, key=lambda row: row["_step"])


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
