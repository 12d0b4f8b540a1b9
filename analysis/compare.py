"""How much compute a rule saves: the size-paired multiplier with its Student-t interval.

A size's misfit (its learning rate, its shape) is shared by the rules of that size, so the gap in ln L is
taken within sizes, and its scatter over the S sizes gives the error. With alpha, the shared exponent of the
two arms' joint fit,

    gap_s = mean over seeds of (ln L_base - ln L_rule) - alpha (ln C_rule - ln C_base)
    ln m  = mean over sizes of gap_s, divided by alpha
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special

from analysis.laws import Array, FitError, SizeMeans, check_points, pooled_slope, size_means

DEFAULT_CONFIDENCE = 0.95
LARGEST_LOG = 690.0  # e to this power, and one over it, are still floating-point numbers


@dataclass(frozen=True)
class Multiplier:
    """m = C_baseline / C_rule at equal loss, with its interval; `cost` says what C is: compute or seconds."""

    rule: str
    baseline: str
    multiplier: float
    ci_low: float
    ci_high: float
    confidence: float
    p_value: float  # one-sided t test of m <= 1
    saving: float  # 1 - 1/m
    saving_low: float
    saving_high: float
    loss_gap: float  # 1 - L_rule / L_base at equal cost; above the floor, if there is one
    loss_gap_low: float
    loss_gap_high: float
    per_size_gap: Mapping[str, float]  # gap_s in ln L at equal cost
    per_size_multiplier: Mapping[str, float]  # exp(gap_s / alpha): the paired gap over the pooled slope
    degrees_of_freedom: int
    alpha: float
    alpha_standard_error: float
    log_multiplier: float
    log_standard_error: float
    cost: str
    floor: float

    def p_at_most(self, value: float) -> float:
        """One-sided p of "m <= value": small means that m is larger."""
        return _upper_tail(
            self.log_multiplier - np.log(value), self.log_standard_error, self.degrees_of_freedom
        )

    def p_at_least(self, value: float) -> float:
        """One-sided p of "m >= value": small means that m is smaller."""
        return _upper_tail(
            np.log(value) - self.log_multiplier, self.log_standard_error, self.degrees_of_freedom
        )


def _upper_tail(distance: float, standard_error: float, freedom: int) -> float:
    if standard_error == 0:
        return 0.5 if distance == 0 else float(distance < 0)
    return float(special.stdtr(freedom, -distance / standard_error))


def paired_multiplier(
    table: pd.DataFrame | SizeMeans,
    baseline: str,
    rule: str,
    *,
    confidence: float = DEFAULT_CONFIDENCE,
    floor: float = 0.0,
    cost: str | None = None,
) -> Multiplier:
    """The size-paired multiplier of `rule` over `baseline`.

    `table` has size, rule, compute, loss and optionally seed. `cost` names another positive column (for
    instance train_seconds) whose ratio replaces that of compute: m is then in that cost; alpha stays that of
    compute. Raises FitError for fewer than 3 sizes, arms that do not match, a loss that does not fall, or an
    interval without finite ends.
    """
    if isinstance(table, SizeMeans):
        means = table
        if cost is not None:
            raise ValueError("cost needs the table of trials")
    else:
        means = size_means(table, [baseline, rule], floor)
    b, r = means.column(baseline), means.column(rule)
    x_SR, y_SR = means.ln_compute_SR[:, [b, r]], means.ln_loss_SR[:, [b, r]]
    cost_SR = x_SR if cost is None else _ln_cost(table, means, baseline, rule, cost)
    check_points(np.exp(x_SR.mean(axis=1)), np.exp(y_SR.mean(axis=1)))
    slope, slope_error, _ = pooled_slope(x_SR, y_SR)
    if not slope < 0:
        raise FitError(f"alpha={-slope:.3g} ({rule} against {baseline}): the loss does not fall with compute")
    return _multiplier(
        means, baseline, rule, -slope, slope_error, y_SR, cost_SR, confidence, cost or "compute"
    )


def _multiplier(
    means: SizeMeans,
    baseline: str,
    rule: str,
    alpha: float,
    alpha_error: float,
    y_SR: Array,
    cost_SR: Array,
    confidence: float,
    cost: str,
) -> Multiplier:
    raw_S = y_SR[:, 0] - y_SR[:, 1]  # at the costs that were spent
    gap_S = raw_S - alpha * (cost_SR[:, 1] - cost_SR[:, 0])  # at equal cost
    sizes = gap_S.size
    gap, gap_error = float(gap_S.mean()), float(gap_S.std(ddof=1) / np.sqrt(sizes))
    log_m = gap / alpha
    # Delta method. alpha enters through the measured gap only: the cost ratio is known, not fitted.
    log_error = float(np.hypot(gap_error, raw_S.mean() * alpha_error / alpha) / alpha)
    freedom = sizes - 1
    quantile = float(special.stdtrit(freedom, (1 + confidence) / 2))
    largest = max(abs(log_m) + quantile * log_error, np.abs(gap_S).max() / alpha)
    if not largest < LARGEST_LOG:
        raise FitError(
            f"alpha={alpha:.3g} ± {alpha_error:.2g} ({rule} against {baseline}): the interval of the "
            "multiplier has no finite ends; C has too narrow a range for the scatter of the losses"
        )
    low, high = float(np.exp(log_m - quantile * log_error)), float(np.exp(log_m + quantile * log_error))
    return Multiplier(
        rule=rule,
        baseline=baseline,
        multiplier=float(np.exp(log_m)),
        ci_low=low,
        ci_high=high,
        confidence=confidence,
        p_value=_upper_tail(log_m, log_error, freedom),
        saving=float(-np.expm1(-log_m)),
        saving_low=1 - 1 / low,
        saving_high=1 - 1 / high,
        loss_gap=float(-np.expm1(-gap)),
        loss_gap_low=float(-np.expm1(-(gap - quantile * gap_error))),
        loss_gap_high=float(-np.expm1(-(gap + quantile * gap_error))),
        per_size_gap={size: float(g) for size, g in zip(means.sizes, gap_S, strict=True)},
        per_size_multiplier={
            size: float(np.exp(g / alpha)) for size, g in zip(means.sizes, gap_S, strict=True)
        },
        degrees_of_freedom=freedom,
        alpha=alpha,
        alpha_standard_error=alpha_error,
        log_multiplier=log_m,
        log_standard_error=log_error,
        cost=cost,
        floor=means.floor,
    )


def _ln_cost(table: pd.DataFrame | SizeMeans, means: SizeMeans, baseline: str, rule: str, cost: str) -> Array:
    """ln of the cost column, averaged like compute, [S, 2], in the order of means.sizes."""
    assert isinstance(table, pd.DataFrame)
    if cost not in table.columns:
        raise FitError(f"{cost}: the table has no such column")
    other = size_means(table.assign(compute=table[cost]), [baseline, rule], means.floor)
    rows = [other.sizes.index(size) for size in means.sizes]
    return other.ln_compute_SR[rows]
