"""Starts that agree, and the percentiles that make an interval."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from analysis.multistart import Objective, ScaledPoints, best_optimum, percentile_intervals
from analysis.parametric_search import fitted, minimise


@pytest.mark.parametrize(("points", "parameters"), [(12, 5), (240, 5)])
def test_percentiles_are_expanded_by_students_t_and_the_lost_degrees_of_freedom(points, parameters):
    """Of a million draws of a standard normal variable the ends are those quantiles of it."""
    draws = stats.norm.ppf((np.arange(1_000_000) + 0.5) / 1_000_000)
    freedom = points - parameters
    reach = stats.t.ppf(0.975, freedom) * np.sqrt(points / freedom)
    low, high = percentile_intervals({"x": draws}, points, parameters)["x"]
    assert (low, high) == pytest.approx((-reach, reach), abs=2e-3)
    assert high > 1.96 + 0.01


def test_starts_at_another_optimum_do_not_agree() -> None:
    """D hardly differs from N, so that the law with its two exponents swapped is a worse optimum."""
    x = np.linspace(-2, 2, 12)
    y = x + 0.05 * np.cos(7 * x)
    truth = np.array([-1.0, 0.4, -2.0, 1.5, 0.0])
    swapped = truth[[2, 3, 0, 1, 4]]
    loss = np.exp(fitted(truth, x, y, log=True)[0])
    data, objective = ScaledPoints(x, y, loss, 0.0, 0.0, 0.0), Objective("log-least-squares")
    guesses = np.stack([truth, swapped, truth + 0.01])
    search = minimise(guesses, data.problem(objective))
    assert search.converged.all() and search.objective[1] > 1e-6
    best, same = best_optimum(guesses, data, objective)
    assert best == pytest.approx(truth, abs=1e-4)
    assert same.tolist() == [True, False, True]
