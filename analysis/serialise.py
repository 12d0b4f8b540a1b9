"""Results as results.json and CSV tables. The schema is in docs/results.md; numbers keep their full
precision."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.claims import Judgement
from analysis.figures_data import cell_summary
from analysis.laws import FloorFit
from analysis.results import RuleResult, StudyResult
from analysis.study_data import StudyData
from attnres.record import write_text_atomic

RESULTS_SCHEMA = 1
UNIT = "FLOP"


def plain(value: Any) -> Any:
    """JSON-ready copy: dataclasses to mappings, arrays to lists, numbers that are not finite to null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def head(data: StudyData, kind: str) -> dict[str, Any]:
    """What results.json begins with, whatever the kind of report."""
    return {
        "schema": RESULTS_SCHEMA,
        "kind": kind,
        "study": data.name,
        "purpose": data.purpose,
        "baseline": data.baseline,
        "rules": list(data.rules),
        "overrides": list(data.overrides),
        "let_pass": list(data.let_pass),
    }


def to_json(result: StudyResult, how: Mapping[str, Any]) -> dict[str, Any]:
    """The content of results.json."""
    data = result.data
    return {
        **head(data, "multiplier"),
        "unit": UNIT,
        "convention": data.convention,
        "confidence": result.confidence,
        "where": dict(data.where),
        "too_small": result.too_small,
        "notes": list(result.notes),
        "design": design(result),
        "comparisons": {rule: comparison(r) for rule, r in result.rules.items()},
        "laws": plain(result.laws),
        "shared_exponent": plain(result.shared),
        "equal_exponents": plain(result.exponents),
        "floors": {rule: _floor(fit) for rule, fit in result.floors.items()},
        "seed_noise": plain(result.noise),
        "how": plain(how),
    }


def design(result: StudyResult) -> dict[str, Any]:
    """Sizes in order of compute, with seeds, compute and tokens."""
    table = result.data.table
    sizes = []
    for size, rows in sorted(table.groupby("size"), key=lambda item: float(item[1]["compute"].mean())):
        sizes.append(
            {
                "size": str(size),
                "seeds": sorted(set(rows["seed"].tolist())),
                "tokens": plain(rows["tokens"].max()),
                "non_embedding_parameters": plain(rows["non_embedding_parameters"].min()),
                "compute_min": float(rows["compute"].min()),
                "compute_max": float(rows["compute"].max()),
                "learning_rates": sorted(set(rows["learning_rate"].dropna().tolist())),
            }
        )
    return {"trials": len(table), "sizes": sizes}


def comparison(r: RuleResult) -> dict[str, Any]:
    """One rule's entry: the multiplier's own numbers at the top, everything else by name."""
    return {
        **plain(r.multiplier),
        "p_holm": r.p_holm,
        "loss_gap_nats_at_largest": r.loss_gap_nats,
        "loss_gap_nats_at_largest_low": r.loss_gap_nats_low,
        "loss_gap_nats_at_largest_high": r.loss_gap_nats_high,
        "not_judged": r.not_judged,
        "verdict_line": r.verdict_line,
        "verdicts": {j.claim.name: verdict(j) for j in r.judgements},
        "wall_clock": plain(r.wall_clock),
        "wall_clock_median_step": plain(r.wall_clock_median_step),
        "wall_clock_note": r.wall_clock_note,
        "conventions": plain(r.conventions),
        "bootstrap": plain(r.bootstrap),
        "pair_fit": plain(r.fit),
        "separate_exponents": plain(r.separate),
        "equal_exponents": plain(r.exponents),
        "leave_one_size_out": plain(r.without_size),
        "leave_largest_out": plain(r.largest_out),
        "sensitivity": plain(r.sensitivity),
    }


def verdict(judgement: Judgement) -> dict[str, Any]:
    entry = plain(judgement)
    claim = entry.pop("claim")
    return {"claim_multiplier": claim["multiplier"], "claim_saving": judgement.claim.saving, **entry}


def _floor(fit: FloorFit) -> dict[str, Any]:
    entry = plain(fit)
    for key in ("profile_floor", "profile_log_rms", "profile_exponent"):
        entry[key] = entry[key][::5]  # enough to draw; the fit itself used all
    return entry


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text_atomic(path, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def write_tables(result: StudyResult, folder: Path) -> list[Path]:
    """Write every table as CSV; returns the paths."""
    tables = {
        "trials": result.data.table,
        "comparisons": pd.DataFrame([comparison_row(r) for r in result.rules.values()]),
        "claims": pd.DataFrame([row for r in result.rules.values() for row in _claim_rows(r)]),
        "sizes": pd.DataFrame([row for r in result.rules.values() for row in size_rows(result, r)]),
        "sensitivity": pd.DataFrame(
            [_sensitivity_row(s) for r in result.rules.values() for s in r.sensitivity]
        ),
        "laws": pd.DataFrame([{"rule": rule, **plain(law)} for rule, law in result.laws.items()]),
    }
    paths = []
    for name, table in tables.items():
        path = folder / f"{name}.csv"
        write_text_atomic(path, table.to_csv(index=False))
        paths.append(path)
    return paths


def comparison_row(r: RuleResult) -> dict[str, Any]:
    """A rule in one row."""
    m, w = r.multiplier, r.wall_clock
    return {
        "rule": m.rule,
        "baseline": m.baseline,
        "multiplier": m.multiplier,
        "ci_low": m.ci_low,
        "ci_high": m.ci_high,
        "saving": m.saving,
        "saving_low": m.saving_low,
        "saving_high": m.saving_high,
        "loss_gap": m.loss_gap,
        "loss_gap_low": m.loss_gap_low,
        "loss_gap_high": m.loss_gap_high,
        "loss_gap_nats_at_largest": r.loss_gap_nats,
        "p_value": m.p_value,
        "p_holm": r.p_holm,
        "alpha": m.alpha,
        "alpha_standard_error": m.alpha_standard_error,
        "wall_clock_multiplier": w.multiplier if w else None,
        "wall_clock_ci_low": w.ci_low if w else None,
        "wall_clock_ci_high": w.ci_high if w else None,
    }


def _claim_rows(r: RuleResult) -> list[dict[str, Any]]:
    return [{"rule": r.rule, "claim": j.claim.name, **verdict(j)} for j in r.judgements]


def size_rows(result: StudyResult, r: RuleResult) -> list[dict[str, Any]]:
    """Per size: both losses, the paired gap, and the multiplier it gives over the pooled slope."""
    table, m = result.data.table, r.multiplier
    cells = {
        rule: cell_summary(table[table["rule"] == rule]).set_index("size") for rule in (m.baseline, m.rule)
    }
    return [
        {
            "rule": m.rule,
            "size": size,
            "compute_baseline": float(cells[m.baseline]["compute"][size]),
            "compute_rule": float(cells[m.rule]["compute"][size]),
            "loss_baseline": float(cells[m.baseline]["loss"][size]),
            "loss_rule": float(cells[m.rule]["loss"][size]),
            "log_gap_at_equal_compute": gap,
            "multiplier": m.per_size_multiplier[size],
            "wall_clock_multiplier": r.wall_clock.per_size_multiplier[size] if r.wall_clock else None,
        }
        for size, gap in m.per_size_gap.items()
    ]


def _sensitivity_row(row: Any) -> dict[str, Any]:
    entry = plain(row)
    return {**entry, "changed": " ".join(entry["changed"])}
