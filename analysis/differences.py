"""Rules against the baseline at each size, without a law: losses, and differences paired by seed.

For studies that a multiplier says nothing about: one size, or sizes of equal compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from analysis.checks import holm
from analysis.compare import DEFAULT_CONFIDENCE
from analysis.paper_rows import PaperRow, paper_row
from analysis.settings import why_times_differ
from analysis.study_data import StudyData
from attnres.words import counted

ONE_SEED = "one seed: no interval"  # a reading
STEP_TIME = "median_step_train_seconds"


@dataclass(frozen=True)
class Difference:
    """A rule at a size. Losses in nats per token; differences are rule - baseline, so negative is better.

    `difference_nats` is the mean over the seeds that both have; its interval is Student's t with one degree
    of freedom fewer than those. With one seed there is no interval, no p and no reading.
    """

    size: str
    rule: str
    loss_nats: float  # mean over the rule's seeds
    loss_per_seed: Mapping[str, float]
    difference_per_seed: Mapping[str, float]
    difference_nats: float
    low: float | None
    high: float | None
    standard_error: float | None
    degrees_of_freedom: int
    p_value: float | None  # two-sided, of no difference
    p_holm: float | None  # over all rows of the report
    reading: str
    step_time_ratio: float | None  # median step over the baseline's, geometric mean over seeds
    step_time_note: str
    parameters: float  # without embeddings
    tokens: float
    steps: float  # nan where the source has none
    compute: float  # FLOP
    paper: PaperRow | None


@dataclass(frozen=True)
class DifferenceResult:
    """All sizes and rules of a study; the baseline's rows have a difference of zero by definition."""

    data: StudyData
    confidence: float
    rows: tuple[Difference, ...]  # sizes in the plan's order, then rules, the baseline first
    pooled_std_nats: float | None  # of paired differences within rule and size
    pooled_degrees_of_freedom: int
    notes: tuple[str, ...]

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.size for row in self.rows))

    @property
    def of_paper(self) -> tuple[str, ...]:
        """Places in the paper that have a row of this study, its baseline apart."""
        compared = [row for row in self.rows if row.reading != "baseline" and row.paper is not None]
        return tuple(sorted({row.paper.place for row in compared if row.paper is not None}))

    def of_size(self, size: str) -> list[Difference]:
        return [row for row in self.rows if row.size == size]


def compute_differences(data: StudyData, *, confidence: float = DEFAULT_CONFIDENCE) -> DifferenceResult:
    """Every rule at every size against the baseline of that size."""
    rows, notes = [], list(data.notes)
    for size, members in data.table.groupby("size", sort=False):
        for rule in data.rules:
            own = members[members["rule"] == rule]
            if own.empty:
                notes.append(f"{size} {rule}: no trial is left")
            else:
                rows.append(_difference(data, str(size), rule, members, confidence, notes))
    p_values = {f"{i}": row.p_value for i, row in enumerate(rows) if row.p_value is not None}
    adjusted = holm(p_values)
    rows = [_read(row, adjusted.get(f"{i}"), data.baseline, confidence) for i, row in enumerate(rows)]
    std, freedom = _pooled(rows)
    return DifferenceResult(data, confidence, tuple(rows), std, freedom, tuple(notes))


def _difference(
    data: StudyData, size: str, rule: str, members: pd.DataFrame, confidence: float, notes: list[str]
) -> Difference:
    own = members[members["rule"] == rule].set_index("seed")
    base = members[members["rule"] == data.baseline].set_index("seed")
    seeds = [seed for seed in own.index if seed in base.index]
    if len(seeds) < len(own):
        lonely = counted(len(own) - len(seeds), "trial")
        notes.append(f"{size} {rule}: without a partner of the same seed: {lonely}")
    gaps = (own["loss"][seeds] - base["loss"][seeds]).to_numpy(float)
    mean, low, high, error, p = paired_interval(gaps, confidence)
    if rule == data.baseline:
        low = high = error = p = None
    ratio, note = _step_time(data, own, base, seeds)
    return Difference(
        size=size,
        rule=rule,
        loss_nats=float(own["loss"].mean()),
        loss_per_seed={str(seed): float(value) for seed, value in own["loss"].items()},
        difference_per_seed={str(seed): float(gap) for seed, gap in zip(seeds, gaps, strict=True)},
        difference_nats=mean,
        low=low,
        high=high,
        standard_error=error,
        degrees_of_freedom=max(0, gaps.size - 1),
        p_value=p,
        p_holm=None,
        reading="",
        step_time_ratio=ratio,
        step_time_note=note,
        parameters=float(own["non_embedding_parameters"].mean()),
        tokens=float(own["tokens"].mean()),
        steps=float(own["steps"].mean()) if "steps" in own else float("nan"),
        compute=float(own["compute"].mean()),
        paper=paper_row(rule),
    )


def paired_interval(
    gaps: np.ndarray, confidence: float
) -> tuple[float, float | None, float | None, float | None, float | None]:
    """Mean, low, high, standard error and two-sided p of paired differences; no interval for fewer than two.

    The mean of no pairs is nan.
    """
    mean = float(gaps.mean()) if gaps.size else float("nan")
    if gaps.size < 2:
        return mean, None, None, None, None
    freedom = gaps.size - 1
    error = float(gaps.std(ddof=1) / np.sqrt(gaps.size))
    reach = float(special.stdtrit(freedom, (1 + confidence) / 2)) * error
    if error == 0:
        return mean, mean, mean, 0.0, 1.0 if mean == 0 else 0.0
    p = float(2 * special.stdtr(freedom, -abs(mean) / error))
    return mean, mean - reach, mean + reach, error, p


def _read(row: Difference, p_holm: float | None, baseline: str, confidence: float) -> Difference:
    if row.rule == baseline:
        return replace(row, reading="baseline")
    if p_holm is None:
        count = len(row.difference_per_seed)
        return replace(row, reading=ONE_SEED if count == 1 else "no pairs")
    if p_holm > 1 - confidence:
        return replace(row, p_holm=p_holm, reading="cannot tell")
    return replace(row, p_holm=p_holm, reading="lower" if row.difference_nats < 0 else "higher")


def _step_time(
    data: StudyData, own: pd.DataFrame, base: pd.DataFrame, seeds: Sequence[Any]
) -> tuple[float | None, str]:
    """Ratio of median step times, seed by seed, or why there is none."""
    both = pd.concat([own[own.index.isin(seeds)], base[base.index.isin(seeds)]])
    if not len(both) or not (both[STEP_TIME] > 0).all():
        return None, "no step times are recorded"
    differ = why_times_differ(both, data.table)
    if differ:
        return None, differ
    logs = np.log(own[STEP_TIME][seeds].to_numpy(float) / base[STEP_TIME][seeds].to_numpy(float))
    return float(np.exp(logs.mean())), ""


def _pooled(rows: Sequence[Difference]) -> tuple[float | None, int]:
    """Standard deviation over seeds of paired differences, pooled over the rows that have several."""
    squares, freedom = 0.0, 0
    for row in rows:
        gaps = np.array(list(row.difference_per_seed.values()))
        if row.reading != "baseline" and gaps.size > 1:
            squares += float(((gaps - gaps.mean()) ** 2).sum())
            freedom += gaps.size - 1
    return (float(np.sqrt(squares / freedom)), freedom) if freedom else (None, 0)
