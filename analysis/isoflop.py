"""IsoFLOP profiles: at each compute budget a parabola of loss in ln N, whose lowest point is the best size.

An optimum at the edge of its grid is not an optimum: such a budget is refused, with the reason, and takes no
part in the power law of optima N_opt = k C^a.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from analysis.arrays import Array, finite_positive
from attnres.errors import ConfigError, DataError

BUDGET_TOLERANCE = 0.05  # relative: budgets closer than this are one
MIN_SIZES = 3
MIN_BUDGETS = 3
NAMED_BUDGETS = 3  # in a message


@dataclass(frozen=True)
class BudgetOptimum:
    """Lowest point of one budget's parabola. C in the unit of the input, loss in nats."""

    compute: float  # geometric mean of the budget's runs
    size: float
    loss: float
    curvature: float  # second derivative of loss by ln N
    rms_misfit: float  # of the parabola, nats
    points: int


@dataclass(frozen=True)
class RefusedBudget:
    """A budget without an optimum, and why."""

    compute: float
    points: int
    reason: str


@dataclass(frozen=True)
class IsoflopFit:
    """N_opt = coefficient * C^exponent over the accepted budgets; interval: 95 % Student t, budgets - 2."""

    coefficient: float
    exponent: float
    exponent_standard_error: float
    exponent_interval: tuple[float, float]
    loss_coefficient: float  # L_opt = loss_coefficient * C^-loss_exponent
    loss_exponent: float
    optima: tuple[BudgetOptimum, ...]
    refused: tuple[RefusedBudget, ...]
    points_used: int
    points_refused: int

    @property
    def tokens_exponent(self) -> float:
        """b of D_opt proportional to C^b, with C proportional to N D."""
        return 1.0 - self.exponent

    def size_at(self, compute: ArrayLike) -> Array:
        """Best size at the given compute."""
        return self.coefficient * np.asarray(compute, float) ** self.exponent

    def as_json(self) -> dict[str, Any]:
        """Plain mapping for `analysis.fit --json`; docs/analysis.md has the schema."""
        return {
            "law": "isoflop",
            "equation": "N_opt = k*C^a",
            "parameters": {"k": self.coefficient, "a": self.exponent},
            "derived": {
                "tokens_exponent": self.tokens_exponent,
                "loss_coefficient": self.loss_coefficient,
                "loss_exponent": self.loss_exponent,
            },
            "standard_errors": {"a": self.exponent_standard_error},
            "intervals": {"a": list(self.exponent_interval)},
            "interval_method": f"Student t over {len(self.optima)} budgets, 95 %",
            "objective": "least-squares of the loss on (1, ln N, ln^2 N) per budget; of ln N_opt on ln C",
            "objective_value": float(sum(o.points * o.rms_misfit**2 for o in self.optima)),
            "points_used": self.points_used,
            "points_in_refused_budgets": self.points_refused,
            "starts": None,
            "starts_agreeing": None,
            "optima": [vars(optimum) for optimum in self.optima],
            "refused": [vars(refused) for refused in self.refused],
            "fitted_range": {"C": [self.optima[0].compute, self.optima[-1].compute]},
            "warnings": [f"C={r.compute:.4g}: refused: {r.reason}" for r in self.refused],
        }


def fit_isoflop(
    N: ArrayLike, C: ArrayLike, L: ArrayLike, budget_tolerance: float = BUDGET_TOLERANCE
) -> IsoflopFit:
    """Fit parabolas and the law of their lowest points.

    Runs belong to one budget when, in order of C, each is within `budget_tolerance` (relative) of the next.
    Raises DataError when fewer than 3 budgets have an optimum; the message gives the refusals.
    """
    size, compute, loss = finite_positive(N=N, C=C, L=L)
    order = np.lexsort((loss, size, compute))
    size, compute, loss = size[order], compute[order], loss[order]
    if not (math.isfinite(budget_tolerance) and budget_tolerance > 0):
        raise ConfigError("--budget-tolerance", budget_tolerance, "must be a positive number")
    breaks = np.flatnonzero(np.diff(np.log(compute)) > np.log1p(budget_tolerance)) + 1
    groups = np.split(np.arange(size.size), breaks)
    found = [budget_optimum(size[g], loss[g], float(np.exp(np.log(compute[g]).mean()))) for g in groups]
    optima = tuple(result for result in found if isinstance(result, BudgetOptimum))
    refused = tuple(result for result in found if isinstance(result, RefusedBudget))
    if len(optima) < MIN_BUDGETS:
        why = "; ".join(f"C={r.compute:.4g}: {r.reason}" for r in refused[:NAMED_BUDGETS]) or "no others"
        why += f" and {len(refused) - NAMED_BUDGETS} more" if len(refused) > NAMED_BUDGETS else ""
        raise DataError(f"budgets={len(optima)}: the law needs {MIN_BUDGETS} with an optimum inside ({why})")
    log_c = np.log([optimum.compute for optimum in optima])
    slope, intercept, error = _line(log_c, np.log([optimum.size for optimum in optima]))
    loss_slope, loss_intercept, _ = _line(log_c, np.log([optimum.loss for optimum in optima]))
    reach = float(stdtrit(len(optima) - 2, 0.975)) * error
    return IsoflopFit(
        coefficient=float(np.exp(intercept)),
        exponent=slope,
        exponent_standard_error=error,
        exponent_interval=(slope - reach, slope + reach),
        loss_coefficient=float(np.exp(loss_intercept)),
        loss_exponent=-loss_slope,
        optima=optima,
        refused=refused,
        points_used=sum(optimum.points for optimum in optima),
        points_refused=sum(r.points for r in refused),
    )


def budget_optimum(size: Array, loss: Array, compute: float) -> BudgetOptimum | RefusedBudget:
    """Lowest point of the parabola through one budget's runs, or why there is none."""
    distinct = np.unique(size)
    if distinct.size < MIN_SIZES:
        return RefusedBudget(compute, size.size, f"{distinct.size} size(s); a parabola needs {MIN_SIZES}")
    center = np.log(size).mean()
    x = np.log(size) - center
    quadratic, linear, constant = np.polyfit(x, loss, 2)
    if not quadratic > 0:
        return RefusedBudget(compute, size.size, "the parabola does not open upwards")
    vertex = -linear / (2 * quadratic)
    best = float(np.exp(vertex + center))
    if not distinct[0] < best < distinct[-1]:
        edge = f"[{distinct[0]:.4g}, {distinct[-1]:.4g}]"
        return RefusedBudget(compute, size.size, f"optimum N={best:.4g} is outside the sizes {edge}")
    lowest = float(size[loss.argmin()])
    if lowest in (distinct[0], distinct[-1]):
        return RefusedBudget(
            compute, size.size, f"the lowest loss is at the edge of the sizes, N={lowest:.4g}"
        )
    misfit = np.polyval([quadratic, linear, constant], x) - loss
    return BudgetOptimum(
        compute=compute,
        size=best,
        loss=float(constant - quadratic * vertex**2),
        curvature=float(2 * quadratic),
        rms_misfit=float(np.sqrt(np.mean(misfit**2))),
        points=size.size,
    )


def _line(x: Array, y: Array) -> tuple[float, float, float]:
    """Slope, intercept and standard error of the slope of least squares."""
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread
    intercept = float(y.mean() - slope * x.mean())
    residual = y - intercept - slope * x
    return slope, intercept, float(np.sqrt(residual @ residual / (x.size - 2) / spread))
