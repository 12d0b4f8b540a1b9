"""The report of a bracket of learning rates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rows_support import LOSSES, edit, trials, write

from analysis.load import load_study
from analysis.rates import _interval, compute_rates, parabola_vertex
from analysis.rates_figures import rates as figure_of
from analysis.report import main
from analysis.simulate import write_study
from attnres.cli import run_command

RATES = (5e-3, 10e-3, 20e-3, 40e-3)
BEST = {"prenorm": 14e-3, "attnres_block_n8": 40e-3}  # where the bowl of ln(rate) has its bottom
FLOOR = {"prenorm": 2.0, "attnres_block_n8": 1.9}


def write_rates(runs: Path, rules: tuple[str, ...] = tuple(BEST), report: str = "rates") -> Path:
    """Two sizes, two seeds, four rates: a bowl for each rule, a seed's effect of 0.01."""
    tables = []
    for size in ("a", "b"):
        for rate in RATES:
            losses = {
                rule: tuple(FLOOR[rule] + 0.1 * np.log(rate / BEST[rule]) ** 2 + seed for seed in (0, 0.01))
                for rule in rules
            }
            tables.append(trials(losses, size=size).assign(**{"optim.learning_rate": rate}))
    write_study(runs / "s", pd.concat(tables), axes="optim.learning_rate")
    edit(runs / "s" / "study.json", report=report)
    return runs / "s"


def test_an_interval_without_ends_is_none() -> None:
    """Seeds that disagree about a bowl that is nearly flat."""
    rates = np.log([0.01, 0.02, 0.04])
    flat = np.array([[2.05, 1.9502], [2.0, 2.0], [1.96, 2.0402]])
    assert parabola_vertex(rates, flat.mean(axis=1)) is not None
    assert _interval(rates, flat) is None
    bowl = np.array([[2.05, 2.06], [2.0, 2.01], [2.06, 2.05]])
    low, high = _interval(rates, bowl) or (0, 0)
    assert 0.01 < low < 0.02 < high < 0.04


def test_best_rates_and_edges(tmp_path: Path) -> None:
    write_rates(tmp_path)
    result = compute_rates(load_study(tmp_path, "s"))
    assert [(curve.size, curve.rule) for curve in result.curves][:2] == [
        ("a", "prenorm"),
        ("a", "attnres_block_n8"),
    ]
    base, rule = result.of_size("b")
    assert base.rates == RATES and base.seeds == 2
    assert base.losses[1] == pytest.approx(2.005 + 0.1 * np.log(10 / 14) ** 2)
    assert base.best_rate == 10e-3 and not base.at_edge
    assert base.vertex_rate == pytest.approx(14e-3) and base.vertex_loss == pytest.approx(2.005)
    assert rule.best_rate == 40e-3 and rule.at_edge and rule.vertex_rate is None
    own, shared = result.gaps["b"]["attnres_block_n8"]
    assert own == pytest.approx(1.905 - base.best_loss)
    assert shared == pytest.approx(1.905 + 0.1 * np.log(4) ** 2 - base.best_loss)


def test_a_curve_has_as_many_seeds_as_its_poorest_rate(tmp_path: Path) -> None:
    folder = write_rates(tmp_path)
    plan = json.loads((folder / "study.json").read_text())
    gone = next(t for t in plan["trials"] if (t["size"], t["rule"], t["seed"]) == ("a", "prenorm", 1))
    (folder / gone["id"] / "record.json").unlink()
    curves = compute_rates(load_study(tmp_path, "s", allow=["missing"])).of_size("a")
    assert [curve.seeds for curve in curves] == [1, 2]


def test_vertex_of_a_parabola() -> None:
    x = np.log([1.0, 3.0, 4.0])
    assert parabola_vertex(x, 2 + 3 * (x - 0.7) ** 2) == pytest.approx((0.7, 2))
    assert parabola_vertex(x, 2 - 3 * (x - 0.7) ** 2) is None


def test_report_of_a_bracket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_rates(tmp_path)
    assert main(["study=s", f"runs_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "a prenorm: 0.01, loss 2.0163; vertex at 0.014" in out
    assert "a attnres_block_n8: 0.04, loss 1.9050; at the edge of the bracket: widen it" in out
    text = (folder / "report" / "report.md").read_text()
    assert "| `attnres_block_n8` | 2.3374 | 2.0972 | 1.9530 | **1.9050** |  | -0.1113 | +0.0809 |" in text
    results = json.loads((folder / "report" / "results.json").read_text())
    assert results["kind"] == "rates" and len(results["curves"]) == 4
    gap = results["difference_nats"]["a"]["attnres_block_n8"]
    assert gap["own_best"] == pytest.approx(-0.1113, abs=1e-4) and gap["baselines_best"] > 0
    assert (folder / "report" / "learning_rates.png").stat().st_size > 1000


def test_figure_marks_the_best_rate(tmp_path: Path) -> None:
    write_rates(tmp_path)
    result = compute_rates(load_study(tmp_path, "s"))
    axes = figure_of(result).axes[0]
    curve, best = axes.lines[0], axes.lines[1]
    assert list(curve.get_xdata()) == list(RATES)
    assert list(curve.get_ydata()) == list(result.curves[0].losses)
    assert (best.get_xdata()[0], best.get_ydata()[0]) == (10e-3, result.curves[0].best_loss)


def test_one_rule_is_enough_and_a_chosen_rate_is_another_report(tmp_path: Path) -> None:
    write_rates(tmp_path, rules=("prenorm",))
    assert len(compute_rates(load_study(tmp_path, "s")).curves) == 2
    write_rates(tmp_path / "two")
    data = load_study(tmp_path / "two", "s", where={"optim.learning_rate": "0.01"})
    assert data.report == "multiplier" and len(data.table) == 8


def test_what_spoils_a_bracket_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_rates(tmp_path)
    path = sorted(folder.glob("*/record.json"))[0]
    edit(path, status="diverged", validation=None)
    command = ["study=s", f"runs_dir={tmp_path}", "--no-figures"]
    assert run_command(main, command) == 2
    assert "1 of 32 trials diverged" in capsys.readouterr().err
    assert run_command(main, [*command, "--allow", "diverged"]) == 0
    path.unlink()
    assert run_command(main, command) == 2
    assert "1 of 32 trials have no record" in capsys.readouterr().err
    write(tmp_path, trials(LOSSES), "rates", study="flat")
    assert run_command(main, ["study=flat", f"runs_dir={tmp_path}", "--no-figures"]) == 2
    assert "report=rates: its axes have no optim.learning_rate" in capsys.readouterr().err
