"""From a report of rates to the config file of a study: what is written, what is refused, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from rows_support import edit, trials

from analysis.load import load_study
from analysis.rates import compute_rates
from analysis.report import main
from analysis.simulate import write_study
from attnres.cli import run_command

RATES = (5e-3, 10e-3, 20e-3, 40e-3)


def write_bracket(
    runs: Path,
    best: dict[tuple[str, str], float],
    wobble: float = 0.0,
    rates: tuple[float, ...] = RATES,
) -> Path:
    """Sizes and rules with the bottom of their bowl, two seeds whose bottoms are `wobble` to either side."""
    tables = []
    for size in dict.fromkeys(size for size, _ in best):
        for rate in rates:
            losses = {
                rule: tuple(
                    2 + 0.1 * np.log(rate / bottom * np.exp(side * wobble)) ** 2 + 0.01 * (side > 0)
                    for side in (-1, 1)
                )
                for (of, rule), bottom in best.items()
                if of == size
            }
            tables.append(trials(losses, size=size).assign(**{"optim.learning_rate": rate}))
    write_study(runs / "s", pd.concat(tables), axes="optim.learning_rate")
    edit(runs / "s" / "study.json", report="rates")
    return runs / "s"


BEST = {
    ("a", "prenorm"): 14e-3,
    ("a", "attnres_block_n8"): 12e-3,
    ("b", "prenorm"): 9e-3,
    ("b", "attnres_block_n8"): 90e-3,  # beyond the bracket
}


def report(runs: Path, *words: str) -> int:
    return run_command(main, ["study=s", f"runs_dir={runs}", "--no-figures", *words])


def read(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text()))


def test_the_baselines_optimum_serves_all_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_bracket(tmp_path, BEST, wobble=0.05)
    target = tmp_path / "mine" / "rates" / "first.yaml"
    assert report(tmp_path, "--write-rates", str(target)) == 0
    assert f"use: rates=first --config-dir {tmp_path / 'mine'}" in capsys.readouterr().out
    written = read(target)
    assert (written["kind"], written["rates"], written["refused"]) == ("shared", {"a": 0.014, "b": 0.009}, [])
    source = written["source"]
    assert (source["study"], source["baseline"]) == ("s", "prenorm") and source["date"] and source["data"]
    first = source["optima"][0]
    assert (first["size"], first["rule"], first["between"], first["seeds"]) == (
        "a",
        "prenorm",
        [5e-3, 20e-3],
        2,
    )
    ids = {trial["id"] for trial in json.loads((folder / "study.json").read_text())["trials"]}
    assert len(first["trials"]) == 6 and set(first["trials"]) <= ids
    # Half the distance of two seeds is their standard error; t with one degree of freedom is 12.7.
    low, high = first["interval_95"]
    assert np.log(high / 0.014) == pytest.approx(12.706 * 0.05, rel=1e-3)
    assert np.log(low / 0.014) == pytest.approx(-12.706 * 0.05, rel=1e-3)


def test_an_edge_is_refused_by_name_and_never_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bracket(tmp_path, BEST)
    assert report(tmp_path, "--write-rates=own", "--per-rule", f"--config-dir={tmp_path}") == 1
    assert (
        "refused: b attnres_block_n8: best 0.04: at the edge of the bracket: widen it"
        in capsys.readouterr().out
    )
    written = read(tmp_path / "rates" / "own.yaml")
    assert written["rates"] == {"a": {"prenorm": 0.014, "attnres_block_n8": 0.012}, "b": {"prenorm": 0.009}}
    assert [(one["size"], one["rule"]) for one in written["refused"]] == [("b", "attnres_block_n8")]
    write_bracket(tmp_path / "edge", {("a", "prenorm"): 1e-3, ("a", "attnres_block_n8"): 14e-3})
    assert report(tmp_path / "edge", "--write-rates=none2", f"--config-dir={tmp_path}") == 2
    error = capsys.readouterr().err
    assert "no rate to write: a prenorm: best 0.005: at the edge of the bracket: widen it" in error
    assert not (tmp_path / "rates" / "none2.yaml").exists()


def diverge(folder: Path, rate: float, seed: int = 0) -> None:
    for trial in json.loads((folder / "study.json").read_text())["trials"]:
        if (
            trial["axes"]["optim.learning_rate"] == rate
            and trial["rule"] == "prenorm"
            and trial["seed"] == seed
        ):
            edit(folder / trial["id"] / "record.json", status="diverged", validation=None)


def only_curve(runs: Path) -> Any:
    return compute_rates(load_study(runs, "s", allow=["diverged"])).curves[0]


def test_a_rate_that_diverged_bounds_the_bracket(tmp_path: Path) -> None:
    write_bracket(tmp_path / "edge", {("a", "prenorm"): 20e-3})
    diverge(tmp_path / "edge" / "s", 40e-3)
    curve = only_curve(tmp_path / "edge")
    assert curve.rates == RATES[:3] and curve.diverged == (40e-3,) and curve.vertex_rate is None
    assert curve.refused == "at the edge of the bracket, and 0.04 diverged: try rates between"
    write_bracket(tmp_path / "inside", {("a", "prenorm"): 9e-3})
    diverge(tmp_path / "inside" / "s", 20e-3)
    curve = only_curve(tmp_path / "inside")
    assert curve.rates == (5e-3, 10e-3, 40e-3) and curve.vertex_rate is None
    assert curve.refused == "0.02, beside the best rate, diverged: try rates between"
    write_bracket(tmp_path / "far", {("a", "prenorm"): 9e-3})
    diverge(tmp_path / "far" / "s", 40e-3)
    assert only_curve(tmp_path / "far").vertex_rate == pytest.approx(9e-3)
    write_bracket(tmp_path / "all", {("a", "prenorm"): 9e-3, ("b", "prenorm"): 9e-3})
    for path in (tmp_path / "all" / "s").glob("*/record.json"):
        if json.loads(path.read_text())["size"] == "b":
            edit(path, status="diverged", validation=None)
    result = compute_rates(load_study(tmp_path / "all", "s", allow=["diverged"]))
    assert result.absent == (("b", "prenorm", "there is no rate at which all trials finished"),)


def test_two_rates_are_too_few(tmp_path: Path) -> None:
    write_bracket(tmp_path, {("a", "prenorm"): 9e-3}, rates=(5e-3, 10e-3))
    assert only_curve(tmp_path).refused == "2 rates are fewer than the 3 that a parabola needs"


@pytest.mark.parametrize("bottom", [5e-3 * 2**0.5, 40e-3 / 2**0.5])
def test_a_tie_with_an_end_leaves_the_bracket_open(tmp_path: Path, bottom: float) -> None:
    folder = write_bracket(tmp_path, {("a", "prenorm"): 14e-3})
    for trial in json.loads((folder / "study.json").read_text())["trials"]:
        steps = abs(np.log2(trial["axes"]["optim.learning_rate"] / bottom))
        edit(folder / trial["id"] / "record.json", validation={"loss_nats": 2 + round(steps, 6)})
    curve = only_curve(tmp_path)
    assert min(curve.losses) in (curve.losses[0], curve.losses[-1])
    assert curve.refused == "at the edge of the bracket: widen it" and curve.vertex_rate is None


def test_means_are_over_the_same_seeds(tmp_path: Path) -> None:
    """The seed that lacks one rate would shift that rate's mean alone."""
    folder = write_bracket(tmp_path, {("a", "prenorm"): 14e-3})
    for path in folder.glob("*/record.json"):
        record = json.loads(path.read_text())
        if record["seed"] == 1:
            edit(
                path, validation={**record["validation"], "loss_nats": record["validation"]["loss_nats"] + 1}
            )
    plan = json.loads((folder / "study.json").read_text())
    gone = next(t for t in plan["trials"] if (t["seed"], t["axes"]["optim.learning_rate"]) == (1, 40e-3))
    (folder / gone["id"] / "record.json").unlink()
    (curve,) = compute_rates(load_study(tmp_path, "s", allow=["missing"])).curves
    assert curve.vertex_rate == pytest.approx(14e-3) and curve.seeds == 1


def test_a_file_with_other_rates_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bracket(tmp_path, BEST)
    words = ("--write-rates", "mine", "--config-dir", str(tmp_path))
    assert report(tmp_path, *words) == 0
    assert report(tmp_path, *words) == 0  # the same rates again
    write_bracket(tmp_path, {**BEST, ("a", "prenorm"): 13e-3})
    assert report(tmp_path, *words) == 2
    assert "exists, with other content" in capsys.readouterr().err
    assert read(tmp_path / "rates" / "mine.yaml")["rates"]["a"] == 0.014


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--write-rates=mine"], "--write-rates=mine: goes into a folder of yours: add --config-dir DIR"),
        (["--write-rates=x/mine.yaml"], "studies find such a file as DIR/rates/NAME.yaml"),
        (["--write-rates=rates/none.yaml"], "is not none"),
        (["--write-rates=a", "--shared", "--per-rule"], "--shared and --per-rule are both given"),
        (["--per-rule"], "--per-rule: goes with --write-rates"),
        (["--config-dir=x"], "--config-dir: a report needs no config files; it goes with --write-rates"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(tmp_path, *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_report_of_something_else_has_no_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_bracket(tmp_path, {("a", "prenorm"): 9e-3, ("a", "attnres_block_n8"): 9e-3}, rates=(5e-3,))
    edit(folder / "study.json", report="rows")
    assert report(tmp_path, "--write-rates=rates/mine.yaml") == 2
    assert "study=s has no report of rates" in capsys.readouterr().err
