"""Verdicts: what an interval says about a claim, and when a design may not say anything."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from published_table import paper_table

from analysis.claims import (
    MAX_ALPHA_RELATIVE_ERROR,
    STANDARD_CLAIMS,
    Claim,
    all_claims,
    judge,
    merge_equal,
    parse_claims,
    study_claims,
    why_too_small,
)
from analysis.compare import Multiplier, paired_multiplier
from analysis.results import verdict_line
from analysis.simulate import Truth, simulate_table
from attnres.errors import ConfigError

CLAIM = Claim("1.25x compute", 1.25)


def multiplier(low: float, high: float) -> Multiplier:
    m = paired_multiplier(paper_table(), "prenorm", "attnres_block")
    return dataclasses.replace(m, multiplier=(low * high) ** 0.5, ci_low=low, ci_high=high)


@pytest.mark.parametrize(
    ("low", "high", "verdict", "inside"),
    [
        (1.26, 1.40, "supported", False),
        (1.25, 1.40, "supported", True),
        (1.24, 1.40, "cannot tell", True),
        (1.10, 1.25, "cannot tell", True),
        (1.10, 1.24, "rejected", False),
    ],
)
def test_verdict_follows_the_interval(low: float, high: float, verdict: str, inside: bool) -> None:
    judgement = judge(CLAIM, multiplier(low, high))
    assert judgement.verdict == verdict
    assert judgement.inside_interval is inside


def test_better_than_baseline_needs_more_than_equality() -> None:
    better = STANDARD_CLAIMS[0]
    assert judge(better, multiplier(1.0, 1.2)).verdict == "cannot tell"
    assert judge(better, multiplier(1.001, 1.2)).verdict == "supported"
    assert judge(better, multiplier(0.8, 0.99)).verdict == "rejected"


@pytest.mark.parametrize("interval", [(1.3, 1.4), (1.0, 1.1)])
def test_a_small_design_never_decides(interval: tuple[float, float]) -> None:
    judgement = judge(CLAIM, multiplier(*interval), "one seed")
    assert judgement.verdict == "cannot tell"
    assert judgement.interval_verdict != "cannot tell"


def test_p_values_agree_with_the_interval() -> None:
    m = paired_multiplier(paper_table(), "prenorm", "attnres_block")
    at_low = judge(Claim("low", m.ci_low), m)
    at_high = judge(Claim("high", m.ci_high), m)
    assert at_low.p_at_most == pytest.approx(0.025, rel=1e-6)
    assert at_high.p_at_least == pytest.approx(0.025, rel=1e-6)


def test_what_is_too_small() -> None:
    assert why_too_small(False, 5) is None
    assert why_too_small(True, 5)
    assert why_too_small("one\n  seed", 5) == "one seed"
    assert "3 sizes" in str(why_too_small(False, 3))


def test_claims_of_the_user() -> None:
    claims = parse_claims("1.15, 30%,1.2x")
    assert [claim.multiplier for claim in claims] == pytest.approx([1.15, 1 / 0.7, 1.2])
    assert claims[1].saving == pytest.approx(0.3)
    assert parse_claims("") == []


@pytest.mark.parametrize("text", ["abc", "-1", "0", "100%", "1.2.3", "nan", "1,,x"])
def test_claims_that_are_not(text: str) -> None:
    with pytest.raises(ConfigError, match="^claims="):
        parse_claims(text)


def test_a_claim_is_judged_at_its_own_value_and_name() -> None:
    """1.2451x is neither 1.25x nor called so; a name for two values is refused."""
    values = {claim.name: claim.multiplier for claim in all_claims(parse_claims("1.2451,1.2549,1.2549001"))}
    assert values["1.25x compute"] == 1.25
    assert [values[f"{text}x compute"] for text in ("1.2451", "1.2549", "1.2549001")] == [
        1.2451,
        1.2549,
        1.2549001,
    ]
    with pytest.raises(ConfigError, match="claims=25 % saving: is the name of both 1.333.* and 1.5"):
        all_claims([Claim("25 % saving", 1.5)])
    assert len(all_claims([Claim("25 % saving", 1.3333)])) == len(STANDARD_CLAIMS)


def test_claims_of_a_study() -> None:
    claims = study_claims([{"name": "half", "multiplier": 2}], "study.json")
    assert claims == [Claim("half", 2.0)]
    with pytest.raises(ConfigError, match="study.json: claims"):
        study_claims([{"name": "half"}], "study.json")


def test_equal_claims_share_a_line() -> None:
    m = multiplier(1.3, 1.31)
    merged = merge_equal([judge(claim, m) for claim in all_claims()])
    labels = [label for label, _ in merged]
    assert "1.25x compute = 20 % saving" in labels
    assert len(labels) == len(STANDARD_CLAIMS) - 1


def test_a_rule_that_is_worse_needs_more() -> None:
    m = paired_multiplier(paper_table(), "attnres_block", "prenorm")
    line = verdict_line(m, [judge(CLAIM, m)], None)
    start = "prenorm against attnres_block: 0.81x compute [0.77, 0.84], needs 24% more [18%, 30%]: "
    assert line.startswith(start)


def test_verdict_line_is_short_and_complete() -> None:
    m = paired_multiplier(paper_table(), "prenorm", "attnres_block")
    claims = [claim for claim in all_claims() if claim.multiplier != 1.1]
    line = verdict_line(m, [judge(claim, m) for claim in claims], None)
    assert line == (
        "attnres_block against prenorm: 1.24x compute [1.18, 1.30], saves 19% [16%, 23%]: "
        "better than baseline supported; 1.25x compute = 20 % saving cannot tell; 25 % saving rejected"
    )


def test_verdict_line_of_a_small_design_names_the_claims() -> None:
    m = paired_multiplier(paper_table(), "prenorm", "attnres_block")
    reason = "One seed, three neighbouring sizes and a few tokens per parameter: the spread is larger than m."
    claims = [claim for claim in all_claims() if claim.multiplier != 1.1]
    line = verdict_line(m, [judge(claim, m, reason) for claim in claims], reason)
    assert line.startswith(
        "attnres_block against prenorm: 1.24x compute [1.18, 1.30]: cannot tell better than baseline, "
        "1.25x compute = 20 % saving, 25 % saving (too small to judge: One seed, three neighbouring sizes"
    )
    assert line.endswith(" ...)") and len(line) < 220


def test_a_poorly_known_exponent_decides_nothing() -> None:
    """Over 0.4 decades of C: this interval rejects a claim, but intervals of this kind miss too often."""
    truth = Truth({"attnres_block": 1.02}, decades=0.4, misfit=0.02, noise=0.0002)
    m = paired_multiplier(simulate_table(truth, np.random.default_rng(0)), "prenorm", "attnres_block")
    relative = m.alpha_standard_error / m.alpha
    assert relative > MAX_ALPHA_RELATIVE_ERROR
    judgement = judge(CLAIM, m)
    assert judgement.interval_verdict == "rejected"
    assert judgement.verdict == "cannot tell"
    reason = f"alpha is known only to ±{100 * relative:.0f} %: too narrow a range of C"
    assert judgement.reason == reason
    assert verdict_line(m, [judgement], None).endswith(f": cannot tell 1.25x compute ({reason})")
    sure = dataclasses.replace(m, alpha_standard_error=0.99 * MAX_ALPHA_RELATIVE_ERROR * m.alpha)
    assert judge(CLAIM, sure).verdict == "rejected"
    assert judge(CLAIM, sure).reason is None
