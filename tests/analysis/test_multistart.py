"""The percentiles that make an interval."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from analysis.multistart import percentile_intervals


@pytest.mark.parametrize(("points", "parameters"), [(12, 5), (240, 5)])
def test_percentiles_are_expanded_by_students_t_and_the_lost_degrees_of_freedom(points, parameters):
    """Of a million draws of a standard normal variable the ends are those quantiles of it."""
    draws = stats.norm.ppf((np.arange(1_000_000) + 0.5) / 1_000_000)
    freedom = points - parameters
    reach = stats.t.ppf(0.975, freedom) * np.sqrt(points / freedom)
    low, high = percentile_intervals({"x": draws}, points, parameters)["x"]
    assert (low, high) == pytest.approx((-reach, reach), abs=2e-3)
    assert high > 1.96 + 0.01
