"""Where the search for L(N, D) begins: a start by variable projection, and random ones.

Both work in the scaled variables of `parametric_search`; the scaled loss is of order one.
"""

from __future__ import annotations

import math

import numpy as np

from analysis.arrays import Array
from analysis.parametric_search import LOWEST_LOG_TERM


def projected_start(x: Array, y: Array, loss: Array, log: bool) -> Array:
    """theta [1, 5] by variable projection: the best exponents on a dense grid, then on ever smaller ones.

    For given exponents the law is linear in E, A and B, which come from non-negative least squares. `log`
    weighs residuals by 1 / L, which is least squares of ln L to first order.
    """
    weight = 1 / loss**2 if log else np.ones_like(loss)
    center = np.log([0.2, 0.2])
    half_width, points = np.log(20.0), 61  # exponents 0.01 to 4
    while half_width > 1e-7:
        span = np.linspace(-half_width, half_width, points)
        alphas, betas = np.exp(center[0] + span), np.exp(center[1] + span)
        misfit, coefficients = _project(x, y, loss, weight, alphas, betas)
        i, j = np.unravel_index(int(misfit.argmin()), misfit.shape)
        center = np.log([alphas[i], betas[j]])
        half_width, points = half_width * (4 / points if points > 15 else 0.4), 15
    floor, a, b = np.log(np.maximum(coefficients[i, j], math.exp(LOWEST_LOG_TERM)))
    return np.array([[a, math.exp(center[0]), b, math.exp(center[1]), floor]])


def _project(
    x: Array, y: Array, loss: Array, weight: Array, alphas: Array, betas: Array
) -> tuple[Array, Array]:
    """Misfit [Ka, Kb] and E, A, B [Ka, Kb, 3] of non-negative least squares for every pair of exponents."""
    shape = (alphas.size, betas.size)
    u, v = np.exp(-np.outer(alphas, x)), np.exp(-np.outer(betas, y))
    gram, right = np.empty((*shape, 3, 3)), np.empty((*shape, 3))
    gram[..., 0, 0] = weight.sum()
    gram[..., 0, 1] = gram[..., 1, 0] = (u @ weight)[:, None]
    gram[..., 0, 2] = gram[..., 2, 0] = v @ weight
    gram[..., 1, 1] = (u**2 @ weight)[:, None]
    gram[..., 2, 2] = v**2 @ weight
    gram[..., 1, 2] = gram[..., 2, 1] = (u * weight) @ v.T
    right[..., 0] = weight @ loss
    right[..., 1] = (u @ (weight * loss))[:, None]
    right[..., 2] = v @ (weight * loss)
    misfit = np.full(shape, np.inf)
    best = np.zeros((*shape, 3))
    # Three columns: of the seven possible sets of positive coefficients the best feasible one is the answer.
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        block = gram[..., np.array(chosen)[:, None], chosen]
        block = block + 1e-13 * np.trace(block, axis1=-2, axis2=-1)[..., None, None] * np.eye(len(chosen))
        solution = np.linalg.solve(block, right[..., chosen][..., None])[..., 0]
        full = np.zeros_like(best)
        full[..., chosen] = solution
        value = np.einsum("...k,...kl,...l->...", full, gram, full) - 2 * np.einsum(
            "...k,...k->...", full, right
        )
        better = (solution >= 0).all(axis=-1) & (value < misfit)
        misfit[better], best[better] = value[better], full[better]
    return misfit, best


def random_starts(count: int, x: Array, y: Array, loss: Array, seed: int) -> Array:
    """Starts [count, 5]: floor 0 to 99 % of the lowest loss, exponents 0.02 to 1.5, the rest for A and B.

    `loss` is the scaled loss (of order one). The draws do not depend on the data's order or units.
    """
    random = np.random.default_rng(seed)
    alpha, beta = np.exp(random.uniform(np.log(0.02), np.log(1.5), (2, count)))
    floor = loss.min() * random.uniform(0.0, 0.99, count)
    share = random.uniform(0.02, 0.98, count)
    height = (loss.mean() - floor) * np.exp(random.uniform(np.log(0.2), np.log(2.0), count))
    a = np.log(share * height) - _log_mean_exp(-np.outer(alpha, x))
    b = np.log((1 - share) * height) - _log_mean_exp(-np.outer(beta, y))
    return np.stack([a, alpha, b, beta, np.log(np.maximum(floor, 1e-6))], axis=1)


def _log_mean_exp(values: Array) -> Array:
    """ln of the mean of exp over the last axis; ranges of C beyond e^700 do not overflow."""
    highest = values.max(axis=1)
    return highest + np.log(np.exp(values - highest[:, None]).mean(axis=1))
