"""Second opinions: separate exponents, left-out sizes, bootstrap, Holm, seed noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from published_table import paper_table
from scipy import stats

from analysis.bootstrap import WEBB_WEIGHTS, wild_cluster_bootstrap
from analysis.checks import (
    drift_power,
    equal_exponents,
    holm,
    leave_largest_out,
    leave_one_size_out,
    seed_noise,
    separate_exponents,
)
from analysis.compare import paired_multiplier
from analysis.laws import size_means
from analysis.simulate import Truth, simulate_table

RULE = "attnres_block"
PAIR = ["prenorm", RULE]


def curves(alpha_base: float, alpha_rule: float) -> pd.DataFrame:
    compute = np.geomspace(1, 100, 5)
    return pd.concat(
        pd.DataFrame({"size": list("abcde"), "rule": rule, "compute": compute, "loss": a * compute**-alpha})
        for rule, a, alpha in (("prenorm", 1.891, alpha_base), (RULE, 1.870, alpha_rule))
    )


def test_separate_exponents_on_the_published_curves() -> None:
    """The paper's 1.25 is read at 5.6 PFLOP/s-days; at 1 the same curves give 1.22."""
    table = curves(0.057, 0.058)
    at = {c: separate_exponents(table, "prenorm", RULE, c).multiplier for c in (1.0, 5.6)}
    assert at[5.6] == pytest.approx(1.254, abs=6e-4)
    assert at[1.0] == pytest.approx(1.216, abs=6e-4)
    assert separate_exponents(table, "prenorm", RULE, 1000.0).extrapolated
    assert not separate_exponents(table, "prenorm", RULE, 5.6).extrapolated


def test_separate_exponents_agree_with_the_shared_one_when_arms_are_parallel() -> None:
    table = simulate_table(Truth(noise=0, misfit=0, overhead=0.1), np.random.default_rng(0))
    at = separate_exponents(table, "prenorm", RULE, 1e14)
    assert at.multiplier == pytest.approx(1.25, rel=1e-6)
    assert at.ci_low == pytest.approx(1.25, rel=1e-5)


def test_equal_exponents_equals_a_regression_of_the_gap() -> None:
    table = simulate_table(Truth(noise=0.004), np.random.default_rng(3))
    means = size_means(table, PAIR)
    gap = means.ln_loss_SR[:, 0] - means.ln_loss_SR[:, 1]
    (slope, _), covariance = np.polyfit(means.ln_compute_SR[:, 0], gap, 1, cov=True)
    test = equal_exponents(means, "prenorm")
    assert test.exponent_difference == pytest.approx(slope, rel=1e-9)
    assert test.f_statistic == pytest.approx(slope**2 / covariance[0, 0], rel=1e-9)
    assert (test.numerator_df, test.denominator_df) == (1, 3)


def test_equal_exponents_notices_a_difference_and_stays_quiet_without() -> None:
    rng = np.random.default_rng(0)
    noisy = curves(0.057, 0.067).assign(loss=lambda t: t["loss"] * np.exp(2e-4 * rng.standard_normal(10)))
    test = equal_exponents(size_means(noisy, PAIR), "prenorm")
    assert test.p_value < 1e-3
    assert test.exponent_difference == pytest.approx(0.010, abs=1e-3)
    rejected = [
        equal_exponents(
            size_means(simulate_table(Truth({RULE: 1.25, "b": 1.1}), np.random.default_rng(i))), "prenorm"
        ).p_value
        < 0.05
        for i in range(100)
    ]
    assert sum(rejected) <= 13


def test_power_of_the_exponent_test_is_what_simulation_gives() -> None:
    truth, growth = Truth(noise=0.01, misfit=0.0), 1.25
    ln_compute = np.log(np.geomspace(1e13, 1e15, 5))
    error = 0.01 * np.sqrt(2 / 3) / np.sqrt(((ln_compute - ln_compute.mean()) ** 2).sum())
    rejected = 0
    for seed in range(150):
        table = simulate_table(truth, np.random.default_rng(seed))
        drift = np.where(table["rule"] == RULE, growth ** np.log10(table["compute"] / 1e14), 1.0)
        means = size_means(table.assign(loss=table["loss"] * drift**-truth.alpha), PAIR)
        rejected += equal_exponents(means, "prenorm").p_value < 0.05
    assert rejected / 150 == pytest.approx(drift_power(truth.alpha, error, 3), abs=0.12)


def test_leave_one_size_out_on_the_published_table() -> None:
    values = leave_one_size_out(size_means(paper_table(), PAIR), "prenorm", RULE)
    assert min(values.values()) == pytest.approx(1.220, abs=6e-4)
    assert max(values.values()) == pytest.approx(1.250, abs=6e-4)


def test_leave_largest_out_is_exact_on_a_law_and_off_when_a_size_is_off() -> None:
    table = simulate_table(Truth(noise=0, misfit=0), np.random.default_rng(0))
    out = leave_largest_out(size_means(table, PAIR), "prenorm", RULE)
    assert out is not None and out.size == "size5"
    assert list(out.log_error.values()) == pytest.approx([0, 0], abs=1e-9)
    assert out.gap_error == pytest.approx(0, abs=1e-9)
    bad = table.assign(
        loss=np.where((table["size"] == "size5") & (table["rule"] == RULE), 1.02, 1) * table["loss"]
    )
    off = leave_largest_out(size_means(bad, PAIR), "prenorm", RULE)
    assert off is not None
    assert off.log_error[RULE] == pytest.approx(-np.log(1.02), abs=1e-9)
    assert off.gap_error == pytest.approx(np.log(1.02), abs=1e-9)


def test_three_sizes_leave_none_out() -> None:
    means = size_means(simulate_table(Truth(sizes=3), np.random.default_rng(0)), PAIR)
    assert leave_one_size_out(means, "prenorm", RULE) == {}
    assert leave_largest_out(means, "prenorm", RULE) is None


def test_holm() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


def test_seed_noise() -> None:
    truth = Truth(sizes=6, seeds=200, noise=0.002, seed_effect=0.005)
    noise = seed_noise(simulate_table(truth, np.random.default_rng(0)), "prenorm")
    assert noise.per_run_std == pytest.approx(np.hypot(0.002, 0.005), rel=0.06)
    assert noise.paired_std == pytest.approx(0.002, rel=0.06)
    one = seed_noise(simulate_table(Truth(seeds=1), np.random.default_rng(0)), "prenorm")
    assert one.per_run_std is None and one.paired_std is None


def test_bootstrap_repeats_and_agrees_roughly_with_t() -> None:
    means = size_means(simulate_table(Truth(), np.random.default_rng(2)), PAIR)
    m = paired_multiplier(means, "prenorm", RULE)
    b = wild_cluster_bootstrap(means, "prenorm", RULE, draws=2000)
    assert b == wild_cluster_bootstrap(means, "prenorm", RULE, draws=2000)
    assert b.ci_low < m.multiplier < b.ci_high
    assert np.log(b.ci_high / b.ci_low) == pytest.approx(np.log(m.ci_high / m.ci_low), rel=0.35)
    assert b.p_value < 0.01


def test_bootstrap_without_noise_is_a_point() -> None:
    means = size_means(simulate_table(Truth(noise=0, misfit=0), np.random.default_rng(2)), PAIR)
    b = wild_cluster_bootstrap(means, "prenorm", RULE, draws=200)
    assert (b.ci_low, b.ci_high) == pytest.approx((1.25, 1.25), rel=1e-6)


def test_bootstrap_is_the_paired_multiplier_of_each_resampled_table_with_one_weight_per_size() -> None:
    """Draw by draw through `paired_multiplier`, with the same random weights."""
    means = size_means(simulate_table(Truth(), np.random.default_rng(2)), PAIR)
    observed = paired_multiplier(means, *PAIR)
    x, y = means.ln_compute_SR, means.ln_loss_SR
    x_c, y_c = x - x.mean(0), y - y.mean(0)
    residual = y_c - x_c * (x_c * y_c).sum() / (x_c**2).sum()
    weights = np.random.default_rng(7).choice(WEBB_WEIGHTS, size=(200, len(y)))
    t = []
    for weight_S in weights:
        resampled = replace(means, ln_loss_SR=y - residual + weight_S[:, None] * residual)
        draw = paired_multiplier(resampled, *PAIR)
        t.append((draw.log_multiplier - observed.log_multiplier) / draw.log_standard_error)
    low, high = np.quantile(t, [0.025, 0.975])
    found = wild_cluster_bootstrap(means, *PAIR, draws=200, seed=7)
    error = observed.log_standard_error
    assert np.log(found.ci_low) == pytest.approx(observed.log_multiplier - high * error, rel=1e-9)
    assert np.log(found.ci_high) == pytest.approx(observed.log_multiplier - low * error, rel=1e-9)


def test_separate_exponents_interval_is_that_of_the_gaps_line() -> None:
    """Student's t with S - 2 degrees of freedom times the standard error of the line at that compute."""
    compute = np.geomspace(1e13, 1e15, 6)
    noise = 0.003 * np.random.default_rng(4).standard_normal((2, 6))
    losses = 26 * compute**-0.08 * np.exp(np.stack([noise[0], noise[1] - 0.02]))
    table = pd.concat(
        pd.DataFrame({"size": list("abcdef"), "rule": rule, "compute": compute, "loss": loss})
        for rule, loss in zip(PAIR, losses, strict=True)
    )
    x, gap = np.log(compute), np.log(losses[0] / losses[1])
    _, covariance = np.polyfit(x, gap, 1, cov=True)
    alpha = -np.polyfit(x, np.log(losses[0]), 1)[0]
    for at in (3e13, 1e15):
        point = np.array([np.log(at), 1.0])
        error = np.sqrt(point @ covariance @ point) / alpha
        found = separate_exponents(table, *PAIR, at)
        half = np.log(found.ci_high / found.ci_low) / 2
        assert half == pytest.approx(stats.t.ppf(0.975, 4) * error, rel=1e-6)
