"""Studies of one size, or of shapes, as records on disk with known losses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.simulate import write_study

LOSSES = {
    "prenorm": (2.00, 2.02, 2.05),
    "attnres_full": (1.96, 1.99, 2.005),
    "attnres_block_s4": (1.97, 1.985, 2.03),
    "rezero": (2.01, 2.00, 2.06),
}


def trials(losses: Mapping[str, Sequence[float]], size: str = "one", **columns: Any) -> pd.DataFrame:
    """A row for each loss; seeds count from 0. The k-th rule's steps take 1 + k / 4 times as long."""
    rows = [
        {
            "size": size,
            "rule": rule,
            "seed": seed,
            "compute": 1e13,
            "compute_without_residual": 1e13,
            "loss": loss,
            "train_seconds": 100.0 * (1 + 0.25 * k) * (1 + 0.1 * seed),
            **columns,
        }
        for k, (rule, values) in enumerate(losses.items())
        for seed, loss in enumerate(values)
    ]
    return pd.DataFrame(rows)


def write(runs: Path, table: pd.DataFrame, report: str | None = None, study: str = "s") -> Path:
    """Write the study; `report` goes into its plan as the study's YAML would have it."""
    folder = runs / study
    write_study(folder, table, purpose="A purpose.")
    edit(folder / "study.json", report=report)
    return folder


def edit(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))


def record_path(folder: Path, rule: str, seed: int = 0, size: str = "one") -> Path:
    plan = json.loads((folder / "study.json").read_text())
    (trial,) = [t for t in plan["trials"] if (t["size"], t["rule"], t["seed"]) == (size, rule, seed)]
    return folder / str(trial["id"]) / "record.json"
