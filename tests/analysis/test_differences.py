"""The report of a study without a multiplier: rows, intervals, the paper's numbers, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rows_support import LOSSES, edit, record_path, trials, write
from scipy import stats

from analysis import differences_figures
from analysis.differences import compute_differences, paired_interval
from analysis.load import load_study
from analysis.paper_rows import TABLE_4, block_size_of, paper_row
from analysis.published_fits import read_table
from analysis.report import main
from attnres.cli import run_command


def report(runs: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run in this process without figures; results.json and report.md."""
    assert main(["study=s", f"runs_dir={runs}", "--no-figures", *arguments]) == 0
    folder = runs / "s" / "report"
    return json.loads((folder / "results.json").read_text()), (folder / "report.md").read_text()


def refusal(runs: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(main, ["study=s", f"runs_dir={runs}", "--no-figures", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_a_study_of_one_size_gets_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, trials(LOSSES))
    results, text = report(tmp_path)
    assert "No compute multiplier: study=s: 1 size (one): a comparison needs 3." in text
    assert results["kind"] == "rows" and results["no_multiplier"] in text
    rows = {row["rule"]: row for row in results["rows"]}
    assert list(rows) == list(LOSSES)
    for rule, losses in LOSSES.items():
        assert rows[rule]["loss_nats"] == pytest.approx(np.mean(losses), rel=1e-12)
        assert f"{np.mean(losses):.4f}" in text
        assert rows[rule]["steps"] == 100
    assert rows["attnres_full"]["difference_nats"] == pytest.approx(-0.115 / 3)  # below the baseline
    table = pd.read_csv(tmp_path / "s" / "report" / "rows.csv").set_index("rule")
    assert table["loss_nats"]["rezero"] == rows["rezero"]["loss_nats"]
    assert "attnres_full: -0.0383 [" in capsys.readouterr().out


def test_a_study_that_promises_a_multiplier_is_refused_with_one_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, trials(LOSSES), "multiplier")
    assert "error: study=s: 1 size (one): a comparison needs 3 (study.report=rows" in refusal(
        tmp_path, capsys
    )
    assert not (folder / "report").exists()


@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_intervals_are_those_of_the_paired_t_test(tmp_path: Path, confidence: float) -> None:
    write(tmp_path, trials(LOSSES))
    rows = compute_differences(load_study(tmp_path, "s"), confidence=confidence).rows
    p_values = []
    for row in rows[1:]:
        test = stats.ttest_rel(LOSSES[row.rule], LOSSES["prenorm"])
        interval = test.confidence_interval(confidence)
        assert (row.low, row.high) == pytest.approx((interval.low, interval.high), rel=1e-10)
        assert row.p_value == pytest.approx(test.pvalue, rel=1e-10)
        assert row.degrees_of_freedom == test.df == 2
        p_values.append(test.pvalue)
    smallest, middle, largest = np.argsort(p_values)
    holm = np.empty(3)
    holm[smallest] = 3 * p_values[smallest]
    holm[middle] = max(holm[smallest], 2 * p_values[middle])
    holm[largest] = max(holm[middle], p_values[largest])
    assert [row.p_holm for row in rows[1:]] == pytest.approx(np.minimum(holm, 1))
    for row, p in zip(rows[1:], holm, strict=True):
        expected = "cannot tell" if p > 1 - confidence else "lower"
        assert row.reading == expected


def test_spread_counts_and_columns_of_rows(tmp_path: Path) -> None:
    table = trials(LOSSES)
    factor = table["rule"].map({rule: 1.0 + i for i, rule in enumerate(LOSSES)})
    write(tmp_path, table.assign(compute=table["compute"] * factor))
    result = compute_differences(load_study(tmp_path, "s"))
    gaps = [np.subtract(LOSSES[rule], LOSSES["prenorm"]) for rule in list(LOSSES)[1:]]
    assert result.pooled_degrees_of_freedom == 2 * len(gaps)
    assert result.pooled_std_nats == pytest.approx(np.sqrt(np.mean([gap.var(ddof=1) for gap in gaps])))
    base = result.rows[0]
    for i, row in enumerate(result.rows):
        assert row.compute == pytest.approx(base.compute * (i + 1))
    records = [json.loads(path.read_text()) for path in (tmp_path / "s").glob("*/record.json")]
    by_rule = {record["rule"]: record["parameters"]["non_embedding"] for record in records}
    assert {row.rule: row.parameters for row in result.rows} == by_rule
    _, text = report(tmp_path)
    starts = ("| rule", "| `attnres_full`")
    header, line = (next(t for t in text.splitlines() if t.startswith(start)) for start in starts)
    cells = dict(zip(header.strip("| ").split(" | "), line.strip("| ").split(" | "), strict=False))
    row = result.rows[1]
    assert cells["loss, nats"] == f"{row.loss_nats:.4f}"
    interval = f"{row.difference_nats:+.4f} [{row.low:+.4f}, {row.high:+.4f}]"
    assert cells["difference [95%]"] == interval
    assert cells["p, Holm"] == f"{row.p_holm:.3f}" != f"{row.p_value:.3f}"


# What stands in the paper's Table 4 and Figure 6, typed here once more.
PRINTED = {
    "prenorm": 1.766,
    "denseformer": 1.767,
    "mhc_n4": 1.747,
    "attnres_full": 1.737,
    "attnres_full_input": 1.731,
    "attnres_full_static": 1.749,
    "attnres_full_sigmoid": 1.741,
    "attnres_full_no_key_norm": 1.743,
    "attnres_window_w8": 1.764,
    "attnres_block_s4": 1.746,
    "attnres_block_s4_h16": 1.752,
    "attnres_block_s4_no_key_norm": 1.750,
    "attnres_block_s2": 1.746,
    "attnres_block_s8": 1.748,
    "attnres_block_s16": 1.753,
    "attnres_block_s32": 1.757,
}


def test_each_rule_has_its_own_row_of_the_paper() -> None:
    assert {rule for rule in PRINTED if rule in TABLE_4} == {*TABLE_4}
    for rule, loss in PRINTED.items():
        row = paper_row(rule)
        assert row is not None and row.loss_nats == loss
        assert row.difference_nats == pytest.approx(loss - 1.766)


def test_readings_tell_lower_from_higher_and_from_nothing(tmp_path: Path) -> None:
    losses = {
        "prenorm": (2.0, 2.1, 2.2, 2.3),
        "better": (1.9, 2.001, 2.1, 2.2),
        "worse": (2.1, 2.2, 2.301, 2.4),
        "same": (2.05, 2.05, 2.2, 2.3),
    }
    write(tmp_path, trials(losses))
    rows = compute_differences(load_study(tmp_path, "s")).rows
    assert [row.reading for row in rows] == ["baseline", "lower", "higher", "cannot tell"]


def test_the_headline_of_several_sizes_says_what_can_be_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The means of both sizes are below the baseline's; their range is not read as an interval."""
    unsure = {"prenorm": (2.0, 2.1, 2.2), "attnres_full": (1.9, 2.11, 2.18)}
    sure = {"prenorm": (1.8, 1.9, 2.0), "attnres_full": (1.78, 1.8801, 1.98)}
    write(tmp_path, pd.concat([trials(unsure, "small"), trials(sure, "large")]))
    line = (
        "attnres_full against prenorm: lower at 2 of 2 sizes in the mean; beyond the spread of the seeds: "
        "cannot tell at 1, lower at 1; means (no interval) -0.0367 nats at small to -0.0200 at large"
    )
    assert line in report(tmp_path)[1].replace("\\", "")
    assert line in capsys.readouterr().out
    one = {rule: losses[:1] for rule, losses in unsure.items()}
    write(tmp_path, pd.concat([trials(one, "small"), trials(one, "large")]), study="t")
    assert main(["study=t", f"runs_dir={tmp_path}", "--no-figures"]) == 0
    assert "beyond the spread of the seeds: one seed, not known;" in capsys.readouterr().out


def test_pairing_takes_a_seed_effect_out(tmp_path: Path) -> None:
    effect = np.array([0.0, 0.4, 0.8])
    losses = {"prenorm": 2 + effect, "attnres_full": 1.9 + effect + [0, 1e-4, 0]}
    write(tmp_path, trials({rule: tuple(values) for rule, values in losses.items()}))
    (_, row) = compute_differences(load_study(tmp_path, "s")).rows
    assert row.high is not None and row.high < -0.0995 and row.reading == "lower"


def test_one_seed_has_no_interval_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, trials({rule: values[:1] for rule, values in LOSSES.items()}))
    results, text = report(tmp_path)
    for row in results["rows"][1:]:
        assert [row[key] for key in ("low", "high", "standard_error", "p_value", "p_holm")] == [None] * 5
        assert row["reading"] == "one seed: no interval"
    assert results["pooled_std_nats"] is None
    assert "One seed: the spread over seeds is unknown. No interval is given" in text
    assert "-0.0400 [" not in text and "-0.0400" in text


def test_interval_of_no_pair_and_of_equal_pairs() -> None:
    assert math.isnan(paired_interval(np.array([]), 0.95)[0])
    assert paired_interval(np.array([0.25, 0.25]), 0.95) == (0.25, 0.25, 0.25, 0.0, 0.0)
    assert paired_interval(np.zeros(3), 0.95)[4] == 1.0


def test_the_papers_numbers_stand_beside_ours_and_are_called_so(tmp_path: Path) -> None:
    write(tmp_path, trials(LOSSES))
    results, text = report(tmp_path)
    rows = {row["rule"]: row["paper"] for row in results["rows"]}
    assert rows["rezero"] is None
    assert rows["attnres_full"]["loss_nats"] == 1.737
    assert rows["attnres_full"]["difference_nats"] == pytest.approx(-0.029)
    (line,) = [line for line in text.splitlines() if line.startswith("| `attnres_block_s4`")]
    assert line.endswith("| 1.746 | -0.020 |")
    (head,) = [line for line in text.splitlines() if line.startswith("| rule | loss")]
    assert head.endswith("| paper: loss | paper: difference |")
    assert "Table 4 of arXiv:2603.15031 (its scale: 436M active parameters" in text
    assert results["paper_scale"].startswith("its scale: 436M")


def test_a_study_without_the_papers_rules_has_no_paper_columns(tmp_path: Path) -> None:
    losses = {"layerscale_0.1": LOSSES["prenorm"], "rezero": LOSSES["rezero"]}
    write(tmp_path, trials(losses))
    edit(tmp_path / "s" / "study.json", baseline="layerscale_0.1")
    results, text = report(tmp_path)
    assert "paper:" not in text and "arXiv" not in text and results["paper_scale"] is None


def test_every_row_of_table_4_has_a_rule_here() -> None:
    assert sorted(TABLE_4.values()) == sorted(read_table("ablation")["variant"])
    for size, loss in read_table("block_size").set_index("block_size_layers")["val_loss"].items():
        if size != "baseline":
            row = paper_row("attnres_full" if size == "1" else f"attnres_block_s{size}")
            assert row is not None and row.loss_nats == loss
    assert [block_size_of(rule) for rule in ("attnres_full", "attnres_block_s16", "attnres_block_n8")] == [
        1,
        16,
        None,
    ]
    assert paper_row("attnres_block_s3") is None and paper_row("attnres_block_s4_sigmoid") is None


def test_step_time_is_a_ratio_by_seed_or_is_withheld(tmp_path: Path) -> None:
    folder = write(tmp_path, trials(LOSSES))
    ratios = [row["step_time_ratio"] for row in report(tmp_path)[0]["rows"]]
    assert ratios == pytest.approx([1, 1.25, 1.5, 1.75])
    path = record_path(folder, "attnres_full")
    environment = json.loads(path.read_text())["environment"]
    edit(path, environment={**environment, "threads": 2})
    results, text = report(tmp_path)
    assert results["rows"][1]["step_time_ratio"] is None and results["rows"][2]["step_time_ratio"] is not None
    assert "Step time: withheld: trials of one size differ in environment.threads (1, 2; one)" in text


def test_what_spoils_a_comparison_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, trials(LOSSES))
    path = record_path(folder, "attnres_full", 1)
    record = json.loads(path.read_text())
    edit(path, schedule_complete=False)
    assert "ended before their schedule: one-attnres_full-s1" in refusal(tmp_path, capsys)
    edit(path, schedule_complete=True, data={**record["data"], "fingerprint": "other"})
    assert "the training data is not the same" in refusal(tmp_path, capsys)
    edit(path, data={**record["data"], "validation_fingerprint": "other"})
    assert "the validation set is not the same" in refusal(tmp_path, capsys)
    path.unlink()
    assert "1 of 12 trials have no record: one-attnres_full-s1" in refusal(tmp_path, capsys)
    results, text = report(tmp_path, "--allow", "missing")
    assert len(results["rows"][1]["difference_per_seed"]) == 2
    assert results["let_pass"] and "Let pass by" in text


def test_a_rule_that_a_seed_lacks_is_an_empty_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = trials(LOSSES)
    write(tmp_path, table[(table["rule"] != "rezero") | (table["seed"] != 2)])
    assert "one rezero seed 2" in refusal(tmp_path, capsys)


def test_the_kind_of_report_is_the_studys_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [trials(LOSSES, size=f"size{i}").assign(compute=1e13 * 4**i) for i in range(3)]
    table = pd.concat([sized.assign(loss=sized["loss"] * 0.9**i) for i, sized in enumerate(sizes)])
    write(tmp_path, table, "rows")
    results, text = report(tmp_path)
    assert len(results["rows"]) == 12
    assert "No compute multiplier: study=s: report=rows: it asks for none." in text
    for asked in (None, "multiplier"):
        edit(tmp_path / "s" / "study.json", report=asked)
        assert "comparisons" in report(tmp_path, "draws=100")[0]
    edit(tmp_path / "s" / "study.json", report="pie chart")
    assert "report='pie chart': one of multiplier, rows, shape, dynamics, rates" in refusal(tmp_path, capsys)


def test_claims_about_one_size_are_told_why_not(tmp_path: Path) -> None:
    write(tmp_path, trials(LOSSES))
    results, text = report(tmp_path, "claims=1.2")
    assert results["kind"] == "rows"
    assert results["no_multiplier"] == "study=s: 1 size (one): a comparison needs 3"
    assert "| `attnres_full` | 1.9850 |" in text


def test_figures_draw_our_numbers_and_the_papers(tmp_path: Path) -> None:
    losses = {**LOSSES, "attnres_block_s8": (1.98, 2.0, 2.03)}
    write(tmp_path, trials(losses))
    result = compute_differences(load_study(tmp_path, "s"))
    ours, paper = differences_figures.differences(result).axes
    assert [label.get_text() for label in ours.get_yticklabels()] == list(losses)[1:]
    squares = [line for line in ours.lines if line.get_marker() == "s"]
    assert [line.get_xdata()[0] for line in squares] == [row.difference_nats for row in result.rows[1:]]
    whiskers = [line for line in ours.lines if line.get_marker() == "None" and len(line.get_xdata()) == 2][:4]
    assert [tuple(line.get_xdata()) for line in whiskers] == [(row.low, row.high) for row in result.rows[1:]]
    diamonds = [line.get_xdata()[0] for line in paper.lines if line.get_marker() == "D"]
    assert diamonds == pytest.approx([-0.029, -0.020, -0.018])
    assert "paper" in paper.get_title(loc="left")
    left, right = differences_figures.block_size(result).axes
    (curve,) = [line for line in left.lines if line.get_marker() == "s"]
    assert list(curve.get_xdata()) == [1, 4, 8]
    assert list(curve.get_ydata()) == pytest.approx(
        [np.mean(losses[r]) for r in ("attnres_full", "attnres_block_s4", "attnres_block_s8")]
    )
    (published,) = [line for line in right.lines if line.get_marker() == "D"]
    assert list(published.get_ydata()) == [1.737, 1.746, 1.746, 1.748, 1.753, 1.757]
    assert "The paper's Figure 6" in right.get_title(loc="left")


def test_a_baseline_that_is_gone_leaves_losses_and_no_differences(tmp_path: Path) -> None:
    folder = write(tmp_path, trials(LOSSES))
    for seed in range(3):
        record_path(folder, "prenorm", seed).unlink()
    assert main(["study=s", f"runs_dir={tmp_path}", "--allow", "missing"]) == 0
    results = json.loads((folder / "report" / "results.json").read_text())
    assert [row["rule"] for row in results["rows"]] == list(LOSSES)[1:]
    assert {row["reading"] for row in results["rows"]} == {"no pairs"}
    assert {row["difference_nats"] for row in results["rows"]} == {None}
    text = (folder / "report" / "report.md").read_text()
    assert "| `attnres_full` | 1.9850 | none |" in text
    assert "one prenorm: no trial is left" in text and ".png" not in text
