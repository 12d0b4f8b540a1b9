"""`python -m attnres.rules`, and that docs/rules.md shows what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnres import rules
from attnres.cli import run_command
from attnres.residual import specs

DOCS = Path(__file__).resolve().parents[2] / "docs" / "rules.md"
COLUMNS = 5  # those that follow are times of one machine


def cells(table: str) -> list[list[str]]:
    rows = [line.strip().strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row[:COLUMNS]] for row in rows]


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(rules.main, []) == 0
    printed = cells(capsys.readouterr().out)
    _, _, rest = DOCS.read_text(encoding="utf-8").partition("<!-- begin: python -m attnres.rules -->")
    shown, end, _ = rest.partition("<!-- end -->")
    assert end
    assert cells(shown) == printed, "put the output of `python -m attnres.rules` into docs/rules.md"
    assert len(printed) >= 2 + len(specs.SPECS)


def test_the_page_names_every_rule() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [rule for rule in specs.SPECS if f"`{rule}`" not in text] == []


def test_one_rule_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(rules.main, ["residual=rezero"]) == 0
    (_, _, row) = cells(capsys.readouterr().out)
    assert row[:3] == ["rezero", "24", "0.000"] and row[4].startswith("no: loss")


def test_times_come_from_the_benchmarks_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"implementation": "plain", "width": 256, "depth": 8, "dtype": "float32", "ratio_to_prenorm": 1.234}
    other = {**row, "rule": "mhc", "ratio_to_prenorm": 9.0}
    wide = {**row, "rule": "rezero", "width": 512, "ratio_to_prenorm": 1.5}
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"rows": [other, {**row, "rule": "rezero"}, wide]}))
    assert run_command(rules.main, ["residual=rezero", "--timings", str(path)]) == 0
    head, _, line = capsys.readouterr().out.splitlines()
    assert head.endswith("| step time, 256 x 8, float32 | step time, 512 x 8, float32 |")
    assert line.endswith("| 1.23 | 1.50 |")
    path.write_text(json.dumps({"rows": [{**wide, "peak_memory_ratio": 1.25}, {**row, "rule": "rezero"}]}))
    assert run_command(rules.main, ["residual=rezero", "--timings", str(path)]) == 0
    head, _, line = capsys.readouterr().out.splitlines()
    assert head.endswith("| step time, 256 x 8, float32 | memory, 512 x 8, float32 |")
    assert line.endswith("| 1.50 | 1.23 | 1.25 |")


def test_options_that_were_not_timed_have_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"rule": "mhc", "implementation": "plain", "width": 8, "depth": 2, "dtype": "float32"}
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"rows": [{**row, "ratio_to_prenorm": 2.0}]}))
    assert run_command(rules.main, ["residual=mhc", "residual.streams=2", "--timings", str(path)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("|  |")


@pytest.mark.parametrize("text", [None, "{", "{}", '{"rows": [{"rule": "mhc"}]}', '{"rows": 3}'])
def test_a_file_that_is_none_of_the_benchmarks_is_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.json"
    if text is not None:
        path.write_text(text)
    assert run_command(rules.main, ["residual=rezero", f"--timings={path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --timings={path}: ") and error.count("\n") == 1


def test_start_says_yes_only_to_rules_that_start_as_prenorm() -> None:
    assert rules.start(specs.PreNorm()) == "yes"
    assert rules.start(specs.HyperConnections(streams=2, dynamic=False)) == "yes"
    assert rules.start(specs.LayerScale(initial=1.0)) == "yes"
    assert rules.start(specs.LayerScale(initial=1.0001)).startswith("no")
