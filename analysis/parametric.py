"""The parametric law L(N, D) = E + A N^-alpha + B D^-beta, fitted to a table of models, with intervals.

How: variable projection (for given exponents E, A and B come from non-negative least squares) gives one start
without a lottery; random starts give many more; damped Newton iterations with analytic derivatives take all
of them to an optimum at once (`parametric_search`). The result says how many starts ended at the best one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.parametric_search import (
    LARGEST_EXPONENT,
    LOWEST_LOG_TERM,
    Array,
    Problem,
    fitted,
    least_absolute,
    minimise,
    objective_value,
)
from analysis.parametric_starts import projected_start, random_starts
from attnres.errors import ConfigError, DataError

Rows = NDArray[np.bool_]  # which rows

PARAMETERS = ("E", "A", "B", "alpha", "beta")
DEFAULT_HUBER_DELTA = 1e-3  # the size of the residuals of ln L; a delta of 1 would be least squares
LEAST_POINTS = 6  # one more than parameters
MIN_LEVELS = 3  # distinct values of N and of D; two cannot show an exponent beside a floor
NEGLIGIBLE_LOG_TERM = math.log(1e-6)  # of the loss
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
class ParametricFit:
    """A fitted L(N, D), losses in nats. N and D have the units of the input; nothing is rounded.

    `objective_value` is a sum over points: of (L_fit - L)^2 for least-squares; with r = ln L_fit - ln L, of
    r^2 for log-least-squares, |r| for lad, and Huber's penalty (r^2 / 2 within delta) for huber.
    `starts_agreeing` of the random `starts` ended at the best optimum: all fitted losses equal within 1e-6.
    Intervals are 95 % percentile intervals of a bootstrap, None without one.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    objective: str
    objective_value: float
    points_used: int
    starts: int
    starts_agreeing: int
    residual_sd_log: float  # standard deviation of ln L_fit - ln L, with points - 5 degrees of freedom
    n_range: tuple[float, float]
    d_range: tuple[float, float]
    warnings: tuple[str, ...]
    intervals: Mapping[str, tuple[float, float]] | None = None
    standard_errors: Mapping[str, float] | None = None
    bootstrap: str | None = None  # kind and draws

    @property
    def parameters(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in PARAMETERS}

    @property
    def size_exponent(self) -> float:
        """a of N_opt proportional to C^a, with C proportional to N D."""
        return self.beta / (self.alpha + self.beta) if self.alpha + self.beta else math.nan

    @property
    def tokens_exponent(self) -> float:
        """b of D_opt proportional to C^b."""
        return 1.0 - self.size_exponent

    def predict(self, N: ArrayLike, D: ArrayLike) -> Array:
        """Loss in nats."""
        n, d = np.asarray(N, float), np.asarray(D, float)
        return self.E + self.A * n**-self.alpha + self.B * d**-self.beta

    def optimum(self, C: float, flops_per_parameter_token: float = 6.0) -> tuple[float, float]:
        """(N, D) of lowest loss with C = flops_per_parameter_token * N * D."""
        product = C / flops_per_parameter_token
        ratio = self.alpha * self.A / (self.beta * self.B)
        size = ratio ** (1 / (self.alpha + self.beta)) * product**self.size_exponent
        return size, product / size

    def as_json(self) -> dict[str, Any]:
        """Plain mapping for `analysis.fit --json`; docs/analysis.md has the schema."""
        return {
            "law": "parametric",
            "equation": "L = E + A*N^-alpha + B*D^-beta",
            "parameters": self.parameters,
            "derived": {"size_exponent": self.size_exponent, "tokens_exponent": self.tokens_exponent},
            "standard_errors": None if self.standard_errors is None else dict(self.standard_errors),
            "intervals": None if self.intervals is None else {k: list(v) for k, v in self.intervals.items()},
            "interval_method": self.bootstrap,
            "objective": self.objective,
            "objective_value": self.objective_value,
            "residual_sd_log": self.residual_sd_log,
            "points_used": self.points_used,
            "starts": self.starts,
            "starts_agreeing": self.starts_agreeing,
            "fitted_range": {"N": list(self.n_range), "D": list(self.d_range)},
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class _Scaled:
    """The data in sorted order (so the row order cannot matter) and in scaled variables."""

    x: Array
    y: Array
    loss: Array
    log_n: float
    log_d: float
    log_loss: float

    def problem(self, objective: Objective, delta: float | None = None) -> Problem:
        target = np.log(self.loss) if objective.log else self.loss
        delta = objective.delta if delta is None else delta
        return Problem(self.x, self.y, target, np.ones(self.x.size), objective.log, delta)

    def parameters(self, theta: Array) -> Array:
        """theta [..., 5] -> E, A, B, alpha, beta [..., 5] in the user's units."""
        a, alpha, b, beta, e = np.moveaxis(theta, -1, 0)
        floor = np.where(e <= NEGLIGIBLE_LOG_TERM, 0.0, np.exp(e + self.log_loss))
        with np.errstate(over="ignore"):
            size = np.exp(a + alpha * self.log_n + self.log_loss)
            tokens = np.exp(b + beta * self.log_d + self.log_loss)
        return np.stack([floor, size, tokens, alpha, beta], axis=-1)


def fit_parametric(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    objective: str | Objective = "huber:1e-3",
    starts: int = 200,
    seed: int = 0,
    bootstrap: int = 0,
    resample: str = "case",
) -> ParametricFit:
    """Fit L = E + A N^-alpha + B D^-beta, with E, A, B, alpha, beta >= 0.

    N parameters, D tokens, L loss in nats: equally long, any order, any positive units. `bootstrap` draws
    give intervals; `resample` is "case" (rows with replacement) or "wild" (residuals with random signs, for a
    table whose N and D were chosen).
    Raises DataError or ConfigError, with the reason, for data that cannot carry the law.
    """
    chosen = parse_objective(objective) if isinstance(objective, str) else objective
    if starts < 1:
        raise ConfigError("starts", starts, "at least 1")
    if bootstrap < 0 or bootstrap == 1:
        raise ConfigError("bootstrap", bootstrap, "0 for none, or at least 2 draws")
    if resample not in ("case", "wild"):
        raise ConfigError("resample", resample, "one of case, wild")
    data = _scale(*_checked(N, D, L))
    guesses = random_starts(starts, data.x, data.y, data.loss, seed)
    guesses = np.vstack([projected_start(data.x, data.y, data.loss, chosen.log), guesses])
    best, same = _best_optimum(guesses, data, chosen)
    agreeing = int(same[1:].sum())
    misfit_log = fitted(best, data.x, data.y, log=True)[0] - np.log(data.loss)
    E, A, B, alpha, beta = map(float, data.parameters(best))
    result = ParametricFit(
        E=E,
        A=A,
        B=B,
        alpha=alpha,
        beta=beta,
        objective=str(chosen),
        objective_value=_reported_objective(best, data, chosen),
        points_used=data.x.size,
        starts=starts,
        starts_agreeing=agreeing,
        residual_sd_log=float(np.sqrt(np.sum(misfit_log**2) / (data.x.size - len(PARAMETERS)))),
        n_range=_range(data.x + data.log_n),
        d_range=_range(data.y + data.log_d),
        warnings=_warnings(best, agreeing, starts),
    )
    if not bootstrap:
        return result
    draws = data.parameters(_bootstrap(best, data, chosen, bootstrap, seed, resample))
    return _with_intervals(result, draws, f"{resample} bootstrap, {bootstrap} draws, 95 % percentile")


def _checked(N: ArrayLike, D: ArrayLike, L: ArrayLike) -> tuple[Array, Array, Array]:
    n, d, loss = (np.asarray(values, dtype=float).ravel() for values in (N, D, L))
    if not n.size == d.size == loss.size:
        raise DataError(f"N, D, L: {n.size}, {d.size} and {loss.size} values; they must be equally many")
    for name, values in (("N", n), ("D", d), ("L", loss)):
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise DataError(f"{name}={values[row]!r}: row {row + 1} is not finite and positive")
    if n.size < LEAST_POINTS:
        raise DataError(
            f"points={n.size}: the parametric law has 5 parameters; at least {LEAST_POINTS} points"
        )
    for name, values in (("N", n), ("D", d)):
        levels = np.unique(np.round(np.log(values), 9)).size
        if levels < MIN_LEVELS:
            raise DataError(f"{name}: {levels} distinct value(s); an exponent needs at least {MIN_LEVELS}")
    correlation = float(np.corrcoef(np.log(n), np.log(d))[0, 1])
    if abs(correlation) > 1 - 1e-6:
        raise DataError(
            f"N, D: correlation of ln N and ln D is {correlation:.6f}; where N and D move together "
            "their terms cannot be told apart"
        )
    return n, d, loss


def _scale(n: Array, d: Array, loss: Array) -> _Scaled:
    order = np.lexsort((loss, d, n))
    log_n, log_d, log_loss = (np.log(values[order]) for values in (n, d, loss))
    means = (float(log_n.mean()), float(log_d.mean()), float(log_loss.mean()))
    return _Scaled(log_n - means[0], log_d - means[1], np.exp(log_loss - means[2]), *means)


def _range(log_values: Array) -> tuple[float, float]:
    return float(np.exp(log_values.min())), float(np.exp(log_values.max()))


def _best_optimum(guesses: Array, data: _Scaled, objective: Objective) -> tuple[Array, Rows]:
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


def _same_fit(optima: Array, best: Array, data: _Scaled) -> Rows:
    """Which optima [R, 5] give the fitted losses of the best one."""
    reference = fitted(best, data.x, data.y, log=True)[0]
    distance = np.abs(fitted(optima, data.x, data.y, log=True)[0] - reference).max(axis=-1)
    return np.asarray(distance < SAME_FIT)


def _reported_objective(theta: Array, data: _Scaled, objective: Objective) -> float:
    if objective.kind == "huber":
        return float(objective_value(theta, data.problem(objective)))
    value = fitted(theta, data.x, data.y, objective.log)[0]
    if objective.kind == "lad":
        return float(np.abs(value - np.log(data.loss)).sum())
    residual = value - (np.log(data.loss) if objective.log else data.loss)
    unit = 1.0 if objective.log else math.exp(data.log_loss)
    return float(np.sum((unit * residual) ** 2))


def _warnings(theta: Array, agreeing: int, starts: int) -> tuple[str, ...]:
    found = []
    if theta[4] < NEGLIGIBLE_LOG_TERM:
        found.append("E is at its bound 0: these data show no floor")
    for name, index in (("A", 0), ("B", 2)):
        if theta[index] < NEGLIGIBLE_LOG_TERM:
            found.append(f"{name} is at its bound 0: its exponent is not identified")
    for name, index in (("alpha", 1), ("beta", 3)):
        if theta[index] <= 1e-6 or theta[index] >= LARGEST_EXPONENT:
            found.append(f"{name} is at its bound {theta[index]:g}: not identified")
    if agreeing < 0.5 * starts:
        found.append(f"only {agreeing} of {starts} starts reach the best optimum: there are others nearby")
    return tuple(found)


def _bootstrap(
    best: Array, data: _Scaled, objective: Objective, draws: int, seed: int, resample: str
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
        # Five parameters were fitted: residuals are that much smaller than the errors.
        residual = (problem.target - value) * math.sqrt(points / (points - 5))
        signs = random.choice([-1.0, 1.0], (draws, points))
        problem = replace(problem, target=value + signs * residual)
    return minimise(np.tile(best, (draws, 1)), problem, cautious=0).theta


def _with_intervals(result: ParametricFit, draws: Array, method: str) -> ParametricFit:
    """Percentile intervals and standard deviations over draws [K, 5] of E, A, B, alpha, beta."""
    total = draws[:, 3] + draws[:, 4]
    exponent = np.divide(draws[:, 4], total, out=np.full(len(draws), np.nan), where=total > 0)
    columns = dict(zip(PARAMETERS, draws.T, strict=True)) | {"size_exponent": exponent}

    def each(statistic: Callable[[Array], Any]) -> dict[str, Any]:
        return {name: statistic(values) for name, values in columns.items()}

    warnings = result.warnings
    if result.E > 0 and np.mean(draws[:, 0] == 0) > 0.025:
        warnings += ("E is not identified: its interval reaches 0",)
    return replace(
        result,
        intervals=each(lambda v: (float(np.quantile(v, 0.025)), float(np.quantile(v, 0.975)))),
        standard_errors=each(lambda v: float(np.std(v, ddof=1))),
        bootstrap=method,
        warnings=warnings,
    )
