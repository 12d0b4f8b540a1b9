"""Records of a study -> one tidy table, or one line that says what is wrong with them.

Reads runs_dir/<study>/study.json (what was planned) and runs_dir/<study>/*/record.json (what came out), and
nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.claims import Claim, study_claims
from analysis.laws import MIN_SIZES
from analysis.settings import differing_settings, mixed_software, time_columns
from attnres.counts import CONVENTIONS
from attnres.errors import ConfigError, RecordError, UserError
from attnres.record import RECORD_FILE, read_record

STUDY_FILE = "study.json"
LEARNING_RATE = "optim.learning_rate"
NAMED_OFFENDERS = 6  # a line names this many and counts the rest

# What `--allow` can let pass, and what is then done.
ALLOWABLE: Mapping[str, str] = {
    "missing": "trials without a record are left out",
    "torn": "records that cannot be read are left out",
    "diverged": "diverged trials are left out",
    "failed": "failed trials are left out",
    "unfinished": "trials whose schedule had not ended are used as they are",
    "mixed_data": "trials on different training data are compared",
    "mixed_validation": "losses on different validation sets are compared",
    "mixed_settings": "trials that differ in more than the rule and the seed are compared",
}


class StudyError(UserError):
    """Records from which no honest comparison can be made; the message names the offenders."""


@dataclass(frozen=True)
class StudyData:
    """A study's records, checked. `table` has one row per compared trial, with the columns of `record_row`.

    `tuned` also has the trials with another learning rate, where the study has several, on the same data.
    """

    name: str
    folder: Path
    description: str
    purpose: str
    baseline: str
    rules: tuple[str, ...]  # in the plan's order, the baseline first
    claims: tuple[Claim, ...]
    too_small: bool | str
    convention: str
    conventions: Mapping[str, str]  # all that the table has, with what they count
    table: pd.DataFrame
    tuned: pd.DataFrame
    where: Mapping[str, str]
    allowed: tuple[str, ...]  # as given
    let_pass: tuple[str, ...]  # what was in fact let pass, by name
    notes: tuple[str, ...]
    overrides: tuple[str, ...] = ()  # that the study was launched with, after its own


def load_study(
    runs_dir: Path,
    study: str,
    *,
    convention: str = "total",
    where: Mapping[str, str] | None = None,
    allow: Sequence[str] = (),
    baseline: str | None = None,
) -> StudyData:
    """Read and check a study. Raises UserError with one line that names what stands in the way."""
    for name in allow:
        if name not in ALLOWABLE:
            raise ConfigError("--allow", name, f"one of {', '.join(ALLOWABLE)}")
    if convention not in CONVENTIONS:
        raise ConfigError("convention", convention, f"one of {', '.join(CONVENTIONS)}")
    folder = runs_dir / study
    plan = read_plan(folder, study)
    gate = _Gate(f"study={study}", tuple(allow))
    records, notes = _read_records(folder, plan, gate)
    rows = [record_row(plan_row, records.get(plan_row["id"]), convention) for plan_row in plan["trials"]]
    every = pd.DataFrame(rows)
    chosen = _select(every, where or {}, study)
    rules = rules_of(chosen, baseline or plan["baseline"])
    usable = _usable(chosen, rules, gate)
    _check_same(usable, "data_fingerprint", "mixed_data", "training data", gate)
    _check_same(usable, "validation_fingerprint", "mixed_validation", "validation set", gate)
    check_losses(usable, study)
    check_sizes(usable, study)
    tuned = _tuned(every, usable, where or {}, study)
    _check_settings(tuned, records, gate)
    notes += mixed_software(tuned)
    return StudyData(
        name=study,
        folder=folder,
        description=str(plan.get("description") or ""),
        purpose=str(plan.get("purpose") or ""),
        baseline=rules[0],
        rules=rules,
        claims=tuple(study_claims(plan.get("claims") or [], str(folder / STUDY_FILE))),
        too_small=plan.get("too_small") or False,
        convention=convention,
        conventions=CONVENTIONS,
        table=usable.reset_index(drop=True),
        tuned=tuned,
        where=dict(where or {}),
        allowed=tuple(allow),
        let_pass=tuple(gate.let_pass),
        notes=tuple(notes),
        overrides=tuple(plan.get("overrides") or ()),
    )


class _Gate:
    """Refuses offenders, unless `--allow` names their kind; remembers what it let pass."""

    def __init__(self, study: str, allow: tuple[str, ...]) -> None:
        self.study = study
        self.allow = allow
        self.let_pass: list[str] = []

    def check(self, kind: str, offenders: Sequence[str], what: str) -> None:
        if not offenders:
            return
        line = f"{what}: {name_some(offenders)}"
        if kind not in self.allow:
            raise StudyError(f"{self.study}: {line} (--allow {kind}: {ALLOWABLE[kind]})")
        self.let_pass.append(f"{kind}: {line}; {ALLOWABLE[kind]}")


def name_some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:NAMED_OFFENDERS])
    return shown if len(names) <= NAMED_OFFENDERS else f"{shown} and {len(names) - NAMED_OFFENDERS} more"


def _more(lines: Sequence[str]) -> str:
    return f" and {len(lines) - 1} more" if len(lines) > 1 else ""


def read_plan(folder: Path, study: str) -> dict[str, Any]:
    """study.json, checked as far as the analysis needs it."""
    path = folder / STUDY_FILE
    if not folder.is_dir():
        raise StudyError(
            f"study={study}: there is no folder {folder}; first python -m sweeps.launch study={study}"
        )
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StudyError(f"{path}: is missing; python -m sweeps.launch study={study} writes it") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StudyError(f"{path}: torn or not JSON ({error})") from None
    trials = plan.get("trials") if isinstance(plan, dict) else None
    if not isinstance(trials, list) or not trials or "baseline" not in plan:
        raise StudyError(f"{path}: needs a baseline and a list of trials")
    for trial in trials:
        lacking = [key for key in ("id", "size", "rule", "seed") if key not in trial]
        if lacking:
            raise StudyError(f"{path}: trials: {lacking[0]}: is missing")
    overrides = plan.get("overrides") or []
    if not (isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)):
        raise StudyError(f"{path}: overrides={overrides!r}: must be a list of texts")
    return plan


def _read_records(
    folder: Path, plan: Mapping[str, Any], gate: _Gate
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Records of planned trials by id. Others are ignored and counted; torn ones go through the gate."""
    planned = {str(trial["id"]): trial for trial in plan["trials"]}
    records: dict[str, dict[str, Any]] = {}
    torn, stray, misplaced, foreign = [], [], [], []
    paths = sorted(folder.glob(f"*/{RECORD_FILE}"))
    if not paths:
        raise StudyError(f"{gate.study}: no records in {folder} (of {len(planned)} planned trials)")
    for path in paths:
        if path.parent.name not in planned:
            stray.append(path.parent.name)
            continue
        try:
            record = read_record(path)
        except RecordError as error:
            torn.append(str(error))
            continue
        if record["trial_id"] != path.parent.name:
            misplaced.append(f"{path} says trial_id={record['trial_id']}")
        for key in ("size", "rule", "seed"):
            if str(record[key]) != str(planned[path.parent.name][key]):
                plans = planned[path.parent.name][key]
                foreign.append(f"{path} says {key}={record[key]}, the plan {key}={plans}")
        records[path.parent.name] = record
    if misplaced:
        raise StudyError(f"{gate.study}: records in the wrong folder: {name_some(misplaced)}")
    if foreign:
        raise StudyError(
            f"{gate.study}: records that disagree with {STUDY_FILE}: {foreign[0]}{_more(foreign)}"
        )
    gate.check("torn", torn, f"{len(torn)} of {len(paths)} records cannot be read")
    notes = []
    if stray:
        notes.append(f"{len(stray)} records that are not in the plan were ignored: {name_some(stray)}")
    return records, notes


def record_row(
    planned: Mapping[str, Any], record: Mapping[str, Any] | None, convention: str
) -> dict[str, Any]:
    """One row of the table. Compute in FLOP, loss in nats, time in seconds; axes under their own keys.

    `status` is finished, unfinished (schedule not ended), diverged, failed or missing.
    """
    axes = {f"axis:{key}": value for key, value in (planned.get("axes") or {}).items()}
    row: dict[str, Any] = {
        "id": planned["id"],
        "trial": planned.get("name") or planned["id"],
        "size": str(planned["size"]),
        "rule": str(planned["rule"]),
        "seed": planned["seed"],
        **axes,
        "status": "missing",
    }
    if record is None:
        return row
    row["status"] = record["status"]
    if record["status"] == "finished" and not record["schedule_complete"]:
        row["status"] = "unfinished"
    timing, environment, times = record["timing"], record["environment"], time_columns(record)
    validation = record["validation"] or {}
    row |= {
        "reason": record["reason"],
        "loss": _number(validation.get("loss_nats")),
        "loss_standard_error": _number(validation.get("standard_error")),
        "bits_per_byte": _number(validation.get("bits_per_byte")),
        "compute": _number(record["training_flops"].get(convention)),
        **{f"compute_{name}": _number(record["training_flops"].get(name)) for name in CONVENTIONS},
        "tokens": record["tokens"],
        "parameters": record["parameters"].get("total"),
        "non_embedding_parameters": record["parameters"].get("non_embedding"),
        "learning_rate": record["learning_rate"],
        "train_seconds": _number(timing.get("train_seconds")),
        "median_step_train_seconds": _number(timing.get("median_step_seconds")) * record["steps"],
        "tokens_per_second": _number(timing.get("tokens_per_second")),
        "attempts": timing.get("attempts"),
        "machine": f"{times['processor']} {times['threads']} threads",
        **times,
        "commit": environment.get("commit"),
        "data_fingerprint": record["data"].get("fingerprint"),
        "validation_fingerprint": record["data"].get("validation_fingerprint"),
    }
    return row


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def axis_columns(table: pd.DataFrame) -> list[str]:
    return [column for column in table.columns if str(column).startswith("axis:")]


def _select(every: pd.DataFrame, where: Mapping[str, str], study: str) -> pd.DataFrame:
    """Rows with the given axis values; one trial per size, rule and seed must be left."""
    chosen = every
    axes = {column.removeprefix("axis:"): column for column in axis_columns(every)}
    for key, text in where.items():
        if key not in axes:
            raise ConfigError(
                "where", f"{key}={text}", f"the axes of this study are {', '.join(axes) or 'none'}"
            )
        kept = chosen[[_same_value(value, text) for value in chosen[axes[key]]]]
        if kept.empty:
            has = ", ".join(_distinct(chosen[axes[key]]))
            raise ConfigError("where", f"{key}={text}", f"no trial has it; the values are {has}")
        chosen = kept
    for key, column in axes.items():
        values = _distinct(chosen[column])
        if len(values) > 1 and key not in where and chosen.duplicated(["size", "rule", "seed"]).any():
            raise StudyError(
                f"study={study}: {key} has the values {', '.join(values)}; choose one, "
                f'for example where="{key}={values[0]}"'
            )
    repeated = chosen[chosen.duplicated(["size", "rule", "seed"])]
    if len(repeated):
        raise StudyError(
            f"study={study}: planned twice for one size, rule, seed: {name_some(list(repeated['trial']))}"
        )
    return chosen


def _tuned(every: pd.DataFrame, usable: pd.DataFrame, where: Mapping[str, str], study: str) -> pd.DataFrame:
    """Usable trials plus those that differ from them in the learning rate only."""
    if f"axis:{LEARNING_RATE}" not in every.columns:
        return usable.reset_index(drop=True)
    others = {key: value for key, value in where.items() if key != LEARNING_RATE}
    rows = every[every["status"] == "finished"]
    for key, text in others.items():
        rows = rows[[_same_value(value, text) for value in rows[f"axis:{key}"]]]
    for column in ("data_fingerprint", "validation_fingerprint"):
        rows = rows[rows[column].isin(usable[column])]
    rows = rows[~rows["id"].isin(usable["id"])]
    both = pd.concat([usable, rows], ignore_index=True)
    check_losses(both, study)
    return both


def _same_value(value: Any, text: str) -> bool:
    try:
        return math.isclose(float(value), float(text), rel_tol=1e-9)
    except (TypeError, ValueError):
        return str(value) == text or json.dumps(value) == text


def _distinct(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(f"{v:g}" if isinstance(v, float) else str(v) for v in values))


def rules_of(chosen: pd.DataFrame, baseline: str) -> tuple[str, ...]:
    rules = list(dict.fromkeys(chosen["rule"]))
    if baseline not in rules:
        raise ConfigError("baseline", baseline, f"is not a rule of this study; it has {', '.join(rules)}")
    if len(rules) < 2:
        raise ConfigError(
            "baseline", baseline, "is the only rule of this study; there is nothing to compare it with"
        )
    return (baseline, *(rule for rule in rules if rule != baseline))


def _usable(chosen: pd.DataFrame, rules: Sequence[str], gate: _Gate) -> pd.DataFrame:
    """Rows with a final loss; every other trial or empty cell of the grid goes through the gate."""
    missing = list(chosen.loc[chosen["status"] == "missing", "trial"])
    planned = set(chosen[["size", "rule", "seed"]].itertuples(index=False, name=None))
    seeds_by_size = chosen.groupby("size", sort=False)["seed"].unique()
    for size, seeds in seeds_by_size.items():
        cells = [(size, rule, seed) for rule in rules for seed in seeds]
        missing += [
            f"{size} {rule} seed {seed}" for _, rule, seed in cells if (size, rule, seed) not in planned
        ]
    gate.check("missing", missing, f"{len(missing)} of {len(chosen)} trials have no record")
    keep = ["finished"]
    for status, has in (
        ("failed", "failed"),
        ("diverged", "diverged"),
        ("unfinished", "ended before their schedule"),
    ):
        names = list(chosen.loc[chosen["status"] == status, "trial"])
        gate.check(status, names, f"{len(names)} of {len(chosen)} trials {has}")
    if "unfinished" in gate.allow:
        keep.append("unfinished")
    return chosen[chosen["status"].isin(keep)]


def _check_same(rows: pd.DataFrame, column: str, kind: str, what: str, gate: _Gate) -> None:
    groups = (
        rows.groupby(column, dropna=False)["trial"]
        .apply(list)
        .sort_values(key=lambda names: -names.str.len())
    )
    if len(groups) <= 1:
        return
    parts = [f"{str(value)[:12]} in {len(names)}" for value, names in groups.items()]
    minority = [name for names in groups.iloc[1:] for name in names]
    gate.check(kind, minority, f"the {what} is not the same ({', '.join(parts)} trials), for example")


def _check_settings(rows: pd.DataFrame, records: Mapping[str, Mapping[str, Any]], gate: _Gate) -> None:
    """Trials of one size differ in the rule, the seed and the declared axes only."""
    axes = [column.removeprefix("axis:") for column in axis_columns(rows)]
    for key, values, minority in differing_settings(rows, records, axes):
        gate.check("mixed_settings", minority, f"{key} is not the same within a size ({values}), for example")


def check_losses(rows: pd.DataFrame, study: str) -> None:
    for column, what in (("loss", "loss"), ("compute", "compute")):
        for _, row in rows.iterrows():
            if not (math.isfinite(row[column]) and row[column] > 0):
                raise StudyError(
                    f"study={study}: {what}={row[column]} of {row['trial']}: must be finite and positive"
                )


def check_sizes(rows: pd.DataFrame, study: str) -> None:
    sizes = list(dict.fromkeys(rows["size"]))
    if len(sizes) < MIN_SIZES:
        raise StudyError(
            f"study={study}: {len(sizes)} sizes ({', '.join(sizes)}): a comparison needs {MIN_SIZES}"
        )
    compute = rows.groupby("size")["compute"].mean()
    if compute.nunique() == 1:
        raise StudyError(
            f"study={study}: compute={compute.iloc[0]:.6g} FLOP at every size: no slope can be fitted"
        )
