"""Power laws: exact recovery, invariance, the paper's table, refusals."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from published_table import paper_table
from scipy import stats
from scipy.optimize import least_squares

from analysis.laws import (
    FitError,
    fit_power_law,
    fit_power_law_with_floor,
    fit_shared_exponent,
    size_means,
)

COMPUTE = np.geomspace(1e13, 1e15, 5)


def test_recovers_a_law_exactly() -> None:
    law = fit_power_law(COMPUTE, 26.0 * COMPUTE**-0.08)
    assert law.coefficient == pytest.approx(26.0, rel=1e-6)
    assert law.exponent == pytest.approx(0.08, rel=1e-6)
    assert law.log_residual_std < 1e-12
    assert law.predict(3e13) == pytest.approx(26.0 * 3e13**-0.08, rel=1e-9)
    assert law.compute_at(law.predict(7e14)) == pytest.approx(7e14, rel=1e-9)


def test_units_and_order_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    loss = 26.0 * COMPUTE**-0.08 * np.exp(0.01 * rng.standard_normal(5))
    law = fit_power_law(COMPUTE, loss)
    shuffled = rng.permutation(5)
    other = fit_power_law(COMPUTE[shuffled] / 8.64e19, loss[shuffled], unit="PFLOP/s-days")
    assert other.exponent == pytest.approx(law.exponent, rel=1e-9)
    assert other.coefficient == pytest.approx(law.coefficient * 8.64e19**-law.exponent, rel=1e-9)
    assert other.exponent_standard_error == pytest.approx(law.exponent_standard_error, rel=1e-9)


def test_standard_error_is_that_of_ordinary_least_squares() -> None:
    loss = 26.0 * COMPUTE**-0.08 * np.exp([0.01, -0.02, 0.005, 0.01, -0.01])
    law = fit_power_law(COMPUTE, loss)
    (slope, _), covariance = np.polyfit(np.log(COMPUTE), np.log(loss), 1, cov=True)
    assert law.exponent == pytest.approx(-slope, rel=1e-9)
    assert law.exponent_standard_error == pytest.approx(math.sqrt(covariance[0, 0]), rel=1e-9)


def test_weights_are_inverse_variances() -> None:
    loss = 26.0 * COMPUTE**-0.08
    spoiled = loss.copy()
    spoiled[2] *= 1.5
    weights = np.array([1, 1, 1e-12, 1, 1])
    assert fit_power_law(COMPUTE, spoiled, weights).exponent == pytest.approx(0.08, rel=1e-6)
    twice = fit_power_law(COMPUTE, spoiled, 7 * np.ones(5))
    assert twice.exponent == pytest.approx(fit_power_law(COMPUTE, spoiled).exponent, rel=1e-12)


@pytest.mark.parametrize(
    ("compute", "loss", "message"),
    [
        ([1, 2], [2, 1], "2 distinct values of compute"),
        ([3, 3, 3], [2, 2, 1], "compute=3 at every point"),
        ([1, 2, 3], [2, float("nan"), 1], "loss=.*nan.*point 1"),
        ([1, 2, 3], [2, -1, 1], "loss=.*-1.*point 1"),
        ([1, 0, 3], [2, 1, 1], "compute=.*0.*point 1"),
        ([1, 2, 3], [2, 1], "two equally long columns"),
    ],
)
def test_refuses_points_without_a_law(compute: list[float], loss: list[float], message: str) -> None:
    with pytest.raises(FitError, match=message):
        fit_power_law(compute, loss)


def test_separate_fits_of_the_published_table() -> None:
    table = paper_table()
    expected = {"prenorm": (1.862, 0.0549), "attnres_block": (1.841, 0.0565), "attnres_full": (1.835, 0.0558)}
    for rule, (coefficient, exponent) in expected.items():
        rows = table[table["rule"] == rule]
        law = fit_power_law(rows["compute"], rows["loss"])
        assert law.coefficient == pytest.approx(coefficient, abs=6e-4)
        assert law.exponent == pytest.approx(exponent, abs=6e-5)


def test_shared_exponent_recovers_each_arm() -> None:
    table = pd.concat(
        pd.DataFrame({"size": list("abcde"), "rule": rule, "compute": c, "loss": a * c**-0.06})
        for rule, a, c in (("base", 20.0, COMPUTE), ("new", 19.5, 1.1 * COMPUTE))
    )
    fit = fit_shared_exponent(table, unit="FLOP", convention="total")
    assert fit.exponent == pytest.approx(0.06, rel=1e-6)
    assert fit.coefficients["base"] == pytest.approx(20.0, rel=1e-6)
    assert fit.coefficients["new"] == pytest.approx(19.5, rel=1e-6)
    assert fit.law("new").convention == "total"
    assert fit.degrees_of_freedom == 3


def test_means_pair_the_seeds() -> None:
    rows = [("a", "base", 0, 2.0), ("a", "base", 1, 9.0), ("a", "new", 0, 1.9)]
    rows += [(size, rule, 0, loss) for size, loss in (("b", 1.8), ("c", 1.6)) for rule in ("base", "new")]
    table = pd.DataFrame(rows, columns=["size", "rule", "seed", "loss"])
    table["compute"] = table["size"].map({"a": 1.0, "b": 10.0, "c": 100.0})
    means = size_means(table, ["base", "new"])
    assert math.exp(means.ln_loss_SR[0, 0]) == pytest.approx(2.0)  # seed 1 has no partner
    assert means.sizes == ("a", "b", "c")


def test_means_name_what_is_missing() -> None:
    table = paper_table()
    with pytest.raises(FitError, match="rule=other: the table has no such rule"):
        size_means(table, ["prenorm", "other"])
    gone = table[~((table["rule"] == "mhc_lite") & (table["size"] == "296"))]
    with pytest.raises(FitError, match="rule=mhc_lite: lacks size 296"):
        size_means(gone, ["prenorm", "mhc_lite"])
    with pytest.raises(FitError, match="loss: the table has no such column"):
        size_means(table.drop(columns="loss"))
    with pytest.raises(FitError, match="floor=1.8: is not below the loss"):
        size_means(table, floor=1.8)
    seeds = table.assign(seed=np.where(table["rule"] == "prenorm", 0, 1))
    with pytest.raises(FitError, match="no seed in common"):
        size_means(seeds, ["prenorm", "mhc_lite"])


def test_floor_is_found_where_the_data_can_tell() -> None:
    compute = np.geomspace(1, 1e4, 9)
    exact = fit_power_law_with_floor(compute, 1.69 + 2 * compute**-0.3)
    assert exact.identified
    assert exact.floor == pytest.approx(1.69, rel=1e-6)
    assert exact.exponent == pytest.approx(0.3, rel=1e-6)
    assert exact.coefficient == pytest.approx(2.0, rel=1e-6)
    rng = np.random.default_rng(0)
    noisy = fit_power_law_with_floor(
        compute, (1.69 + 2 * compute**-0.3) * np.exp(0.002 * rng.standard_normal(9))
    )
    assert noisy.identified
    assert noisy.floor_low < 1.69 < noisy.floor_high


def test_floor_of_the_published_table_is_not_identified() -> None:
    rows = paper_table().query("rule == 'prenorm'")
    fit = fit_power_law_with_floor(rows["compute"], rows["loss"])
    assert not fit.identified
    assert fit.floor is None and fit.exponent is None
    assert fit.floor_low == 0
    assert fit.floor_high > 1.4
    assert "fit equally well" in fit.reason


def test_floor_of_three_points_says_why_not() -> None:
    fit = fit_power_law_with_floor([1, 10, 100], [2.0, 1.8, 1.7])
    assert not fit.identified
    assert "no degree of freedom" in fit.reason


def test_means_are_of_the_loss_above_the_floor() -> None:
    table = pd.DataFrame(
        {"size": list("abcde"), "rule": "prenorm", "compute": COMPUTE, "loss": 1.5 + 26.0 * COMPUTE**-0.08}
    )
    means = size_means(table, floor=1.5)
    assert means.ln_loss_SR[:, 0] == pytest.approx(np.log(26.0 * COMPUTE**-0.08), rel=1e-12)


def test_interval_of_the_floor_is_where_the_profile_is_below_the_f_limit() -> None:
    """The profile again, by polyfit at each floor of the same grid; F with 1 and n - 3 degrees of freedom."""
    compute = np.geomspace(1e13, 1e17, 12)
    noise = 0.004 * np.random.default_rng(5).standard_normal(12)
    loss = (1.2 + 400.0 * compute**-0.2) * np.exp(noise)
    floors = loss.min() * (1 - np.geomspace(1, 1e-3, 100))
    squares = []
    for floor in floors:
        slope, intercept = np.polyfit(np.log(compute), np.log(loss - floor), 1, w=(loss - floor) / loss)
        fit = least_squares(
            lambda p, floor=floor: np.log(floor + np.exp(p[0] + p[1] * np.log(compute))) - np.log(loss),
            [intercept, slope],
            x_scale="jac",
            xtol=1e-14,
            ftol=1e-14,
            gtol=1e-14,
        )
        squares.append(2 * fit.cost)
    found = fit_power_law_with_floor(compute, loss)
    assert found.identified and found.floor is not None
    least = min(squares)  # of the grid: the minimum between its points is a little lower
    limit = least * (1 + stats.f.ppf(0.95, 1, 9) / 9)
    inside = floors[np.array(squares) <= limit]
    step = 0.02  # of the grid, about there
    assert found.floor_low == pytest.approx(inside.min(), abs=step)
    assert found.floor_high == pytest.approx(inside.max(), abs=step)
    wrong = least * (1 + stats.f.ppf(0.95, 1, 9))
    assert floors[np.array(squares) <= wrong].min() < found.floor_low - 2 * step  # so that this can tell
