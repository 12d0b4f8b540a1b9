"""A plan and its records -> StudyData, checked; wherever they were read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.claims import Claim, study_claims
from analysis.gate import Gate, check_losses, rules_of, why_no_multiplier
from analysis.rows import LEARNING_RATE, axis_columns, record_row, select, tuned_rows
from analysis.settings import differing_settings, mixed_software
from attnres.counts import CONVENTIONS
from attnres.errors import ConfigError

REPORTS = ("multiplier", "rows", "shape", "dynamics", "rates")  # what a study may ask for; docs/studies.md

Curve = tuple[list[float], list[float]]  # training tokens, training losses


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
    curves: Mapping[str, Curve] | None = None  # by trial id; None: from metrics.jsonl in the trials' folders
    report: str | None = None  # one of REPORTS, as the study asks; None: by the number of sizes
    no_multiplier: str | None = None  # the line that says why no law can be fitted
    left_out: pd.DataFrame | None = None  # rows of planned trials that are not in `table`

    @property
    def wants_multiplier(self) -> bool:
        """Whether the report fits loss against compute; else it compares rows at each size."""
        return self.report in (None, "multiplier") and self.no_multiplier is None


@dataclass(frozen=True)
class Found:
    """What a source holds: the plan (as study.json), records by trial id, and the rest.

    `absent` says why a planned trial has no record, where it is not just missing: torn or failed.
    """

    name: str
    folder: Path  # below it the report is written
    plan: Mapping[str, Any]
    plan_place: str  # names the plan in messages
    records: Mapping[str, Mapping[str, Any]]
    absent: Mapping[str, str]
    notes: Sequence[str]
    curves: Mapping[str, Curve] | None = None
    unplanned: str = ""  # what there is besides the plan's trials, in words


def check_convention(convention: str) -> None:
    if convention not in CONVENTIONS:
        raise ConfigError("convention", convention, f"one of {', '.join(CONVENTIONS)}")


def build_study(
    found: Found,
    gate: Gate,
    convention: str,
    where: Mapping[str, str],
    baseline: str | None,
    least_rules: int = 2,
) -> StudyData:
    """Check what was found. Raises UserError with one line that names what stands in the way."""
    plan, records = found.plan, found.records
    rows = [
        record_row(trial, records.get(trial["id"]), convention, found.absent.get(trial["id"], "missing"))
        for trial in plan["trials"]
    ]
    every = pd.DataFrame(rows)
    report = plan.get("report")
    if report == "rates" and where:
        report = "multiplier"  # one rate is chosen
    chosen = every if report == "rates" else select(every, where, gate.source)
    rules = rules_of(chosen, baseline or plan["baseline"], least=1 if report == "rates" else least_rules)
    usable = _usable(chosen, rules, gate, found.unplanned)
    _check_same(usable, "data_fingerprint", "mixed_data", "training data", gate)
    _check_same(usable, "validation_fingerprint", "mixed_validation", "validation set", gate)
    check_losses(usable, gate.source)
    tuned = tuned_rows(every, usable, where, gate.source)
    own_rates = own_rate_keys(plan)
    _check_settings(tuned, records, gate, own_rates)
    return StudyData(
        name=found.name,
        folder=found.folder,
        description=str(plan.get("description") or ""),
        purpose=str(plan.get("purpose") or ""),
        baseline=rules[0],
        rules=rules,
        claims=tuple(study_claims(plan.get("claims") or [], found.plan_place)),
        too_small=plan.get("too_small") or False,
        convention=convention,
        conventions=CONVENTIONS,
        table=usable.reset_index(drop=True),
        tuned=tuned,
        where=dict(where),
        allowed=gate.allow,
        let_pass=tuple(gate.let_pass),
        notes=(*found.notes, *rates_note(plan), *mixed_software(tuned)),
        overrides=tuple(plan.get("overrides") or ()),
        curves=found.curves,
        report=report,
        no_multiplier=why_no_multiplier(usable, gate.source),
        left_out=chosen[~chosen["id"].isin(usable["id"])],
    )


def own_rate_keys(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys in which the rules of a size may differ, because the study gave each rule its own rate."""
    rates = plan.get("rates")
    return (LEARNING_RATE, "optim.muon_learning_rate") if rates and rates.get("kind") == "per_rule" else ()


def rates_note(plan: Mapping[str, Any]) -> list[str]:
    rates = plan.get("rates")
    if not rates:
        return []
    whose = "each rule its own" if rates.get("kind") == "per_rule" else "one for all rules of a size"
    of = f"rates={rates.get('name')}"
    notes = [f"learning rates are those of {of} (study {rates.get('study')}), {whose}"]
    if isinstance(other := rates.get("other_budget"), Mapping):
        notes += [
            f"{size}: {of} was {why}; the best rate depends on the budget" for size, why in other.items()
        ]
    return notes


def _usable(chosen: pd.DataFrame, rules: Sequence[str], gate: Gate, unplanned: str) -> pd.DataFrame:
    """Rows with a final loss; every other trial or empty cell of the grid goes through the gate."""
    missing = list(chosen.loc[chosen["status"] == "missing", "trial"])
    missing += empty_cells(chosen, rules)
    gate.check("missing", missing, f"{len(missing)} of {len(chosen)} trials have no record", unplanned)
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


def empty_cells(table: pd.DataFrame, rules: Sequence[str]) -> list[str]:
    """Cells of the grid sizes x rules x seeds (those that the size has) for which there is no row."""
    present = set(table[["size", "rule", "seed"]].itertuples(index=False, name=None))
    cells = [
        (size, rule, seed)
        for size, seeds in table.groupby("size", sort=False)["seed"].unique().items()
        for rule in rules
        for seed in seeds
    ]
    return [f"{size} {rule} seed {seed}" for size, rule, seed in cells if (size, rule, seed) not in present]


def _check_same(rows: pd.DataFrame, column: str, kind: str, what: str, gate: Gate) -> None:
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


def _check_settings(
    rows: pd.DataFrame, records: Mapping[str, Mapping[str, Any]], gate: Gate, free: Sequence[str]
) -> None:
    """Trials of one size differ in the rule, the seed, the declared axes and `free` keys only."""
    axes = [*free] + [column.removeprefix("axis:") for column in axis_columns(rows)]
    for key, values, minority in differing_settings(rows, records, axes):
        gate.check("mixed_settings", minority, f"{key} is not the same within a size ({values}), for example")
