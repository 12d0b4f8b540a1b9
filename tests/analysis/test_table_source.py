"""A report from any CSV: the published table as a long file, column maps, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from published_table import paper_table

from analysis.report import main
from analysis.simulate import Truth, simulate_table
from attnres.cli import run_command

COLUMNS = "columns=rule=method,loss=val,compute=pf_days*8.64e19"


def published(folder: Path) -> Path:
    table = paper_table().rename(columns={"rule": "method", "loss": "val", "compute": "pf_days"})
    path = folder / "published.csv"
    table.to_csv(path, index=False)
    return path


def run(*arguments: str) -> int:
    return run_command(main, [*arguments, "draws=100", "--no-figures"])


def test_published_table_as_a_csv(tmp_path: Path) -> None:
    assert run(f"source={published(tmp_path)}", COLUMNS, "baseline=prenorm") == 0
    results = json.loads((tmp_path / "published" / "report" / "results.json").read_text())
    block = results["comparisons"]["attnres_block"]
    found = (block["multiplier"], block["ci_low"], block["ci_high"])
    assert found == pytest.approx((1.239, 1.184, 1.297), abs=6e-4)
    assert block["verdicts"]["25 % saving"]["verdict"] == "rejected"
    assert block["wall_clock"] is None and block["wall_clock_median_step"] is None
    assert results["convention"] == "as_given"
    assert results["seed_noise"]["per_run_std"] is None
    assert "was not checked" in (tmp_path / "published" / "report" / "report.md").read_text()


def test_seeds_seconds_and_six_n_d(tmp_path: Path) -> None:
    table = simulate_table(Truth(noise=0, misfit=0), np.random.default_rng(0))
    table["params"] = (table["compute"] / 120) ** 0.5
    table["tokens"] = 20 * table["params"]
    table.drop(columns=["compute"]).to_csv(tmp_path / "t.csv", index=False)
    columns = "columns=N=params,D=tokens,seconds=train_seconds"
    assert run(f"source={tmp_path / 't.csv'}", columns, "baseline=prenorm", f"out={tmp_path / 'o'}") == 0
    results = json.loads((tmp_path / "o" / "report" / "results.json").read_text())
    block = results["comparisons"]["attnres_block"]
    assert block["multiplier"] == pytest.approx(1.25, rel=1e-6)
    assert block["wall_clock"]["multiplier"] == pytest.approx(1.25, rel=0.02)
    assert results["design"]["sizes"][0]["seeds"] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([COLUMNS], "baseline=: name the rule"),
        ([COLUMNS, "baseline=mhc"], "baseline=mhc: is not a rule of this study"),
        (
            ["columns=rule=method", "baseline=prenorm"],
            "needs loss=COLUMN; the file has size, method, pf_days, val",
        ),
        (["columns=rule=method,loss=val", "baseline=prenorm"], "needs compute=COLUMN in FLOP, or N=COLUMN"),
        ([COLUMNS.replace("=val", "=gone"), "baseline=prenorm"], "columns=loss=gone: published.csv has size"),
        (["columns=colour=method", "baseline=prenorm"], "columns=colour=method: write quantity=column"),
        ([COLUMNS, "baseline=prenorm", "runs_dir=x"], "runs_dir=x: unknown key"),
        ([COLUMNS, "baseline=prenorm", "--allow", "torn"], "--allow=torn: a table has no records"),
        ([COLUMNS + "*1e.e", "baseline=prenorm"], "'1e.e' is not a positive number"),
        ([COLUMNS + "*0", "baseline=prenorm"], "'0' is not a positive number"),
    ],
)
def test_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(f"source={published(tmp_path)}", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1.909", "n/a", "val='n/a' in row"),
        ("1.909", "-1.909", "loss=-1.909"),
        ("296", "241", "two rows for 241"),
        ("296", " ", "size in row"),
    ],
)
def test_bad_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    path = published(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    assert run(f"source={path}", COLUMNS, "baseline=prenorm") == 2
    assert message in capsys.readouterr().err


def test_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(f"source={tmp_path / 'none.csv'}", COLUMNS, "baseline=prenorm") == 2
    assert "none.csv: no such file" in capsys.readouterr().err
    (tmp_path / "empty.csv").write_text("")
    assert run(f"source={tmp_path / 'empty.csv'}", COLUMNS, "baseline=prenorm") == 2
    assert "empty.csv: is empty" in capsys.readouterr().err
    assert run(f"source={tmp_path}", COLUMNS, "baseline=prenorm") == 2
    assert "is a folder; name a CSV table" in capsys.readouterr().err
    (tmp_path / "header.csv").write_text("size,rule,loss,compute\n")
    assert run(f"source={tmp_path / 'header.csv'}", "baseline=prenorm") == 2
    assert "has a header and no rows" in capsys.readouterr().err


def test_a_cell_without_a_row_is_refused_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = published(tmp_path)
    lines = path.read_text().splitlines()
    gone = next(line for line in lines if "attnres_block" in line and "296" in line)
    path.write_text("\n".join(line for line in lines if line != gone) + "\n")
    assert run(f"source={path}", COLUMNS, "baseline=prenorm") == 2
    error = capsys.readouterr().err
    assert "1 cells of the grid have no row: 296" in error and "attnres_block seed 0" in error
    assert run(f"source={path}", COLUMNS, "baseline=prenorm", "--allow", "missing") == 0
    assert "missing: 1 cells of the grid" in (tmp_path / "published" / "report" / "report.md").read_text()


def test_a_factor_scales_the_column(tmp_path: Path) -> None:
    assert run(f"source={published(tmp_path)}", COLUMNS, "baseline=prenorm") == 0
    results = json.loads((tmp_path / "published" / "report" / "results.json").read_text())
    lowest = paper_table()["compute"].astype(float).min()
    assert min(size["compute_min"] for size in results["design"]["sizes"]) == pytest.approx(lowest * 8.64e19)
