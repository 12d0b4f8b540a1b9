"""`python -m analysis.fit`: laws on a CSV, the grammar of columns and conditions, the JSON, the refusals."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.compute_law import fit_compute_law
from analysis.fit import fit_csv, main
from analysis.points import read_points
from analysis.published_fits import PAPER
from attnres.cli import run_command
from attnres.errors import ConfigError, DataError, UserError

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = "N=Model Size,D=Training Tokens,loss=loss"
TABLE_2 = "N=active_params_m*1e6,D=tokens_b*1e9,loss=loss_prenorm"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """60 models of a known parametric law, header with spaces, a text column, rows in random order."""
    random = np.random.default_rng(0)
    N, D = (np.exp(random.uniform(np.log(low), np.log(high), 60)) for low, high in ((4e7, 1e10), (2e8, 3e11)))
    L = 1.8 + 480 * N**-0.35 + 2000 * D**-0.37
    rows = [
        {"Model Size": n, "Training Tokens": d, "Training FLOP": 6 * n * d, "loss": loss, "rule": "ba"[i % 2]}
        for i, (n, d, loss) in enumerate(zip(N, D, L, strict=True))
    ]
    return write(tmp_path / "runs.csv", rows)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_parametric_through_the_command(table: Path) -> None:
    command = [sys.executable, "-m", "analysis.fit", str(table), "--law", "parametric", "--columns", COLUMNS]
    options = ["--drop-highest", "5", "--where", "C<1e22", "--starts", "20", "--bootstrap", "20", "--json"]
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(done.stdout)
    assert document["law"] == "parametric"
    for name, value in {"E": 1.8, "A": 480, "B": 2000, "alpha": 0.35, "beta": 0.37}.items():
        assert document["parameters"][name] == pytest.approx(value, rel=1e-6)
        assert document["intervals"][name] == pytest.approx([value, value], rel=1e-5)
        assert document["standard_errors"][name] == pytest.approx(0, abs=1e-4 * value)
    assert document["points_left_out"]["drop_highest"] == 5
    used = document["points_used"] + sum(document["points_left_out"].values())
    assert used == document["points_in_file"] == 60
    assert document["starts"] == document["starts_agreeing"] == 20
    assert document["objective"] == "huber:0.001" and document["objective_value"] < 1e-20
    assert "5 rows of highest loss" in document["outlier_rule"]


def test_missing_tokens_come_from_compute(table: Path) -> None:
    whole = fit_csv(table, "parametric", COLUMNS, starts=3, bootstrap=0)
    derived = fit_csv(table, "parametric", "N=Model Size,C=Training FLOP,loss=loss", starts=3, bootstrap=0)
    by_hand = "N=Model Size,D=Training FLOP/6/Model Size,loss=loss"
    divided = fit_csv(table, "parametric", by_hand, starts=3, bootstrap=0)
    assert derived["columns"]["D"] == "C/(6*N)"
    for document in (derived, divided):
        assert document["parameters"] == pytest.approx(whole["parameters"], rel=1e-6)


def test_units_by_expression_scale_the_coefficients(table: Path) -> None:
    first = fit_csv(table, "parametric", COLUMNS, starts=3, bootstrap=0)["parameters"]
    millions = COLUMNS.replace("Model Size", "Model Size/1e6")
    second = fit_csv(table, "parametric", millions, starts=3, bootstrap=0)["parameters"]
    assert second["A"] == pytest.approx(first["A"] * 1e6 ** -first["alpha"], rel=1e-5)


@pytest.mark.parametrize(
    ("columns", "where"),
    [
        (COLUMNS, "C<1e21"),  # of N, D and C the one that is not given
        ("N=Model Size,C=Training FLOP,loss=loss", "D<1e10"),
        ("D=Training Tokens,C=Training FLOP,loss=loss", "N<1e9"),
    ],
)
def test_conditions_on_what_comes_from_6_n_d(table: Path, columns: str, where: str) -> None:
    rows = list(csv.DictReader(table.read_text().splitlines()))
    column, limit = {"C": "Training FLOP", "D": "Training Tokens", "N": "Model Size"}[where[0]], where[2:]
    expected = [float(row["loss"]) for row in rows if float(row[column]) < float(limit)]
    assert 0 < len(expected) < len(rows)
    points = read_points(table, columns, ("N", "D", "loss"), where)
    assert points.values["loss"].tolist() == expected


def test_where_and_drop_highest_choose_rows(table: Path) -> None:
    def values(**options: Any) -> np.ndarray:
        return np.sort(read_points(table, COLUMNS, ("N", "D", "loss"), **options).values["loss"])

    every = values()
    assert len(every) == 60
    assert values(drop_highest=7) == pytest.approx(every[:-7])
    assert len(values(where="rule==a")) == len(values(where="rule != a")) == 30
    limited = read_points(table, COLUMNS, ("N", "D", "loss"), where="N>=1e9 and Training Tokens<1e10")
    assert (limited.values["N"] >= 1e9).all() and (limited.values["D"] < 1e10).all()
    assert limited.left_out["where"] == 60 - limited.used
    assert (
        len(values(where="'Training FLOP' < 1e20", drop_highest=2))
        == np.sum(read_points(table, "C=Training FLOP,loss=loss", ("C", "loss")).values["C"] < 1e20) - 2
    )


def test_choice_of_dropped_rows_does_not_depend_on_their_order(tmp_path: Path) -> None:
    rows = [{"C": c, "loss": 2.0} for c in (1e15, 2e15, 4e15, 8e15)]
    first, second = (
        read_points(write(tmp_path / "runs.csv", order), "C=C,loss=loss", ("C", "loss"), drop_highest=1)
        for order in (rows, rows[::-1])
    )
    assert set(first.values["C"]) == set(second.values["C"])


def test_power_law_of_the_published_table() -> None:
    document = fit_csv(PAPER / "scaling_law.csv", "power", TABLE_2.replace("*1e6", "*1e6/8.64e19"))
    assert document["parameters"]["A"] == pytest.approx(1.862, abs=5e-4)
    assert document["parameters"]["alpha"] == pytest.approx(0.0549, abs=5e-5)
    assert document["parameters"]["E"] == 0 and document["fixed"] == ["E"]
    assert document["columns"]["C"] == "6*N*D"
    low, high = document["intervals"]["alpha"]
    assert low < 0.0549 < high
    low, high = document["intervals"]["A"]
    assert low < 1.862 < high


def test_floor_of_the_published_table_is_not_identified() -> None:
    document = fit_csv(PAPER / "scaling_law.csv", "power_floor", TABLE_2)
    assert document["identified"] is False
    assert document["parameters"] == {"A": None, "alpha": None, "E": None}
    assert any("not identified" in text for text in document["warnings"])


@pytest.mark.parametrize("objective", ["log-least-squares", "huber:1e-3", "lad", "least-squares"])
def test_floor_of_clean_data_is_found(tmp_path: Path, objective: str) -> None:
    C = np.geomspace(1e15, 1e21, 12)
    rows = [{"flops": c, "val": 1.5 + 60 * c**-0.12} for c in C]
    path = write(tmp_path / "runs.csv", rows)
    document = fit_csv(path, "power_floor", "C=flops,loss=val", objective=objective, starts=20, bootstrap=0)
    assert document["parameters"] == pytest.approx({"A": 60, "alpha": 0.12, "E": 1.5}, rel=1e-5)


def test_robust_power_law_ignores_an_outlier() -> None:
    C = np.geomspace(1e15, 1e19, 15)
    L = 20 * C**-0.05
    L[3] *= 1.2
    for objective in ("huber:1e-4", "lad"):
        fit = fit_compute_law(C, L, objective, starts=10, bootstrap=20)
        assert fit.alpha == pytest.approx(0.05, abs=1e-4)
        assert fit.E == 0 and fit.starts_agreeing == 10
    assert abs(fit_compute_law(C, L, "log-least-squares", starts=5).alpha - 0.05) > 1e-3


@pytest.mark.parametrize("objective", ["huber:1e-3", "huber:1", "lad", "log-least-squares", "least-squares"])
@pytest.mark.parametrize("bootstrap", [0, 20])
def test_a_power_law_without_a_floor_never_finds_one(objective: str, bootstrap: int) -> None:
    """On data that have a floor, and in every draw: the search once left the start value of E."""
    random = np.random.default_rng(0)
    C = np.geomspace(1e17, 1e22, 40)
    L = (1.5 + 400 * C**-0.13) * np.exp(0.01 * random.standard_normal(40))
    fit = fit_compute_law(C, L, objective, starts=20, bootstrap=bootstrap)
    assert fit.E == 0
    assert abs(fit.alpha - 0.05) < 0.02  # with the floor it is 0.13
    if objective in ("huber:1", "log-least-squares"):
        slope, intercept = np.polyfit(np.log(C), np.log(L), 1)
        assert fit.alpha == pytest.approx(-slope, rel=1e-6)
        assert fit.A == pytest.approx(np.exp(intercept), rel=1e-5)
    if fit.intervals:
        low, high = fit.intervals["alpha"]
        assert low < fit.alpha < high < 0.08


def test_compute_law_agrees_with_the_closed_form() -> None:
    random = np.random.default_rng(0)
    C = np.geomspace(1e15, 1e19, 9)
    L = 20 * C**-0.05 * np.exp(0.01 * random.standard_normal(9))
    slope, intercept = np.polyfit(np.log(C), np.log(L), 1)
    fit = fit_compute_law(C, L, "log-least-squares", starts=5)
    assert fit.alpha == pytest.approx(-slope, rel=1e-6)
    assert fit.A == pytest.approx(np.exp(intercept), rel=1e-5)


def test_isoflop_through_the_library(tmp_path: Path) -> None:
    rows = [
        {"n": 0.1 * c**0.5 * f, "c": c, "l": 2 + 0.03 * np.log(f) ** 2 - 0.01 * np.log(c / 1e18)}
        for c in (1e18, 1e19, 1e20, 1e21)
        for f in (0.3, 0.6, 1.0, 1.7, 3.0)
    ]
    document = fit_csv(write(tmp_path / "iso.csv", rows), "isoflop", "N=n,C=c,loss=l")
    assert document["parameters"] == pytest.approx({"k": 0.1, "a": 0.5}, rel=1e-6)
    assert len(document["optima"]) == 4 and document["refused"] == []
    json.dumps(document, allow_nan=False)


def test_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(PAPER / "scaling_law.csv"), "--law", "power", "--columns", TABLE_2, "--objective", "lad"]
    assert run_command(main, [*arguments, "--bootstrap", "20", "--starts", "7"]) == 0
    text = capsys.readouterr().out
    assert "starts: 7 of 7" in text and "points: 5 used of 5" in text and "C = 6*N*D" in text


def test_empty_cells_are_refused_or_dropped_on_request(tmp_path: Path) -> None:
    rows = [{"C": c, "loss": 20 * c**-0.05} for c in np.geomspace(1e15, 1e18, 6)]
    rows[2]["loss"] = ""
    path = write(tmp_path / "runs.csv", rows)
    with pytest.raises(DataError, match=r"loss='' \(line 4\): is not a number"):
        fit_csv(path, "power", "C=C,loss=loss")
    document = fit_csv(path, "power", "C=C,loss=loss", drop_empty=True)
    assert document["points_used"] == 5 and document["points_left_out"]["empty"] == 1


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("N=params,D=Training Tokens,loss=loss", {}, "--columns N=params: no column 'params'"),
        ("N=Model Size,loss=loss", {}, "needs D, or N and C"),
        ("N=Model Size,D=Training Tokens", {}, "needs loss for this law"),
        ("N=Model Size,N=loss,D=Training Tokens,loss=loss", {}, "N is given twice"),
        ("X=Model Size", {}, "--columns=X=Model Size: the name is one of"),
        ("N", {}, "--columns=N: write NAME=column"),
        ("N=6*2,D=Training Tokens,loss=loss", {}, "names no column"),
        ("N=rule,D=Training Tokens,loss=loss", {}, "rule='b' (line 2): is not a number"),
        ("N=Model Size*-1,D=Training Tokens,loss=loss", {}, "must be finite and positive"),
        (COLUMNS, {"where": "C ~ 3"}, "--where=C ~ 3: write name operator value"),
        (COLUMNS, {"where": "width>3"}, "no column 'width'"),
        (COLUMNS, {"where": "rule>b"}, "'b' is not a number"),
        (COLUMNS, {"where": "__import__('os').system('true')<1"}, "no column"),
        (COLUMNS, {"where": "N>1e30"}, "points=0"),
        (COLUMNS, {"drop_highest": 57}, "points=3"),
        (COLUMNS, {"drop_highest": -1}, "--drop-highest=-1"),
        (COLUMNS, {"law": "cubic"}, "--law=cubic: one of power"),
        (COLUMNS, {"law": "isoflop", "objective": "lad"}, "--objective=lad"),
        (COLUMNS, {"objective": "huber"}, None),
    ],
)
def test_refusals(table: Path, columns: str, options: dict[str, Any], message: str | None) -> None:
    settings = {"law": "parametric", "starts": 1, "bootstrap": 0, **options}
    if message is None:
        assert fit_csv(table, columns=columns, **settings)["objective"] == "huber:0.001"
        return
    with pytest.raises(UserError) as caught:
        fit_csv(table, columns=columns, **settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_negative_loss_names_line_and_value(table: Path) -> None:
    text = table.read_text().splitlines()
    cells = text[3].split(",")
    cells[3] = "-2.5"
    table.write_text("\n".join([*text[:3], ",".join(cells), *text[4:]]))
    with pytest.raises(DataError, match=r"loss=-2\.5 \(line 4, loss\): must be finite and positive"):
        fit_csv(table, "parametric", COLUMNS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("a,a\n1,2\n", "column 'a' occurs twice"),
        ("C,loss\n1,2,3\n", "line 2 has 3 cells, the header 2"),
        ("C,loss\n1,2\n", "need"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        fit_csv(path, "power", "C=C,loss=loss" if "C" in content else "C=a,loss=a")
    assert message in str(caught.value)
    with pytest.raises(DataError, match="no such file"):
        fit_csv(tmp_path / "absent.csv", "power", "C=C,loss=loss")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.csv"], "--law: is needed"),
        (["x.csv", "--law", "power"], "--columns: is needed"),
        (["--law", "power", "--columns", "C=C"], "one CSV file is expected"),
        (["x.csv", "--law", "power", "--columns", "C=C", "--start", "3"], "--start: unknown option"),
        (["x.csv", "--law", "power", "--columns", "C=C", "--starts", "many"], "--starts=many: a whole"),
        (["x.csv", "--law", "power", "--columns", "C=C,loss=l"], "x.csv: no such file"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(main, arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_help_and_every_module_start_without_torch() -> None:
    modules = "compute_law, fit, isoflop, parametric, pilot, power, published, published_figures"
    code = f"import sys\nfrom analysis import {modules}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    light = "import sys, analysis.fit, analysis.power, analysis.published\nassert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", light], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("option", "value"), [("bootstrap", 1), ("bootstrap", -5), ("seed", -1), ("starts", 0), ("resample", "x")]
)
@pytest.mark.parametrize("law", ["power", "power_floor", "parametric"])
def test_settings_are_checked_for_every_law(law: str, option: str, value: object) -> None:
    path = PAPER / "scaling_law.csv"
    columns = "N=active_params_m,D=tokens_b,loss=loss_prenorm"
    with pytest.raises(ConfigError, match=f"{option}="):
        fit_csv(path, law, columns, **{option: value})  # type: ignore[arg-type]


def test_standard_errors_of_a_power_law_are_those_of_ordinary_least_squares(tmp_path: Path) -> None:
    C = np.geomspace(1e18, 1e21, 9)
    L = 30 * C**-0.06 * np.exp(0.01 * np.random.default_rng(1).standard_normal(9))
    path = write(tmp_path / "power.csv", [{"C": c, "loss": loss} for c, loss in zip(C, L, strict=True)])
    document = fit_csv(path, law="power", columns="C=C,loss=loss")
    _, covariance = np.polyfit(np.log(C), np.log(L), 1, cov=True)
    errors = document["standard_errors"]
    assert errors["alpha"] == pytest.approx(np.sqrt(covariance[0, 0]), rel=1e-6)
    assert errors["A"] == pytest.approx(document["parameters"]["A"] * np.sqrt(covariance[1, 1]), rel=1e-6)
