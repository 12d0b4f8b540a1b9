"""Curves of magnitude and gradient over depth and training, and maps of the depth-attention weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from analysis import style
from analysis.arrays import Array
from analysis.dynamics import Dynamics, RuleProbes
from analysis.figures import short

QUANTITIES = {
    "block_output_rms": "output magnitude (RMS)",
    "block_gradient_norm": "gradient norm",
}


def draw_all(dynamics: Dynamics, folder: Path) -> list[Path]:
    """Write magnitudes, magnitudes_training and, for rules with weights, depth_weights."""
    paths: list[Path] = []
    if not dynamics.rules:
        return paths
    with style.style():
        paths += style.save(magnitudes(dynamics), folder, "magnitudes")
        if max(len(probes.tokens) for probes in dynamics.rules.values()) > 1:
            paths += style.save(over_training(dynamics), folder, "magnitudes_training")
        if any(probes.depth_weights is not None for probes in dynamics.rules.values()):
            paths += style.save(depth_weights(dynamics), folder, "depth_weights")
    return paths


def magnitudes(dynamics: Dynamics) -> Figure:
    """Per transformer block at the last probe: output magnitude, what its attention reads, gradient."""
    figure = Figure(figsize=(11.4, 4.1))
    panels = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.065, right=0.985, bottom=0.135, top=0.82, wspace=0.26)
    for index, probes in enumerate(dynamics.rules.values()):
        look = {
            **style.look(index),
            "markersize": 4.5,
            "markeredgecolor": "white",
            "label": short(probes.rule),
        }
        blocks = np.arange(1, probes.block_output_rms.shape[1] + 1)
        panels[0].plot(blocks, probes.block_output_rms[-1], **look)
        panels[1].plot(blocks, probes.read_rms[-1, probes.reads_of("attention")], **look)
        panels[2].plot(blocks, probes.block_gradient_norm[-1], **look)
    titles = (
        "Output of the block (RMS)",
        "What its attention reads (RMS)",
        "Gradient of its parameters (norm)",
    )
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left")
        axes.set_xlabel("transformer block")
        axes.xaxis.set_major_locator(style.few_ticks())
        axes.set_ylim(bottom=0)
    gradients = np.concatenate([probes.block_gradient_norm[-1] for probes in dynamics.rules.values()])
    style.log_axis(panels[2].yaxis, *_around(gradients))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.055, 0.99), ncols=min(len(labels), 5))
    return figure


def over_training(dynamics: Dynamics) -> Figure:
    """Both magnitudes over depth, a column a rule, a line a probe: darker is earlier."""
    rules = list(dynamics.rules.values())
    width = 2.3 + 3.0 * len(rules)
    figure = Figure(figsize=(width, 6.2))
    grid = figure.subplots(2, len(rules), sharex=True, sharey="row", squeeze=False)
    figure.subplots_adjust(
        left=0.9 / width, right=1 - 1.4 / width, bottom=0.085, top=0.935, wspace=0.07, hspace=0.1
    )
    times = sorted({float(tokens) for probes in rules for tokens in probes.tokens})
    colours = dict(zip(times, colormaps["viridis"](np.linspace(0, 0.92, len(times))), strict=True))
    for line, (quantity, label) in zip(grid, QUANTITIES.items(), strict=True):
        for axes, probes in zip(line, rules, strict=True):
            values = getattr(probes, quantity)
            blocks = np.arange(1, values.shape[1] + 1)
            for tokens, curve in zip(probes.tokens, values, strict=True):
                name = f"{style.count_text(tokens)} tokens"
                axes.plot(blocks, curve, color=colours[float(tokens)], linewidth=1.5, label=name)
            axes.xaxis.set_major_locator(style.few_ticks())
        everything = np.concatenate([getattr(probes, quantity).ravel() for probes in rules])
        style.log_axis(line[0].yaxis, *_around(everything))
        line[0].set_ylabel(label)
    for column, probes in enumerate(rules):
        grid[0, column].set_title(short(probes.rule), loc="left")
        grid[1, column].set_xlabel("transformer block")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", bbox_to_anchor=(1.0, 0.94))
    return figure


def _around(values: Array) -> tuple[float, float]:
    """Limits of a logarithmic axis; a gradient of exactly zero cannot be drawn."""
    positive = values[values > 0]
    return (float(positive.min()) / 1.3, float(positive.max()) * 1.3) if positive.size else (0.1, 1.0)


def depth_weights(dynamics: Dynamics) -> Figure:
    """Weights at the last probe: sources over reads, before attention and before the MLP; a row a rule."""
    rules = [probes for probes in dynamics.rules.values() if probes.depth_weights is not None]
    height = 0.9 + 3.5 * len(rules)
    figure = Figure(figsize=(10.6, height))
    grid = figure.subplots(len(rules), 2, squeeze=False)
    figure.subplots_adjust(
        left=0.12, right=0.885, bottom=0.6 / height, top=1 - 0.45 / height, wspace=0.32, hspace=0.38
    )
    for line, probes in zip(grid, rules, strict=True):
        assert probes.depth_weights is not None
        top = _top(probes.depth_weights[-1])
        for axes, kind in zip(line, ("attention", "mlp"), strict=True):
            image = _weights(axes, probes, kind, top)
        box = line[1].get_position()
        bar = figure.colorbar(image, cax=figure.add_axes((0.905, box.y0, 0.014, box.height)), extend="max")
        bar.set_label("mean weight")
    return figure


def _top(weights: Array) -> float:
    """Top of the scale: the largest weight of reads with more than three sources. Earlier ones are near 1."""
    many = weights[np.isfinite(weights).sum(axis=1) > 3]
    return max(1e-9, float(np.nanmax(many if many.size else weights)))


def _weights(axes: Axes, probes: RuleProbes, kind: str, top: float) -> ScalarMappable:
    assert probes.depth_weights is not None
    reads = probes.reads_of(kind)
    values = probes.depth_weights[-1][reads]
    colours = colormaps["viridis"].with_extremes(bad="#f2f2f2")
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0, vmax=top, aspect="auto")
    step = max(1, len(reads) // 8)
    axes.set_yticks(range(0, len(reads), step), [str(i + 1) for i in range(0, len(reads), step)])
    step = max(1, len(probes.sources) // 8)
    places = range(0, len(probes.sources), step)
    axes.set_xticks(places, ["emb." if i == 0 else str(i) for i in places])
    axes.grid(visible=False)
    axes.set_ylabel("transformer block")
    source = "sublayer" if len(probes.sources) == len(probes.reads) else probes.sources[-1].rpartition("_")[0]
    axes.set_xlabel(f"source: embedding, then {source.replace('_', ' ')} number")
    before = "attention" if kind == "attention" else "the MLP"
    axes.set_title(f"{short(probes.rule)}: reads before {before}", loc="left")
    return image
