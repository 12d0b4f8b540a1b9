"""Tables and expressions of `python -m analysis.fit`: what is read, what is refused, what is doubted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis.fit import fit_csv
from analysis.isoflop import fit_isoflop
from analysis.points import parse_expression
from attnres.errors import ConfigError, DataError


@pytest.mark.parametrize("text", ['"C"junk', "C*", "*C", "C//k", "", '"C" k', "C * / k", 'C*"k"x', "/C"])
def test_nothing_in_an_expression_is_passed_over(text: str) -> None:
    with pytest.raises(ConfigError, match="--columns C="):
        parse_expression(text, ["C", "k"], "--columns C")


def test_expressions() -> None:
    header = ["C", "k", "tokens/s", "Training FLOP"]
    for text, factors in {
        " C * 1e+6 / k": (("C", 1), (1e6, 1), ("k", -1)),
        '"tokens/s"*2': (("tokens/s", 1), (2.0, 1)),
        "6*Training FLOP/'tokens/s'": ((6.0, 1), ("Training FLOP", 1), ("tokens/s", -1)),
    }.items():
        assert parse_expression(text, header, "x").factors == factors


@pytest.mark.parametrize("number", ["1_000", "\uff11", "1\u00a0000", "1,5"])
def test_what_no_table_means_is_no_number(tmp_path: Path, number: str) -> None:
    (tmp_path / "t.csv").write_text(f'C,loss\n"{number}",3\n2,2\n3,1.5\n', encoding="utf-8")
    with pytest.raises(DataError, match="is not a number"):
        fit_csv(tmp_path / "t.csv", "power", "C=C,loss=loss")


def test_overflow_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("C,k,loss\n1e10,1e-310,3\n2,1,2\n3,1,1.5\n")
    with pytest.raises(DataError, match=r"C=inf \(line 2, C/k\): must be finite and positive"):
        fit_csv(tmp_path / "t.csv", "power", "C=C/k,loss=loss")


@pytest.mark.parametrize(("law", "objective"), [("power", "lad"), ("power_floor", "huber:1e-3")])
def test_compute_over_six_hundred_decades(tmp_path: Path, law: str, objective: str) -> None:
    """Warnings of arithmetic are errors here."""
    rows = [f"1e{p},{2 + 10 ** (-p / 300)}" for p in range(-300, 301, 50)]
    (tmp_path / "t.csv").write_text("C,loss\n" + "\n".join(rows))
    document = fit_csv(tmp_path / "t.csv", law, "C=C,loss=loss", objective=objective, starts=50, bootstrap=0)
    assert document["points_used"] == 13


def test_what_cannot_be_a_loss_is_doubted(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("C,loss\n1,1e9\n2,1e8\n3,1e6\n")
    (warning,) = fit_csv(tmp_path / "t.csv", "power", "C=C,loss=loss")["warnings"]
    assert warning == "the loss runs from 1e+06 to 1e+09: is loss a loss?"


def test_a_refusal_of_many_budgets_is_short() -> None:
    size = np.geomspace(1e6, 1e9, 40)
    with pytest.raises(DataError, match="and 37 more") as caught:
        fit_isoflop(size, 6 * size**2, np.full(40, 3.0))
    assert len(str(caught.value)) < 400
