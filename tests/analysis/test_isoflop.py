"""IsoFLOP parabolas: recovery, grouping of budgets, and refusal of optima at an edge."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.isoflop import BudgetOptimum, RefusedBudget, budget_optimum, fit_isoflop
from attnres.errors import ConfigError, DataError

BUDGETS = np.array([1e18, 3e18, 1e19, 3e19, 1e20])


def profiles(exponent: float = 0.5, shift: float = 1.0, noise: float = 0.0) -> tuple[np.ndarray, ...]:
    """N, C, L: five sizes around N_opt = 0.1 C^exponent (times `shift`) at each budget."""
    N, C, L = [], [], []
    for budget in BUDGETS:
        best = 0.1 * budget**exponent
        for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
            size = best * factor * shift
            N.append(size)
            C.append(budget)
            L.append(10 * budget**-0.05 + 0.03 * np.log(size / best) ** 2)
    random = np.random.default_rng(0)
    return np.array(N), np.array(C), np.array(L) + noise * random.standard_normal(len(L))


def test_recovers_the_law_of_optima() -> None:
    fit = fit_isoflop(*profiles())
    assert fit.exponent == pytest.approx(0.5, rel=1e-6)
    assert fit.coefficient == pytest.approx(0.1, rel=1e-6)
    assert fit.loss_exponent == pytest.approx(0.05, rel=1e-6)
    assert fit.loss_coefficient == pytest.approx(10, rel=1e-6)
    assert fit.tokens_exponent == pytest.approx(0.5, rel=1e-6)
    assert (fit.points_used, fit.points_refused, fit.refused) == (25, 0, ())
    assert fit.size_at(1e19) == pytest.approx(0.1 * 1e19**0.5)
    assert fit.optima[0].curvature == pytest.approx(0.06, rel=1e-6)


def test_an_optimum_at_the_edge_is_refused_and_the_others_are_fitted() -> None:
    N, C, L = profiles()
    keep = (C < 1e20) | (N > 0.1 * 1e20**0.5 * 1.5)  # of the largest budget only sizes beyond the optimum
    fit = fit_isoflop(N[keep], C[keep], L[keep])
    assert len(fit.optima) == 4 and len(fit.refused) == 1
    assert fit.refused[0].compute == pytest.approx(1e20)
    assert fit.exponent == pytest.approx(0.5, rel=1e-6)
    assert any("refused" in text for text in fit.as_json()["warnings"])


@pytest.mark.parametrize(
    ("sizes", "losses", "why"),
    [
        ([1, 2], [2.0, 1.9], "2 size"),
        ([1, 2, 4, 8], [1.0, 1.2, 1.2, 1.0], "does not open upwards"),
        ([1, 2, 4, 8], [2.0, 1.7, 1.5, 1.4], "outside the sizes"),
        ([1, 2, 4, 8, 16], [1.0, 1.01, 1.02, 1.3, 1.9], "edge"),
    ],
)
def test_reasons_of_refusal(sizes: list[float], losses: list[float], why: str) -> None:
    result = budget_optimum(np.array(sizes, float), np.array(losses), 1e18)
    assert isinstance(result, RefusedBudget)
    assert why in result.reason or "outside the sizes" in result.reason


def test_lowest_loss_at_the_edge_is_refused_even_if_the_parabola_turns_inside() -> None:
    sizes, losses = np.array([1.0, 2, 4, 8]), np.array([1.00, 1.01, 1.02, 1.30])
    assert np.polyfit(np.log(sizes), losses, 2)[0] > 0
    result = budget_optimum(sizes, losses, 1e18)
    assert isinstance(result, RefusedBudget) and "edge" in result.reason


def test_vertex_between_the_sizes_is_accepted() -> None:
    result = budget_optimum(np.array([1.0, 2, 4]), np.array([1.1, 1.0, 1.1]), 1e18)
    assert isinstance(result, BudgetOptimum)
    assert result.size == pytest.approx(2)
    assert result.loss == pytest.approx(1.0)


def test_scattered_budgets_are_one_within_the_tolerance() -> None:
    N, C, L = profiles()
    C = C * (1 + 0.02 * np.sin(np.arange(C.size)))
    assert len(fit_isoflop(N, C, L).optima) == 5
    with pytest.raises(DataError, match="budgets=0"):
        fit_isoflop(N, C, L, budget_tolerance=1e-6)


def test_order_and_units_change_nothing() -> None:
    N, C, L = profiles(noise=0.001)
    order = np.random.default_rng(2).permutation(N.size)
    first, second = fit_isoflop(N, C, L), fit_isoflop(N[order], C[order], L[order])
    assert first == second
    third = fit_isoflop(N / 1e6, C / 8.64e19, L)
    assert third.exponent == pytest.approx(first.exponent, rel=1e-9)


def test_interval_holds_the_exponent() -> None:
    hits = 0
    for seed in range(60):
        N, C, L = profiles()
        L = L + 0.002 * np.random.default_rng(seed).standard_normal(L.size)
        low, high = fit_isoflop(N, C, L).exponent_interval
        hits += low <= 0.5 <= high
    assert hits >= 52  # a sound 95 % interval misses more than 8 of 60 with probability 0.3 %


def test_too_few_budgets_say_why() -> None:
    N, C, L = profiles(shift=30.0)
    with pytest.raises(DataError, match="budgets=0: the law needs 3.*outside the sizes"):
        fit_isoflop(N, C, L)
    with pytest.raises(DataError, match="L=-1"):
        fit_isoflop(N, C, np.where(np.arange(L.size) == 3, -1, L))
    with pytest.raises(DataError, match="equally many"):
        fit_isoflop(N[1:], C, L)


@pytest.mark.parametrize("tolerance", [0.0, -1.0, float("nan"), float("inf")])
def test_a_tolerance_that_is_no_share_is_refused(tolerance):
    with pytest.raises(ConfigError, match="--budget-tolerance"):
        fit_isoflop([1.0], [1.0], [1.0], tolerance)
