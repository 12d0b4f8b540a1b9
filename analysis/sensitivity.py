"""How the multiplier moves with choices that a careful reader may have made otherwise.

Rows: FLOP convention x floor x learning rate (shared, or each arm's own best) x seeds (all, or one at a
time).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from analysis.compare import DEFAULT_CONFIDENCE, paired_multiplier
from analysis.laws import FitError, SizeMeans, size_means
from analysis.rows import LEARNING_RATE

FLOOR_FRACTIONS = (0.0, 0.25, 0.5, 0.75)  # of the lowest loss in the table
SHARED, OWN_BEST = "shared", "own best"
ALL_SEEDS = "all"


@dataclass(frozen=True)
class SensitivityRow:
    """m under one combination of choices; numbers are None and `note` says why where there is no answer."""

    rule: str
    convention: str
    floor: float  # nats, assumed
    learning_rate: str
    seeds: str
    multiplier: float | None
    ci_low: float | None
    ci_high: float | None
    alpha: float | None
    changed: tuple[str, ...]  # choices that differ from the headline's
    note: str = ""


def sensitivity(
    table: pd.DataFrame,
    tuned: pd.DataFrame,
    baseline: str,
    rule: str,
    conventions: Sequence[str],
    *,
    confidence: float = DEFAULT_CONFIDENCE,
) -> list[SensitivityRow]:
    """All combinations, the headline first: `conventions` starts with its own.

    `table` and `tuned` have columns compute_<convention>.
    """
    arms = table[table["rule"].isin((baseline, rule))]
    lowest = float(arms["loss"].min())
    floors = [fraction * lowest for fraction in FLOOR_FRACTIONS]
    rates = learning_rate_tables(arms, tuned[tuned["rule"].isin((baseline, rule))])
    seeds = [ALL_SEEDS, *map(str, sorted(set(arms["seed"])))]
    if len(seeds) == 2:  # one seed is all seeds
        seeds = seeds[:1]
    rows: list[SensitivityRow] = []
    for (rate, rate_table), seed in itertools.product(rates.items(), seeds):
        chosen = rate_table if seed == ALL_SEEDS else rate_table[rate_table["seed"].astype(str) == seed]
        grid = _MeansGrid(chosen, baseline, rule)
        for name, floor in itertools.product(conventions, floors):
            choices = {
                "convention": (name, conventions[0]),
                "floor": (floor, 0.0),
                "learning_rate": (rate, SHARED),
                "seeds": (seed, ALL_SEEDS),
            }
            changed = tuple(key for key, (value, headline) in choices.items() if value != headline)
            row = SensitivityRow(rule, name, floor, rate, seed, None, None, None, None, changed)
            try:
                m = paired_multiplier(grid.means(name, floor), baseline, rule, confidence=confidence)
            except FitError as error:
                rows.append(replace(row, note=str(error)))
                continue
            rows.append(
                replace(row, multiplier=m.multiplier, ci_low=m.ci_low, ci_high=m.ci_high, alpha=m.alpha)
            )
    return rows


class _MeansGrid:
    """Means over seeds under each convention and floor; averaging is what takes time, so each is done
    once."""

    def __init__(self, table: pd.DataFrame, baseline: str, rule: str) -> None:
        self.table, self.rules = table, [baseline, rule]
        self._compute: dict[str, SizeMeans] = {}
        self._loss: dict[float, SizeMeans] = {}

    def means(self, convention: str, floor: float) -> SizeMeans:
        if convention not in self._compute:
            table = self.table.assign(compute=self.table[f"compute_{convention}"])
            self._compute[convention] = size_means(table, self.rules)
        if floor not in self._loss:
            self._loss[floor] = size_means(self.table, self.rules, floor)
        compute, loss = self._compute[convention], self._loss[floor]
        order = [loss.sizes.index(size) for size in compute.sizes]
        return replace(compute, ln_loss_SR=loss.ln_loss_SR[order], floor=floor)


def learning_rate_tables(table: pd.DataFrame, tuned: pd.DataFrame) -> Mapping[str, pd.DataFrame]:
    """The shared rate's table; and, where several rates were run, each arm's own best and every single rate.

    The own best rate of a size x rule is the one with the lowest mean loss, so its loss is a little too
    good; a size at which only one rate was run keeps it.
    """
    tables = {SHARED: table}
    column = f"axis:{LEARNING_RATE}"
    if column not in tuned.columns or tuned[column].nunique() < 2:
        return tables
    means = tuned.groupby(["size", "rule", column])["loss"].mean().reset_index()
    best = means.loc[means.groupby(["size", "rule"])["loss"].idxmin(), ["size", "rule", column]]
    tables[OWN_BEST] = tuned.merge(best, on=["size", "rule", column])
    for rate, rows in tuned.groupby(column):
        if set(rows["id"]) != set(table["id"]):
            tables[f"all at {float(str(rate)):g}"] = rows
    return tables
