"""What a pilot's records say about noise, exponent and cost, for the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import chdtri

from analysis.gate import Gate, StudyError
from analysis.laws import fit_shared_exponent
from analysis.load import read_plan, read_records
from analysis.power import SizeCost
from analysis.study_data import build_study

MIN_SIZES_FOR_ALPHA = 3
PARTS_MISSING = ("missing", "failed", "diverged")  # a pilot need not be whole


@dataclass(frozen=True)
class Pilot:
    """Noise of ln L over runs with its 95 % interval, exponent (None below 3 sizes), and cost per size.

    `paired`: the noise is what is left without what the rules of a seed share, as in the comparison.
    """

    study: str
    runs: int
    noise: float
    noise_low: float
    noise_high: float
    degrees_of_freedom: int
    paired: bool
    alpha: float | None
    costs: tuple[SizeCost, ...]

    def text(self) -> str:
        """One line for people."""
        kind = "paired noise" if self.paired else "noise (one rule: pairing unknown)"
        alpha = "not fitted" if self.alpha is None else f"{self.alpha:.4f}"
        return (
            f"pilot {self.study}: {self.runs} finished runs, {len(self.costs)} sizes; {kind} of ln L "
            f"{self.noise:.4f} [{self.noise_low:.4f}, {self.noise_high:.4f}], "
            f"{self.degrees_of_freedom} degrees of freedom; alpha {alpha}"
        )


def read_pilot(
    runs_dir: Path, study: str, convention: str = "total", where: Mapping[str, str] | None = None
) -> Pilot:
    """The finished records of a study, whole or not, checked as for a report; `where` as there.

    Raises UserError where trials differ in more than size, rule and seed, or show no noise.
    """
    gate = Gate(f"study={study}", PARTS_MISSING, offers=False)
    folder = runs_dir / study
    found = read_records(study, folder, read_plan(folder, study), gate)
    if not any(record["status"] == "finished" for record in found.records.values()):
        raise StudyError(f"study={study}: no finished record in {folder}; run a pilot of 3 seeds first")
    _check_axes(found.plan["trials"], where or {}, study)
    return estimate_pilot(build_study(found, gate, convention, where or {}, None, least_rules=1).table, study)


def _check_axes(trials: Sequence[Mapping[str, Any]], where: Mapping[str, str], study: str) -> None:
    """What differs between the values of an axis is no noise."""
    values: dict[str, dict[str, None]] = {}
    for trial in trials:
        for key, value in (trial.get("axes") or {}).items():
            values.setdefault(key, {})[str(value)] = None
    for key, distinct in values.items():
        if len(distinct) > 1 and key not in where:
            raise StudyError(
                f"study={study}: {key} has the values {', '.join(distinct)}; a pilot's noise is at one of "
                f'them: python -m analysis.power study={study} where="{key}={next(iter(distinct))}"'
            )


def estimate_pilot(table: pd.DataFrame, study: str) -> Pilot:
    """From a table with size, rule, seed, loss, compute and, if known, train_seconds."""
    log_loss = pd.Series(np.log(table["loss"].to_numpy(float)), index=table.index)
    grids = [
        rows.pivot_table(index="seed", columns="rule", values="ln_loss").dropna()
        for _, rows in table.assign(ln_loss=log_loss).groupby("size", sort=False)
    ]
    squares, freedom = _pooled([grid.to_numpy() for grid in grids])
    if freedom == 0:
        raise StudyError(f"study={study}: no size has 2 or more finished seeds; noise cannot be estimated")
    low, high = (float(np.sqrt(squares / chdtri(freedom, p))) for p in (0.025, 0.975))
    sizes, rules = table["size"].nunique(), table["rule"].nunique()
    alpha = fit_shared_exponent(table).exponent if sizes >= MIN_SIZES_FOR_ALPHA else None
    return Pilot(
        study=study,
        runs=len(table),
        noise=float(np.sqrt(squares / freedom)),
        noise_low=low,
        noise_high=high,
        degrees_of_freedom=freedom,
        paired=rules > 1,
        alpha=alpha,
        costs=_costs(table, rules),
    )


def _pooled(grids: Sequence[np.ndarray]) -> tuple[float, int]:
    """Sum of squares and degrees of freedom over sizes of [seeds, rules] less its row and column means."""
    squares, freedom = 0.0, 0
    for grid in grids:
        seeds, rules = grid.shape
        if seeds < 2:
            continue
        rest = grid - grid.mean(axis=0)
        if rules > 1:
            rest = rest - rest.mean(axis=1, keepdims=True)
        squares += float((rest**2).sum())
        freedom += (seeds - 1) * max(rules - 1, 1)
    return squares, freedom


def _costs(table: pd.DataFrame, rules: int) -> tuple[SizeCost, ...]:
    """Mean cost of a run of each size, times the number of rules, cheapest first."""
    costs = []
    for size, rows in table.groupby("size", sort=False):
        seconds = rows["train_seconds"].mean() if "train_seconds" in rows else np.nan
        hours = float(rules * seconds / 3600) if np.isfinite(seconds) and seconds > 0 else None
        costs.append(SizeCost(str(size), float(rules * rows["compute"].mean()), hours))
    return tuple(sorted(costs, key=lambda cost: cost.flops))
