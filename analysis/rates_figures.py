"""Loss over the learning rate, a panel a size, a line a rule."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from analysis import style
from analysis.figures import short
from analysis.rates import RatesResult

COLUMNS = 3


def draw_all(result: RatesResult, folder: Path) -> list[Path]:
    with style.style():
        return style.save(rates(result), folder, "learning_rates")


def rates(result: RatesResult) -> Figure:
    """The best rate tried is filled, the others are hollow."""
    columns = min(COLUMNS, len(result.sizes))
    lines = -(-len(result.sizes) // columns)
    width, height = 1.1 + 3.3 * columns, 0.75 + 2.9 * lines
    figure = Figure(figsize=(width, height))
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    figure.subplots_adjust(
        left=0.85 / width, right=0.985, bottom=0.55 / height, top=1 - 0.75 / height, wspace=0.27, hspace=0.42
    )
    looks = {rule: style.look(index) for index, rule in enumerate(result.data.rules)}
    for axes, size in zip(panels, result.sizes, strict=False):
        curves = result.of_size(size)
        for curve in curves:
            look = looks[curve.rule]
            axes.plot(curve.rates, curve.losses, markersize=6, markerfacecolor="white", **look)
            axes.plot([curve.best_rate], [curve.best_loss], linestyle="none", markersize=7, **look)
        every = sorted({rate for curve in curves for rate in curve.rates})
        axes.set_xscale("log")
        axes.set_xticks(every, [f"{rate:.3g}" for rate in every])
        axes.minorticks_off()
        axes.margins(0.08)
        axes.yaxis.set_major_locator(style.few_ticks())
        axes.set_title(short(size), loc="left")
    for axes in panels[len(result.sizes) :]:
        axes.set_visible(False)
    for place, axes in enumerate(panels[: len(result.sizes)]):
        if place + columns >= len(result.sizes):
            axes.set_xlabel("learning rate")
        if place % columns == 0:
            axes.set_ylabel("validation loss (nats)")
    handles = [panels[0].plot([], [], label=short(rule), **look)[0] for rule, look in looks.items()]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.5 / width, 1.0), ncols=4)
    return figure
