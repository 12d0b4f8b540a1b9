"""The paired multiplier: exact recovery, invariance, the published table, coverage and type-1 error."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from published_table import paper_table

from analysis.compare import paired_multiplier
from analysis.laws import FitError
from analysis.simulate import Truth, simulate_table

RULE = "attnres_block"
EXACT = Truth(noise=0.0, misfit=0.0, overhead=0.03)


def table_of(truth: Truth, seed: int = 0) -> pd.DataFrame:
    return simulate_table(truth, np.random.default_rng(seed))


def test_recovers_the_multiplier_exactly_when_arms_differ_in_compute() -> None:
    m = paired_multiplier(table_of(EXACT), "prenorm", RULE)
    assert m.multiplier == pytest.approx(1.25, rel=1e-6)
    assert m.saving == pytest.approx(0.2, rel=1e-6)
    assert m.alpha == pytest.approx(0.057, rel=1e-6)
    assert m.ci_low == pytest.approx(1.25, rel=1e-6) and m.ci_high == pytest.approx(1.25, rel=1e-6)
    assert m.loss_gap == pytest.approx(1 - 1.25**-0.057, rel=1e-6)
    assert m.p_value < 1e-6


def test_a_misfit_shared_by_the_rules_changes_nothing() -> None:
    m = paired_multiplier(table_of(Truth(noise=0.0, misfit=0.02)), "prenorm", RULE)
    assert np.std(list(m.per_size_gap.values())) < 1e-12
    assert m.loss_gap == pytest.approx(1 - 1.25**-0.057, rel=1e-6)


def test_swapping_the_arms_inverts_the_multiplier() -> None:
    table = table_of(Truth())
    there, back = paired_multiplier(table, "prenorm", RULE), paired_multiplier(table, RULE, "prenorm")
    assert there.multiplier * back.multiplier == pytest.approx(1, rel=1e-12)
    assert there.ci_low * back.ci_high == pytest.approx(1, rel=1e-12)


def test_units_row_order_and_loss_units_do_not_matter() -> None:
    table = table_of(Truth(overhead=0.05))
    m = paired_multiplier(table, "prenorm", RULE)
    moved = table.sample(frac=1, random_state=3).assign(
        compute=lambda t: t["compute"] / 8.64e19, loss=lambda t: t["loss"] / np.log(2)
    )
    other = paired_multiplier(moved, "prenorm", RULE)
    for name in ("multiplier", "ci_low", "ci_high", "p_value", "alpha", "loss_gap"):
        assert getattr(other, name) == pytest.approx(getattr(m, name), rel=1e-9), name


def test_equal_compute_interval_is_the_paired_t_interval() -> None:
    """Against a calculation by hand, with the uncertainty of alpha added by the delta method."""
    table = table_of(Truth(noise=0.004), seed=5)
    means = table.assign(y=np.log(table["loss"])).groupby(["size", "rule"])["y"].mean().unstack()
    gap = (means["prenorm"] - means[RULE]).to_numpy()
    x = np.log(table.groupby("size")["compute"].mean().to_numpy())
    middle = means.mean(axis=1).to_numpy()
    (slope, _), covariance = np.polyfit(x, middle, 1, cov=True)
    log_m = gap.mean() / -slope
    error = np.sqrt(gap.var(ddof=1) / 5 + log_m**2 * covariance[0, 0]) / -slope
    m = paired_multiplier(table, "prenorm", RULE)
    t_975_4df = 2.7764451051977987
    assert m.multiplier == pytest.approx(np.exp(log_m), rel=1e-9)
    assert m.ci_low == pytest.approx(np.exp(log_m - t_975_4df * error), rel=1e-9)
    assert m.ci_high == pytest.approx(np.exp(log_m + t_975_4df * error), rel=1e-9)


def test_wall_clock_is_the_multiplier_times_the_ratio_of_speeds() -> None:
    table = table_of(EXACT)
    slow = np.where(table["rule"] == RULE, 1.4, 1.0) * table["compute"] / 1e9  # 1.4 x the seconds per FLOP
    m = paired_multiplier(table.assign(train_seconds=slow), "prenorm", RULE, cost="train_seconds")
    assert m.multiplier == pytest.approx(1.25 / 1.4, rel=1e-6)
    assert m.cost == "train_seconds"
    assert m.alpha == pytest.approx(0.057, rel=1e-6)


@pytest.mark.parametrize(
    ("rule", "multiplier", "low", "high"),
    [(RULE, 1.239, 1.184, 1.297), ("attnres_full", 1.306, 1.232, 1.385), ("mhc_lite", 1.264, 1.216, 1.314)],
)
def test_published_table(rule: str, multiplier: float, low: float, high: float) -> None:
    m = paired_multiplier(paper_table(), "prenorm", rule)
    assert (m.multiplier, m.ci_low, m.ci_high) == pytest.approx((multiplier, low, high), abs=6e-4)


def test_published_table_size_by_size_and_claims() -> None:
    m = paired_multiplier(paper_table(), "prenorm", RULE)
    expected = [1.228, 1.210, 1.218, 1.227, 1.315]
    assert list(m.per_size_multiplier.values()) == pytest.approx(expected, abs=6e-4)
    assert m.ci_low < 1.25 < m.ci_high
    assert m.p_at_least(4 / 3) == pytest.approx(0.006, abs=6e-4)
    for floor in (0.5, 1.0, 1.4):
        with_floor = paired_multiplier(paper_table(), "prenorm", RULE, floor=floor).multiplier
        assert 1.23 < with_floor < 1.245


def test_refuses_what_has_no_multiplier() -> None:
    table = table_of(Truth())
    with pytest.raises(FitError, match="the loss does not fall with compute"):
        paired_multiplier(table.assign(loss=1 / table["loss"]), "prenorm", RULE)
    with pytest.raises(FitError, match="2 distinct values of compute"):
        paired_multiplier(table[table["size"].isin(["size1", "size2"])], "prenorm", RULE)
    with pytest.raises(FitError, match="lacks size size3"):
        paired_multiplier(table[~((table["size"] == "size3") & (table["rule"] == RULE))], "prenorm", RULE)
    with pytest.raises(FitError, match="hours: the table has no such column"):
        paired_multiplier(table, "prenorm", RULE, cost="hours")


def test_an_interval_without_ends_is_one_line() -> None:
    """A loss that hardly falls: exp(1000) is no multiplier, and no bare warning of numpy's either."""
    table = table_of(Truth(alpha=0.001, noise=0.05, misfit=0.0, sizes=4, seeds=1), seed=2)
    table["loss"] = np.where(table["rule"] == RULE, 2.0, 2.1) * (table["compute"] / 1e13) ** -1e-5
    table.loc[0, "loss"] *= 1.0 + 1e-4
    with pytest.raises(
        FitError, match=r"alpha=.* \(attnres_block against prenorm\): the interval .* no finite"
    ):
        paired_multiplier(table, "prenorm", RULE)


def coverage_and_type_1(truth: Truth, studies: int) -> tuple[float, float]:
    """Share of 95 % intervals that cover the truth; share of studies without an effect with p < 0.05."""
    (true_m,) = truth.multipliers.values()
    nothing = Truth(**{**truth.__dict__, "multipliers": {RULE: 1.0}})
    covered = rejected = 0
    for seed in range(studies):
        m = paired_multiplier(table_of(truth, seed), "prenorm", RULE)
        covered += m.ci_low <= true_m <= m.ci_high
        rejected += paired_multiplier(table_of(nothing, 10_000 + seed), "prenorm", RULE).p_value < 0.05
    return covered / studies, rejected / studies


def test_coverage_and_type_1_error() -> None:
    """120 studies of the issue's design; bounds are 0.1 % and 99.9 % of the binomial at 95 % and 5 %."""
    covered, rejected = coverage_and_type_1(Truth(), 120)
    assert 0.88 <= covered <= 0.995
    assert 0.005 <= rejected <= 0.12


@pytest.mark.slow
@pytest.mark.parametrize(
    "truth",
    [
        Truth(),
        Truth(overhead=0.05, seed_effect=0.004),
        Truth(sizes=4, seeds=1, noise=0.005),
        Truth(sizes=6, seeds=5, noise=0.01, misfit=0.01),
        Truth(alpha=0.1, decades=1.2, noise=0.003),
    ],
    ids=["issue", "unequal_compute", "small", "noisy", "short_range"],
)
def test_coverage_and_type_1_error_in_400_studies(truth: Truth) -> None:
    covered, rejected = coverage_and_type_1(truth, 400)
    assert 0.93 <= covered <= 0.98
    assert 0.03 <= rejected <= 0.07
