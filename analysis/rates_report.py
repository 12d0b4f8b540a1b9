"""Writes the report of a bracket of learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.differences_report import REPORT_FOLDER
from analysis.markdown import escape, how_lines, name, table
from analysis.rates import RateCurve, RatesResult
from analysis.serialise import head, plain, write_json
from attnres.record import write_text_atomic


def write_result(result: RatesResult, how: Mapping[str, Any], with_figures: bool) -> tuple[Path, list[str]]:
    """Write report.md, results.json, trials.csv and the figure: path of report.md, lines for the terminal."""
    data = result.data
    folder = data.folder / REPORT_FOLDER
    figures: list[str] = []
    if with_figures:
        from analysis.rates_figures import draw_all  # matplotlib takes longer to import than all the rest

        figures = [path.name for path in draw_all(result, folder) if path.suffix == ".png"]
    write_json(folder / "results.json", to_json(result, how))
    write_text_atomic(folder / "trials.csv", data.table.to_csv(index=False))
    path = folder / "report.md"
    write_text_atomic(path, render(result, how, figures))
    return path, best_lines(result)


def to_json(result: RatesResult, how: Mapping[str, Any]) -> dict[str, Any]:
    data = result.data
    return {
        **head(data, "rates"),
        "notes": list(data.notes),
        **result.as_json(),
        "how": plain(how),
    }


def best_lines(result: RatesResult) -> list[str]:
    absent = [f"{size} {rule}: {why}" for size, rule, why in result.absent]
    return [*map(best_line, result.curves), *absent]


def best_line(curve: RateCurve) -> str:
    """The best rate in words."""
    line = f"{curve.size} {curve.rule}: {curve.best_rate:.3g}, loss {curve.best_loss:.4f}"
    if curve.vertex_rate is None:
        return f"{line}; {'' if curve.at_edge else 'no vertex: '}{curve.refused}"
    between = ""
    if curve.interval is not None:
        between = f", 95 % [{curve.interval[0]:.3g}, {curve.interval[1]:.3g}] over seeds"
    return f"{line}; vertex at {curve.vertex_rate:.3g}{between}"


def render(result: RatesResult, how: Mapping[str, Any], figures: list[str]) -> str:
    data = result.data
    lines = [f"# {escape(data.name)}", "", *([escape(data.purpose), ""] if data.purpose else [])]
    lines += ["## Best rates", "", *(f"- {escape(line)}" for line in best_lines(result)), ""]
    for size in result.sizes:
        lines += _size(result, size)
    for figure in figures:
        lines += [f"![Loss over the learning rate]({figure})", ""]
    lines += ["## Caveats", ""]
    seeds = min(curve.seeds for curve in result.curves)
    if seeds == 1:
        lines.append("- One seed: a difference between neighbouring rates may be noise.")
    lines.append(
        "- Each rule at its own best rate is the fairer comparison, and still one of minima: it favours "
        "whichever has the noisier losses."
    )
    lines.append(
        "- A vertex is of the parabola in ln(rate) through the best rate and its two neighbours; its "
        "interval is from the spread over seeds, and knows nothing of how far the losses are from a parabola."
    )
    lines += [f"- Let pass by \\-\\-allow {escape(text)}." for text in data.let_pass]
    lines += [f"- {escape(note)}." for note in data.notes]
    return "\n".join([*lines, "", *how_lines(data, how)]).rstrip() + "\n"


def _size(result: RatesResult, size: str) -> list[str]:
    curves = result.of_size(size)
    every = sorted({rate for curve in curves for rate in curve.rates})
    header = ["rule", *(f"{rate:.3g}" for rate in every), "vertex", "own best rates", "baseline's best rate"]
    rows = []
    for curve in curves:
        at_rate = dict(zip(curve.rates, curve.losses, strict=True))
        cells = [f"{at_rate[rate]:.4f}" if rate in at_rate else "" for rate in every]
        best = every.index(curve.best_rate)
        cells[best] = f"**{cells[best]}**"
        gaps = result.gaps[size].get(curve.rule)
        rows.append(
            [
                name(curve.rule),
                *cells,
                "" if curve.vertex_rate is None else f"{curve.vertex_rate:.3g}",
                *(["", ""] if gaps is None else [f"{gap:+.4f}" for gap in gaps]),
            ]
        )
    about = "Losses in nats per token by learning rate; right, the difference from the baseline."
    return [f"## {escape(size)}", "", about, "", *table(header, rows)]
