"""Claims about a multiplier, and what an interval says about them.

A claim reads "saves at least this much": m >= value. It is supported when the whole interval lies at or above
the value, rejected when the whole interval lies below it, and otherwise the design cannot tell. That m equals
a value exactly can never be shown; whether the value lies inside the interval is printed beside the verdict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from analysis.compare import Multiplier
from attnres.errors import ConfigError
from attnres.words import counted

Verdict = Literal["supported", "rejected", "cannot tell"]
MIN_SIZES_FOR_VERDICT = (
    4  # with 3 sizes the interval rests on 2 degrees of freedom and no size can be left out
)


# Above this SE(alpha)/alpha the interval of m covers less than it says, for ln m is a ratio with alpha below
# and the delta method takes alpha as nearly known. Simulated: at 0.17 (4 sizes over 1 decade of C, misfit
# 2 %) a 95 % interval covers 90 %, at 0.57 (0.4 decades) 84 %; over 2 decades the ratio is about 0.02.
MAX_ALPHA_RELATIVE_ERROR = 0.10


SAME_CLAIM = 1e-3  # relative: a study may write 1.333 for 25 % saving


@dataclass(frozen=True)
class Claim:
    """m >= multiplier (m > 1 for the first standard claim)."""

    name: str
    multiplier: float

    @property
    def saving(self) -> float:
        return 1 - 1 / self.multiplier


STANDARD_CLAIMS = (
    Claim("better than baseline", 1.0),
    Claim("1.10x compute", 1.10),
    Claim("1.25x compute", 1.25),
    Claim("20 % saving", 1.25),
    Claim("25 % saving", 4 / 3),
)


@dataclass(frozen=True)
class Judgement:
    """A claim judged by an interval. `interval_verdict` is what the interval alone would say; `reason` is why
    that does not count, or None."""

    claim: Claim
    verdict: Verdict
    interval_verdict: Verdict
    inside_interval: bool
    p_at_most: float  # one-sided p of m <= value
    p_at_least: float  # one-sided p of m >= value
    reason: str | None = None


def judge(claim: Claim, m: Multiplier, too_small: str | None = None) -> Judgement:
    """Judge a claim. A design that is too small, or that hardly knows alpha, never supports or rejects."""
    value = claim.multiplier
    verdict: Verdict = "cannot tell"
    if m.ci_low > value or (m.ci_low == value and value > 1):
        verdict = "supported"
    elif m.ci_high < value:
        verdict = "rejected"
    reason = why_not_judged(m, too_small)
    return Judgement(
        claim=claim,
        verdict="cannot tell" if reason else verdict,
        interval_verdict=verdict,
        inside_interval=m.ci_low <= value <= m.ci_high,
        p_at_most=m.p_at_most(value),
        p_at_least=m.p_at_least(value),
        reason=reason,
    )


def why_not_judged(m: Multiplier, too_small: str | None = None) -> str | None:
    """Why no claim about this pair is judged, whatever its interval; or None."""
    if too_small:
        return f"too small to judge: {too_small}"
    relative = m.alpha_standard_error / m.alpha
    if relative > MAX_ALPHA_RELATIVE_ERROR:
        return f"alpha is known only to ±{100 * relative:.0f} %: too narrow a range of C"
    return None


def why_too_small(declared: bool | str, sizes: int) -> str | None:
    """Reason why a design cannot judge a claim, or None."""
    if isinstance(declared, str) and declared.strip():
        return " ".join(declared.split())
    if declared:
        return "the study says that it is too small to judge a claim"
    if sizes < MIN_SIZES_FOR_VERDICT:
        return f"{counted(sizes, 'size')}, fewer than the {MIN_SIZES_FOR_VERDICT} that a verdict needs"
    return None


def parse_claims(text: str) -> list[Claim]:
    """`1.15,30%` -> claims: a multiplier (with or without x) or a saving in percent."""
    claims = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([0-9.]+)\s*(x|%|)", word)
        try:
            number = float(match.group(1)) if match else math.nan
        except ValueError:
            number = math.nan
        is_saving = bool(match) and word.endswith("%")
        value = 1 / (1 - number / 100) if is_saving and number < 100 else number
        if not (math.isfinite(value) and value > 0) or (is_saving and not number < 100):
            raise ConfigError("claims", word, "write a multiplier such as 1.25 or a saving such as 20%")
        claims.append(Claim(f"{number:.10g} % saving" if is_saving else f"{number:.10g}x compute", value))
    return claims


def study_claims(entries: Sequence[Mapping[str, Any]], where: str) -> list[Claim]:
    """The claims of study.json: a list of {name, multiplier}."""
    claims = []
    for entry in entries:
        value = entry.get("multiplier") if isinstance(entry, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"{where}: claims", entry, "each needs a name and a positive multiplier")
        claims.append(Claim(str(entry.get("name") or f"{value:.10g}x compute"), float(value)))
    return claims


def all_claims(*groups: Sequence[Claim]) -> list[Claim]:
    """Standard and further claims, one of each name; later groups win; in order of the multiplier.

    Raises ConfigError for a name that stands for two values: one of them would be judged under it unseen.
    """
    merged: dict[str, Claim] = {}
    for claim in (claim for group in (STANDARD_CLAIMS, *groups) for claim in group):
        before = merged.get(claim.name, claim).multiplier
        if not math.isclose(before, claim.multiplier, rel_tol=SAME_CLAIM):
            raise ConfigError(
                "claims", claim.name, f"is the name of both {before:g} and {claim.multiplier:g}"
            )
        merged[claim.name] = claim
    return sorted(merged.values(), key=lambda claim: claim.multiplier)


def merge_equal(judgements: Sequence[Judgement]) -> list[tuple[str, Judgement]]:
    """Judgements of the same multiplier as one line: `1.25x compute = 20 % saving`."""
    merged: list[tuple[str, Judgement]] = []
    for judgement in judgements:
        if merged and math.isclose(merged[-1][1].claim.multiplier, judgement.claim.multiplier, rel_tol=1e-9):
            merged[-1] = (f"{merged[-1][0]} = {judgement.claim.name}", judgement)
        else:
            merged.append((judgement.claim.name, judgement))
    return merged
