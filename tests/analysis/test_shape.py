"""The report of a study of shapes: the grid, its best shapes, and what is no grid."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rows_support import edit, trials, write

from analysis.differences import compute_differences
from analysis.load import load_study
from analysis.report import main
from analysis.shape import ShapeGrid, shape_grid, shape_lines
from analysis.shape_figures import shape_maps

WIDTHS = {10: 40, 16: 32, 8: 48}  # by depth: width/depth is 4, 2, 6
HEADS = (0.3, 0.5, 0.7)


def loss(width_per_block: float, share: float, rule: str) -> float:
    """A bowl whose bottom is at 4 for the baseline and at 2 for the rule; fewer heads are better."""
    bottom, level = (4, 2.1) if rule == "prenorm" else (2, 2.05)
    return level + 0.01 * (width_per_block - bottom) ** 2 + 0.1 * share


def write_shapes(runs: Path) -> Path:
    """Nine shapes with losses of the bowl, in no order; the records hold the shapes as training does."""
    shapes = {
        f"l{depth}_h{share}": {"width": width, "depth": depth, "heads": round(share * depth)}
        for share in HEADS
        for depth, width in WIDTHS.items()
    }
    tables = []
    for size, shape in shapes.items():
        share = float(size.rpartition("h")[2])
        ratio = shape["width"] / shape["depth"]
        losses = {rule: (loss(ratio, share, rule),) for rule in ("prenorm", "attnres_block_n8")}
        tables.append(trials(losses, size=size))
    folder = write(runs, pd.concat(tables), "shape")
    for trial in json.loads((folder / "study.json").read_text())["trials"]:
        path = folder / trial["id"] / "record.json"
        config = json.loads(path.read_text())["config"]
        edit(path, config={**config, "model": shapes[trial["size"]]})
    return folder


def test_the_grid_has_every_shape_in_its_place(tmp_path: Path) -> None:
    write_shapes(tmp_path)
    grid = shape_grid(compute_differences(load_study(tmp_path, "s")))
    assert isinstance(grid, ShapeGrid)
    assert grid.width_per_block == (2, 4, 6)
    # Heads are whole: 5, 8, 11 of 16, 3, 5, 7 of 10 and 2, 4, 6 of 8.
    shares = np.array([[5 / 16, 8 / 16, 11 / 16], [3 / 10, 5 / 10, 7 / 10], [2 / 8, 4 / 8, 6 / 8]])
    assert grid.heads_per_block == pytest.approx(shares.mean(axis=0))
    assert grid.sizes[0] == ("l16_h0.3", "l16_h0.5", "l16_h0.7")
    for rule, losses in grid.losses.items():
        expected = [[loss(ratio, share, rule) for share in HEADS] for ratio in (2, 4, 6)]
        assert losses == pytest.approx(np.array(expected))
    assert grid.best("prenorm") == (1, 0) and grid.best("attnres_block_n8") == (0, 0)
    assert grid.parameters_spread == grid.compute_spread == 0


def test_report_of_shapes_beside_the_papers(tmp_path: Path) -> None:
    folder = write_shapes(tmp_path)
    assert main(["study=s", f"runs_dir={tmp_path}"]) == 0
    text = (folder / "report" / "report.md").read_text()
    results = json.loads((folder / "report" / "results.json").read_text())
    assert results["kind"] == "shape"
    assert results["shape"]["best"]["prenorm"]["size"] == "l10_h0.3"
    assert results["shape"]["paper"]["best"][0]["best_val_loss"] == 1.847
    assert "| paper: attnres |  | 45 | 0.3 | 1.802 |" in text
    assert "its scale: about 230M active parameters" in text
    assert "attnres_block_n8 against prenorm: lower at 6 of 9 sizes" in text
    assert "training FLOPs by 0.0%. Rows" in text
    assert "FLOP at every size: no slope can be fitted" in text
    assert "![Loss of every shape; the best one is framed](shape.png)" in text
    assert (folder / "report" / "shape.png").read_bytes().startswith(b"\x89PNG")


def test_shapes_that_are_not_equal_are_called_so(tmp_path: Path) -> None:
    write_shapes(tmp_path)
    grid = shape_grid(compute_differences(load_study(tmp_path, "s")))
    assert isinstance(grid, ShapeGrid)
    (rule_line,) = [line for line in shape_lines(grid) if line.startswith("| `prenorm`")]
    assert "edge" in rule_line  # the best width is inside, the fewest heads are at the edge
    warned = shape_lines(replace(grid, compute_spread=0.03))
    assert "by 3.0%. That is more than 2%: the shapes are not equal." in "".join(warned)


def test_maps_show_the_losses_and_their_difference(tmp_path: Path) -> None:
    write_shapes(tmp_path)
    grid = shape_grid(compute_differences(load_study(tmp_path, "s")))
    assert isinstance(grid, ShapeGrid)
    panels = shape_maps(grid).axes
    assert len(panels) == 3
    drawn = [np.asarray(axes.images[0].get_array()) for axes in panels]
    assert drawn[0] == pytest.approx(grid.losses["prenorm"])
    assert drawn[2] == pytest.approx(grid.losses["attnres_block_n8"] - grid.losses["prenorm"])
    (frame,) = panels[0].patches
    assert (frame.get_x(), frame.get_y()) == (-0.5, 0.5)  # column 0, row 1


def test_sizes_that_are_no_grid_say_so(tmp_path: Path) -> None:
    folder = write(tmp_path, trials({"prenorm": (2.0,), "rezero": (2.1,)}), "shape")
    assert shape_grid(compute_differences(load_study(tmp_path, "s"))) == (
        "no grid: the records do not say width, depth and heads"
    )
    for path in folder.glob("*/record.json"):
        edit(path, config={"model": {"width": 8, "depth": 2, "heads": 1}})
    assert "no grid: 1 pairs of width and depth" in str(
        shape_grid(compute_differences(load_study(tmp_path, "s")))
    )
    assert main(["study=s", f"runs_dir={tmp_path}", "--no-figures"]) == 0
    assert "no grid: 1 pairs" in (folder / "report" / "report.md").read_text()
