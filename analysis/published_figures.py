"""Figures of the published numbers: Figure 4 with our fits, the multiplier, Figure 6, Table 4, Table 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.compare import Multiplier
from analysis.published import NAMES
from analysis.published_fits import (
    BASELINE,
    CONVENTIONS,
    FIGURE_4_COMPUTE,
    FLOORS,
    HEADLINE,
    MEMORY_IO,
    RULES,
    TYPICAL_BLOCK_SIZE,
    TYPICAL_BLOCKS,
    TYPICAL_STREAMS,
    TYPICAL_WIDTH,
    Published,
    curve_multiplier,
)

DRAWN = (BASELINE, "attnres_block", "attnres_full")  # the curves of Figure 4
DASHES = (0, (4, 2.5))
LOOKS = {name: style.look(index) for index, name in enumerate((BASELINE, *RULES))}
CONVENTION_LABELS = {
    "6nd": "C = 6ND",
    "6nd_causal": "6ND + causal attention",
    "6nd_attention": "6ND + full-square attention",
    "6nd_causal_rule": "6ND + causal + AttnRes reads",
}
MECHANISMS: dict[str, tuple[str, dict[str, Any]]] = {
    "prenorm": ("PreNorm", LOOKS[BASELINE]),
    "attnres_block_two_phase": ("Block AttnRes", LOOKS["attnres_block"]),
    "attnres_full_two_phase": ("Full AttnRes", LOOKS["attnres_full"]),
    "mhc": ("mHC", LOOKS["mhc_lite"]),
}
ABLATION_LABELS = {
    "prenorm": "PreNorm (baseline)",
    "denseformer": "DenseFormer",
    "mhc": "mHC",
    "attnres_full": "Full AttnRes",
    "attnres_full_input_dependent_query": "Full, input-dependent query",
    "attnres_full_input_independent_mixing": "Full, input-independent weights",
    "attnres_full_sigmoid": "Full, sigmoid",
    "attnres_full_without_key_rmsnorm": "Full, no key norm",
    "attnres_sliding_window_8_plus_embedding": "last 8 layers + embedding",
    "attnres_block_size_4": "Block AttnRes (4 layers)",
    "attnres_block_multihead_16": "Block, 16 depth heads",
    "attnres_block_without_key_rmsnorm": "Block, no key norm",
}


def draw_all(published: Published, folder: Path) -> list[Path]:
    """Write every figure as PNG and SVG."""
    drawings = {
        "figure_4_scaling_law": scaling_law,
        "table_2_multiplier": multiplier_forest,
        "figure_6_block_size": block_size,
        "table_4_ablation": ablation,
        "table_1_memory_io": memory_io,
    }
    paths = []
    with style.style():
        for name, draw in drawings.items():
            paths += style.save(draw(published), folder, name)
    return paths


def scaling_law(published: Published) -> Figure:
    """Figure 4: losses of Table 2, our fits, and the printed curves, for two ways of counting C."""
    figure = Figure(figsize=(10.2, 4.8))
    panels = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.075, right=0.985, bottom=0.125, top=0.905, wspace=0.06)
    for axes, convention in zip(panels, (HEADLINE, "6nd_causal"), strict=True):
        for rule in DRAWN:
            _curves_of_rule(axes, published, convention, rule)
        style.log_axis(axes.xaxis, 0.42, 8.0)
        axes.set_xlabel(f"training compute C (PFLOP/s-days), {CONVENTION_LABELS[convention]}")
    style.log_axis(panels[0].yaxis, 1.655, 1.985)
    panels[0].set_yticks([1.7, 1.75, 1.8, 1.85, 1.9, 1.95])
    panels[0].set_ylabel("validation loss (nats per token)")
    panels[0].set_title("Figure 4 with our fits; the paper does not print C", loc="left", pad=10)
    panels[1].set_title("The printed curves lie nearer with this C", loc="left", pad=10)
    for axes, convention in zip(panels, (HEADLINE, "6nd_causal"), strict=True):
        axes.legend(handles=_line_handles(published, convention), loc="upper right")
        _arrow_of_curves(axes, published)
    return figure


def _curves_of_rule(axes: Axes, published: Published, convention: str, rule: str) -> None:
    """Points, our fit (solid) and the printed curve (dashed) of one rule."""
    rows = published.table[published.table["rule"] == rule]
    colour = LOOKS[rule]["color"]
    line = np.geomspace(0.42, 8.0, 60)
    a, alpha = published.curves[rule]
    axes.plot(line, published.fits[convention][rule].predict(line), color=colour, linewidth=1.5)
    axes.plot(line, a * line**-alpha, color=colour, linewidth=1.1, linestyle=DASHES)
    axes.plot(rows[f"compute_{convention}"], rows["loss"], linestyle="none", **_marker(rule))


def _marker(rule: str) -> dict[str, Any]:
    """Full AttnRes is drawn hollow, because two of its points lie on those of Block AttnRes."""
    if rule == "attnres_full":
        return {
            **LOOKS[rule],
            "markersize": 7,
            "markerfacecolor": "none",
            "markeredgewidth": 1.5,
            "zorder": 4,
        }
    return {**LOOKS[rule], "markersize": 6, "markeredgecolor": "white", "zorder": 3}


def _line_handles(published: Published, convention: str) -> list[Line2D]:
    handles = [
        Line2D([], [], label=_fit_label(published, convention, rule), **_marker(rule)) for rule in DRAWN
    ]
    printed = Line2D([], [], color=style.MUTED, linewidth=1.1, linestyle=DASHES, label="printed in the paper")
    return [*handles, printed]


def _fit_label(published: Published, convention: str, rule: str) -> str:
    law = published.fits[convention][rule]
    return rf"{NAMES[rule]}: ${law.coefficient:.3f}\,C^{{-{law.exponent:.4f}}}$"


def _arrow_of_curves(axes: Axes, published: Published) -> None:
    """Arrow from the printed Block curve at 5.6 to the printed PreNorm curve at equal loss; what it says."""
    multiplier, low, high = published.curve_multiplier[FIGURE_4_COMPUTE]
    a, alpha = published.curves["attnres_block"]
    loss = a * FIGURE_4_COMPUTE**-alpha
    axes.annotate(
        "",
        (FIGURE_4_COMPUTE * multiplier, loss),
        xytext=(FIGURE_4_COMPUTE, loss),
        arrowprops={"arrowstyle": "<->", "color": "#222222", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0},
        zorder=5,
    )
    axes.text(
        0.04,
        0.06,
        f"Arrow: printed curves at C = {FIGURE_4_COMPUTE}, {multiplier:.2f}x\n"
        f"({low:.2f}x to {high:.2f}x within their rounding)",
        transform=axes.transAxes,
        fontsize=9,
        color=style.MUTED,
    )


def multiplier_forest(published: Published) -> Figure:
    """m of each rule with its interval: headline, per size, conventions, floors; and Figure 4's curves."""
    figure = Figure(figsize=(10.2, 5.4))
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    figure.subplots_adjust(left=0.225, right=0.985, bottom=0.115, top=0.89, wspace=0.07)
    labels = _forest_labels(published)
    for axes, rule in zip(panels, RULES, strict=True):
        result, look = published.rules[rule], LOOKS[rule]
        rows: dict[str, Multiplier] = {CONVENTION_LABELS[c]: m for c, m in result.by_convention.items()}
        rows |= {_floor_label(floor): m for floor, m in result.by_floor.items() if floor}
        for value, dash in ((1.25, (0, (4, 2))), (4 / 3, (0, (1, 1.5)))):
            axes.axvline(value, color=style.MUTED, linewidth=1, linestyle=dash, zorder=1)
        for convention in CONVENTIONS:
            if convention not in result.by_convention:
                y = labels.index(CONVENTION_LABELS[convention])
                text = axes.text(1.13, y, "it has no AttnRes reads", va="center", fontsize=8)
                text.set_color(style.MUTED)
        for label, m in rows.items():
            y = labels.index(label)
            bold = label == CONVENTION_LABELS[HEADLINE]
            axes.plot([m.ci_low, m.ci_high], [y, y], color=look["color"], linewidth=2.6 if bold else 1.3)
            axes.plot(m.multiplier, y, markersize=8 if bold else 6, markeredgecolor="white", **look)
        for size, value in result.multiplier.per_size_multiplier.items():
            axes.plot(value, labels.index(f"{size} alone"), markersize=5.5, markerfacecolor="none", **look)
        for size, value in result.without_size.items():
            axes.plot(value, labels.index(f"without {size}"), markersize=5.5, markeredgecolor="white", **look)
        _forest_curves(axes, labels, rule)
        m = result.multiplier
        axes.set_title(f"{NAMES[rule]}\n{m.multiplier:.3f} [{m.ci_low:.3f}, {m.ci_high:.3f}]", loc="left")
        axes.set_xlim(1.11, 1.45)
        axes.set_xticks([1.15, 1.2, 1.25, 1.3, 1.35, 1.4])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(labels)), labels)
    panels[0].set_ylim(len(labels) - 0.4, -0.6)
    panels[1].set_xlabel("compute multiplier m over PreNorm; dashed 1.25 (20 % saving), dotted 1.333 (25 %)")
    return figure


def _forest_labels(published: Published) -> list[str]:
    sizes = list(published.rules["attnres_block"].multiplier.per_size_multiplier)
    return [
        *(CONVENTION_LABELS[convention] for convention in CONVENTIONS),
        *(_floor_label(floor) for floor in FLOORS if floor),
        *(f"without {size}" for size in sizes),
        *(f"{size} alone" for size in sizes),
        "Figure 4's curves, rounding",
    ]


def _floor_label(floor: float) -> str:
    return f"C = 6ND, floor {floor:g} nats"


def _forest_curves(axes: Axes, labels: Sequence[str], rule: str) -> None:
    """Figure 4's curves at 5.6, with the range that their rounding allows; printed for two rules only."""
    if rule == "mhc_lite":
        return
    value, low, high = curve_multiplier(FIGURE_4_COMPUTE, rule)
    y = labels.index("Figure 4's curves, rounding")
    axes.plot([low, high], [y, y], color=style.MUTED, linewidth=1.3)
    axes.plot(value, y, marker="|", markersize=10, color=style.MUTED)


def block_size(published: Published) -> Figure:
    """Figure 6: loss of the 436M model by block size, with PreNorm as a line."""
    rows = published.block_size
    baseline = float(rows.loc[rows["block_size_layers"] == "baseline", "val_loss"].iloc[0])
    sizes = rows[rows["block_size_layers"] != "baseline"]
    x, loss = sizes["block_size_layers"].astype(int).to_numpy(), sizes["val_loss"].to_numpy(float)
    figure = Figure(figsize=(6.6, 4.2))
    axes = figure.subplots()
    figure.subplots_adjust(left=0.125, right=0.86, bottom=0.14, top=0.88)
    axes.axhline(baseline, color=LOOKS[BASELINE]["color"], linewidth=1.4)
    axes.text(1.0, baseline + 0.0006, f"PreNorm {baseline:.3f}", ha="left", va="bottom", fontsize=9.5)
    axes.plot(x, loss, linewidth=1.5, markersize=7, markeredgecolor="white", **LOOKS["attnres_block"])
    for size, value in zip(x, loss, strict=True):
        axes.annotate(
            f"{value:.3f}",
            (size, value),
            xytext=(-8, 9),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=LOOKS["attnres_block"]["color"],
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(v) for v in x])
    axes.minorticks_off()
    axes.set_xlim(0.72, 40)
    axes.set_ylim(1.7325, 1.7705)
    axes.set_xlabel("layers in a depth block (1 is Full AttnRes, 32 is one block)")
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_title("Figure 6: block size, 436M model, one run each", loc="left", pad=10)
    _multiplier_scale(axes, published, baseline)
    return figure


def _multiplier_scale(axes: Axes, published: Published, baseline: float) -> None:
    """Right-hand scale: the gap to PreNorm over the pooled exponent of Table 2, as a multiplier."""
    alpha = published.rules["attnres_block"].multiplier.alpha
    right = axes.secondary_yaxis(
        "right",
        functions=(
            lambda loss: (baseline / np.maximum(loss, 1e-9)) ** (1 / alpha),
            lambda m: baseline * np.maximum(m, 1e-9) ** -alpha,
        ),
    )
    right.set_yticks([1.0, 1.1, 1.2, 1.3, 1.4])
    right.set_ylabel(f"equivalent multiplier at alpha = {alpha:.4f}", fontsize=9.5)


def ablation(published: Published) -> Figure:
    """Table 4 as a dot plot, best on top."""
    rows = published.ablation.sort_values("val_loss", kind="stable")
    baseline = float(rows.loc[rows["variant"] == BASELINE, "val_loss"].iloc[0])
    figure = Figure(figsize=(7.4, 4.7))
    axes = figure.subplots()
    figure.subplots_adjust(left=0.36, right=0.965, bottom=0.125, top=0.9)
    axes.axvline(baseline, color=LOOKS[BASELINE]["color"], linewidth=1.2)
    for y, (variant, loss) in enumerate(zip(rows["variant"], rows["val_loss"], strict=True)):
        look = _ablation_look(str(variant))
        axes.plot([baseline, loss], [y, y], color=look["color"], linewidth=1.4, alpha=0.55)
        axes.plot(loss, y, markersize=8, markeredgecolor="white", **look)
        side = -1 if loss <= baseline else 1
        axes.annotate(
            f"{loss:.3f}",
            (loss, y),
            xytext=(8 * side, 0),
            textcoords="offset points",
            ha="right" if side < 0 else "left",
            va="center",
            fontsize=9,
            color=look["color"],
        )
    axes.set_yticks(range(len(rows)), [ABLATION_LABELS[str(v)] for v in rows["variant"]])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(1.7255, 1.772)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("validation loss (nats per token)")
    axes.set_title("Table 4: ablation, 436M model, one run each", loc="left", pad=10)
    return figure


def _ablation_look(variant: str) -> dict[str, Any]:
    if variant.startswith("attnres_block"):
        return LOOKS["attnres_block"]
    if variant == BASELINE:
        return LOOKS[BASELINE]
    return LOOKS["attnres_full"] if variant.startswith("attnres") else LOOKS["mhc_lite"]


def memory_io(published: Published) -> Figure:
    """Table 1: traffic of the residual path at the paper's typical shape, and as the model gets deeper."""
    figure = Figure(figsize=(10.2, 4.0))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    figure.subplots_adjust(left=0.125, right=0.85, bottom=0.145, top=0.88, wspace=0.24)
    for y, (mechanism, (_, look)) in enumerate(MECHANISMS.items()):
        value = published.memory_io[mechanism]
        left.barh(y, value, color=look["color"], height=0.6)
        left.text(value + 0.6, y, f"{value:.3g} d", va="center", fontsize=9.5)
    left.set_yticks(range(len(MECHANISMS)), [name for name, _ in MECHANISMS.values()])
    left.set_ylim(len(MECHANISMS) - 0.4, -0.6)
    left.set_xlim(0, 40)
    left.tick_params(axis="y", length=0)
    left.grid(axis="y", visible=False)
    left.set_xlabel("elements per token and layer, in widths d")
    shape = f"N = {TYPICAL_BLOCKS}, S = {TYPICAL_BLOCK_SIZE}, m = {TYPICAL_STREAMS}"
    left.set_title(f"Table 1: L = {TYPICAL_BLOCKS * TYPICAL_BLOCK_SIZE}, {shape}", loc="left")
    layers = np.array([16, 32, 64, 128, 256, 512])
    ends = []
    for mechanism, (name, look) in MECHANISMS.items():
        traffic = [
            MEMORY_IO[mechanism](TYPICAL_WIDTH, TYPICAL_BLOCKS, depth // TYPICAL_BLOCKS, TYPICAL_STREAMS)
            / TYPICAL_WIDTH
            for depth in layers
        ]
        right.plot(layers, traffic, markersize=6, markeredgecolor="white", **look)
        ends.append((traffic[-1], name, look["color"]))
    style.log_axis(right.yaxis, 2, 100)
    right.set_xscale("log", base=2)
    right.set_xticks(layers, [str(v) for v in layers])
    right.minorticks_off()
    right.set_xlabel(f"layers L, with N = {TYPICAL_BLOCKS} blocks of S = L / {TYPICAL_BLOCKS}")
    right.set_title("The same formulas over depth", loc="left")
    style.label_ends(right, ends)
    return figure
