"""Figures of a report. Each takes results and returns a matplotlib Figure; none reads runs but training
curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import style
from analysis.figures_data import cell_summary
from analysis.laws import SharedExponentFit
from analysis.results import RuleResult, StudyResult
from analysis.study_data import Curve, StudyData

METRICS_FILE = "metrics.jsonl"
REFERENCE_MULTIPLIERS = (1.0, 1.25, 4 / 3)
NAMED_AT_MOST = 28  # characters of a rule's name in a figure


def short(name: str) -> str:
    """A name as figures show it: no mathtext, not too long."""
    text = name.replace("$", r"\$")
    return text if len(text) <= NAMED_AT_MOST else text[: NAMED_AT_MOST - 1] + "…"


def loss_against_compute(result: StudyResult) -> Figure:
    """Losses and shared-exponent lines over compute, the multiplier as an arrow; below, the gap to the
    baseline."""
    data, table = result.data, result.data.table
    per_unit, unit = 1.0, "FLOP"  # a table's own
    if data.convention != "as_given":
        per_unit, unit = style.compute_unit(float(table["compute"].max()))
    figure = Figure(figsize=(7.6, 6.3))
    axes, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
    figure.subplots_adjust(left=0.115, right=0.75, bottom=0.09, top=0.935, hspace=0.09)
    low, high = float(table["compute"].min()) / 1.35, float(table["compute"].max()) * 1.35
    line_C = np.geomspace(low, high, 50)
    starts, ends = [], []
    for index, rule in enumerate(data.rules):
        look = style.look(index)
        cells = cell_summary(table[table["rule"] == rule])
        law = _fit_of(result, rule).law(rule)
        axes.plot(line_C / per_unit, law.predict(line_C), color=look["color"], linewidth=1.4, zorder=2)
        _points(axes, cells["compute"] / per_unit, cells["loss"], cells["error"], look)
        ends.append((float(law.predict(high)), _line_label(result, rule), look["color"]))
        starts.append(float(law.predict(low)))
    losses = [*map(float, table["loss"]), *starts, *(end for end, _, _ in ends)]
    _gap_panel(lower, result, per_unit)
    margin = (max(losses) / min(losses)) ** 0.08
    style.log_axis(axes.yaxis, min(losses) / margin, max(losses) * margin**0.5)
    style.log_axis(lower.xaxis, low / per_unit, high / per_unit, powers=True)
    lower.set_xlabel(f"training compute C ({unit}, convention {data.convention})")
    axes.set_ylabel("validation loss (nats per token)")
    for panel in (axes, lower):
        panel.yaxis.set_label_coords(-0.115, 0.5)
    axes.set_title(f"Loss against compute: {short(data.name)}", loc="left", pad=10)
    style.label_ends(axes, ends)
    _multiplier_arrow(axes, _most(result), per_unit)
    note = f"{_bar_note(table)}\nLines: one exponent for each pair with {short(data.baseline)}."
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(0.02, 0.03, note, transform=axes.transAxes, fontsize=8, color=style.MUTED, bbox=white)
    return figure


def _points(axes: Axes, x: Any, y: Any, error: Any, look: dict[str, Any]) -> None:
    axes.errorbar(
        x,
        y,
        yerr=error,
        linestyle="none",
        markersize=5.5,
        capsize=2.5,
        elinewidth=1,
        markeredgecolor="white",
        markeredgewidth=0.6,
        zorder=3,
        **look,
    )


def _bar_note(table: pd.DataFrame) -> str:
    seeds = table.groupby(["size", "rule"])["seed"].nunique()
    if seeds.max() == 1:
        return "Points: one seed; bars: standard error over\nvalidation windows, mostly shared by the rules."
    number = str(seeds.max()) if seeds.min() == seeds.max() else f"{seeds.min()} to {seeds.max()}"
    return f"Points: means over {number} seeds; bars: standard error over seeds."


def _gap_panel(axes: Axes, result: StudyResult, per_unit: float) -> None:
    """Paired loss gap of each size at equal compute in percent, with the pooled gap and its interval.

    1 - L_rule / L_baseline, as in the tables: above 0 the rule is better.
    """
    axes.axhline(0, color=style.COLOURS[0], linewidth=1.4, zorder=2)
    rules = list(result.rules.values())
    for index, r in enumerate(rules, start=1):
        look, m = style.look(index), r.multiplier
        compute = np.exp(r.means.ln_compute_SR[:, r.means.column(m.baseline)])
        dodge = 1.03 ** (index - (len(rules) + 1) / 2)  # side by side, not on top of each other
        gap = [-100 * float(np.expm1(-g)) for g in m.per_size_gap.values()]
        error = _paired_error(result.data.table, m.baseline, r.rule, r.means.sizes)
        _points(axes, compute * dodge / per_unit, gap, error, look)
        axes.axhline(100 * m.loss_gap, color=look["color"], linewidth=1.2, linestyle=(0, (5, 2)), zorder=1)
        axes.axhspan(
            100 * m.loss_gap_low,
            100 * m.loss_gap_high,
            color=look["color"],
            alpha=0.1,
            linewidth=0,
            zorder=0,
        )
    axes.set_ylabel(f"loss below {short(result.data.baseline)} (%)")
    axes.yaxis.set_major_locator(style.few_ticks())
    band = f"band: {result.confidence:.0%} interval"
    text = f"at equal compute,\npaired by size and seed;\ndashed: pooled gap,\n{band}"
    axes.text(1.035, 0.5, text, transform=axes.transAxes, fontsize=8, color=style.MUTED, va="center")


def _paired_error(table: pd.DataFrame, baseline: str, rule: str, sizes: Sequence[str]) -> list[float]:
    """Standard error over seeds of the paired gap in percent, by size; 0 where there is one seed."""
    losses = table.pivot_table(index=["size", "seed"], columns="rule", values="loss")
    gap = 100 * (1 - losses[rule] / losses[baseline]).dropna()
    groups = gap.groupby("size")
    error: pd.Series[float] = groups.std(ddof=1).fillna(0.0) / np.sqrt(groups.size())
    return [float(error[size]) for size in sizes]


def _fit_of(result: StudyResult, rule: str) -> SharedExponentFit:
    """The pair fit that a rule's line comes from; the baseline's is that of the rule with the arrow."""
    return _most(result).fit if rule == result.data.baseline else result.rules[rule].fit


def _most(result: StudyResult) -> RuleResult:
    return max(result.rules.values(), key=lambda r: abs(r.multiplier.log_multiplier))


def _line_label(result: StudyResult, rule: str) -> str:
    if rule == result.data.baseline:
        return f"{short(rule)} (baseline)"
    m = result.rules[rule].multiplier
    return f"{short(rule)}\n{m.multiplier:.2f}× [{m.ci_low:.2f}, {m.ci_high:.2f}]"


def _multiplier_arrow(axes: Axes, rule: RuleResult, per_unit: float) -> None:
    """Horizontal arrow at one loss, from the rule's line to the baseline's: its length is m."""
    m = rule.multiplier
    law = rule.fit.law(rule.rule)
    middle = len(rule.means.sizes) // 2
    start = float(
        np.exp(rule.means.ln_compute_SR[middle - 1 : middle + 1].mean())
    )  # between two sizes' points
    loss = float(law.predict(start))
    stop = start * m.multiplier
    axes.annotate(
        "",
        xy=(stop / per_unit, loss),
        xytext=(start / per_unit, loss),
        arrowprops={"arrowstyle": "-|>", "color": style.MUTED, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0},
        zorder=4,
    )
    text = (
        f"for the same loss {short(m.baseline)} needs\n{m.multiplier:.2f}× the compute of {short(rule.rule)}"
    )
    axes.annotate(
        text,
        xy=(np.sqrt(start * stop) / per_unit, loss),
        xytext=(0.98, 0.95),
        textcoords="axes fraction",
        fontsize=9,
        color=style.MUTED,
        va="top",
        ha="right",
        arrowprops={
            "arrowstyle": "-",
            "color": style.MUTED,
            "linewidth": 0.6,
            "relpos": (0.5, 0),
            "shrinkA": 2,
            "shrinkB": 4,
        },
    )


def size_gaps(result: StudyResult) -> Figure:
    """Multiplier of each size (paired gap over the pooled slope) and the pooled estimate with its
    interval."""
    rules = list(result.rules.values())
    rows = sum(len(r.means.sizes) + 2 for r in rules)
    figure = Figure(figsize=(7.4, 1.5 + 0.27 * rows))
    axes = figure.subplots()
    height = figure.get_size_inches()[1]
    figure.subplots_adjust(left=0.3, right=0.8, bottom=0.78 / height, top=1 - 0.6 / height)
    values, y = [1.0], 0.0
    labels: list[tuple[float, str]] = []
    for index, r in enumerate(rules, start=1):
        y = _forest(axes, r, style.look(index), y, labels, values)
    for reference in REFERENCE_MULTIPLIERS:
        dash = "-" if reference == 1 else (0, (4, 3))
        axes.axvline(reference, color="#9a9a9a", linewidth=0.9, linestyle=dash, zorder=1)
        axes.annotate(
            f"{reference:.3g}×" if reference != 1 else "1×",
            xy=(reference, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right" if reference == 1.25 else "center" if reference == 1 else "left",
            fontsize=8.5,
            color=style.MUTED,
        )
    low, high = min(values), max(max(values), 4 / 3)
    pad = (high / low) ** 0.06
    style.log_axis(axes.xaxis, low / pad, high * pad)
    axes.set_yticks([place for place, _ in labels], [text for _, text in labels])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(y - 1.1, -0.9)
    axes.set_title("Multiplier of each size, and pooled", loc="left", pad=18)
    axes.set_xlabel(
        f"compute multiplier m against {short(result.data.baseline)}\n"
        f"(bar and band: {result.confidence:.0%} interval of the pooled m)"
    )
    return figure


def _forest(
    axes: Axes,
    r: RuleResult,
    look: dict[str, Any],
    y: float,
    labels: list[tuple[float, str]],
    values: list[float],
) -> float:
    """Rows of one rule from y downwards; returns the next free y. Bars of a size: its paired spread over
    seeds."""
    m = r.multiplier
    for size, value in m.per_size_multiplier.items():
        axes.plot([value], [y], linestyle="none", markersize=6, markeredgecolor="white", **look)
        labels.append((y, short(size)))
        values.append(value)
        y += 1
    axes.fill_betweenx(
        [y - len(m.per_size_multiplier) - 0.4, y + 0.4],
        m.ci_low,
        m.ci_high,
        color=look["color"],
        alpha=0.1,
        linewidth=0,
    )
    axes.plot([m.ci_low, m.ci_high], [y, y], color=look["color"], linewidth=2.4, solid_capstyle="butt")
    axes.plot([m.multiplier], [y], marker="d", markersize=9, color=look["color"])
    axes.annotate(
        f"{m.multiplier:.3f}\n[{m.ci_low:.3f}, {m.ci_high:.3f}]",
        xy=(1.02, y),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=9,
        color=look["color"],
        annotation_clip=False,
    )
    labels.append((y, f"{short(r.rule)}, pooled"))
    values += [m.ci_low, m.ci_high]
    return y + 2


def training_curves(data: StudyData) -> Figure:
    """Training loss (each seed, smoothed) and final validation losses (points), one panel per size."""
    table = data.table
    order = table.groupby("size")["compute"].mean().sort_values().index
    columns = min(3, len(order))
    lines = -(-len(order) // columns)
    figure = Figure(figsize=(2.75 * columns + 0.5, 2.3 * lines + 0.75), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for place, size in enumerate(order):
        _curves(grid.flat[place], table[table["size"] == size], data, str(size))
    for axes in list(grid.flat)[len(order) :]:
        axes.set_visible(False)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.supxlabel("training tokens", fontsize=10.5)
    figure.supylabel("loss (nats per token)", fontsize=10.5)
    for handle in handles:
        handle.set_linewidth(1.6)
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=min(4, len(labels)),
        title=f"Loss over training: {short(data.name)}",  # a title of the figure would lie on the legend
        title_fontsize=11.5,
    )
    return figure


def _curves(axes: Axes, rows: pd.DataFrame, data: StudyData, size: str) -> None:
    late: list[float] = []
    for index, rule in enumerate(data.rules):
        look = style.look(index)
        named = False
        for _, row in rows[rows["rule"] == rule].iterrows():
            tokens, loss = smooth(*curve_of(data, str(row["id"])))
            label = short(rule) if not named else None
            named = True
            axes.plot(tokens, loss, color=look["color"], linewidth=0.8, alpha=0.75, label=label)
            axes.plot([row["tokens"]], [row["loss"]], markersize=3.5, markeredgewidth=0, **look)
            late += [float(row["loss"]), *loss[len(loss) // 6 :]]
    axes.set_title(short(size), fontsize=10)
    axes.set_ylim(min(late) * 0.97, max(late) * 1.05)  # the first sixth of training would flatten the rest
    axes.set_xlim(0, float(rows["tokens"].max()) * 1.03)
    axes.xaxis.set_major_locator(style.few_ticks())
    axes.xaxis.set_major_formatter(style.count_formatter())


def smooth(tokens: list[float], loss: list[float]) -> tuple[list[float], list[float]]:
    """Running mean over a fortieth of the curve: one batch's loss varies more than rules differ."""
    window = max(1, len(loss) // 40)
    kernel = np.full(window, 1 / window)
    means = [np.convolve(values, kernel, "valid").tolist() if values else [] for values in (tokens, loss)]
    return means[0], means[1]


def curve_of(data: StudyData, trial: str) -> Curve:
    """Tokens and training losses of a trial, empty where they are not known."""
    if data.curves is not None:
        return data.curves.get(trial, ([], []))
    return read_curve(data.folder / trial / METRICS_FILE)


def read_curve(path: Path) -> tuple[list[float], list[float]]:
    """Tokens and training losses of a metrics file; a torn last line, as a kill leaves it, is skipped."""
    tokens: list[float] = []
    losses: list[float] = []
    if not path.is_file():
        return tokens, losses
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and row.get("kind") == "train" and "tokens" in row and "loss_nats" in row:
            tokens.append(float(row["tokens"]))
            losses.append(float(row["loss_nats"]))
    return tokens, losses


def draw_all(result: StudyResult, folder: Path) -> list[Path]:
    """Draw and write every figure; returns the paths."""
    paths: list[Path] = []
    with style.style():
        drawings = [
            ("loss_against_compute", loss_against_compute(result)),
            ("size_gaps", size_gaps(result)),
        ]
        if any(curve_of(result.data, str(trial))[0] for trial in result.data.table["id"]):
            drawings.append(("training_curves", training_curves(result.data)))
        for name, figure in drawings:
            paths += style.save(figure, folder, name)
    return paths
