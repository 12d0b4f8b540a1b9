"""The parametric law L(N, D) = E + A N^-alpha + B D^-beta, fitted to a table of models, with intervals.

How: variable projection (for given exponents E, A and B come from non-negative least squares) gives one start
without a lottery; random starts give many more; damped Newton iterations with analytic derivatives take all
of them to an optimum at once (`parametric_search`). The result says how many starts ended at the best one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from analysis.arrays import Array, finite_positive
from analysis.multistart import (
    LOWEST_EXPONENT,
    NEGLIGIBLE_LOG_TERM,
    Objective,
    best_optimum,
    bootstrap_draws,
    check_search,
    finite_or_none,
    intervals_as_json,
    parse_objective,
    percentile_intervals,
    reported_objective,
    scale_points,
    standard_errors,
    value_range,
)
from analysis.parametric_search import LARGEST_EXPONENT, fitted
from analysis.parametric_starts import projected_start, random_starts
from attnres.errors import DataError

PARAMETERS = ("E", "A", "B", "alpha", "beta")
LEAST_POINTS = 6  # one more than parameters
MIN_LEVELS = 3  # distinct values of N and of D; two cannot show an exponent beside a floor


@dataclass(frozen=True)
class ParametricFit:
    """A fitted L(N, D), losses in nats. N and D have the units of the input; nothing is rounded.

    `objective_value` is a sum over points: of (L_fit - L)^2 for least-squares; with r = ln L_fit - ln L, of
    r^2 for log-least-squares, |r| for lad, and Huber's penalty (r^2 / 2 within delta) for huber.
    `starts_agreeing` of the random `starts` ended at the best optimum: all fitted losses equal within 1e-6.
    Intervals are 95 % expanded percentile intervals of a bootstrap, None without one.
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
            "derived": {
                "size_exponent": finite_or_none(self.size_exponent),
                "tokens_exponent": finite_or_none(self.tokens_exponent),
            },
            **intervals_as_json(self.standard_errors, self.intervals),
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
    give intervals; `resample` is "case" (rows with replacement) or, for the two kinds of least squares,
    "wild" (residuals with random signs, for a table whose N and D were chosen).
    Raises DataError or ConfigError, with the reason, for data that cannot carry the law.
    """
    chosen = parse_objective(objective) if isinstance(objective, str) else objective
    check_search(chosen, starts, bootstrap, resample, seed)
    data = scale_points(*_checked(N, D, L))
    guesses = random_starts(starts, data.x, data.y, data.loss, seed)
    guesses = np.vstack([projected_start(data.x, data.y, data.loss, chosen.log), guesses])
    best, same = best_optimum(guesses, data, chosen)
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
        objective_value=reported_objective(best, data, chosen),
        points_used=data.x.size,
        starts=starts,
        starts_agreeing=agreeing,
        residual_sd_log=float(np.sqrt(np.sum(misfit_log**2) / (data.x.size - len(PARAMETERS)))),
        n_range=value_range(data.x + data.log_n),
        d_range=value_range(data.y + data.log_d),
        warnings=_warnings(best, E, agreeing, starts),
    )
    if not bootstrap:
        return result
    draws = data.parameters(bootstrap_draws(best, data, chosen, bootstrap, seed, resample))
    return _with_intervals(
        result, draws, f"{resample} bootstrap, {bootstrap} draws, 95 % expanded percentile"
    )


def _checked(N: ArrayLike, D: ArrayLike, L: ArrayLike) -> tuple[Array, Array, Array]:
    n, d, loss = finite_positive(N=N, D=D, L=L)
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


def _warnings(theta: Array, E: float, agreeing: int, starts: int) -> tuple[str, ...]:
    found = []
    if E == 0:
        found.append("E is at its bound 0: these data show no floor")
    for variable, name, log_term, exponent in (("N", "alpha", *theta[:2]), ("D", "beta", *theta[2:4])):
        if exponent <= LOWEST_EXPONENT or log_term < NEGLIGIBLE_LOG_TERM:
            found.append(f"the loss does not fall with {variable}: {name} is not identified")
        elif exponent >= LARGEST_EXPONENT:
            found.append(f"{name} is at its bound {LARGEST_EXPONENT:g}: not identified")
    if agreeing < 0.5 * starts:
        found.append(f"only {agreeing} of {starts} starts reach the best optimum: there are others nearby")
    return tuple(found)


def _with_intervals(result: ParametricFit, draws: Array, method: str) -> ParametricFit:
    """Percentile intervals and standard deviations over draws [K, 5] of E, A, B, alpha, beta."""
    total = draws[:, 3] + draws[:, 4]
    exponent = np.divide(draws[:, 4], total, out=np.full(len(draws), np.nan), where=total > 0)
    columns = dict(zip(PARAMETERS, draws.T, strict=True)) | {"size_exponent": exponent}
    warnings = result.warnings
    if result.E > 0 and np.mean(draws[:, 0] == 0) > 0.025:
        warnings += ("E is not identified: its interval reaches 0",)
    return replace(
        result,
        intervals=percentile_intervals(columns, result.points_used, len(PARAMETERS)),
        standard_errors=standard_errors(columns),
        bootstrap=method,
        warnings=warnings,
    )
