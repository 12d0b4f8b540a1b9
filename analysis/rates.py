"""A bracket of learning rates: the best one of every size and rule, and how sure the bracket is of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from analysis.gate import StudyError
from analysis.rows import LEARNING_RATE
from analysis.serialise import plain
from analysis.study_data import StudyData

MOST_LN_RATE = 100.0  # of an interval's ends; exp(100) is 3e43, and no learning rate


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
    interval: tuple[float, float] | None  # 95 %, of vertex_rate over seeds; None with one seed, or if endless
    diverged: tuple[float, ...]  # rates at which a trial diverged; they are not among `rates`
    refused: str | None  # why there is no vertex
    neighbours: tuple[float, float]  # of the best rate: the vertex lies between them
    trials: tuple[str, ...]  # ids of the trials at the best rate and its neighbours
    tokens: float  # that these trained on: the optimum is one at this budget


@dataclass(frozen=True)
class RatesResult:
    data: StudyData
    curves: tuple[RateCurve, ...]  # sizes in the plan's order, then rules
    gaps: Mapping[str, Mapping[str, tuple[float, float]]]  # size -> rule -> at own best, at the baseline's
    absent: tuple[tuple[str, str, str], ...] = ()  # size, rule, why it has no curve

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
    planned = data.table if data.left_out is None else pd.concat([data.table, data.left_out])
    curves, absent = [], []
    for size in dict.fromkeys(planned["size"]):
        for rule in data.rules:
            rows = planned[(planned["size"] == size) & (planned["rule"] == rule)]
            if rows.empty:
                continue
            used = rows["id"].isin(data.table["id"])
            diverged = tuple(sorted(set(rows.loc[~used & (rows["status"] == "diverged"), column])))
            rows = rows[used & ~rows[column].isin(diverged)]
            if rows.empty:
                absent.append((str(size), rule, "there is no rate at which all trials finished"))
            else:
                curves.append(_curve(str(size), rule, rows, column, diverged))
    if not curves:
        raise StudyError(f"study={data.name}: report=rates: {absent[0][2]}")
    gaps = {
        size: _gaps([curve for curve in curves if curve.size == size], data.baseline)
        for size in dict.fromkeys(curve.size for curve in curves)
    }
    return RatesResult(data, tuple(curves), gaps, tuple(absent))


def _curve(size: str, rule: str, rows: pd.DataFrame, column: str, diverged: tuple[float, ...]) -> RateCurve:
    """A rate at which any seed diverged is none to train at: it only bounds the bracket."""
    by_seed = rows.pivot_table(index=column, columns="seed", values="loss").sort_index()
    seeds = int(by_seed.notna().sum(axis=1).min())
    if by_seed.notna().all().any():
        by_seed = by_seed.loc[:, by_seed.notna().all()]  # else a rate's mean would depend on who is in it
    rates, losses = by_seed.index.to_numpy(float), by_seed.mean(axis=1).to_numpy(float)
    best = int(losses.argmin())
    if losses[-1] == losses[best]:  # a tie with either end leaves the bracket open
        best = losses.size - 1
    edge = best in (0, losses.size - 1)
    near = slice(max(0, best - 1), best + 2)
    refused = _why_no_vertex(rates, best, diverged, bool(by_seed.isna().any(axis=None)))
    vertex = None if edge or refused else parabola_vertex(np.log(rates[near]), losses[near])
    if vertex is None and refused is None:
        refused = "the losses do not form a bowl"
    used = rows[rows[column].isin(rates[near]) & rows["seed"].isin(by_seed.columns)]
    return RateCurve(
        size=size,
        rule=rule,
        rates=tuple(map(float, rates)),
        losses=tuple(map(float, losses)),
        seeds=seeds,
        best_rate=float(rates[best]),
        best_loss=float(losses[best]),
        at_edge=edge,
        vertex_rate=None if vertex is None else float(np.exp(vertex[0])),
        vertex_loss=None if vertex is None else vertex[1],
        interval=None if vertex is None else _interval(np.log(rates[near]), by_seed.to_numpy()[near]),
        diverged=tuple(map(float, diverged)),
        refused=refused,
        neighbours=(float(rates[near][0]), float(rates[near][-1])),
        trials=tuple(map(str, used["id"])),
        tokens=float(used["tokens"].median()),
    )


def _why_no_vertex(
    rates: np.ndarray, best: int, diverged: tuple[float, ...], unequal_seeds: bool
) -> str | None:
    """Why the best rate says nothing about where the optimum is, or None."""
    if rates.size < 3 and not diverged:
        return f"{rates.size} rates are fewer than the 3 that a parabola needs"
    if best in (0, rates.size - 1):
        beyond = [rate for rate in diverged if rate > rates[best]]
        if beyond and best == rates.size - 1:
            return f"at the edge of the bracket, and {min(beyond):.3g} diverged: try rates between"
        return "at the edge of the bracket: widen it"
    between = [rate for rate in diverged if rates[best - 1] < rate < rates[best + 1]]
    if between:
        return f"{between[0]:.3g}, beside the best rate, diverged: try rates between"
    if unequal_seeds:
        return "its rates have no seed in common"
    return None


def _interval(x: np.ndarray, losses_RS: np.ndarray) -> tuple[float, float] | None:
    """95 % of the vertex' rate from the spread over seeds (delta method, Student's t); None with one seed, or
    where it is so wide (a nearly flat parabola) that its ends are no numbers.

    `losses_RS` are losses at the three rates by seed. A seed's own offset moves no vertex.
    """
    seeds = losses_RS.shape[1]
    if seeds < 2:
        return None
    shifted = x - x[1]
    to_coefficients = np.linalg.inv(np.vander(shifted, 3))[:2]  # curvature and slope, linear in the losses
    curvature, slope = to_coefficients @ losses_RS.mean(axis=1)
    gradient = (slope * to_coefficients[0] - curvature * to_coefficients[1]) / (2 * curvature**2)
    spread = np.std(gradient @ losses_RS, ddof=1) / np.sqrt(seeds)
    centre = x[1] - slope / (2 * curvature)
    half = stats.t.ppf(0.975, seeds - 1) * spread
    if not half + abs(centre) < MOST_LN_RATE:
        return None
    return float(np.exp(centre - half)), float(np.exp(centre + half))


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
