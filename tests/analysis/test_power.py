"""The planner: the reference table, whole studies by simulation, costs, budgets, the pilot, the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.gate import StudyError
from analysis.pilot import estimate_pilot
from analysis.power import RIVAL, SizeCost, format_plan, main, plan_power, standard_error, t_power
from analysis.simulate import Truth, simulate_table, write_study
from analysis.simulate import main as simulate_study
from attnres.cli import run_command
from attnres.errors import ConfigError

# noise, sizes, seeds, SE(ln m), P(reject m <= 1), P(reject 1.333): simulated, truth 1.25, alpha 0.057.
REFERENCE = [
    (0.001, 4, 1, 0.012, 1.00, 0.98),
    (0.002, 5, 1, 0.023, 1.00, 0.76),
    (0.002, 5, 3, 0.013, 1.00, 0.99),
    (0.005, 4, 1, 0.063, 0.86, 0.21),
    (0.005, 5, 3, 0.033, 1.00, 0.51),
    (0.005, 6, 5, 0.023, 1.00, 0.77),
    (0.010, 5, 3, 0.066, 0.88, 0.17),
]


@pytest.mark.parametrize(("noise", "sizes", "seeds", "error", "positive", "rival"), REFERENCE)
def test_reference_table(
    noise: float, sizes: int, seeds: int, error: float, positive: float, rival: float
) -> None:
    design = plan_power(noise, 0.057, sizes=[sizes], seeds=[seeds]).designs[0]
    assert design.standard_error == pytest.approx(error, abs=0.002)
    assert design.power_positive == pytest.approx(positive, abs=0.02)
    assert design.power_rival == pytest.approx(rival, abs=0.045)  # the table's own simulation error is 0.02


def simulate(noise: float, sizes: int, seeds: int, draws: int = 4000) -> tuple[float, float, float, float]:
    """SD of ln m, P(reject m <= 1), P(reject 1.333), P(95 % interval excludes 1.333) over whole studies.

    One decade of compute; alpha is estimated from both arms of each study, its error added by the delta
    method.
    """
    random = np.random.default_rng(0)
    alpha, x = 0.057, np.linspace(0, math.log(10), sizes)
    scatter = noise / math.sqrt(seeds) * random.standard_normal((draws, sizes, 2))
    y = -alpha * x[:, None] + np.array([0.0, -alpha * math.log(1.25)]) + scatter
    centred = x - x.mean()
    slope = -np.einsum("s,dsr->d", centred, y) / (2 * centred @ centred)
    gap = y[..., 0] - y[..., 1]
    log_m = gap.mean(axis=1) / slope
    slope_error = noise / math.sqrt(seeds * 2 * centred @ centred)
    gap_error = gap.std(axis=1, ddof=1) / math.sqrt(sizes)
    error = np.hypot(gap_error, gap.mean(axis=1) * slope_error / slope) / slope
    one, two = (stats.t.ppf(1 - level, sizes - 1) for level in (0.05, 0.025))
    below = math.log(RIVAL) - log_m
    return (
        float(log_m.std(ddof=1)),
        float(np.mean(log_m > one * error)),
        float(np.mean(below > one * error)),
        float(np.mean(below > two * error)),
    )


DESIGNS = [(0.005, 4, 1), (0.002, 5, 1), (0.01, 5, 3), (0.005, 3, 2)]


@pytest.mark.parametrize(("noise", "sizes", "seeds"), DESIGNS)
def test_power_is_what_whole_studies_show(noise: float, sizes: int, seeds: int) -> None:
    flops = np.geomspace(1e15, 1e16, sizes)
    costs = [SizeCost(str(i), float(f)) for i, f in enumerate(flops)]
    design = plan_power(noise, 0.057, sizes=[sizes], seeds=[seeds], cost_per_size=costs).designs[0]
    error, positive, rival, interval = simulate(noise, sizes, seeds)
    assert design.standard_error == pytest.approx(error, rel=0.04)
    assert design.power_positive == pytest.approx(positive, abs=0.02)
    assert design.power_rival == pytest.approx(rival, abs=0.02)
    assert design.power_interval == pytest.approx(interval, abs=0.02)


def test_noncentral_t_is_scipys() -> None:
    for distance, error, freedom in ((0.2, 0.06, 3), (0.065, 0.02, 4), (0.01, 0.05, 7)):
        expected = stats.nct.sf(stats.t.ppf(0.95, freedom), freedom, distance / error)
        assert t_power(distance, error, freedom) == pytest.approx(expected, abs=1e-9)
    assert t_power(0.0, 0.1, 5) == pytest.approx(0.05, abs=1e-9)
    assert t_power(1.0, 0.0, 5) == 1.0
    assert t_power(10.0, 1e-4, 4) == pytest.approx(1.0)


def test_scatter_over_sizes_is_not_helped_by_seeds() -> None:
    few, many = (standard_error(0.002, 0.057, 5, k, size_scatter=0.003) for k in (1, 1000))
    assert many == pytest.approx(0.003 / math.sqrt(5) / 0.057, rel=1e-2)
    assert few > many


COSTS = [SizeCost(f"s{i}", 1e15 * 2**i, 0.1 * 2**i) for i in range(6)]


def test_smallest_design_is_the_cheapest_that_suffices() -> None:
    plan = plan_power(0.002, 0.057, cost_per_size=COSTS)
    assert plan.smallest is not None
    cheaper = [d for d in plan.designs if d.flops < plan.smallest.flops]
    assert cheaper and all(d.power_interval < 0.8 for d in cheaper)
    assert plan.smallest.power_interval >= 0.8
    flops = plan.smallest.seeds * sum(cost.flops for cost in COSTS[: plan.smallest.sizes])
    assert plan.smallest.flops == pytest.approx(flops)
    assert plan.smallest.hours == pytest.approx(plan.smallest.flops / 1e16)
    assert "is the smallest design" in plan.reason


def test_none_within_the_budget_is_said() -> None:
    plan = plan_power(0.005, 0.057, cost_per_size=COSTS, budget_hours=3.0)
    assert plan.smallest is None
    assert plan.reason.startswith("none of the") and "the best," in plan.reason
    plan = plan_power(0.005, 0.057, cost_per_size=COSTS, budget_flops=1e10)
    assert plan.smallest is None and "the cheapest needs" in plan.reason
    assert format_plan(plan).endswith(plan.reason)


def test_a_budget_is_named_only_where_it_leaves_something_out() -> None:
    assert "none of the 20 designs can" in plan_power(0.05, 0.057).reason
    rich = plan_power(0.05, 0.057, cost_per_size=COSTS, budget_flops=1e30)
    assert "designs can" in rich.reason
    poor = plan_power(0.05, 0.057, cost_per_size=COSTS, budget_flops=2e16)
    assert "designs within the budget can" in poor.reason


@pytest.mark.parametrize("noise", [1e-9, 1e-8, 1e-6])
def test_power_far_from_the_tested_value_is_1(noise: float) -> None:
    """Where the distribution's own code gives nan."""
    plan = plan_power(noise, 10.0, multiplier=100.0, rival=0.01)
    assert {d.power_interval for d in plan.designs} == {1.0} and plan.smallest is not None
    worse = plan_power(noise, 10.0, multiplier=0.01, rival=100.0)
    assert {(d.power_positive, d.power_interval) for d in worse.designs} == {(0.0, 1.0)}


def test_designs_never_use_more_sizes_than_have_a_cost() -> None:
    plan = plan_power(0.002, 0.057, sizes=[3, 4, 9], cost_per_size=COSTS)
    assert {d.sizes for d in plan.designs} == {3, 4}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"noise": 0.0}, "noise"),
        ({"noise": math.nan}, "noise"),
        ({"alpha": -0.1}, "alpha"),
        ({"sizes": [2]}, "sizes"),
        ({"sizes": []}, "sizes"),
        ({"seeds": [0]}, "seeds"),
        ({"rival": 1.25}, "rival"),
        ({"enough": 1.0}, "enough"),
        ({"size_scatter": -1.0}, "size_scatter"),
        ({"cost_per_size": [SizeCost("tiny", 0.0)]}, "cost of tiny"),
        ({"cost_per_size": COSTS[:2]}, "sizes"),
        ({"budget_hours": 1.0}, "--budget-hours"),
        ({"cost_per_size": COSTS, "budget_hours": math.nan}, "--budget-hours"),
        ({"cost_per_size": COSTS, "budget_hours": 0.0}, "--budget-hours"),
        ({"cost_per_size": COSTS, "budget_flops": -1.0}, "--budget-flops"),
        ({"cost_per_size": COSTS, "budget_flops": math.inf}, "--budget-flops"),
        ({"cost_per_size": [SizeCost("a", 1e15), SizeCost("b", 1e15), SizeCost("c", 1e15)]}, "size_flops"),
    ],
)
def test_refusals(settings: dict, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}="):
        plan_power(**{"noise": 0.002, "alpha": 0.057, **settings})


def pilot_table(
    sizes: int, seeds: int, rules: int, noise: float, shared: float, seed: int = 0
) -> pd.DataFrame:
    """Losses with noise per run and an effect of the seed that the rules share."""
    random = np.random.default_rng(seed)
    rows = []
    for s in range(sizes):
        for k in range(seeds):
            common = shared * random.standard_normal()
            for r in range(rules):
                log_loss = 0.6 - 0.057 * s + common + noise * random.standard_normal() - 0.01 * r
                row = {"size": f"s{s}", "rule": f"r{r}", "seed": k, "loss": math.exp(log_loss)}
                rows.append({**row, "compute": 1e15 * math.e**s, "train_seconds": 36.0 * (s + 1)})
    return pd.DataFrame(rows)


def test_pilot_takes_out_what_the_rules_of_a_seed_share() -> None:
    pilot = estimate_pilot(pilot_table(4, 40, 2, noise=0.002, shared=0.02), "p")
    assert pilot.paired and pilot.degrees_of_freedom == 4 * 39
    assert pilot.noise == pytest.approx(0.002, rel=0.15)
    assert pilot.noise_low < 0.002 < pilot.noise_high
    assert pilot.alpha == pytest.approx(0.057, abs=0.01)
    assert [c.name for c in pilot.costs] == ["s0", "s1", "s2", "s3"]
    assert pilot.costs[1].flops == pytest.approx(2e15 * math.e)
    assert pilot.costs[1].hours == pytest.approx(2 * 72 / 3600)


def test_pilot_noise_interval_covers() -> None:
    inside = 0
    for seed in range(25):
        pilot = estimate_pilot(pilot_table(2, 3, 2, 0.002, 0.01, seed), "p")
        inside += pilot.noise_low <= 0.002 <= pilot.noise_high
    assert inside >= 20  # a sound 95 % interval misses more than 5 of 25 with probability 0.1 %


def test_pilot_of_one_rule_or_few_sizes() -> None:
    pilot = estimate_pilot(pilot_table(2, 5, 1, noise=0.002, shared=0.0), "p")
    assert not pilot.paired and pilot.alpha is None and pilot.degrees_of_freedom == 8
    with pytest.raises(StudyError, match="study=p: no size has 2 or more finished seeds"):
        estimate_pilot(pilot_table(3, 1, 2, 0.002, 0.0), "p")


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, "--noise .002 --alpha .057 --sizes 5 --seeds 3 --json".split()) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["designs"][0]["power_rival"] == pytest.approx(0.99, abs=0.01)
    assert document["smallest"]["sizes"] == 5 and document["pilot"] is None
    arguments = "--noise .002 --alpha .057 --size-flops 1e15,2e15,4e15 --size-hours 1,2,4 --budget-hours 8"
    assert run_command(main, arguments.split()) == 0
    assert "none of the" in capsys.readouterr().out


def test_command_reads_a_pilot_from_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = ["study=pilot", f"runs_dir={tmp_path}", "noise=0.002", "alpha=0.06", "sizes=4", "seeds=4"]
    assert run_command(simulate_study, made) == 0
    capsys.readouterr()
    assert run_command(main, ["study=pilot", f"runs_dir={tmp_path}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pilot"]["runs"] == 32 and document["pilot"]["paired"]
    assert document["noise"] == document["pilot"]["noise"]
    assert document["pilot"]["noise_low"] < 0.002 < document["pilot"]["noise_high"]
    assert document["alpha"] == pytest.approx(0.06, abs=0.005)
    assert document["at_noise_high"]["noise"] == document["pilot"]["noise_high"]
    assert all(design["hours"] > 0 for design in document["designs"])
    assert run_command(main, ["study=pilot", f"runs_dir={tmp_path}", "--seeds", "1"]) == 0
    text = capsys.readouterr().out
    assert (
        text.startswith("pilot pilot: 32 finished runs") and "at the upper end of the pilot's noise" in text
    )
    first, second, *_ = sorted(tmp_path.glob("pilot/*/record.json"))
    kept = first.read_text()
    for text, said in (
        (second.read_text(), "records in the wrong folder"),
        (kept.replace('"fingerprint": "', '"fingerprint": "x'), "the training data is not the same"),
        ("{", "torn or not JSON"),
    ):
        first.write_text(text)
        assert run_command(main, ["study=pilot", f"runs_dir={tmp_path}"]) == 2
        error = capsys.readouterr().err
        assert said in error and "--allow" not in error
    first.unlink()  # a pilot need not be whole
    assert run_command(main, ["study=pilot", f"runs_dir={tmp_path}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pilot"]["runs"] == 31


def test_values_of_an_axis_are_no_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Learning rates differ in loss by ten times the noise; at one of them the noise is what it is."""
    tables = []
    for rate, worse in ((0.001, 1.02), (0.004, 1.0), (0.016, 1.03)):
        one = simulate_table(Truth(sizes=4, seeds=4, noise=0.002), np.random.default_rng(int(1e3 * rate)))
        tables.append(one.assign(loss=one["loss"] * worse, **{"optim.learning_rate": rate}))
    write_study(tmp_path / "p", pd.concat(tables, ignore_index=True), axes="optim.learning_rate")
    assert run_command(main, ["study=p", f"runs_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "optim.learning_rate has the values 0.001, 0.004, 0.016" in error and 'where="optim.' in error
    for rate in (0.001, 0.016):
        words = ["study=p", f"runs_dir={tmp_path}", f"where=optim.learning_rate={rate}", "--json"]
        assert run_command(main, words) == 0
        pilot = json.loads(capsys.readouterr().out)["pilot"]
        assert pilot["runs"] == 32 and pilot["noise_low"] < 0.002 < pilot["noise_high"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--alpha .057", "--noise: give it"),
        ("--noise .002", "--alpha: give it"),
        ("--noise x --alpha .057", "--noise=x"),
        ("--noise .002 --alpha .057 --sizes 2.5", "--sizes=2.5"),
        ("--noise .002 --alpha .057 --size-flops 1e15,2e15 --size-hours 1", "--size-hours=1"),
        ("--noise .002 --alpha .057 --power 3", "--power: unknown option"),
        ("stduy=smoke", "stduy=smoke: unknown"),
        ("study=nothing_here", "study=nothing_here"),
        ("study=../x", "study=../x: name the study"),
        ("--noise 1e300 --alpha .057", "noise=1e+300: must be from"),
        ("--noise .002 --alpha 1e-300", "alpha=1e-300: must be from"),
        ("--noise .002 --alpha .057 --multiplier 1e300", "multiplier=1e+300: must be from"),
        ("--noise .002 --alpha .057 --sizes inf", "--sizes=inf: whole numbers"),
        ("--noise .002 --alpha .057 --seeds 1e9", "seeds=[1000000000]: at most"),
        ("--noise .002 --alpha .057 --size-flops 1,2,3 --size-hours nan,1,1", "cost of size 1=nan"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(main, arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
