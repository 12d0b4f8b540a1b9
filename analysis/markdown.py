"""report.md: verdict first, then the numbers, then what could be wrong with them, then how it was made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.checks import EqualExponents
from analysis.claims import merge_equal
from analysis.compare import Multiplier
from analysis.laws import PowerLaw
from analysis.results import RuleResult, StudyResult
from analysis.sensitivity import SensitivityRow
from analysis.serialise import design, size_rows
from analysis.study_data import StudyData
from attnres.words import counted

ESTIMATOR = (
    "gaps in ln L paired by size and seed, a shared exponent, Student's t with one degree of freedom fewer "
    "than sizes, delta method for alpha"
)


def escape(text: str) -> str:
    """Names and texts of others: nothing in them acts as Markdown or HTML."""
    flat = " ".join(str(text).split())
    flat = re.sub(r"([\\`*{}\[\]<>#|~&$])", r"\\\1", flat)
    flat = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", flat)  # inside a word it means nothing
    # At the start of a line, "- " or "1. " would begin a list.
    return re.sub(r"^(\d*)([-+.)])(?=\s|$)", r"\1\\\2", flat)


def name(text: str) -> str:
    """A name as code where its characters allow it, else escaped."""
    return f"`{text}`" if re.fullmatch(r"[A-Za-z0-9._=/-]+", text) else escape(text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; cells are Markdown already."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def interval(m: Multiplier | None, digits: int = 3) -> str:
    if m is None:
        return "not available"
    return f"{m.multiplier:.{digits}f} [{m.ci_low:.{digits}f}, {m.ci_high:.{digits}f}]"


def p_text(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def p_is(p: float) -> str:
    return f"p {p_text(p)}" if p < 0.001 else f"p = {p_text(p)}"


def _f_test(e: EqualExponents) -> str:
    return f"F({e.numerator_df}, {e.denominator_df}) = {e.f_statistic:.2f}, {p_is(e.p_value)}"


def render(result: StudyResult, how: Mapping[str, Any], figures: Sequence[str]) -> str:
    """The whole report. `figures` are the file names of the PNG figures that were drawn."""
    sections = [
        _head(result),
        _multipliers(result),
        _claims(result),
        _design(result),
        _figure(figures, "loss_against_compute", "Loss against compute, and the paired gap to the baseline"),
        _sizes(result, figures),
        _checks(result),
        _sensitivity(result),
        _laws(result),
        _caveats(result),
        _figure(
            figures,
            "training_curves",
            "Training loss over tokens, each seed, smoothed; points are the final validation losses",
        ),
        how_lines(result.data, how, ESTIMATOR),
    ]
    return "\n".join(line for section in sections for line in section).rstrip() + "\n"


def _head(result: StudyResult) -> list[str]:
    data = result.data
    lines = [f"# {escape(data.name)}", ""]
    if data.purpose:
        lines += [escape(data.purpose), ""]
    lines += ["## Verdict", ""]
    lines += [f"- {escape(r.verdict_line)}" for r in result.rules.values()]
    lines.append("")
    if result.too_small:
        lines += [f"**Too small to judge a claim.** {escape(result.too_small)}", ""]
    else:
        unjudged = [r for r in result.rules.values() if r.not_judged]
        lines += [f"**{name(r.rule)}: no claim is judged.** {escape(r.not_judged or '')}." for r in unjudged]
        lines += [""] if unjudged else []
    return lines


def _multipliers(result: StudyResult) -> list[str]:
    percent = f"{result.confidence:.0%}"
    header = [
        "rule",
        f"m in FLOP [{percent}]",
        "saving",
        "loss gap at equal C",
        "nats, largest size",
        "m in wall-clock",
        "p of m <= 1",
        "Holm",
    ]
    rows = []
    for r in result.rules.values():
        m = r.multiplier
        rows.append(
            [
                name(r.rule),
                interval(m),
                f"{m.saving:.1%} [{m.saving_low:.1%}, {m.saving_high:.1%}]",
                f"{m.loss_gap:.2%} [{m.loss_gap_low:.2%}, {m.loss_gap_high:.2%}]",
                f"{r.loss_gap_nats:.4f}",
                interval(r.wall_clock),
                p_text(m.p_value),
                p_text(r.p_holm),
            ]
        )
    return [
        "## Compute multipliers",
        "",
        f"m is how many times the rule's compute {name(result.data.baseline)} needs for the same loss. "
        f"Compute is in FLOP, convention {name(result.data.convention)}: "
        f"{escape(result.data.conventions[result.data.convention])}.",
        "",
        *table(header, rows),
    ]


def _design(result: StudyResult) -> list[str]:
    """What was trained: the budget decides what a verdict is worth."""
    rows = []
    for size in design(result)["sizes"]:
        parameters, tokens = size["non_embedding_parameters"], size["tokens"]
        ratio = f"{tokens / parameters:.3g}" if parameters else "unknown"
        rates = ", ".join(f"{rate:g}" for rate in size["learning_rates"]) or "unknown"
        cells = [name(size["size"]), _count(parameters), _count(tokens), ratio, rates]
        rows.append([*cells, str(len(size["seeds"])), f"{size['compute_min']:.3g}"])
    header = ["size", "parameters", "tokens", "tokens per parameter", "learning rate", "seeds", "C, least"]
    return [
        "## What was trained",
        "",
        "Parameters are without embedding and unembedding (of the smallest rule), tokens are of one trial, "
        "C is in FLOP.",
        "",
        *table(header, rows),
    ]


def _count(number: float | None) -> str:
    return "unknown" if number is None or number != number else f"{number:,.0f}"


def _claims(result: StudyResult) -> list[str]:
    rules, small = list(result.rules.values()), result.too_small
    rows = []
    for index, (label, judgement) in enumerate(merge_equal(rules[0].judgements)):
        cells = [escape(label), f"{judgement.claim.multiplier:.4g}"]
        for r in rules:
            j = merge_equal(r.judgements)[index][1]
            inside = "inside" if j.inside_interval else "outside"
            cells.append(f"**{j.verdict}** ({inside}; p {p_text(min(j.p_at_most, j.p_at_least))})")
        rows.append(cells)
    return [
        "## Claims",
        "",
        "A claim is that m is at least the value: supported if the whole interval lies at or above it, "
        "rejected if the whole interval lies below it, else this design cannot tell. Inside and outside say "
        "where the value itself lies; p is one-sided, against the value, on the side of the estimate."
        + (
            " This design is too small to judge, so it cannot tell whatever its interval is." if small else ""
        ),
        "",
        *table(["claim", "m", *(name(r.rule) for r in rules)], rows),
    ]


def _figure(figures: Sequence[str], stem: str, caption: str) -> list[str]:
    return [f"![{caption}]({stem}.png)", ""] if f"{stem}.png" in figures else []


def _sizes(result: StudyResult, figures: Sequence[str]) -> list[str]:
    rows = []
    for r in result.rules.values():
        for row in size_rows(result, r):
            wall = row["wall_clock_multiplier"]
            rows.append(
                [
                    name(r.rule),
                    name(row["size"]),
                    f"{row['compute_baseline']:.4g}",
                    f"{row['compute_rule'] / row['compute_baseline'] - 1:+.1%}",
                    f"{row['loss_baseline']:.4f}",
                    f"{row['loss_rule']:.4f}",
                    f"{-np.expm1(-row['log_gap_at_equal_compute']):.2%}",
                    f"{row['multiplier']:.3f}",
                    "" if wall is None else f"{wall:.3f}",
                ]
            )
    header = [
        "rule",
        "size",
        "C of the baseline (FLOP)",
        "C of the rule",
        "baseline loss",
        "rule's loss",
        "gap at equal C",
        "m",
        "m in wall-clock",
    ]
    return [
        "## Size by size",
        "",
        "The m of a size is its paired gap over the pooled exponent. Losses are means over seeds, in nats.",
        "",
        *table(header, rows),
        *_figure(figures, "size_gaps", "Multiplier of each size, and pooled with its interval"),
    ]


def _checks(result: StudyResult) -> list[str]:
    lines = ["## Checks", ""]
    for r in result.rules.values():
        lines += [f"**{escape(r.rule)}**", "", *(f"- {text}" for text in _rule_checks(r)), ""]
    if result.exponents and len(result.rules) > 1:
        e = result.exponents
        lines += [
            f"All rules together, one exponent: {_f_test(e)}.",
            "",
        ]
    return lines


def _rule_checks(r: RuleResult) -> list[str]:
    m, b, e = r.multiplier, r.bootstrap, r.exponents
    at = [f"{s.multiplier:.3f} [{s.ci_low:.3f}, {s.ci_high:.3f}] at {s.compute:.3g} FLOP" for s in r.separate]
    checks = [
        f"alpha = {m.alpha:.4f} ± {m.alpha_standard_error:.4f} (local, over the fitted range); 0.1 % of loss "
        f"is {0.1 / m.alpha:.1f} % of m.",
        f"Wild cluster bootstrap, {b.draws:,} draws: [{b.ci_low:.3f}, {b.ci_high:.3f}], {p_is(b.p_value)}. "
        "A second opinion; it covers a little less than it says.",
        f"An exponent for each arm: m = {' and '.join(at)}.",
        f"Equal exponents: {_f_test(e)}; power {e.power or 0:.0%} to notice an m that grows "
        f"{e.power_for_growth_per_decade:g} times per decade of C.",
    ]
    if r.wall_clock_median_step:
        median_step = interval(r.wall_clock_median_step)
        checks.append(f"Wall-clock from each trial's median step, blind to pauses: m = {median_step}.")
    if r.without_size:
        known = [value for value in r.without_size.values() if np.isfinite(value)]
        none = [name(size) for size, value in r.without_size.items() if not np.isfinite(value)]
        span = f"m from {min(known):.3f} to {max(known):.3f}" if known else "no m"
        also = f"; no m without {', '.join(none)}" if none else ""
        checks.append(f"Leaving out one size at a time: {span}{also}.")
    else:
        checks.append("Leaving out a size needs 4 sizes.")
    if r.largest_out:
        out = r.largest_out
        errors = ", ".join(f"{name(arm)} {error:+.2%}" for arm, error in out.log_error.items())
        checks.append(
            f"Predicting {name(out.size)} from the smaller sizes: loss off by {errors} (predicted over "
            f"observed); gap predicted {out.gap_predicted:.2%}, observed {out.gap_observed:.2%}."
        )
    return checks


def _sensitivity(result: StudyResult) -> list[str]:
    lines = ["## How the answer moves with choices", ""]
    header = ["rule", "change", "m", "alpha"]
    rows = []
    ranges = []
    for r in result.rules.values():
        for row in r.sensitivity:
            if len(row.changed) <= 1:
                rows.append([name(r.rule), _change(row), _row_interval(row), _alpha(row)])
        values = [row.multiplier for row in r.sensitivity if row.multiplier is not None]
        span = f"{min(values):.3f} to {max(values):.3f}"
        ranges.append(f"- {name(r.rule)}: {span} over {len(values)} combinations")
    lines += [*table(header, rows), "All combinations are in sensitivity.csv:", "", *ranges, ""]
    return lines


def _change(row: SensitivityRow) -> str:
    if not row.changed:
        return "none (headline)"
    (key,) = row.changed
    return {
        "convention": f"C counted as {name(row.convention)}",
        "floor": f"floor of {row.floor:.3f} nats assumed",
        "learning_rate": f"learning rate: {escape(row.learning_rate)}",
        "seeds": f"seed {escape(row.seeds)} only",
    }[key]


def _row_interval(row: SensitivityRow) -> str:
    if row.multiplier is None:
        return f"none: {escape(row.note)}"
    return f"{row.multiplier:.3f} [{row.ci_low:.3f}, {row.ci_high:.3f}]"


def _alpha(row: SensitivityRow) -> str:
    return "" if row.alpha is None else f"{row.alpha:.4f}"


def _laws(result: StudyResult) -> list[str]:
    rows = []
    for rule, law in result.laws.items():
        floor = result.floors[rule]
        text = f"{floor.floor:.3f} nats" if floor.identified else "not identified"
        rows.append([name(rule), *_law_cells(law), f"{text} ({escape(floor.reason)})"])
    first = next(iter(result.laws.values()))
    lines = [
        "## Laws",
        "",
        "L = A C^-alpha with an exponent of its own for each rule, C in FLOP, fitted to means over seeds "
        f"from {first.compute_min:.3g} to {first.compute_max:.3g} FLOP.",
        "",
        *table(["rule", "A", "alpha", "residual of ln L", "floor E"], rows),
    ]
    if result.shared:
        shared = result.shared
        lines += [
            f"Shared by all rules: alpha = {shared.exponent:.4f} ± {shared.exponent_standard_error:.4f}.",
            "",
        ]
    return lines


def _law_cells(law: PowerLaw) -> list[str]:
    return [
        f"{law.coefficient:.4g}",
        f"{law.exponent:.4f} ± {law.exponent_standard_error:.4f}",
        f"{law.log_residual_std:.5f}",
    ]


def _caveats(result: StudyResult) -> list[str]:
    table_ = result.data.table
    decades = np.log10(table_["compute"].max() / table_["compute"].min())
    noise = result.noise
    lines = ["## Caveats", ""]
    lines.append(
        f"- {table_['size'].nunique()} sizes over {decades:.1f} decades of C. The interval is about these "
        "sizes; nothing here says that m holds at larger compute."
    )
    if noise.per_run_std is not None:
        paired = "" if noise.paired_std is None else f"; {noise.paired_std:.3%} after pairing by seed"
        lines.append(f"- Spread over seeds of one trial: {noise.per_run_std:.3%} of the loss{paired}.")
    else:
        lines.append(
            "- One seed: the spread over seeds is unknown; the interval rests on the scatter over sizes."
        )
    lines.append(
        "- Hyperparameters were the same for all rules of a size unless the table above lists learning "
        "rates; a rate tuned on the baseline favours the baseline."
    )
    notes = {r.wall_clock_note for r in result.rules.values() if r.wall_clock_note}
    timed = any(r.wall_clock is not None for r in result.rules.values())
    machines = ", ".join(map(escape, sorted(set(table_["machine"])))) if timed else "not available"
    remarks = " ".join(f"{escape(note)}." for note in sorted(notes))
    lines.append(f"- Wall-clock (training time): {machines}. {remarks}".rstrip())
    lines.append(
        "- Wall-clock times are as the trials ran, side by side with others on that machine, not alone on it."
    )
    if len(result.rules) > 1:
        lines.append("- Several rules were compared; Holm's p-values account for that, the intervals do not.")
    lines += [f"- Let pass by \\-\\-allow {escape(text)}." for text in result.data.let_pass]
    lines += [f"- {escape(note)}." for note in result.notes]
    return [*lines, ""]


def how_lines(data: StudyData, how: Mapping[str, Any], estimator: str = "") -> list[str]:
    """The last section of any report."""
    commits = (
        ", ".join(re.sub("(?<=^.{12})[0-9a-f]+", "", str(c)) for c in how["record_commits"]) or "unknown"
    )
    lines = [
        "## How this was made",
        "",
        f"- Command: `{how['command'].replace('`', '')}`",
        f"- Analysis at commit {escape(str(how['commit'] or 'unknown'))}; trials at {escape(commits)}.",
        f"- {counted(len(data.table), 'trial')}; {escape(how['versions'])}.",
    ]
    if estimator:
        lines.append(f"- Estimator: {estimator}.")
    if data.overrides:
        lines.append(f"- Launched with {', '.join(map(escape, data.overrides))}.")
    if data.where:
        chosen = ", ".join(f"{key}={value}" for key, value in data.where.items())
        lines.append(f"- Only trials with {escape(chosen)}.")
    return lines
