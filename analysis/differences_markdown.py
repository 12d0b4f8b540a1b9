"""report.md of a study without a multiplier: rows beside the paper's, then what could be wrong with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.differences import ONE_SEED, Difference, DifferenceResult
from analysis.differences_output import why_no_multiplier
from analysis.markdown import escape, how_lines, name, p_text, table
from analysis.paper_rows import PAPER_SCALE

SIZES_WITH_A_TABLE = 4  # more share one
CAPTIONS = {
    "differences": "Difference from the baseline with interval; small points are seeds; right, the paper's",
    "block_size": "Loss against the block size; right, the paper's Figure 6 on its own axis",
    "shape": "Loss of every shape; the best one is framed",
    "magnitudes": "Magnitudes over depth at the last probe",
    "magnitudes_training": "The same over training; a line a probe",
    "depth_weights": "What the reads of the last probe are made of, mean over tokens",
}


def render(
    result: DifferenceResult, how: Mapping[str, Any], figures: Sequence[str], sections: Sequence[str]
) -> str:
    """The whole report. `figures` are the PNG files, `sections` the lines that the kind of report adds."""
    many = len(result.sizes) > SIZES_WITH_A_TABLE
    parts = [
        _head(result),
        *([_many_sizes(result)] if many else [_size(result, size) for size in result.sizes]),
        _paper(result),
        sections,
        *(_figure(file) for file in figures),
        _caveats(result),
        how_lines(result.data, how),
    ]
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"


def summary_lines(result: DifferenceResult) -> list[str]:
    """For the terminal: one line a rule, or a count where there are many."""
    compared = [row for row in result.rows if row.reading != "baseline"]
    if len(result.sizes) > 1:
        return [
            _summary_of_sizes(rule, result.data.baseline, [row for row in compared if row.rule == rule])
            for rule in result.data.rules[1:]
        ]
    return [
        f"{row.rule}: {_nats(row)} nats against {result.data.baseline}: {row.reading}" for row in compared
    ]


def _summary_of_sizes(rule: str, baseline: str, rows: Sequence[Difference]) -> str:
    """What can be told stands beside the means: their range alone would read as an interval."""
    rows = [row for row in rows if row.difference_per_seed]
    if not rows:
        return f"{rule}: no pairs"
    readings = [row.reading for row in rows]
    told = [f"{word} at {readings.count(word)}" for word in dict.fromkeys(readings)]
    if set(readings) == {ONE_SEED}:
        told = ["one seed, not known"]
    lowest, highest = (pick(rows, key=lambda row: row.difference_nats) for pick in (min, max))
    return (
        f"{rule} against {baseline}: lower at {sum(row.difference_nats < 0 for row in rows)} of {len(rows)} "
        f"sizes in the mean; beyond the spread of the seeds: {', '.join(told)}; means (no interval) "
        f"{lowest.difference_nats:+.4f} nats at {lowest.size} to {highest.difference_nats:+.4f} at "
        f"{highest.size}"
    )


def _head(result: DifferenceResult) -> list[str]:
    data = result.data
    lines = [f"# {escape(data.name)}", ""]
    if data.purpose:
        lines += [escape(data.purpose), ""]
    lines += ["## Result", "", *(f"- {escape(line)}" for line in summary_lines(result)), ""]
    if data.too_small:
        reason = data.too_small if isinstance(data.too_small, str) else "the study says so"
        lines += [f"**Too small to judge a claim.** {escape(reason)}", ""]
    return [*lines, f"No compute multiplier: {escape(why_no_multiplier(result))}.", ""]


def _size(result: DifferenceResult, size: str) -> list[str]:
    rows = result.of_size(size)
    first = rows[0]
    percent = f"{result.confidence:.0%}"
    steps = "" if math.isnan(first.steps) else f", {first.steps:,.0f} steps"
    tokens = "" if math.isnan(first.tokens) else f"{first.tokens:,.0f} tokens{steps}, "
    header = [
        "rule",
        "loss, nats",
        f"difference [{percent}]",
        "p, Holm",
        "reading",
        "seeds",
        "parameters",
        "step time",
    ]
    with_paper = bool(result.of_paper)
    if with_paper:
        header += ["paper: loss", "paper: difference"]
    lines = [
        [
            name(row.rule),
            f"{row.loss_nats:.4f}",
            "" if row.reading == "baseline" else _nats(row),
            "" if row.p_holm is None else p_text(row.p_holm),
            row.reading,
            str(len(row.loss_per_seed)),
            "" if math.isnan(row.parameters) else f"{row.parameters:,.0f}",
            "" if row.step_time_ratio is None else f"{row.step_time_ratio:.2f}",
            *(_paper_cells(row) if with_paper else []),
        ]
        for row in rows
    ]
    about = (
        f"{tokens}C of the baseline {first.compute:.3g} FLOP ({result.data.convention}). Differences are "
        f"rule - {name(result.data.baseline)} in nats per token, paired by seed: negative is better. Step "
        "time is the median step over the baseline's."
    )
    return [f"## {escape(size)}", "", about, "", *table(header, lines)]


def _many_sizes(result: DifferenceResult) -> list[str]:
    """One line a size: every rule's loss and difference."""
    others = result.data.rules[1:]
    header = ["size", "parameters", "tokens", f"C of {name(result.data.baseline)}, FLOP"]
    header += [name(result.data.baseline), *(cell for rule in others for cell in (name(rule), "difference"))]
    lines = []
    for size in result.sizes:
        rows = {row.rule: row for row in result.of_size(size)}
        first = next(iter(rows.values()))
        line = [name(size), f"{first.parameters:,.0f}", f"{first.tokens:,.0f}", f"{first.compute:.4g}"]
        base = rows.get(result.data.baseline)
        line.append("" if base is None else f"{base.loss_nats:.4f}")
        for rule in others:
            row = rows.get(rule)
            line += ["", ""] if row is None else [f"{row.loss_nats:.4f}", _nats(row)]
        lines.append(line)
    about = "Losses in nats per token; a difference is the rule's minus the baseline's: negative is better."
    return ["## Sizes", "", about, "", *table(header, lines)]


def _nats(row: Difference) -> str:
    if math.isnan(row.difference_nats):
        return "none"
    mean = f"{row.difference_nats:+.4f}"
    return mean if row.low is None or row.high is None else f"{mean} [{row.low:+.4f}, {row.high:+.4f}]"


def _paper_cells(row: Difference) -> list[str]:
    if row.paper is None:
        return ["", ""]
    return [f"{row.paper.loss_nats:.3f}", f"{row.paper.difference_nats:+.3f}"]


def _paper(result: DifferenceResult) -> list[str]:
    if not result.of_paper or len(result.sizes) > SIZES_WITH_A_TABLE:
        return []
    return [
        f"Columns headed paper: {' and '.join(result.of_paper)} of arXiv:2603.15031 ({PAPER_SCALE}), from "
        "its prenorm. Another model, corpus and tokenizer: signs and order can be compared with ours, "
        "amounts cannot.",
        "",
    ]


def _figure(file: str) -> list[str]:
    caption = CAPTIONS[file.removesuffix(".png")]
    return [f"![{caption}]({file})", "", f"{caption}.", ""]


def _caveats(result: DifferenceResult) -> list[str]:
    data, lines = result.data, ["## Caveats", ""]
    counts = {len(row.difference_per_seed) for row in result.rows if row.reading != "baseline"}
    if counts == {1}:
        lines.append(
            "- One seed: the spread over seeds is unknown. No interval is given, and no sign is judged."
        )
    elif result.pooled_std_nats is not None:
        lines.append(
            f"- Spread over seeds of a paired difference: {result.pooled_std_nats:.4f} nats (standard "
            f"deviation, pooled, {result.pooled_degrees_of_freedom} degrees of freedom). The intervals do "
            "not pool it: each is Student's t over the seeds of its row."
        )
        lines.append(
            "- The reading is that of Holm's p over all rows of the report; each interval is for one row."
        )
    if data.table["learning_rate"].notna().all():
        lines.append("- All rules of a size have one learning rate; one chosen on the baseline favours it.")
    notes = {row.step_time_note for row in result.rows if row.step_time_note}
    lines += [f"- Step time: {escape(note)}." for note in sorted(notes)]
    if any(row.step_time_ratio is not None for row in result.rows):
        lines.append("- Step times are as the trials ran, side by side with others on that machine.")
    lines += [f"- Let pass by \\-\\-allow {escape(text)}." for text in data.let_pass]
    return [*lines, *(f"- {escape(note)}." for note in result.notes), ""]
