"""Writes the report of a study without a multiplier: the rows, and what its kind adds to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.differences import compute_differences
from analysis.differences_markdown import render, summary_lines
from analysis.differences_output import to_json, write_tables
from analysis.dynamics import Dynamics, read_dynamics
from analysis.dynamics_markdown import dynamics_lines
from analysis.serialise import write_json
from analysis.shape import ShapeGrid, shape_grid, shape_lines
from analysis.study_data import StudyData
from attnres.record import write_text_atomic

REPORT_FOLDER = "report"


def write_differences(
    data: StudyData, how: Mapping[str, Any], confidence: float, with_figures: bool
) -> tuple[Path, list[str]]:
    """Compute, then write everything below the study's folder: path of report.md, lines for the terminal."""
    result = compute_differences(data, confidence=confidence)
    folder = data.folder / REPORT_FOLDER
    grid: ShapeGrid | str | None = shape_grid(result) if data.report == "shape" else None
    dynamics: Dynamics | None = read_dynamics(data) if data.report == "dynamics" else None
    extra: dict[str, Any] = {}
    sections: list[str] = []
    if grid is not None:
        extra["shape"] = grid if isinstance(grid, str) else grid.as_json()
        sections += shape_lines(grid)
    if dynamics is not None:
        extra["dynamics"] = dynamics.as_json()
        sections += dynamics_lines(dynamics)
    figures: list[Path] = []
    if with_figures:  # matplotlib takes longer to import than all the rest
        from analysis import differences_figures, dynamics_figures, shape_figures

        figures += differences_figures.draw_all(result, folder)
        if isinstance(grid, ShapeGrid):
            figures += shape_figures.draw_all(grid, folder)
        if dynamics is not None:
            figures += dynamics_figures.draw_all(dynamics, folder)
    write_json(folder / "results.json", to_json(result, how, extra))
    write_tables(result, folder)
    path = folder / "report.md"
    pictures = [figure.name for figure in figures if figure.suffix == ".png"]
    write_text_atomic(path, render(result, how, pictures, sections))
    return path, summary_lines(result)
