"""The paper's tables, refitted: every value that the reference page gives, and what is said about them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from analysis.published import as_json, main, report_text
from analysis.published_fits import (
    FIGURE_4_COMPUTE,
    Published,
    compute_published,
    curve_multiplier,
    read_table,
    rule_flops_per_token,
    table_2,
)
from attnres.cli import run_command


@pytest.fixture(scope="module")
def published() -> Published:
    return compute_published()


def test_separate_fits(published: Published) -> None:
    expected = {"prenorm": (1.862, 0.0549), "attnres_block": (1.841, 0.0565), "attnres_full": (1.835, 0.0558)}
    for rule, (coefficient, exponent) in expected.items():
        law = published.fits["6nd"][rule]
        assert law.coefficient == pytest.approx(coefficient, abs=5e-4)
        assert law.exponent == pytest.approx(exponent, abs=5e-5)
    causal = published.fits["6nd_causal"]["prenorm"]
    assert (round(causal.coefficient, 3), round(causal.exponent, 4)) == (1.899, 0.0573)


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("attnres_block", (1.239, 1.184, 1.297)),
        ("attnres_full", (1.306, 1.232, 1.385)),
        ("mhc_lite", (1.264, 1.216, 1.314)),
    ],
)
def test_multipliers(published: Published, rule: str, values: tuple[float, float, float]) -> None:
    m = published.rules[rule].multiplier
    assert (m.multiplier, m.ci_low, m.ci_high) == pytest.approx(values, abs=0.002)


def test_block_in_detail(published: Published) -> None:
    block = published.rules["attnres_block"]
    sizes = list(block.multiplier.per_size_multiplier.values())
    assert sizes == pytest.approx([1.228, 1.210, 1.218, 1.227, 1.315], abs=6e-4)
    without = block.without_size.values()
    assert (min(without), max(without)) == pytest.approx((1.220, 1.250), abs=6e-4)
    verdicts = {j.claim.name: j for j in block.judgements}
    assert verdicts["1.25x compute"].inside_interval and verdicts["1.25x compute"].verdict == "cannot tell"
    assert verdicts["25 % saving"].verdict == "rejected"
    assert verdicts["25 % saving"].p_at_least == pytest.approx(0.006, abs=6e-4)
    for m in (*block.by_convention.values(), *block.by_floor.values()):
        assert 1.22 < m.multiplier < 1.25
    low, high = block.loss_rounding
    assert low < block.multiplier.multiplier < high


def test_curves_and_their_rounding() -> None:
    assert curve_multiplier(FIGURE_4_COMPUTE) == pytest.approx((1.254, 1.203, 1.307), abs=1e-3)
    assert curve_multiplier(1.0)[0] == pytest.approx(1.22, abs=5e-3)
    fits = read_table("fits").set_index("variant")
    for rule in ("prenorm", "attnres_block"):
        row = fits.loc[rule]
        loss = row["coefficient"] * FIGURE_4_COMPUTE ** -row["exponent"]
        assert loss == pytest.approx(row["loss_at_5_6_pflops_days"], abs=6e-4)


def test_floor_is_not_identified(published: Published) -> None:
    assert not any(fit.identified for fit in published.floors.values())


def test_memory_io_matches_the_printed_values(published: Published) -> None:
    for _, row in read_table("memory_io").iterrows():
        assert published.memory_io[row["mechanism"]] == pytest.approx(row["typical_in_d"], abs=0.05)


def test_rule_flops_by_hand() -> None:
    # Two sublayers, width 10: reads of 2 (before layer 2: embedding, output 1) and 3 (at the end) sources.
    assert rule_flops_per_token("prenorm", 2, 10) == 20
    assert rule_flops_per_token("attnres_full", 2, 10) == 4 * 10 * (2 + 3)
    assert math.isnan(rule_flops_per_token("mhc_lite", 2, 10))
    # 16 layers in 8 blocks of 2: after an odd layer one finished block fewer and a running sum.
    sources = sum(1 + done // 2 + done % 2 for done in range(1, 17))
    assert rule_flops_per_token("attnres_block", 16, 10) == 4 * 10 * sources + 160


def test_table_2_counts_compute() -> None:
    table = table_2()
    first = table[(table["size"] == "194M") & (table["rule"] == "prenorm")].iloc[0]
    assert first["compute_6nd"] == pytest.approx(6 * 194e6 * 38.7e9 / 8.64e19)
    extra = 6 * 12 * 896 * 8192 * 38.7e9 / 8.64e19
    assert first["compute_6nd_causal"] == pytest.approx(first["compute_6nd"] + extra)
    assert table["compute_6nd_causal_rule"].isna().sum() == 5  # mHC-lite


def test_text_says_what_cannot_be_said(published: Published) -> None:
    text = report_text(published)
    for phrase in ("1.239 [1.184, 1.297]", "1.20x to 1.31x", "Nothing about seeds", "Not a ranking"):
        assert phrase in text
    assert published.between["attnres_full over attnres_block"].ci_low < 1


def test_json_has_the_headline_and_round_trips(published: Published) -> None:
    document = json.loads(json.dumps(as_json(published), allow_nan=False))
    block = document["comparisons"]["attnres_block"]
    assert block["multiplier"] == published.rules["attnres_block"].multiplier.multiplier
    assert block["verdicts"]["25 % saving"]["verdict"] == "rejected"
    assert document["separate_fits"]["6nd"]["prenorm"]["A"] == pytest.approx(1.862, abs=5e-4)


def test_command_writes_numbers_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures"
    assert run_command(main, ["--json", str(tmp_path / "out.json"), "--out", str(out)]) == 0
    assert "What they cannot support" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["schema"] == 1
    names = {path.name for path in out.iterdir()}
    for figure in ("figure_4_scaling_law", "table_2_multiplier", "figure_6_block_size", "table_4_ablation"):
        assert {f"{figure}.png", f"{figure}.svg"} <= names
    assert {"table_1_memory_io.png", "published.md", "table_2.csv"} <= names
    assert all(path.stat().st_size > 1000 for path in out.iterdir())


def test_mistakes_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, ["--jsn", "x"]) == 2
    assert run_command(main, ["study=smoke"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_table_2_counts_the_rules_own_flops_forward_and_backward() -> None:
    table = table_2()
    for rule in ("prenorm", "attnres_full", "attnres_block"):
        row = table[(table["size"] == "194M") & (table["rule"] == rule)].iloc[0]
        extra = 3 * rule_flops_per_token(rule, 24, 896) * 38.7e9 / 8.64e19
        difference = row["compute_6nd_causal_rule"] - row["compute_6nd_causal"]
        assert difference == pytest.approx(extra, rel=1e-6)
