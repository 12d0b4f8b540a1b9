"""A second opinion on the interval: wild cluster bootstrap, the clusters being the sizes.

The residuals of the two arms' joint fit are flipped and scaled size by size, with one weight for both arms
of a size (Webb's six weights: with few sizes two weights give too few distinct draws), each draw is fitted
again, and the interval is read from the t statistics of the draws. Never the headline: with 4 to 6 sizes the
paired t is better.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.compare import DEFAULT_CONFIDENCE, paired_multiplier
from analysis.laws import Array, SizeMeans, pooled_slope

WEBB_WEIGHTS = np.array([-np.sqrt(1.5), -1, -np.sqrt(0.5), np.sqrt(0.5), 1, np.sqrt(1.5)])


@dataclass(frozen=True)
class BootstrapInterval:
    """Bootstrap-t interval of m."""

    ci_low: float
    ci_high: float
    p_value: float  # one-sided, of m <= 1
    draws: int
    seed: int


def wild_cluster_bootstrap(
    means: SizeMeans,
    baseline: str,
    rule: str,
    *,
    draws: int = 2000,
    seed: int = 0,
    confidence: float = DEFAULT_CONFIDENCE,
) -> BootstrapInterval:
    """Interval and one-sided p of the paired multiplier from `draws` resamples of the sizes' residuals."""
    observed = paired_multiplier(means, baseline, rule, confidence=confidence)
    columns = [means.column(baseline), means.column(rule)]
    x_SR, y_SR = means.ln_compute_SR[:, columns], means.ln_loss_SR[:, columns]
    slope, _, residual_SR = pooled_slope(x_SR, y_SR)
    fitted_SR = y_SR - residual_SR
    generator = np.random.default_rng(seed)
    weights_KS = generator.choice(WEBB_WEIGHTS, size=(draws, y_SR.shape[0]))
    log_m_K, error_K = _multipliers(x_SR, fitted_SR + weights_KS[:, :, None] * residual_SR)
    if observed.log_standard_error == 0:
        return BootstrapInterval(observed.multiplier, observed.multiplier, observed.p_value, draws, seed)
    t_K = (log_m_K - observed.log_multiplier) / np.maximum(error_K, np.finfo(float).tiny)
    low_t, high_t = np.quantile(t_K, [(1 - confidence) / 2, (1 + confidence) / 2])
    t_observed = observed.log_multiplier / observed.log_standard_error
    return BootstrapInterval(
        ci_low=float(np.exp(observed.log_multiplier - high_t * observed.log_standard_error)),
        ci_high=float(np.exp(observed.log_multiplier - low_t * observed.log_standard_error)),
        p_value=float((1 + np.sum(t_K >= t_observed)) / (1 + draws)),
        draws=draws,
        seed=seed,
    )


def _multipliers(x_SR: Array, y_KSR: Array) -> tuple[Array, Array]:
    """ln m and its standard error for K resampled tables; the formulas of compare.py, without a loop."""
    sizes = x_SR.shape[0]
    x_c = x_SR - x_SR.mean(axis=0)
    y_c = y_KSR - y_KSR.mean(axis=1, keepdims=True)
    slope_K = (x_c * y_c).sum(axis=(1, 2)) / (x_c**2).sum()
    alpha_K = -slope_K
    shared_KS = (y_c - slope_K[:, None, None] * x_c).mean(axis=2)
    slope_error_K = np.sqrt((shared_KS**2).sum(axis=1) / (sizes - 2) / (x_c.mean(axis=1) ** 2).sum())
    raw_KS = y_KSR[:, :, 0] - y_KSR[:, :, 1]
    gap_KS = raw_KS - alpha_K[:, None] * (x_SR[:, 1] - x_SR[:, 0])
    gap_error_K = gap_KS.std(axis=1, ddof=1) / np.sqrt(sizes)
    error_K = np.hypot(gap_error_K, raw_KS.mean(axis=1) * slope_error_K / alpha_K) / alpha_K
    return gap_KS.mean(axis=1) / alpha_K, error_K
