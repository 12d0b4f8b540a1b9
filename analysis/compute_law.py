"""L = E + A C^-alpha (or without E) under any objective of `multistart`, for `analysis.fit`.

`analysis.laws` fits the same laws by least squares of ln L, with Student-t intervals and a profile over E;
this is for the robust objectives, Huber and least absolute deviations, and for least squares of L itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from analysis.arrays import finite_positive
from analysis.multistart import (
    Objective,
    best_optimum,
    bootstrap_draws,
    check_search,
    parse_objective,
    percentile_intervals,
    reported_objective,
    scale_points,
    standard_errors,
    value_range,
)
from analysis.parametric_search import LOWEST_LOG_TERM
from analysis.parametric_starts import random_starts
from attnres.errors import DataError

MIN_LEVELS = 3  # of C for two parameters; one more with a floor


@dataclass(frozen=True)
class ComputeLaw:
    """L = E + A C^-alpha; E is 0 and fixed without a floor. Fields as in `parametric.ParametricFit`."""

    A: float
    alpha: float
    E: float
    with_floor: bool
    objective: str
    objective_value: float
    points_used: int
    starts: int
    starts_agreeing: int
    c_range: tuple[float, float]
    warnings: tuple[str, ...]
    intervals: Mapping[str, tuple[float, float]] | None = None
    standard_errors: Mapping[str, float] | None = None
    bootstrap: str | None = None


def fit_compute_law(
    C: ArrayLike,
    L: ArrayLike,
    objective: str | Objective = "huber:1e-3",
    with_floor: bool = False,
    starts: int = 200,
    seed: int = 0,
    bootstrap: int = 0,
    resample: str = "case",
) -> ComputeLaw:
    """Fit with A, alpha, E >= 0. Raises DataError for points that cannot carry the law."""
    chosen = parse_objective(objective) if isinstance(objective, str) else objective
    check_search(chosen, starts, bootstrap, resample, seed)
    compute, loss = finite_positive(C=C, L=L)
    distinct = np.unique(compute).size
    if distinct < MIN_LEVELS + with_floor:
        raise DataError(f"C: {distinct} distinct value(s); the law needs {MIN_LEVELS + with_floor}")
    # theta is that of L(N, D): the term of D is held at none, and without a floor the floor as well. Small
    # start values alone do not keep them out, for the search may leave them.
    free = np.array([True, True, False, False, with_floor])
    data = replace(scale_points(compute, np.ones_like(compute), loss), free=free)
    guesses = random_starts(starts, data.x, data.y, data.loss, seed)
    guesses[:, 0] = np.log(np.exp(guesses[:, 0]) + np.exp(guesses[:, 2]))
    guesses[:, 2], guesses[:, 3] = LOWEST_LOG_TERM, 0.0  # no term of D
    if not with_floor:
        guesses[:, 4] = LOWEST_LOG_TERM
    best, same = best_optimum(guesses, data, chosen)
    E, A, _, alpha, _ = map(float, data.parameters(best))
    agreeing = int(same.sum())
    warnings = (
        [] if agreeing >= 0.5 * starts else [f"only {agreeing} of {starts} starts reach the best optimum"]
    )
    if alpha == 0:
        warnings.append("the loss does not fall with C: alpha is not identified")
    if with_floor and E == 0:
        warnings.append("E is at its bound 0: these data show no floor")
    result = ComputeLaw(
        A=A,
        alpha=alpha,
        E=E,
        with_floor=with_floor,
        objective=str(chosen),
        objective_value=reported_objective(best, data, chosen),
        points_used=loss.size,
        starts=starts,
        starts_agreeing=agreeing,
        c_range=value_range(data.x + data.log_n),
        warnings=tuple(warnings),
    )
    if not bootstrap:
        return result
    draws = data.parameters(bootstrap_draws(best, data, chosen, bootstrap, seed, resample, 2 + with_floor))
    columns = {"A": draws[:, 1], "alpha": draws[:, 3]} | ({"E": draws[:, 0]} if with_floor else {})
    if with_floor and E > 0 and np.mean(draws[:, 0] == 0) > 0.025:
        warnings.append("E is not identified: its interval reaches 0")
    return replace(
        result,
        intervals=percentile_intervals(columns, loss.size, 2 + with_floor),
        standard_errors=standard_errors(columns),
        bootstrap=f"{resample} bootstrap, {bootstrap} draws, 95 % expanded percentile",
        warnings=tuple(warnings),
    )
