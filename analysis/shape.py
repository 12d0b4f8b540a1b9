"""A study of shapes as a grid: width over depth by heads over depth, for each rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.arrays import Array
from analysis.differences import DifferenceResult
from analysis.differences_output import paper_shape
from analysis.markdown import name, table
from analysis.serialise import plain

EQUAL_WITHIN = 0.02  # parameters and FLOPs of the shapes; short runs round their steps to more


@dataclass(frozen=True)
class ShapeGrid:
    """Losses [width/depth, heads/depth], nats; nan where a shape has none left."""

    baseline: str
    width_per_block: tuple[float, ...]  # of each row of the grid, ascending
    heads_per_block: tuple[float, ...]  # mean of each column: whole heads make it differ by row
    sizes: tuple[tuple[str, ...], ...]
    losses: Mapping[str, Array]  # by rule, the baseline first
    parameters_spread: float  # largest over smallest, less 1, of the rule where that is largest
    compute_spread: float  # the same of training FLOPs, the rule's own included

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(rule for rule in self.losses if rule != self.baseline)

    def best(self, rule: str) -> tuple[int, int]:
        """Place of the lowest loss."""
        place = np.unravel_index(int(np.nanargmin(self.losses[rule])), self.losses[rule].shape)
        return int(place[0]), int(place[1])

    def as_json(self) -> dict[str, Any]:
        best = {}
        for rule in self.losses:
            i, j = self.best(rule)
            best[rule] = {
                "size": self.sizes[i][j],
                "width_per_block": self.width_per_block[i],
                "heads_per_block": self.heads_per_block[j],
                "loss_nats": float(self.losses[rule][i, j]),
            }
        keys = (
            "width_per_block",
            "heads_per_block",
            "sizes",
            "losses",
            "parameters_spread",
            "compute_spread",
        )
        return {**{key: plain(getattr(self, key)) for key in keys}, "best": best, "paper": paper_shape()}


def shape_grid(result: DifferenceResult) -> ShapeGrid | str:
    """The grid, or in words why these sizes are none: every width and depth must have as many head counts."""
    table_ = result.data.table
    shapes = table_.drop_duplicates("size").set_index("size")
    if not {"width", "depth", "heads"} <= set(shapes.columns) or shapes[
        ["width", "depth", "heads"]
    ].isna().any(axis=None):
        return "no grid: the records do not say width, depth and heads"
    groups: dict[tuple[float, float], list[tuple[float, str]]] = {}
    for size, row in shapes.iterrows():
        ratio = (float(row["width"]) / float(row["depth"]), float(row["depth"]))
        groups.setdefault(ratio, []).append((float(row["heads"]) / float(row["depth"]), str(size)))
    counts = {len(members) for members in groups.values()}
    if len(counts) != 1 or len(groups) < 2 or counts == {1}:
        return f"no grid: {len(groups)} pairs of width and depth with {sorted(counts)} numbers of heads"
    ordered = [sorted(groups[key]) for key in sorted(groups)]
    sizes = tuple(tuple(size for _, size in members) for members in ordered)
    ratios = np.array([[ratio for ratio, _ in members] for members in ordered])
    by_cell = {(row.size, row.rule): row.loss_nats for row in result.rows}
    all_losses = {
        rule: np.array([[by_cell.get((size, rule), np.nan) for size in line] for line in sizes])
        for rule in result.data.rules
    }
    losses = {rule: values for rule, values in all_losses.items() if np.isfinite(values).any()}
    if result.data.baseline not in losses:
        return f"no grid: no trial of {result.data.baseline} is left"
    return ShapeGrid(
        baseline=result.data.baseline,
        width_per_block=tuple(width for width, _ in sorted(groups)),
        heads_per_block=tuple(float(value) for value in ratios.mean(axis=0)),
        sizes=sizes,
        losses=losses,
        parameters_spread=_spread(result, "parameters"),
        compute_spread=_spread(result, "compute"),
    )


def _spread(result: DifferenceResult, field: str) -> float:
    """Largest over smallest over the shapes of a rule, less one; of the rule where it is largest."""
    spreads = []
    for rule in result.data.rules:
        values = [getattr(row, field) for row in result.rows if row.rule == rule]
        spreads += [max(values) / min(values) - 1] if values else []
    return max(spreads)


def shape_lines(grid: ShapeGrid | str) -> list[str]:
    """The section of report.md."""
    if isinstance(grid, str):
        return ["## Best shapes", "", f"{grid}.", ""]
    rows: list[Sequence[str]] = []
    for rule in grid.losses:
        i, j = grid.best(rule)
        edge = i in (0, len(grid.width_per_block) - 1) or j in (0, len(grid.heads_per_block) - 1)
        rows.append(
            [
                name(rule),
                name(grid.sizes[i][j]),
                f"{grid.width_per_block[i]:.2f}",
                f"{grid.heads_per_block[j]:.2f}",
                f"{grid.losses[rule][i, j]:.4f}",
                "at the edge of the grid" if edge else "inside",
            ]
        )
    unequal = max(grid.parameters_spread, grid.compute_spread) > EQUAL_WITHIN
    warning = f" That is more than {EQUAL_WITHIN:.0%}: the shapes are not equal." if unequal else ""
    paper = paper_shape()
    for row in paper["best"]:
        place = [f"{row['best_width_per_block']:.0f}", f"{row['best_heads_per_block']:.1f}"]
        rows.append([f"paper: {row['rule']}", "", *place, f"{row['best_val_loss']:.3f}", ""])
    return [
        "## Best shapes",
        "",
        f"Between the shapes of a rule, parameters differ by at most {grid.parameters_spread:.1%}, "
        f"training FLOPs by {grid.compute_spread:.1%}.{warning} Rows headed paper are Figure 7 of "
        "arXiv:2603.15031 "
        f"({paper['scale']}); there AttnRes is lower in all 25 shapes, by 0.019 to 0.063 nats. A "
        "ratio of width to depth belongs to a number of parameters: compare on which side of the baseline's "
        "best AttnRes has its own.",
        "",
        *table(["rule", "best shape", "width/depth", "heads/depth", "loss, nats", "place"], rows),
    ]
