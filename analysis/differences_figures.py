"""Figures of a report without a multiplier: rows as dots with intervals, and loss against block size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import style
from analysis.differences import Difference, DifferenceResult
from analysis.figures import short
from analysis.paper_rows import block_size_of, figure_6

OURS, PAPER, BASE = style.COLOURS[1], style.COLOURS[2], style.COLOURS[0]
ROWS_AT_MOST = 30  # in the figure of differences
BLOCK_SIZES_AT_LEAST = 3  # for a curve over them


def draw_all(result: DifferenceResult, folder: Path) -> list[Path]:
    """Write the figures that these rows allow, as PNG and SVG."""
    paths: list[Path] = []
    compared = [row for row in result.rows if row.difference_per_seed and row.reading != "baseline"]
    if not compared:
        return paths
    with style.style():
        if len(compared) <= ROWS_AT_MOST and result.data.report != "shape":
            paths += style.save(differences(result), folder, "differences")
        if len(result.sizes) == 1 and len(_block_sizes(result.rows)) >= BLOCK_SIZES_AT_LEAST:
            paths += style.save(block_size(result), folder, "block_size")
    return paths


def differences(result: DifferenceResult) -> Figure:
    """A row for each rule and size: the difference with its interval; right, that of the paper."""
    rows = [row for row in result.rows if row.difference_per_seed and row.reading != "baseline"]
    with_paper = bool(result.of_paper)
    height = 1.55 + 0.34 * len(rows)
    figure = Figure(figsize=(10.2 if with_paper else 6.8, height))
    panels = (
        figure.subplots(1, 2, sharey=True, squeeze=False, width_ratios=(1.5, 1))[0] if with_paper else None
    )
    axes = panels[0] if panels is not None else figure.subplots()
    left = 0.26 if with_paper else 0.36
    figure.subplots_adjust(left=left, right=0.975, bottom=0.62 / height, top=1 - 0.68 / height, wspace=0.07)
    for y, row in enumerate(rows):
        _interval(axes, y, row)
    _dress(axes, rows, len(result.sizes) > 1)
    axes.set_xlabel(f"loss - loss of {short(result.data.baseline)}, nats per token (left is better)")
    axes.set_title(_title(result), loc="left", fontsize=10.5, pad=8)
    if panels is not None:
        _paper_panel(panels[1], rows)
    return figure


def _title(result: DifferenceResult, what: str = "mean difference with {} interval") -> str:
    one_seed = all(len(row.difference_per_seed) < 2 for row in result.rows)
    where = f", {short(result.sizes[0])}" if len(result.sizes) == 1 else ""
    spread = "one seed, no interval" if one_seed else what.format(f"{result.confidence:.0%}")
    return f"This study{where}\n{spread}"


def _interval(axes: Axes, y: int, row: Difference) -> None:
    seeds = list(row.difference_per_seed.values())
    if len(seeds) > 1:
        axes.plot(
            seeds,
            [y + 0.24] * len(seeds),
            "o",
            color=OURS,
            markersize=4,
            alpha=0.45,
            markeredgewidth=0,
            zorder=2,
        )
    if row.low is not None and row.high is not None:
        axes.plot([row.low, row.high], [y, y], color=OURS, linewidth=1.6, zorder=2)
    axes.plot(row.difference_nats, y, "s", color=OURS, markersize=7, markeredgecolor="white", zorder=3)


def _dress(axes: Axes, rows: Sequence[Difference], with_size: bool) -> None:
    axes.axvline(0, color=BASE, linewidth=1.1, zorder=1)
    labels = [short(f"{row.size} {row.rule}" if with_size else row.rule) for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(style.few_ticks())


def _paper_panel(axes: Axes, rows: Sequence[Difference]) -> None:
    values = [row.paper.difference_nats for row in rows if row.paper is not None]
    low, high = min(0.0, *values), max(0.0, *values)
    reach = high - low or 1.0
    axes.set_xlim(
        low - 0.32 * reach, high + (0.32 if max(values) > 0 else 0.1) * reach
    )  # the numbers stand outside of the dots
    for y, row in enumerate(rows):
        if row.paper is None:
            continue
        value = row.paper.difference_nats
        axes.plot(value, y, "D", color=PAPER, markersize=6.5, markeredgecolor="white", zorder=3)
        side = -1 if value <= 0 else 1
        axes.annotate(
            f"{value:+.3f}",
            (value, y),
            xytext=(8 * side, 0),
            textcoords="offset points",
            ha="right" if side < 0 else "left",
            va="center",
            fontsize=8.5,
            color=PAPER,
        )
    axes.axvline(0, color=BASE, linewidth=1.1, zorder=1)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(style.few_ticks())
    places = " and ".join(sorted({row.paper.place for row in rows if row.paper is not None}))
    axes.set_title(f"The paper's {places}\n436M model, one run a row", loc="left", fontsize=10.5, pad=8)
    axes.set_xlabel("the same, at its scale")


def _block_sizes(rows: Sequence[Difference]) -> dict[int, Difference]:
    sizes = {block_size_of(row.rule): row for row in rows}
    known = [(size, row) for size, row in sizes.items() if size is not None and row.difference_per_seed]
    return dict(sorted(known, key=lambda item: item[0]))


def block_size(result: DifferenceResult) -> Figure:
    """Loss against S, the baseline as a line; the interval is that of the difference from the baseline."""
    sizes = _block_sizes(result.rows)
    figure = Figure(figsize=(10.2, 4.4))
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.08, right=0.985, bottom=0.125, top=0.86, wspace=0.2)
    base = next(row.loss_nats for row in result.rows if row.reading == "baseline")
    x = list(sizes)
    for size, row in sizes.items():
        if row.low is not None and row.high is not None:
            left.plot([size, size], [base + row.low, base + row.high], color=OURS, linewidth=1.4, zorder=2)
        if len(row.difference_per_seed) > 1:
            values = [base + gap for gap in row.difference_per_seed.values()]
            left.plot(
                [size * 1.07] * len(values),
                values,
                "o",
                color=OURS,
                alpha=0.45,
                markersize=4,
                markeredgewidth=0,
            )
    means = [base + row.difference_nats for row in sizes.values()]
    left.plot(x, means, "-s", color=OURS, markersize=7, markeredgecolor="white", zorder=3)
    _block_axis(left, x, base, short(result.data.baseline), f"{base:.4f}")
    left.set_title(
        _title(result, "mean loss, {} interval of the difference"), loc="left", fontsize=10.5, pad=8
    )
    left.set_ylabel("validation loss (nats per token)")
    losses = {int(size): loss for size, loss in figure_6().items() if size != "baseline"}
    right.plot(list(losses), list(losses.values()), "-D", color=PAPER, markersize=7, markeredgecolor="white")
    _block_axis(right, list(losses), figure_6()["baseline"], "PreNorm", f"{figure_6()['baseline']:.3f}")
    right.set_title(
        "The paper's Figure 6, its own axis\n436M model, one run each", loc="left", fontsize=10.5, pad=8
    )
    return figure


def _block_axis(axes: Axes, sizes: Sequence[int], base: float, label: str, value: str) -> None:
    line = axes.axhline(base, color=BASE, linewidth=1.3, zorder=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), [str(size) for size in sizes])
    axes.minorticks_off()
    axes.margins(x=0.07, y=0.12)
    axes.set_xlabel("block size S in sublayers (1 is Full AttnRes)")
    # On the line itself it would hide what lies near the baseline.
    axes.legend([line], [f"{label} {value}"], loc="best", frameon=False, fontsize=9.5)
