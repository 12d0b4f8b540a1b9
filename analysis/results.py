"""Everything that a report says about a study, computed once. Figures, tables and text take this, never
runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten

import numpy as np
import pandas as pd

from analysis.bootstrap import BootstrapInterval, wild_cluster_bootstrap
from analysis.checks import (
    EqualExponents,
    LeaveLargestOut,
    MultiplierAt,
    SeedNoise,
    equal_exponents,
    holm,
    leave_largest_out,
    leave_one_size_out,
    seed_noise,
    separate_exponents,
)
from analysis.claims import Claim, Judgement, all_claims, judge, merge_equal, why_not_judged, why_too_small
from analysis.compare import DEFAULT_CONFIDENCE, Multiplier, paired_multiplier
from analysis.gate import StudyError
from analysis.laws import (
    FitError,
    FloorFit,
    PowerLaw,
    SharedExponentFit,
    SizeMeans,
    fit_power_law,
    fit_power_law_with_floor,
    fit_shared_exponent,
    size_means,
)
from analysis.sensitivity import SensitivityRow, sensitivity
from analysis.settings import why_times_differ
from analysis.study_data import StudyData
from attnres.words import counted

DEFAULT_DRAWS = 2000
REASON_LENGTH = 75  # characters of a reason in the verdict line, which is to fit two lines of a terminal


@dataclass(frozen=True)
class RuleResult:
    """One rule against the baseline."""

    rule: str
    means: SizeMeans  # baseline and rule, the sizes and seeds that both have
    fit: SharedExponentFit  # of the two arms
    multiplier: Multiplier
    wall_clock: Multiplier | None
    wall_clock_median_step: Multiplier | None  # seconds as median step times steps: blind to pauses
    wall_clock_note: str
    judgements: tuple[Judgement, ...]
    not_judged: str | None  # why every verdict is "cannot tell" whatever the interval
    verdict_line: str
    conventions: Mapping[str, Multiplier | None]
    bootstrap: BootstrapInterval
    separate: tuple[MultiplierAt, ...]  # at the smallest and the largest size's compute
    exponents: EqualExponents
    without_size: Mapping[str, float]
    largest_out: LeaveLargestOut | None
    p_holm: float
    loss_gap_nats: float  # at the largest size, mean over seeds of L_base times the pooled relative gap
    loss_gap_nats_low: float
    loss_gap_nats_high: float
    sensitivity: tuple[SensitivityRow, ...]


@dataclass(frozen=True)
class StudyResult:
    """All rules of a study."""

    data: StudyData
    confidence: float
    too_small: str | None
    laws: Mapping[str, PowerLaw]  # an exponent of its own for each rule
    shared: SharedExponentFit | None  # all rules, over the sizes that all have
    floors: Mapping[str, FloorFit]
    exponents: EqualExponents | None  # all rules at once
    noise: SeedNoise
    rules: Mapping[str, RuleResult]
    notes: tuple[str, ...]


def compute_results(
    data: StudyData,
    *,
    claims: Sequence[Claim] = (),
    confidence: float = DEFAULT_CONFIDENCE,
    draws: int = DEFAULT_DRAWS,
) -> StudyResult:
    """Fit and compare everything. Raises UserError where an arm cannot be compared."""
    if data.no_multiplier is not None:
        raise StudyError(data.no_multiplier)
    table, notes = data.table, list(data.notes)
    arms = {}
    for rule in data.rules[1:]:
        arms[rule] = _paired_rows(table, data, rule, notes)
    sizes = {rule: rows["size"].nunique() for rule, rows in arms.items()}
    too_small = why_too_small(data.too_small, min(sizes.values()))
    judged = all_claims(data.claims, claims)
    headline = _headline_claims(data.claims, claims)
    p_values = {rule: paired_multiplier(rows, data.baseline, rule).p_value for rule, rows in arms.items()}
    adjusted = holm(p_values)
    results = {
        rule: _rule_result(data, rule, rows, judged, headline, too_small, adjusted[rule], confidence, draws)
        for rule, rows in arms.items()
    }
    complete = _complete_sizes(table, data.rules)
    shared = joint = None
    if complete["size"].nunique() >= 3:
        means = size_means(complete, data.rules)
        shared = fit_shared_exponent(means, convention=data.convention)
        joint = equal_exponents(means, data.baseline)
    laws, floors = {}, {}
    for rule in data.rules:
        own = size_means(table, [rule])
        compute, loss = np.exp(own.ln_compute_SR[:, 0]), np.exp(own.ln_loss_SR[:, 0])
        laws[rule] = fit_power_law(compute, loss, convention=data.convention)
        floors[rule] = fit_power_law_with_floor(
            compute, loss, confidence=confidence, convention=data.convention
        )
    return StudyResult(
        data=data,
        confidence=confidence,
        too_small=too_small,
        laws=laws,
        shared=shared,
        floors=floors,
        exponents=joint,
        noise=seed_noise(table, data.baseline),
        rules=results,
        notes=tuple(notes),
    )


def _paired_rows(table: pd.DataFrame, data: StudyData, rule: str, notes: list[str]) -> pd.DataFrame:
    """Trials of the baseline and the rule with a partner of the same size and seed."""
    rows = table[table["rule"].isin((data.baseline, rule))]
    paired = rows[rows.groupby(["size", "seed"])["rule"].transform("nunique") == 2]
    if len(paired) < len(rows):
        lonely = counted(len(rows) - len(paired), "trial")
        notes.append(f"{rule}: without a partner of the same size and seed, not used: {lonely}")
    sizes = list(dict.fromkeys(paired["size"]))
    if len(sizes) < 3:
        raise StudyError(
            f"study={data.name}: rule={rule}: {counted(len(sizes), 'size')} ({', '.join(sizes) or 'none'}) "
            f"shared with {data.baseline}; a comparison needs 3"
        )
    return paired.reset_index(drop=True)


def _complete_sizes(table: pd.DataFrame, rules: Sequence[str]) -> pd.DataFrame:
    """Rows of size x seed that every rule has."""
    return table[table.groupby(["size", "seed"])["rule"].transform("nunique") == len(rules)]


def _headline_claims(study: Sequence[Claim], further: Sequence[Claim]) -> set[str]:
    """Names of the claims in the verdict line: m > 1 and what the study or the user asks."""
    standard = [claim for claim in all_claims() if claim.multiplier != 1.10]
    asked = study or [claim for claim in standard if claim.multiplier > 1]
    return {standard[0].name, *(claim.name for claim in (*asked, *further))}


def _rule_result(
    data: StudyData,
    rule: str,
    rows: pd.DataFrame,
    claims: Sequence[Claim],
    headline: set[str],
    too_small: str | None,
    p_holm: float,
    confidence: float,
    draws: int,
) -> RuleResult:
    baseline = data.baseline
    means = size_means(rows, [baseline, rule])
    m = paired_multiplier(means, baseline, rule, confidence=confidence)
    wall_clock, wall_clock_note = _wall_clock(data, rows, rule, confidence)
    judgements = tuple(judge(claim, m, too_small) for claim in claims)
    ends = np.exp(means.ln_compute_SR[[0, -1], means.column(rule)])
    base_loss = float(np.exp(means.ln_loss_SR[-1, means.column(baseline)]))
    names = [data.convention, *(name for name in data.conventions if name != data.convention)]
    rows_by_choice = sensitivity(rows, data.tuned, baseline, rule, names, confidence=confidence)
    return RuleResult(
        rule=rule,
        means=means,
        fit=fit_shared_exponent(means, convention=data.convention),
        multiplier=m,
        wall_clock=wall_clock,
        wall_clock_median_step=_wall_clock(data, rows, rule, confidence, "median_step_train_seconds")[0],
        wall_clock_note=wall_clock_note,
        judgements=judgements,
        not_judged=why_not_judged(m, too_small),
        verdict_line=verdict_line(m, [j for j in judgements if j.claim.name in headline], too_small),
        conventions={name: _under(rows, baseline, rule, name, confidence) for name in data.conventions},
        bootstrap=wild_cluster_bootstrap(means, baseline, rule, draws=draws, confidence=confidence),
        separate=tuple(
            separate_exponents(means, baseline, rule, compute, confidence=confidence) for compute in ends
        ),
        exponents=equal_exponents(means, baseline),
        without_size=leave_one_size_out(means, baseline, rule),
        largest_out=leave_largest_out(means, baseline, rule),
        p_holm=p_holm,
        loss_gap_nats=base_loss * m.loss_gap,
        loss_gap_nats_low=base_loss * m.loss_gap_low,
        loss_gap_nats_high=base_loss * m.loss_gap_high,
        sensitivity=tuple(rows_by_choice),
    )


def _under(
    rows: pd.DataFrame, baseline: str, rule: str, convention: str, confidence: float
) -> Multiplier | None:
    """The multiplier under a convention of C; None where the records lack it."""
    compute = rows[f"compute_{convention}"]
    if not (compute > 0).all():
        return None
    try:
        return paired_multiplier(rows.assign(compute=compute), baseline, rule, confidence=confidence)
    except FitError:
        return None  # the sensitivity table, which has the same row, says why


def _wall_clock(
    data: StudyData, rows: pd.DataFrame, rule: str, confidence: float, seconds: str = "train_seconds"
) -> tuple[Multiplier | None, str]:
    """m in seconds of training: m in compute times the ratio of the speeds, taken size by size."""
    if not (rows[seconds] > 0).all():
        return None, "some trials have no training time"
    differ = why_times_differ(rows, data.table)
    if differ:
        return None, differ
    resumed = int((rows["attempts"].fillna(1) > 1).sum())
    note = f"resumed: {counted(resumed, 'trial')}; training time is the sum of the parts" if resumed else ""
    try:
        return (
            paired_multiplier(rows, data.baseline, rule, cost=seconds, confidence=confidence),
            note,
        )
    except FitError as error:
        return None, str(error)


def verdict_line(m: Multiplier, judgements: Sequence[Judgement], too_small: str | None) -> str:
    """One short line: the multiplier, the saving, and what follows for each named claim.

    Where nothing is judged the claims are named all the same, with the reason, cut short.
    """
    numbers = (
        f"{m.rule} against {m.baseline}: {_times(m.multiplier)}x compute "
        f"[{_times(m.ci_low)}, {_times(m.ci_high)}]"
    )
    merged = merge_equal(judgements)
    reason = why_not_judged(m, too_small)
    if reason:
        names = ", ".join(name for name, _ in merged)
        return f"{numbers}: cannot tell {names} ({shorten(reason, REASON_LENGTH, placeholder=' ...')})"
    saving = f"saves {m.saving:.0%} [{m.saving_low:.0%}, {m.saving_high:.0%}]"
    if m.saving < 0:
        saving = f"needs {-m.saving:.0%} more [{-m.saving_high:.0%}, {-m.saving_low:.0%}]"
    return f"{numbers}, {saving}: " + "; ".join(f"{name} {j.verdict}" for name, j in merged)


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1e}"
