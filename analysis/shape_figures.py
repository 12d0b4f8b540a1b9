"""Maps of the loss over shapes, a panel a rule, and of the difference from the baseline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis import style
from analysis.arrays import Array
from analysis.figures import short
from analysis.shape import ShapeGrid


def draw_all(grid: ShapeGrid, folder: Path) -> list[Path]:
    with style.style():
        return style.save(shape_maps(grid), folder, "shape")


def shape_maps(grid: ShapeGrid) -> Figure:
    """Loss of each rule, then the difference of each other rule from the baseline; the best is framed."""
    panels = len(grid.losses) + len(grid.others)
    figure = Figure(figsize=(1.0 + 3.7 * panels, 4.0))
    columns = figure.subplots(1, panels, squeeze=False)[0]
    figure.subplots_adjust(left=0.75 / (1 + 3.7 * panels), right=0.99, bottom=0.14, top=0.88, wspace=0.16)
    everything = np.concatenate([values.ravel() for values in grid.losses.values()])
    low, high = float(np.nanmin(everything)), float(np.nanmax(everything))
    for axes, (rule, values) in zip(columns, grid.losses.items(), strict=False):
        _map(axes, grid, values, (low, high), "viridis", "{:.3f}")
        i, j = grid.best(rule)
        frame = Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor=style.COLOURS[2], linewidth=2.6)
        axes.add_patch(frame)
        axes.set_title(f"{short(rule)}: loss, nats", loc="left")
    for axes, rule in zip(columns[len(grid.losses) :], grid.others, strict=True):
        gap = grid.losses[rule] - grid.losses[grid.baseline]
        reach = float(np.nanmax(np.abs(gap))) or 1.0
        _map(axes, grid, gap, (-reach, reach), "RdBu_r", "{:+.3f}")
        axes.set_title(f"{short(rule)} - {short(grid.baseline)}", loc="left")
    columns[0].set_ylabel("width / transformer blocks")
    return figure


def _map(
    axes: Axes, grid: ShapeGrid, values: Array, limits: tuple[float, float], colours: str, text: str
) -> None:
    image = axes.imshow(values, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", origin="lower")
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = image.to_rgba(np.array([value]))[0]
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            axes.text(
                j,
                i,
                text.format(value),
                ha="center",
                va="center",
                fontsize=9,
                color="white" if dark else "black",
            )
    axes.set_xticks(range(len(grid.heads_per_block)), [f"{value:.2f}" for value in grid.heads_per_block])
    axes.set_yticks(range(len(grid.width_per_block)), [f"{value:.2f}" for value in grid.width_per_block])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set_xlabel("heads / transformer blocks")
