"""Scaling laws of one compute axis: L = A C^-alpha, with a shared exponent, with a floor.

Fits are least squares in ln L. Points are arrays, or a tidy table with one row per trial and the columns
`size`, `rule`, `compute`, `loss` and, where seeds were repeated, `seed`. Every result says in which unit and
by which convention C was counted and over which range it was fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import special

from attnres.errors import UserError
from attnres.words import counted

Array = NDArray[np.float64]
Codes = NDArray[np.intp]

MIN_SIZES = 3  # two parameters; fewer sizes leave nothing to judge the fit by
DEFAULT_UNIT = "FLOP"
DEFAULT_CONVENTION = "as given"


class FitError(UserError):
    """Points that no law can be fitted to; the message names the offenders."""


@dataclass(frozen=True)
class PowerLaw:
    """L = coefficient * C^-exponent (nats, C in `unit`), fitted over compute_min..compute_max."""

    coefficient: float  # loss in nats at C = 1 unit
    exponent: float
    exponent_standard_error: float  # independent errors in ln L assumed
    log_residual_std: float  # of ln L about the fit, n - 2 degrees of freedom
    compute_min: float
    compute_max: float
    points: int
    unit: str = DEFAULT_UNIT
    convention: str = DEFAULT_CONVENTION

    def predict(self, compute: ArrayLike) -> Array:
        """Loss in nats at the given compute."""
        return self.coefficient * np.asarray(compute, dtype=float) ** -self.exponent

    def compute_at(self, loss: ArrayLike) -> Array:
        """Compute at which the fitted law reaches the given loss."""
        return (self.coefficient / np.asarray(loss, dtype=float)) ** (1 / self.exponent)


@dataclass(frozen=True)
class SizeMeans:
    """Means over seeds in ln, S sizes (ascending compute) by R rules."""

    sizes: tuple[str, ...]
    rules: tuple[str, ...]
    ln_compute_SR: Array
    ln_loss_SR: Array  # of loss - floor
    floor: float = 0.0

    def column(self, rule: str) -> int:
        return self.rules.index(rule)

    def without(self, size: str) -> SizeMeans:
        keep = [name != size for name in self.sizes]
        sizes = tuple(name for name in self.sizes if name != size)
        return SizeMeans(sizes, self.rules, self.ln_compute_SR[keep], self.ln_loss_SR[keep], self.floor)


@dataclass(frozen=True)
class SharedExponentFit:
    """ln L = ln A_rule - alpha ln C with one alpha for all rules.

    The standard error of alpha treats a size's misfit as shared by the rules (clustered by size): residuals
    of one size are averaged over the rules before they are counted, with S - 2 degrees of freedom.
    """

    exponent: float
    exponent_standard_error: float
    degrees_of_freedom: int
    coefficients: Mapping[str, float]  # A by rule
    size_misfit: Mapping[str, float]  # mean over rules of the residual in ln L
    log_residual_std: float  # of all size x rule means, S R - R - 1 degrees of freedom
    compute_min: float
    compute_max: float
    unit: str
    convention: str

    def law(self, rule: str) -> PowerLaw:
        """The rule's line as a PowerLaw."""
        return PowerLaw(
            coefficient=self.coefficients[rule],
            exponent=self.exponent,
            exponent_standard_error=self.exponent_standard_error,
            log_residual_std=self.log_residual_std,
            compute_min=self.compute_min,
            compute_max=self.compute_max,
            points=len(self.size_misfit),
            unit=self.unit,
            convention=self.convention,
        )


@dataclass(frozen=True)
class FloorFit:
    """L = floor + A C^-alpha by profile over the floor E.

    `identified` is true only if the profile interval of E excludes 0; otherwise `floor`, `coefficient` and
    `exponent` are None and `reason` says why, because any E in the interval fits as well.
    """

    identified: bool
    reason: str
    floor: float | None
    floor_low: float
    floor_high: float
    coefficient: float | None
    exponent: float | None
    profile_floor: Array  # grid of E
    profile_log_rms: Array  # residual rms in ln L at each E
    profile_exponent: Array
    points: int
    unit: str
    convention: str


def fit_power_law(
    compute: ArrayLike,
    loss: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    unit: str = DEFAULT_UNIT,
    convention: str = DEFAULT_CONVENTION,
) -> PowerLaw:
    """Least squares of ln L on ln C. `weights` are relative inverse variances of ln L.

    Raises FitError for non-positive or non-finite points and for fewer than 3 distinct values of C.
    """
    compute_P, loss_P = check_points(compute, loss)
    weights_P = np.ones_like(loss_P) if weights is None else np.asarray(weights, dtype=float)
    if weights_P.shape != loss_P.shape or not np.all(np.isfinite(weights_P)) or np.any(weights_P <= 0):
        raise FitError(f"weights: need {loss_P.size} finite, positive numbers")
    x, y = np.log(compute_P), np.log(loss_P)
    share = weights_P / weights_P.sum()
    x_mean, y_mean = float(share @ x), float(share @ y)
    spread = float(share @ (x - x_mean) ** 2)
    slope = float(share @ ((x - x_mean) * (y - y_mean))) / spread
    residual = y - y_mean - slope * (x - x_mean)
    variance = float(share @ residual**2) * loss_P.size / (loss_P.size - 2)
    return PowerLaw(
        coefficient=float(np.exp(y_mean - slope * x_mean)),
        exponent=-slope,
        exponent_standard_error=float(np.sqrt(variance / loss_P.size / spread)),
        log_residual_std=float(np.sqrt(variance)),
        compute_min=float(compute_P.min()),
        compute_max=float(compute_P.max()),
        points=int(loss_P.size),
        unit=unit,
        convention=convention,
    )


def check_points(compute: ArrayLike, loss: ArrayLike) -> tuple[Array, Array]:
    """Finite, positive, at least 3 distinct values of C; else FitError naming the first offender."""
    compute_P = np.atleast_1d(np.asarray(compute, dtype=float))
    loss_P = np.atleast_1d(np.asarray(loss, dtype=float))
    if compute_P.shape != loss_P.shape or compute_P.ndim != 1:
        raise FitError(
            f"compute has shape {compute_P.shape} and loss {loss_P.shape}: need two equally long columns"
        )
    for name, values in (("compute", compute_P), ("loss", loss_P)):
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            raise FitError(f"{name}={values[bad[0]]!r} (point {bad[0]}): must be finite and positive")
    distinct = np.unique(compute_P).size
    if distinct == 1:
        raise FitError(
            f"compute={compute_P[0]:.6g} at every point: a law needs at least {MIN_SIZES} distinct values"
        )
    if distinct < MIN_SIZES:
        raise FitError(f"{distinct} distinct values of compute: a law needs at least {MIN_SIZES}")
    return compute_P, loss_P


def size_means(table: pd.DataFrame, rules: Sequence[str] | None = None, floor: float = 0.0) -> SizeMeans:
    """Average ln C and ln(L - floor) over seeds within size x rule; sizes in order of compute.

    Where rules were run with different seeds at a size, only seeds that all of them have count: seeds are
    paired. Raises FitError for a missing column or arm, a loss at or below the floor, bad numbers.
    """
    for column in ("size", "rule", "compute", "loss"):
        if column not in table.columns:
            raise FitError(
                f"{column}: the table has no such column (it has {', '.join(map(str, table.columns))})"
            )
    names = list(rules) if rules is not None else list(dict.fromkeys(table["rule"]))
    size_labels, size_N = np.unique(table["size"].to_numpy().astype(str), return_inverse=True)
    rule_N = pd.Index(names).get_indexer(pd.Index(table["rule"]))
    for rule, code in zip(names, range(len(names)), strict=True):
        if not (rule_N == code).any():
            has = ", ".join(sorted(map(str, set(table["rule"]))))
            raise FitError(f"rule={rule}: the table has no such rule (it has {has})")
    used_N = rule_N >= 0
    compute_N, loss_N = (table[column].to_numpy(dtype=float) for column in ("compute", "loss"))
    for column, values in (("compute", compute_N), ("loss", loss_N)):
        bad = np.flatnonzero(used_N & ~(np.isfinite(values) & (values > 0)))
        if bad.size:
            place = f"size {size_labels[size_N[bad[0]]]}, rule {names[rule_N[bad[0]]]}"
            raise FitError(f"{column}={float(values[bad[0]])!r} ({place}): must be finite and positive")
    low = np.flatnonzero(used_N & (loss_N <= floor))
    if low.size:
        place = f"size {size_labels[size_N[low[0]]]}"
        raise FitError(f"floor={floor:g}: is not below the loss {loss_N[low[0]]:g} of {place}")
    used_S = np.bincount(size_N[used_N], minlength=size_labels.size) > 0
    if "seed" in table.columns:
        seed_N = np.unique(table["seed"].to_numpy(), return_inverse=True)[1]
        used_N &= _has_all_rules(size_N, rule_N, seed_N, used_N, len(names))
    shape = (size_labels.size, len(names))
    cell_N = size_N[used_N] * len(names) + rule_N[used_N]
    count_SR = np.bincount(cell_N, minlength=shape[0] * shape[1]).reshape(shape)
    for s in np.flatnonzero(used_S):
        _check_cells(table, str(size_labels[s]), names, count_SR[s])
    ln_compute_SR, ln_loss_SR = (
        np.bincount(cell_N, np.log(values[used_N]), minlength=shape[0] * shape[1]).reshape(shape)[used_S]
        / count_SR[used_S]
        for values in (compute_N, loss_N - floor)
    )
    order = np.argsort(ln_compute_SR.mean(axis=1), kind="stable")
    return SizeMeans(
        sizes=tuple(str(name) for name in size_labels[used_S][order]),
        rules=tuple(names),
        ln_compute_SR=ln_compute_SR[order],
        ln_loss_SR=ln_loss_SR[order],
        floor=floor,
    )


def _has_all_rules(size_N: Codes, rule_N: Codes, seed_N: Codes, used_N: NDArray[np.bool_], rules: int) -> Any:
    """Whether the row's size x seed was run under every rule."""
    group_N = size_N * (int(seed_N.max()) + 1) + seed_N
    pairs = np.unique(np.stack([group_N[used_N], rule_N[used_N]]), axis=1)
    return np.bincount(pairs[0], minlength=int(group_N.max()) + 1)[group_N] == rules


def _check_cells(table: pd.DataFrame, size: str, rules: Sequence[str], count_R: Codes) -> None:
    if count_R.all():
        return
    present = set(table.loc[table["size"].astype(str) == size, "rule"])
    for rule in rules:
        if rule not in present:
            raise FitError(f"rule={rule}: lacks size {size}")
    raise FitError(f"size={size}: the rules {', '.join(rules)} have no seed in common")


def fit_shared_exponent(
    table: pd.DataFrame | SizeMeans,
    rules: Sequence[str] | None = None,
    *,
    floor: float = 0.0,
    unit: str = DEFAULT_UNIT,
    convention: str = DEFAULT_CONVENTION,
) -> SharedExponentFit:
    """Least squares of ln(L - floor) on ln C over size x rule means: one slope, an intercept per rule."""
    means = table if isinstance(table, SizeMeans) else size_means(table, rules, floor)
    x_SR, y_SR = means.ln_compute_SR, means.ln_loss_SR
    sizes, arms = x_SR.shape
    check_points(np.exp(x_SR.mean(axis=1)), np.exp(y_SR.mean(axis=1)))
    slope, slope_error, residual_SR = pooled_slope(x_SR, y_SR)
    freedom = sizes * arms - arms - 1
    intercept_R = y_SR.mean(axis=0) - slope * x_SR.mean(axis=0)
    return SharedExponentFit(
        exponent=-slope,
        exponent_standard_error=slope_error,
        degrees_of_freedom=sizes - 2,
        coefficients={rule: float(np.exp(a)) for rule, a in zip(means.rules, intercept_R, strict=True)},
        size_misfit={size: float(r) for size, r in zip(means.sizes, residual_SR.mean(axis=1), strict=True)},
        log_residual_std=float(np.sqrt((residual_SR**2).sum() / freedom)),
        compute_min=float(np.exp(x_SR.min())),
        compute_max=float(np.exp(x_SR.max())),
        unit=unit,
        convention=convention,
    )


def pooled_slope(x_SR: Array, y_SR: Array) -> tuple[float, float, Array]:
    """Common slope with an intercept per column; its size-clustered standard error; residuals [S, R]."""
    x_c, y_c = x_SR - x_SR.mean(axis=0), y_SR - y_SR.mean(axis=0)
    slope = float((x_c * y_c).sum() / (x_c**2).sum())
    residual_SR = y_c - slope * x_c
    shared = residual_SR.mean(axis=1)
    spread = float((x_c.mean(axis=1) ** 2).sum())
    return slope, float(np.sqrt((shared @ shared) / (x_SR.shape[0] - 2) / spread)), residual_SR


def fit_power_law_with_floor(
    compute: ArrayLike,
    loss: ArrayLike,
    *,
    confidence: float = 0.95,
    grid: int = 100,
    unit: str = DEFAULT_UNIT,
    convention: str = DEFAULT_CONVENTION,
) -> FloorFit:
    """L = E + A C^-alpha: residuals in ln L, minimised over A and alpha for each E of a grid in [0, min L).

    The interval of E holds every E whose summed squares stay below the F limit (1 and n - 3 degrees of
    freedom). One or two decades of C rarely tell E from 0; then the result says so and gives no number.
    """
    compute_P, loss_P = check_points(compute, loss)
    points = loss_P.size
    floors = loss_P.min() * (1 - np.geomspace(1, 1e-3, grid))  # 0 up to just below the lowest loss
    fits = [_fit_at_floor(compute_P, loss_P, float(floor)) for floor in floors]
    sse = np.array([fit[0] for fit in fits])
    best = int(sse.argmin())
    least, floor, coefficient, exponent = fits[best]
    if 0 < best < grid - 1:
        start = (floor, math.log(coefficient), -exponent)
        least, floor, coefficient, exponent = _gauss_newton(compute_P, loss_P, start, free_floor=True)
    freedom = points - 3
    if freedom < 1:
        inside = np.ones(grid, dtype=bool)
    else:
        # Below rounding error the profile is flat for no statistical reason.
        limit = max(least, points * np.finfo(float).eps ** 2) * (
            1 + special.fdtri(1, freedom, confidence) / freedom
        )
        inside = sse <= limit
        inside[best] = inside[best] or not inside.any()
    low, high = float(floors[inside].min()), float(floors[inside].max())
    if freedom < 1:
        reason = f"of {counted(points, 'point')} no degree of freedom is left for a floor"
    elif inside[0]:
        reason = f"floors from 0 to {high:.3g} nats fit equally well ({confidence:.0%} profile interval)"
    elif inside[-1]:
        reason = f"the profile is open towards the lowest loss {loss_P.min():.3g} nats"
    else:
        reason = ""
    identified = not reason
    return FloorFit(
        identified=identified,
        reason=reason or f"{confidence:.0%} profile interval {low:.4g} to {high:.4g} nats",
        floor=floor if identified else None,
        floor_low=low,
        floor_high=high,
        coefficient=coefficient if identified else None,
        exponent=exponent if identified else None,
        profile_floor=floors,
        profile_log_rms=np.sqrt(sse / points),
        profile_exponent=np.array([fit[3] for fit in fits]),
        points=points,
        unit=unit,
        convention=convention,
    )


def _fit_at_floor(compute_P: Array, loss_P: Array, floor: float) -> tuple[float, float, float, float]:
    """Summed squares in ln L, floor, A and alpha at a given floor."""
    x = np.log(compute_P)
    share = (loss_P - floor) / loss_P  # d ln L / d ln(L - E): turns residuals of ln(L - E) into those of ln L
    slope, intercept = np.polyfit(x - x.mean(), np.log(loss_P - floor), 1, w=share)
    start = (floor, float(intercept - slope * x.mean()), float(slope))
    return _gauss_newton(compute_P, loss_P, start, free_floor=False)


def _gauss_newton(
    compute_P: Array, loss_P: Array, start: tuple[float, float, float], free_floor: bool
) -> tuple[float, float, float, float]:
    """Least squares in ln L from (floor, ln A, slope), with the floor free or held; steps that help only."""
    x, target = np.log(compute_P), np.log(loss_P)
    centre = x.mean()
    x = x - centre
    values = np.array([start[0], start[1] + start[2] * centre, start[2]])

    def residual(values: Array) -> Array:
        return np.log(values[0] + np.exp(values[1] + values[2] * x)) - target

    best = residual(values)
    for _ in range(50):
        reducible = np.exp(values[1] + values[2] * x)
        total = values[0] + reducible
        jacobian = np.stack([1 / total, reducible / total, x * reducible / total], axis=1)
        step = np.zeros(3)
        free = slice(0 if free_floor else 1, 3)
        step[free] = np.linalg.lstsq(jacobian[:, free], -best, rcond=None)[0]
        if not 0 <= values[0] + step[0] < loss_P.min():
            break
        trial = residual(values + step)
        if not trial @ trial < best @ best:
            break
        values, best = values + step, trial
    coefficient = float(np.exp(values[1] - values[2] * centre))
    return float(best @ best), float(values[0]), coefficient, -float(values[2])
