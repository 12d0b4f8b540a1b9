"""Fits of sums of power laws from many starts: objectives, scaled data, the best optimum, bootstrap draws.

Used for L = E + A N^-alpha + B D^-beta and, without the term of D or the floor, for laws of compute alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from analysis.arrays import Array
from analysis.parametric_search import (
    LOWEST_LOG_TERM,
    Problem,
    fitted,
    least_absolute,
    minimise,
    objective_value,
)
from attnres.errors import ConfigError

Rows = NDArray[np.bool_]  # which rows

DEFAULT_HUBER_DELTA = 1e-3  # the size of the residuals of ln L; a delta of 1 would be least squares
NEGLIGIBLE_LOG_TERM = math.log(1e-6)  # of the loss
LOWEST_EXPONENT = 1e-6  # below it a power law is a constant
MOST_STARTS = 1_000_000  # and bootstrap draws: beyond, the arrays outgrow a machine
SAME_FIT = 1e-6  # relative difference of fitted losses under which two optima are one


@dataclass(frozen=True)
class Objective:
    """What is summed over points: "huber" of ln L (with delta), "least-squares" of L, "log-least-squares" of
    ln L or "lad" (least absolute deviations) of ln L."""

    kind: str
    delta: float = math.inf

    @property
    def log(self) -> bool:
        return self.kind != "least-squares"

    def __str__(self) -> str:
        return f"huber:{self.delta!r}" if self.kind == "huber" else self.kind


def parse_objective(text: str) -> Objective:
    """`huber`, `huber:1e-3`, `least-squares`, `log-least-squares` or `lad`."""
    kind, colon, delta_text = text.partition(":")
    if kind in ("least-squares", "log-least-squares", "lad") and not colon:
        return Objective(kind)
    if kind != "huber":
        raise ConfigError("objective", text, "one of huber:DELTA, least-squares, log-least-squares, lad")
    try:
        delta = float(delta_text) if colon else DEFAULT_HUBER_DELTA
    except ValueError:
        raise ConfigError("objective", text, f"delta {delta_text!r} is not a number") from None
    if not 0 < delta < math.inf:
        raise ConfigError("objective", text, "delta must be positive and finite")
    return Objective("huber", delta)


@dataclass(frozen=True)
class ScaledPoints:
    """The data in sorted order (so the row order cannot matter) and in scaled variables; which of the five
    parameters of theta are fitted."""

    x: Array
    y: Array
    loss: Array
    log_n: float
    log_d: float
    log_loss: float
    free: Rows = field(default_factory=lambda: np.ones(5, dtype=bool))

    def problem(self, objective: Objective, delta: float | None = None) -> Problem:
        target = np.log(self.loss) if objective.log else self.loss
        delta = objective.delta if delta is None else delta
        return Problem(self.x, self.y, target, np.ones(self.x.size), objective.log, delta, self.free)

    def parameters(self, theta: Array) -> Array:
        """theta [..., 5] -> E, A, B, alpha, beta [..., 5] in the user's units.

        A term whose exponent is 0 is a constant: it is counted in E, with coefficient and exponent 0.
        """
        a, alpha, b, beta, e = np.moveaxis(theta, -1, 0)
        floor = np.where(e <= NEGLIGIBLE_LOG_TERM, 0.0, np.exp(e + self.log_loss))
        found = []
        for log_term, exponent, log_mean in ((a, alpha, self.log_n), (b, beta, self.log_d)):
            with np.errstate(over="ignore"):
                coefficient = np.exp(log_term + exponent * log_mean + self.log_loss)
            constant = exponent <= LOWEST_EXPONENT
            floor = floor + np.where(constant & (log_term > NEGLIGIBLE_LOG_TERM), coefficient, 0.0)
            found.append((np.where(constant, 0.0, coefficient), np.where(constant, 0.0, exponent)))
        (size, alpha), (tokens, beta) = found
        return np.stack([floor, size, tokens, alpha, beta], axis=-1)


def scale_points(n: Array, d: Array, loss: Array) -> ScaledPoints:
    order = np.lexsort((loss, d, n))
    log_n, log_d, log_loss = (np.log(values[order]) for values in (n, d, loss))
    means = (float(log_n.mean()), float(log_d.mean()), float(log_loss.mean()))
    return ScaledPoints(log_n - means[0], log_d - means[1], np.exp(log_loss - means[2]), *means)


def value_range(log_values: Array) -> tuple[float, float]:
    return float(np.exp(log_values.min())), float(np.exp(log_values.max()))


def best_optimum(guesses: Array, data: ScaledPoints, objective: Objective) -> tuple[Array, Rows]:
    """theta [5] of the best optimum, and which rows of `guesses` [R, 5] lead to it.

    A negligible floor becomes exactly none. Least absolute deviations are searched with Huber's penalty,
    whose optima are compared, and then solved exactly.
    """
    lad = objective.kind == "lad"
    problem = data.problem(objective, DEFAULT_HUBER_DELTA if lad else None)
    search = minimise(guesses, problem)
    best = search.theta[int(search.objective.argmin())]
    if best[4] < NEGLIGIBLE_LOG_TERM:
        floorless = best.copy()
        floorless[4] = LOWEST_LOG_TERM
        polished = minimise(floorless[None], problem)
        if polished.objective[0] <= search.objective.min() * (1 + 1e-9):
            best = polished.theta[0]
    same = _same_fit(search.theta, best, data)
    return (least_absolute(best, problem) if lad else best), same


def _same_fit(optima: Array, best: Array, data: ScaledPoints) -> Rows:
    """Which optima [R, 5] give the fitted losses of the best one."""
    reference = fitted(best, data.x, data.y, log=True)[0]
    distance = np.abs(fitted(optima, data.x, data.y, log=True)[0] - reference).max(axis=-1)
    return np.asarray(distance < SAME_FIT)


def reported_objective(theta: Array, data: ScaledPoints, objective: Objective) -> float:
    if objective.kind == "huber":
        return float(objective_value(theta, data.problem(objective)))
    value = fitted(theta, data.x, data.y, objective.log)[0]
    if objective.kind == "lad":
        return float(np.abs(value - np.log(data.loss)).sum())
    residual = value - (np.log(data.loss) if objective.log else data.loss)
    unit = 1.0 if objective.log else math.exp(data.log_loss)
    return float(np.sum((unit * residual) ** 2))


def bootstrap_draws(
    best: Array,
    data: ScaledPoints,
    objective: Objective,
    draws: int,
    seed: int,
    resample: str,
    fitted_parameters: int = 5,
) -> Array:
    """theta [draws, 5]: the fit repeated on resampled data, started from the best fit."""
    random = np.random.default_rng([seed, 1])
    delta = 1e-4 if objective.kind == "lad" else None  # a smooth stand-in for |r|
    problem = data.problem(objective, delta)
    points = data.x.size
    if resample == "case":
        weight = random.multinomial(points, np.full(points, 1 / points), draws).astype(float)
        problem = replace(problem, weight=weight)
    else:
        value = fitted(best, data.x, data.y, objective.log)[0]
        # The fit took up as many degrees of freedom: residuals are that much smaller than the errors.
        residual = (problem.target - value) * math.sqrt(points / max(points - fitted_parameters, 1))
        signs = random.choice([-1.0, 1.0], (draws, points))
        problem = replace(problem, target=value + signs * residual)
    return minimise(np.tile(best, (draws, 1)), problem, cautious=0).theta


def check_search(objective: Objective, starts: int, bootstrap: int, resample: str, seed: int = 0) -> None:
    """Raise ConfigError for settings that cannot be used."""
    if not 1 <= starts <= MOST_STARTS:
        raise ConfigError("starts", starts, f"from 1 to {MOST_STARTS:,}")
    if not (bootstrap == 0 or 2 <= bootstrap <= MOST_STARTS):
        raise ConfigError("bootstrap", bootstrap, f"0 for none, or 2 draws to {MOST_STARTS:,}")
    if seed < 0:
        raise ConfigError("seed", seed, "must not be negative")
    if resample not in ("case", "wild"):
        raise ConfigError("resample", resample, "one of case, wild")
    if bootstrap and resample == "wild" and objective.kind in ("huber", "lad"):
        # Measured: 83 to 89 % instead of 95 %. Random signs leave the sizes of the residuals as they are, and
        # the spread of these estimators depends on how many residuals are near 0.
        raise ConfigError("resample", resample, f"does not cover with objective {objective}; use case")


def percentile_intervals(
    draws: Mapping[str, Array], points: int, fitted_parameters: int
) -> dict[str, tuple[float, float]]:
    """95 % interval of each column of draws: expanded percentiles.

    The share cut off at each end is that of Student's t with points - parameters degrees of freedom, widened
    by sqrt(points / (points - parameters)); plain percentiles are too narrow for few points.
    """
    freedom = points - fitted_parameters
    share = float(ndtr(math.sqrt(points / freedom) * stdtrit(freedom, 0.025)))
    return {
        name: (float(np.quantile(v, share)), float(np.quantile(v, 1 - share))) for name, v in draws.items()
    }


def standard_errors(draws: Mapping[str, Array]) -> dict[str, float]:
    """Standard deviation of each column of draws."""
    return {name: float(np.std(v, ddof=1)) for name, v in draws.items()}


def finite_or_none(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def intervals_as_json(
    errors: Mapping[str, float] | None, intervals: Mapping[str, tuple[float, float]] | None
) -> dict[str, Any]:
    """The fields `standard_errors` and `intervals` of `analysis.fit --json`."""
    return {
        "standard_errors": None if errors is None else {k: finite_or_none(v) for k, v in errors.items()},
        "intervals": None
        if intervals is None
        else {k: [finite_or_none(end) for end in ends] for k, ends in intervals.items()},
    }
