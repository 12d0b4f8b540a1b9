"""L(N, D): exact recovery, starts, invariances, intervals, refusals; against SciPy where that is possible."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import optimize

from analysis.multistart import parse_objective, scale_points
from analysis.parametric import PARAMETERS, fit_parametric
from analysis.parametric_search import Problem, derivatives, minimise, objective_value
from analysis.parametric_starts import projected_start, random_starts
from attnres.errors import ConfigError, DataError, UserError

TRUTH = {"E": 1.82, "A": 482.0, "B": 2085.0, "alpha": 0.348, "beta": 0.366}
OBJECTIVES = ["huber:1e-3", "least-squares", "log-least-squares", "lad"]


def models(points: int, noise: float = 0.0, seed: int = 0, tails: float = 3.0) -> tuple[np.ndarray, ...]:
    """N, D, L of TRUTH; noise in ln L from Student's t."""
    random = np.random.default_rng(seed)
    N = np.exp(random.uniform(np.log(4e7), np.log(1.6e10), points))
    D = np.exp(random.uniform(np.log(2e8), np.log(3e11), points))
    L = TRUTH["E"] + TRUTH["A"] * N ** -TRUTH["alpha"] + TRUTH["B"] * D ** -TRUTH["beta"]
    return N, D, L * np.exp(noise * random.standard_t(tails, points))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_recovers_a_law_without_noise_from_every_start(objective: str) -> None:
    starts = 200 if objective.startswith("huber") else 20
    fit = fit_parametric(*models(240), objective=objective, starts=starts)
    for name in PARAMETERS:
        assert getattr(fit, name) == pytest.approx(TRUTH[name], rel=1e-5), name
    assert (fit.starts, fit.starts_agreeing) == (starts, starts)
    assert fit.warnings == ()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_optimum_is_not_improved_by_scipy(objective: str) -> None:
    N, D, L = models(40, noise=0.01)
    fit = fit_parametric(N, D, L, objective=objective, starts=5)

    def value(q: np.ndarray) -> float:
        predicted = np.exp(q[0]) + np.exp(q[1] - q[3] * np.log(N)) + np.exp(q[2] - q[4] * np.log(D))
        if objective == "least-squares":
            return float(np.sum((predicted - L) ** 2))
        r = np.abs(np.log(predicted / L))
        if objective == "lad":
            return float(r.sum())
        if objective == "log-least-squares":
            return float(np.sum(r**2))
        return float(np.sum(np.where(r < 1e-3, r**2 / 2, 1e-3 * (r - 5e-4))))

    here = np.array([np.log(fit.E), np.log(fit.A), np.log(fit.B), fit.alpha, fit.beta])
    assert value(here) == pytest.approx(fit.objective_value, rel=1e-9)
    random = np.random.default_rng(0)
    for _ in range(2):
        start = here * (1 + 1e-3 * random.standard_normal(5))
        found = optimize.minimize(
            value, start, method="Nelder-Mead", options={"maxiter": 2000, "xatol": 1e-10}
        )
        assert found.fun >= fit.objective_value * (1 - 1e-7)


def test_derivatives_are_those_of_the_objective() -> None:
    N, D, L = models(30, noise=0.02)
    data = scale_points(N, D, L)
    for log, delta in ((True, np.inf), (True, 0.01), (False, np.inf)):
        target = np.log(data.loss) if log else data.loss
        problem = Problem(data.x, data.y, target, np.ones(30), log, delta)
        theta = random_starts(1, data.x, data.y, data.loss, seed=3)
        gradient, hessian = derivatives(theta, problem, reweighted=False)
        for k in range(5):
            step = np.zeros((1, 5))
            step[0, k] = 1e-6
            slope = (objective_value(theta + step, problem) - objective_value(theta - step, problem)) / 2e-6
            assert gradient[0, k] == pytest.approx(slope[0], rel=1e-5, abs=1e-8)
            up, down = (derivatives(theta + sign * step, problem, reweighted=False)[0] for sign in (1, -1))
            assert hessian[0, k] == pytest.approx((up - down)[0] / 2e-6, rel=1e-4, abs=1e-6)


def test_reweighted_curvature_lies_above_the_penalty() -> None:
    N, D, L = models(40, noise=0.05)
    data = scale_points(N, D, L)
    problem = Problem(data.x, data.y, np.log(data.loss), np.ones(40), True, 1e-3)
    theta = projected_start(data.x, data.y, data.loss, log=True)
    upper = derivatives(theta, problem, reweighted=True)[1][0]
    assert np.linalg.eigvalsh(upper).min() > 0


def test_projection_alone_is_near_the_optimum() -> None:
    data = scale_points(*models(240))
    theta = projected_start(data.x, data.y, data.loss, log=False)
    E, A, B, alpha, beta = data.parameters(theta)[0]
    assert [E, alpha, beta] == pytest.approx([TRUTH["E"], TRUTH["alpha"], TRUTH["beta"]], rel=1e-3)


def test_bad_starts_are_counted_and_do_not_win() -> None:
    """A start at a bound of the exponents stays there; the count says so and the best optimum stands."""
    data = scale_points(*models(60, noise=0.01))
    problem = Problem(data.x, data.y, np.log(data.loss), np.ones(60), True, np.inf)
    good = projected_start(data.x, data.y, data.loss, log=True)
    found = minimise(np.vstack([good, good + np.array([0, 4.9, 0, 4.9, -40])]), problem)
    assert found.objective[0] <= found.objective[1]
    assert np.isfinite(found.objective).all()


def test_order_of_rows_changes_nothing() -> None:
    N, D, L = models(50, noise=0.01)
    order = np.random.default_rng(1).permutation(50)
    first = fit_parametric(N, D, L, starts=5, bootstrap=10)
    assert fit_parametric(N[order], D[order], L[order], starts=5, bootstrap=10) == first


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_units_rescale_the_coefficients_only(objective: str) -> None:
    N, D, L = models(40, noise=0.01)
    first = fit_parametric(N, D, L, objective=objective, starts=5)
    second = fit_parametric(N / 1e6, D / 1e9, L / np.log(2), objective=objective, starts=5)
    assert second.alpha == pytest.approx(first.alpha, rel=1e-6)
    assert second.beta == pytest.approx(first.beta, rel=1e-6)
    assert second.E == pytest.approx(first.E / np.log(2), rel=1e-6)
    assert second.A == pytest.approx(first.A * 1e6**-first.alpha / np.log(2), rel=1e-5)
    assert second.B == pytest.approx(first.B * 1e9**-first.beta / np.log(2), rel=1e-5)


def test_huber_shrugs_off_an_outlier_that_moves_least_squares() -> None:
    N, D, L = models(100, noise=0.002)
    L[7] *= 1.5
    robust, squares = (fit_parametric(N, D, L, o, starts=5) for o in ("huber:1e-3", "least-squares"))
    assert abs(robust.E - TRUTH["E"]) < 0.03 < abs(squares.E - TRUTH["E"])


def test_a_huge_delta_is_least_squares() -> None:
    N, D, L = models(60, noise=0.01)
    huber = fit_parametric(N, D, L, "huber:1", starts=10)
    squares = fit_parametric(N, D, L, "log-least-squares", starts=10)
    assert huber.alpha == pytest.approx(squares.alpha, rel=1e-6)
    assert 2 * huber.objective_value == pytest.approx(squares.objective_value, rel=1e-9)


def test_data_without_a_floor_say_so() -> None:
    N, D, _ = models(40)
    fit = fit_parametric(N, D, 12.0 * N**-0.1 + 9.0 * D**-0.09, starts=10, bootstrap=5)
    assert fit.E == 0 and "E is at its bound 0: these data show no floor" in fit.warnings
    assert (fit.alpha, fit.beta) == pytest.approx((0.1, 0.09), rel=1e-4)


def test_a_term_that_does_not_matter_is_counted_in_the_floor() -> None:
    N, D, _ = models(40)
    fit = fit_parametric(N, D, 1.8 + 480 * N**-0.35, "least-squares", starts=5, bootstrap=5)
    assert (fit.E, fit.A, fit.alpha) == pytest.approx((1.8, 480, 0.35), rel=1e-6)
    assert fit.B == pytest.approx(0, abs=1e-9)
    assert "the loss does not fall with D: beta is not identified" in fit.warnings
    json.dumps(fit.as_json(), allow_nan=False)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_constant_loss_is_no_law_and_no_crash(objective: str) -> None:
    N, D, _ = models(20)
    fit = fit_parametric(N, D, np.full(20, 2.5), objective, starts=3, bootstrap=3)
    assert fit.E == pytest.approx(2.5) and len(fit.warnings) == 2
    document = json.loads(json.dumps(fit.as_json(), allow_nan=False))
    assert document["derived"]["size_exponent"] is None


def test_compute_optimum_is_where_the_loss_is_lowest() -> None:
    fit = fit_parametric(*models(60), starts=5)
    assert fit.size_exponent == pytest.approx(0.366 / (0.348 + 0.366), rel=1e-6)
    N, D = fit.optimum(1e21)
    assert 6 * N * D == pytest.approx(1e21)
    around = fit.predict(N * np.array([0.9, 1.0, 1.1]), D / np.array([0.9, 1.0, 1.1]))
    assert around[1] < min(around[0], around[2])


@pytest.mark.parametrize("resample", ["case", "wild"])
def test_interval_holds_the_truth_and_names_its_kind(resample: str) -> None:
    data = models(120, noise=0.005)
    fit = fit_parametric(*data, "log-least-squares", starts=5, bootstrap=100, resample=resample)
    assert fit.intervals is not None and fit.standard_errors is not None and fit.bootstrap is not None
    assert resample in fit.bootstrap and "100 draws" in fit.bootstrap
    for name in PARAMETERS:
        low, high = fit.intervals[name]
        assert low < getattr(fit, name) < high
        assert low - fit.standard_errors[name] < TRUTH[name] < high + fit.standard_errors[name]


def test_coverage_of_the_interval() -> None:
    """16 studies: a sound interval misses 5 or more with probability under 1 %; one of 50 %, mostly."""
    assert coverage(16, 60, "case", points=60) >= 12 / 16


@pytest.mark.slow
@pytest.mark.parametrize("resample", ["case", "wild"])
def test_coverage_of_the_interval_over_many_studies(resample: str) -> None:
    assert 0.90 <= coverage(300, 200, resample) <= 0.98


def coverage(studies: int, draws: int, resample: str, points: int = 240) -> float:
    """Share of studies (normal noise 0.005 in ln L) whose interval of alpha holds the truth."""
    hits = 0
    for study in range(studies):
        data = models(points, noise=0.005, seed=1000 + study, tails=1e9)
        fit = fit_parametric(
            *data, "log-least-squares", starts=1, bootstrap=draws, seed=study, resample=resample
        )
        assert fit.intervals is not None
        low, high = fit.intervals["alpha"]
        hits += low <= TRUTH["alpha"] <= high
    return hits / studies


def test_refusals_name_field_and_value() -> None:
    N, D, L = models(40)
    with pytest.raises(DataError, match="N, D, L: 40, 40, 39 values"):
        fit_parametric(N, D, L[1:])
    with pytest.raises(DataError, match="points=5"):
        fit_parametric(N[:5], D[:5], L[:5])
    with pytest.raises(DataError, match="N: 2 distinct"):
        fit_parametric(np.where(N > 1e9, 1e9, 1e8), D, L)
    with pytest.raises(DataError, match="cannot be told apart"):
        fit_parametric(N, 20 * N, L)
    for bad in (-1.0, 0.0, np.nan, np.inf):
        broken = L.copy()
        broken[4] = bad
        with pytest.raises(DataError, match="^L=.*row 5"):
            fit_parametric(N, D, broken)
    with pytest.raises(ConfigError, match="resample=rows"):
        fit_parametric(N, D, L, resample="rows")
    with pytest.raises(ConfigError, match="resample=wild: does not cover with objective huber"):
        fit_parametric(N, D, L, resample="wild", bootstrap=10)
    with pytest.raises(ConfigError, match="starts=0"):
        fit_parametric(N, D, L, starts=0)
    with pytest.raises(ConfigError, match="bootstrap=1"):
        fit_parametric(N, D, L, bootstrap=1)


@pytest.mark.parametrize("text", ["huber:0", "huber:-1", "huber:inf", "huber:x", "ridge", "lad:2", ""])
def test_unknown_objectives_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="^objective="):
        parse_objective(text)
