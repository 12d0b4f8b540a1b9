"""Is the multiplier to be believed? Other readings of the same table, and the table without a size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special

from analysis.compare import DEFAULT_CONFIDENCE, paired_multiplier
from analysis.laws import Array, FitError, SizeMeans, fit_power_law, fit_shared_exponent, size_means

MIN_SIZES_TO_LEAVE_OUT = 4  # three sizes must stay
DRIFT_PER_DECADE = 1.25  # growth of m over a decade of C that the test of equal exponents should notice


@dataclass(frozen=True)
class MultiplierAt:
    """m read with an exponent of its own for each arm, so that it depends on where it is read."""

    compute: float  # of the rule
    multiplier: float  # compute at which the baseline reaches the rule's loss at `compute`, over `compute`
    ci_low: float
    ci_high: float
    extrapolated: bool  # outside the fitted range


@dataclass(frozen=True)
class EqualExponents:
    """F test that all rules have one exponent, sizes paired. `power` is for a stated difference."""

    f_statistic: float
    p_value: float
    numerator_df: int
    denominator_df: int
    exponent_difference: float | None  # rule - baseline; one rule only
    standard_error: float | None
    power: float | None  # to notice, at 5 %, an m that grows by the factor below over a decade of C
    power_for_growth_per_decade: float


@dataclass(frozen=True)
class LeaveLargestOut:
    """Laws fitted without the largest size, read at it. Errors are predicted minus observed, in ln L."""

    size: str
    log_error: Mapping[str, float]  # by arm, separate exponents
    gap_predicted: float  # mean gap of the other sizes
    gap_observed: float
    gap_error: float


@dataclass(frozen=True)
class SeedNoise:
    """Spread over seeds within size x rule, pooled, in ln L; None where no cell has two seeds."""

    per_run_std: float | None
    paired_std: (
        float | None
    )  # of ln L_base - ln L_rule at one seed, over sqrt 2: the part that pairing leaves
    degrees_of_freedom: int
    by_size: Mapping[str, float]


def separate_exponents(
    table: pd.DataFrame | SizeMeans,
    baseline: str,
    rule: str,
    at_compute: float,
    *,
    confidence: float = DEFAULT_CONFIDENCE,
) -> MultiplierAt:
    """m at the rule's compute, from one power law per arm.

    The interval is that of the gap's straight line in ln C (sizes paired, S - 2 degrees of freedom) over the
    baseline's exponent.
    """
    means = table if isinstance(table, SizeMeans) else size_means(table, [baseline, rule])
    b, r = means.column(baseline), means.column(rule)
    x_SR = means.ln_compute_SR
    base = fit_power_law(np.exp(x_SR[:, b]), np.exp(means.ln_loss_SR[:, b]))
    other = fit_power_law(np.exp(x_SR[:, r]), np.exp(means.ln_loss_SR[:, r]))
    log_m = float(np.log(base.compute_at(other.predict(at_compute)) / at_compute))
    x, gap_S = _gap_at_equal_compute(means, b, r, base.exponent)
    _, error_slope, error_mean = _line(x, gap_S)
    error = np.hypot(error_mean, error_slope * (np.log(at_compute) - x.mean())) / base.exponent
    quantile = special.stdtrit(x.size - 2, (1 + confidence) / 2)
    return MultiplierAt(
        compute=float(at_compute),
        multiplier=float(np.exp(log_m)),
        ci_low=float(np.exp(log_m - quantile * error)),
        ci_high=float(np.exp(log_m + quantile * error)),
        extrapolated=bool(
            not np.exp(x_SR.min()) <= at_compute * (1 + 1e-9) <= np.exp(x_SR.max()) * (1 + 2e-9)
        ),
    )


def equal_exponents(means: SizeMeans, baseline: str) -> EqualExponents:
    """Gap of each rule to the size's mean, regressed on ln C: do the slopes differ?"""
    sizes, arms = means.ln_loss_SR.shape
    alpha = fit_shared_exponent(means).exponent
    x = means.ln_compute_SR.mean(axis=1)
    level_SR = means.ln_loss_SR + alpha * (means.ln_compute_SR - x[:, None])  # all rules at the size's mean C
    level_SR = level_SR - level_SR.mean(axis=1, keepdims=True)  # a size's shared misfit drops out
    level_SR = level_SR - level_SR.mean(axis=0)
    centred = x - x.mean()
    slope_R = centred @ level_SR / (centred @ centred)
    residual_SR = level_SR - centred[:, None] * slope_R
    numerator, denominator = arms - 1, (arms - 1) * (sizes - 2)
    explained = float((slope_R**2).sum() * (centred @ centred)) / numerator
    unexplained = float((residual_SR**2).sum()) / denominator
    f_statistic = _ratio(explained, unexplained)
    difference = error = power = None
    if arms == 2:
        b = means.column(baseline)
        gap_S = level_SR[:, b] - level_SR[:, 1 - b]
        difference, error, _ = _line(x, gap_S)
        power = drift_power(alpha, error, sizes - 2)
    return EqualExponents(
        f_statistic=f_statistic,
        p_value=float(special.fdtrc(numerator, denominator, f_statistic)),
        numerator_df=numerator,
        denominator_df=denominator,
        exponent_difference=difference,
        standard_error=error,
        power=power,
        power_for_growth_per_decade=DRIFT_PER_DECADE,
    )


def drift_power(alpha: float, error: float, freedom: int) -> float:
    """Power of the two-sided 5 % test if m grew by DRIFT_PER_DECADE over a decade of C.

    `error` is the standard error of the exponents' difference; where it is estimated from few sizes, so is
    the power.
    """
    # d ln m / d ln C = (alpha_rule - alpha_base) / alpha
    effect = alpha * np.log(DRIFT_PER_DECADE) / np.log(10)
    if error == 0:
        return 1.0
    limit = special.stdtrit(freedom, 0.975)
    return float(1 - special.nctdtr(freedom, effect / error, limit))


def _ratio(explained: float, unexplained: float) -> float:
    if unexplained == 0:
        return 0.0 if explained == 0 else np.inf
    return explained / unexplained


def _gap_at_equal_compute(means: SizeMeans, b: int, r: int, alpha: float) -> tuple[Array, Array]:
    """ln C of the rule, and ln L_base - ln L_rule with the baseline moved to it, [S]."""
    x_SR, y_SR = means.ln_compute_SR, means.ln_loss_SR
    return x_SR[:, r], y_SR[:, b] - y_SR[:, r] - alpha * (x_SR[:, r] - x_SR[:, b])


def _line(x: Array, y: Array) -> tuple[float, float, float]:
    """Slope, its standard error, and the standard error of the mean about the line."""
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread
    residual = y - y.mean() - slope * centred
    variance = float(residual @ residual) / (x.size - 2)
    return slope, float(np.sqrt(variance / spread)), float(np.sqrt(variance / x.size))


def leave_one_size_out(means: SizeMeans, baseline: str, rule: str) -> dict[str, float]:
    """m without each size in turn, nan where the others give none; empty below 4 sizes."""
    if len(means.sizes) < MIN_SIZES_TO_LEAVE_OUT:
        return {}
    return {size: _multiplier_or_nan(means.without(size), baseline, rule) for size in means.sizes}


def _multiplier_or_nan(means: SizeMeans, baseline: str, rule: str) -> float:
    try:
        return paired_multiplier(means, baseline, rule).multiplier
    except FitError:
        return float("nan")


def leave_largest_out(means: SizeMeans, baseline: str, rule: str) -> LeaveLargestOut | None:
    """How well the other sizes predict the largest one; None below 4 sizes."""
    if len(means.sizes) < MIN_SIZES_TO_LEAVE_OUT:
        return None
    size = means.sizes[-1]
    rest = means.without(size)
    errors = {}
    for arm in (baseline, rule):
        column = means.column(arm)
        law = fit_power_law(np.exp(rest.ln_compute_SR[:, column]), np.exp(rest.ln_loss_SR[:, column]))
        predicted = np.log(law.predict(np.exp(means.ln_compute_SR[-1, column])))
        errors[arm] = float(predicted - means.ln_loss_SR[-1, column])
    alpha = fit_shared_exponent(rest).exponent
    _, gap_S = _gap_at_equal_compute(means, means.column(baseline), means.column(rule), alpha)
    predicted_gap, observed_gap = float(gap_S[:-1].mean()), float(gap_S[-1])
    return LeaveLargestOut(size, errors, predicted_gap, observed_gap, predicted_gap - observed_gap)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values: the chance of one or more false findings stays below the level."""
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}


def seed_noise(table: pd.DataFrame, baseline: str) -> SeedNoise:
    """Pooled spread over seeds, alone and after pairing with the baseline's trial of that size and seed."""
    log = table[["size", "rule", "seed"]].assign(y=np.log(table["loss"].to_numpy(dtype=float)))
    per_run, freedom = _pooled(log, ["size", "rule"])
    by_size = {}
    for size, rows in log.groupby("size", sort=False):
        std, _ = _pooled(rows, ["rule"])
        if std is not None:
            by_size[str(size)] = std
    base = log[log["rule"] == baseline].set_index(["size", "seed"])["y"]
    other = log[log["rule"] != baseline].copy()
    other["y"] = base.reindex(pd.MultiIndex.from_frame(other[["size", "seed"]])).to_numpy() - other["y"]
    paired, _ = _pooled(other.dropna(subset=["y"]), ["size", "rule"])
    return SeedNoise(per_run, None if paired is None else paired / float(np.sqrt(2)), freedom, by_size)


def _pooled(rows: pd.DataFrame, keys: list[str]) -> tuple[float | None, int]:
    groups = rows.groupby(keys)["y"]
    freedom = int((groups.size() - 1).sum())
    if freedom < 1:
        return None, 0
    squares = float(((rows["y"] - groups.transform("mean")) ** 2).sum())
    return float(np.sqrt(squares / freedom)), freedom
