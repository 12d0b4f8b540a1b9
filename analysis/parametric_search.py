"""Minimising the misfit of L(N, D) = E + A N^-alpha + B D^-beta from many starts at once.

Scaled variables: x = ln N - mean, y = ln D - mean, and theta = (a, alpha, b, beta, e), so that ln L is
the log-sum-exp of z_1 = a - alpha x, z_2 = b - beta y, z_3 = e. Every quantity is of order one in any units.
The objective is a sum over points (never a mean) of a penalty of the residual, with analytic derivatives.

Shapes: R problems (starts or bootstrap draws), P points, 5 parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from analysis.arrays import Array

CAUTIOUS_ITERATIONS = 40  # far from the optimum reweighted Gauss-Newton steps are safe; then Newton is fast
MAX_ITERATIONS = 400
LARGEST_EXPONENT = 5.0  # alpha and beta are kept in [0, 5]; published laws have 0.03 to 0.5
LOWEST_LOG_TERM = -60.0  # a term below e^-60 of the loss is zero in double precision
_LOWER = np.array([LOWEST_LOG_TERM, 0.0, LOWEST_LOG_TERM, 0.0, LOWEST_LOG_TERM])
_UPPER = np.array([60.0, LARGEST_EXPONENT, 60.0, LARGEST_EXPONENT, 60.0])


@dataclass(frozen=True)
class Problem:
    """What is fitted: x, y [P]; target [P] or [R, P]; weight [P] or [R, P].

    With `log` the residual is ln L_fit - ln L and target is ln L; otherwise it is L_fit - L. `delta` is
    Huber's: r^2 / 2 up to delta, delta (|r| - delta / 2) beyond; infinity is least squares. Parameters that
    are not `free` [5] keep the value of the start.
    """

    x: Array
    y: Array
    target: Array
    weight: Array
    log: bool
    delta: float
    free: NDArray[np.bool_] = field(default_factory=lambda: np.ones(5, dtype=bool))

    def rows(self, index: NDArray[np.intp]) -> Problem:
        """The problems of these rows only."""
        target = self.target if self.target.ndim == 1 else self.target[index]
        weight = self.weight if self.weight.ndim == 1 else self.weight[index]
        return replace(self, target=target, weight=weight)


@dataclass(frozen=True)
class Search:
    """theta [R, 5], objective [R], converged [R]."""

    theta: Array
    objective: Array
    converged: NDArray[np.bool_]


def fitted(theta: Array, x: Array, y: Array, log: bool) -> tuple[Array, Array]:
    """Values [..., P] for theta [..., 5], and their derivatives by z_1, z_2, z_3 as [3, ..., P]."""
    # The terms are the first axis: numpy adds whole arrays much faster than it reduces a short last axis.
    z = np.empty((3, *theta.shape[:-1], x.size))
    z[0] = theta[..., 0, None] - theta[..., 1, None] * x
    z[1] = theta[..., 2, None] - theta[..., 3, None] * y
    z[2] = theta[..., 4, None]
    top = np.maximum(np.maximum(z[0], z[1]), z[2])
    z -= top
    share = np.exp(z, out=z)
    total = share[0] + share[1] + share[2]
    if log:
        return top + np.log(total), share / total
    with np.errstate(over="ignore"):  # a wild step is refused by its infinite objective
        scale = np.exp(top)
        return total * scale, share * scale


def penalty(residual: Array, delta: float) -> Array:
    """Huber's penalty of each residual."""
    size = np.abs(residual)
    if np.isinf(delta):
        return 0.5 * residual**2
    return np.where(size <= delta, 0.5 * residual**2, delta * (size - 0.5 * delta))


def objective_value(theta: Array, problem: Problem) -> Array:
    """Summed penalty of each row of theta."""
    value, _ = fitted(theta, problem.x, problem.y, problem.log)
    with np.errstate(over="ignore", invalid="ignore"):
        total = (problem.weight * penalty(value - problem.target, problem.delta)).sum(axis=-1)
    return np.where(np.isfinite(total), total, np.inf)


def derivatives(theta: Array, problem: Problem, reweighted: bool) -> tuple[Array, Array]:
    """Gradient [R, 5] and curvature [R, 5, 5] of the objective.

    The curvature is the exact Hessian, or, `reweighted`, that of the quadratic that touches the penalty at
    the residual and lies above it everywhere (iteratively reweighted least squares).
    """
    value, share = fitted(theta, problem.x, problem.y, problem.log)
    residual = value - problem.target
    clipped = np.clip(residual, -problem.delta, problem.delta)
    slope = problem.weight * clipped
    ones = np.ones_like(problem.x)
    design = np.stack([ones, -problem.x, ones, -problem.y, ones])
    jacobian = share[[0, 0, 1, 1, 2]] * design.reshape(5, *([1] * (share.ndim - 2)), -1)
    jacobian = np.moveaxis(jacobian, 0, -2)  # [R, 5, P]
    gradient = (jacobian @ slope[..., None])[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        touching = problem.weight * np.where(residual == 0, 1.0, clipped / residual)
    if reweighted:
        return gradient, _outer_sum(jacobian, touching)
    inside = problem.weight * (np.abs(residual) <= problem.delta)
    # A law of one term is linear in theta: with hardly a point within delta (a resample may lack them) its
    # Hessian is zero and the step infinite.
    few = np.asarray(((inside > 0).sum(axis=-1) < problem.free.sum()) & ~problem.free.all())
    hessian = _outer_sum(jacobian, inside - slope if problem.log else inside)
    # Second derivative of the value: sum over terms of share z' z'^T (minus J J^T for the log, done above).
    for term, block in ((0, slice(0, 2)), (1, slice(2, 4)), (2, slice(4, 5))):
        pulled = (slope * share[term])[..., None, :] * design[block]
        hessian[..., block, block] += pulled @ design[block].T
    if few.any():
        hessian = np.where(few[..., None, None], _outer_sum(jacobian, touching), hessian)
    return gradient, hessian


def _outer_sum(jacobian: Array, weight: Array) -> Array:
    return (jacobian * weight[..., None, :]) @ np.swapaxes(jacobian, -1, -2)


def minimise(start: Array, problem: Problem, cautious: int = CAUTIOUS_ITERATIONS) -> Search:
    """Damped Newton iterations from every row of `start` [R, 5] at once; rows stop on their own.

    The first `cautious` iterations use the reweighted curvature. A row has converged when the quadratic model
    promises less than 1e-15 of the objective (or of its rounding).
    """
    theta = np.clip(start, _LOWER, _UPPER)
    objective = objective_value(theta, problem)
    damping = np.full(len(theta), 1e-2)
    converged = np.zeros(len(theta), dtype=bool)
    active = np.flatnonzero(np.isfinite(objective))
    noise = 1e-30 * problem.x.size
    for iteration in range(MAX_ITERATIONS):
        if active.size == 0:
            break
        part = problem.rows(active)
        here = theta[active]
        gradient, curvature = derivatives(here, part, reweighted=iteration < cautious)
        step, promise = _damped_step(gradient, curvature, damping[active], here, part.free)
        trial = np.clip(here + step, _LOWER, _UPPER)
        value = objective_value(trial, part)
        better = value < objective[active]
        theta[active[better]] = trial[better]
        done = promise <= 1e-15 * objective[active] + noise
        objective[active[better]] = value[better]
        damping[active] = np.clip(damping[active] * np.where(better, 0.2, 6.0), 1e-14, 1e12)
        stuck = ~better & (damping[active] > 1e8)
        converged[active] = done | stuck
        active = active[~(done | stuck)]
    return Search(theta, objective, converged)


def _damped_step(
    gradient: Array, curvature: Array, damping: Array, theta: Array, may_move: NDArray[np.bool_]
) -> tuple[Array, Array]:
    """Step along -(|H| + damping) ^-1 g and the decrease that the undamped model promises.

    |H| has the absolute eigenvalues, so a saddle is left and not approached. Parameters at a bound that the
    gradient pushes outwards stay where they are, and so do those that may not move.
    """
    held = ~may_move | ((theta <= _LOWER) & (gradient > 0)) | ((theta >= _UPPER) & (gradient < 0))
    gradient = np.where(held, 0.0, gradient)
    free = ~held
    curvature = curvature * (free[..., None] & free[..., None, :])
    # Unit diagonal: the damping then means the same for every parameter.
    diagonal = np.sqrt(np.maximum(np.abs(np.einsum("...ii->...i", curvature)), 1e-300))
    diagonal = np.maximum(diagonal, 1e-9 * diagonal.max(axis=-1, keepdims=True))
    scaled = curvature / (diagonal[..., None] * diagonal[..., None, :])
    values, vectors = np.linalg.eigh(scaled)
    size = np.maximum(np.abs(values), 1e-13)
    along = np.einsum("...ij,...i->...j", vectors, gradient / diagonal)
    step = -np.einsum("...ij,...j->...i", vectors, along / (size + damping[..., None])) / diagonal
    step = np.where(held, 0.0, step)
    longest = np.abs(step).max(axis=-1, keepdims=True)
    return step * np.minimum(1.0, 3.0 / np.maximum(longest, 1e-300)), (along**2 / size).sum(axis=-1)


def least_absolute(theta: Array, problem: Problem) -> Array:
    """theta [5] of least absolute deviations near `theta`: exact, by linear programmes within a trust region.

    Huber's penalty with smaller and smaller delta brings the start close; where the law is linearised, the
    optimum is a vertex (five points fitted exactly) that a smooth method only approaches.
    """
    from scipy.optimize import linprog  # only this objective needs it, and it is slow to import

    for delta in (1e-4, 1e-5, 1e-6):
        theta = minimise(theta[None], replace(problem, delta=delta)).theta[0]
    ones = np.ones_like(problem.x)
    design = np.stack([ones, -problem.x, ones, -problem.y, ones], axis=-1)
    eye = np.eye(problem.x.size)
    cost = np.concatenate([np.zeros(5), ones])
    radius = 0.1
    while radius > 1e-12:
        value, share = fitted(theta, problem.x, problem.y, problem.log)
        residual = value - problem.target
        jacobian = design * share[[0, 0, 1, 1, 2]].T
        reach = np.where(problem.free, radius, 0.0)
        low, high = np.maximum(-reach, _LOWER - theta), np.minimum(reach, _UPPER - theta)
        programme = linprog(  # step and the absolute residuals after it
            cost,
            A_ub=np.block([[jacobian, -eye], [-jacobian, -eye]]),
            b_ub=np.concatenate([-residual, residual]),
            bounds=[*zip(low, high, strict=True), *[(0, None)] * problem.x.size],
            method="highs",
        )
        if programme.status != 0:
            radius *= 0.1
            continue
        step = programme.x[:5]
        after = fitted(theta + step, problem.x, problem.y, problem.log)[0] - problem.target
        if np.abs(after).sum() < np.abs(residual).sum():
            theta = theta + step
            radius = min(radius, 4 * float(np.abs(step).max()))
        else:
            radius *= 0.1
    return theta
