"""A bracket of learning rates: the best one of every size and rule, and how sure the bracket is of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.gate import StudyError
from analysis.rows import LEARNING_RATE
from analysis.serialise import plain
from analysis.study_data import StudyData


@dataclass(frozen=True)
class RateCurve:
    """Losses of a rule at a size over the learning rate, nats per token, means over seeds."""

    size: str
    rule: str
    rates: tuple[float, ...]  # ascending
    losses: tuple[float, ...]
    seeds: int  # at each rate, the fewest
    best_rate: float  # of those tried
    best_loss: float
    at_edge: bool  # the best one is the lowest or the highest tried: the bracket is open
    vertex_rate: float | None  # of the parabola in ln(rate) through the best and its neighbours
    vertex_loss: float | None


@dataclass(frozen=True)
class RatesResult:
    data: StudyData
    curves: tuple[RateCurve, ...]  # sizes in the plan's order, then rules
    gaps: Mapping[str, Mapping[str, tuple[float, float]]]  # size -> rule -> at own best, at the baseline's

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(curve.size for curve in self.curves))

    def of_size(self, size: str) -> list[RateCurve]:
        return [curve for curve in self.curves if curve.size == size]

    def as_json(self) -> dict[str, Any]:
        gaps = {
            size: {
                rule: dict(zip(("own_best", "baselines_best"), gap, strict=True)) for rule, gap in by.items()
            }
            for size, by in self.gaps.items()
        }
        return {"curves": [plain(curve) for curve in self.curves], "difference_nats": plain(gaps)}


def compute_rates(data: StudyData) -> RatesResult:
    """Curves of all sizes and rules. Raises StudyError where the study has no axis of learning rates."""
    column = f"axis:{LEARNING_RATE}"
    if column not in data.table.columns:
        raise StudyError(f"study={data.name}: report=rates: its axes have no {LEARNING_RATE}")
    curves = []
    for size, members in data.table.groupby("size", sort=False):
        for rule in data.rules:
            rows = members[members["rule"] == rule]
            if rows.empty:
                continue
            by_rate = rows.groupby(column)["loss"]
            means, counts = by_rate.mean(), by_rate.size()
            curves.append(
                _curve(str(size), rule, means.index.to_numpy(float), means.to_numpy(float), counts.min())
            )
    gaps = {
        size: _gaps([curve for curve in curves if curve.size == size], data.baseline)
        for size in dict.fromkeys(curve.size for curve in curves)
    }
    return RatesResult(data, tuple(curves), gaps)


def _curve(size: str, rule: str, rates: np.ndarray, losses: np.ndarray, seeds: int) -> RateCurve:
    best = int(losses.argmin())
    edge = best in (0, losses.size - 1)
    vertex = (
        None if edge else parabola_vertex(np.log(rates[best - 1 : best + 2]), losses[best - 1 : best + 2])
    )
    return RateCurve(
        size=size,
        rule=rule,
        rates=tuple(map(float, rates)),
        losses=tuple(map(float, losses)),
        seeds=int(seeds),
        best_rate=float(rates[best]),
        best_loss=float(losses[best]),
        at_edge=edge,
        vertex_rate=None if vertex is None else float(np.exp(vertex[0])),
        vertex_loss=None if vertex is None else vertex[1],
    )


def parabola_vertex(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
    """Lowest point of the parabola through three points, or None where it opens downwards."""
    curvature, slope, level = np.polyfit(x - x[1], y, 2)
    if curvature <= 0:
        return None
    shift = -slope / (2 * curvature)
    return float(x[1] + shift), float(level - slope**2 / (4 * curvature))


def _gaps(curves: list[RateCurve], baseline: str) -> dict[str, tuple[float, float]]:
    """Rule - baseline in nats: each at its own best rate, and both at the baseline's best."""
    by_rule = {curve.rule: curve for curve in curves}
    base = by_rule.get(baseline)
    gaps = {}
    for rule, curve in by_rule.items():
        if base is None or rule == baseline:
            continue
        at_rate = dict(zip(curve.rates, curve.losses, strict=True))
        shared = at_rate.get(base.best_rate, float("nan")) - base.best_loss
        gaps[rule] = (curve.best_loss - base.best_loss, shared)
    return gaps
