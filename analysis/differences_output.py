"""A report without a multiplier as results.json and CSV; docs/results.md has the schema."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.differences import Difference, DifferenceResult
from analysis.paper_rows import FIGURE_7_SCALE, PAPER_SCALE, figure_7
from analysis.serialise import UNIT, head, plain
from attnres.record import write_text_atomic


def to_json(result: DifferenceResult, how: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The content of results.json; `extra` has what the kind of report adds (shape, dynamics)."""
    data = result.data
    return {
        **head(data, data.report if data.report in ("shape", "dynamics") else "rows"),
        "unit": UNIT,
        "convention": data.convention,
        "confidence": result.confidence,
        "where": dict(data.where),
        "too_small": data.too_small or None,
        "notes": list(result.notes),
        "no_multiplier": why_no_multiplier(result),
        "paper_scale": PAPER_SCALE if result.of_paper else None,
        "rows": [plain(row) for row in result.rows],
        "pooled_std_nats": result.pooled_std_nats,
        "pooled_degrees_of_freedom": result.pooled_degrees_of_freedom,
        **plain(extra),
        "how": plain(how),
    }


def paper_shape() -> dict[str, Any]:
    """Figure 7 as far as the paper's text gives it."""
    return {"scale": FIGURE_7_SCALE, "best": figure_7().to_dict(orient="records")}


def why_no_multiplier(result: DifferenceResult) -> str:
    """The line that says why there is none: the sizes, or that the study does not ask."""
    data = result.data
    return data.no_multiplier or f"study={data.name}: report={data.report}: it asks for none"


def write_tables(result: DifferenceResult, folder: Path) -> list[Path]:
    """trials.csv and rows.csv."""
    tables = {"trials": result.data.table, "rows": pd.DataFrame([flat(row) for row in result.rows])}
    paths = []
    for name, table in tables.items():
        paths.append(folder / f"{name}.csv")
        write_text_atomic(paths[-1], table.to_csv(index=False))
    return paths


def flat(row: Difference) -> dict[str, Any]:
    """A row without nesting; the paper's numbers under paper_*."""
    entry = plain(row)
    paper = entry.pop("paper") or {}
    seeds = entry.pop("loss_per_seed")
    del entry["difference_per_seed"]
    keys = ("place", "row", "loss_nats", "difference_nats")
    return {**entry, "seeds": " ".join(seeds), **{f"paper_{key}": paper.get(key) for key in keys}}
