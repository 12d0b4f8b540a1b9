"""Statistics over depth: from probes.npz to the report and its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rows_support import LOSSES, record_path, trials, write

from analysis.dynamics import read_dynamics
from analysis.dynamics_figures import depth_weights, magnitudes, over_training
from analysis.load import load_study
from analysis.report import main
from attnres.errors import UserError

DEPTH, PROBES = 3, 4
SUBLAYERS = [f"{kind}_{block}" for block in range(1, DEPTH + 1) for kind in ("attention", "mlp")]
RULES = ("prenorm", "attnres_full")


def probes(trial: str, level: float, weights: bool) -> dict[str, Any]:
    """Arrays as attnres.probe_file writes them, with values that name their place."""
    reads, blocks = len(SUBLAYERS) + 1, np.arange(1, DEPTH + 1)
    growth = np.arange(1, PROBES + 1)[:, None]
    arrays: dict[str, Any] = {
        "step": np.arange(PROBES),
        "tokens": 1000 * np.arange(PROBES),
        "loss_nats": np.full(PROBES, level),
        "read_rms": level * growth * np.arange(1, reads + 1),
        "block_output_rms": level * growth * blocks,
        "block_gradient_norm": level / (growth * blocks),
        "read": np.array([*SUBLAYERS, "output"]),
        "source": np.array(["embedding", *SUBLAYERS]),
        "about": np.array(json.dumps({"schema": 1, "trial_id": trial, "rule": "any"})),
    }
    if weights:
        lower = np.tril(np.ones((reads, reads)))
        each = np.where(lower > 0, lower / lower.sum(1, keepdims=True), np.nan)
        # Learned: another at every probe and seed, so that neither can be taken for another.
        arrays["depth_weights"] = each * growth[..., None] * level / 2
        arrays["depth_entropy_nats"] = growth * level * np.log(np.arange(1, reads + 1)) / 2
        arrays["depth_source"] = arrays["source"]
    return arrays


def write_probes(runs: Path) -> Path:
    """Two rules, two seeds; seed 1 has three times the magnitudes of seed 0."""
    folder = write(runs, trials({rule: LOSSES[rule][:2] for rule in RULES}), "dynamics")
    for rule in RULES:
        for seed, level in ((0, 1.0), (1, 3.0)):
            path = record_path(folder, rule, seed).parent
            np.savez(path / "probes.npz", **probes(path.name, level, rule == "attnres_full"))
    return folder


def test_probes_are_means_over_seeds(tmp_path: Path) -> None:
    write_probes(tmp_path)
    dynamics = read_dynamics(load_study(tmp_path, "s"))
    assert list(dynamics.rules) == list(RULES) and dynamics.notes == ()
    prenorm, full = dynamics.rules.values()
    assert prenorm.seeds == ("0", "1") and prenorm.depth_weights is None
    assert prenorm.block_output_rms[-1] == pytest.approx([8, 16, 24])  # (1 + 3) / 2 x 4 x block
    assert prenorm.tokens.tolist() == [0, 1000, 2000, 3000]
    assert full.depth_weights is not None
    assert full.depth_weights[-1][2][:3] == pytest.approx([PROBES * 1 / 3] * 3)  # (1 + 3) / 2 / 2 x 4
    assert full.depth_entropy_nats is not None
    assert full.depth_entropy_nats[0] == pytest.approx(np.log(np.arange(1, len(SUBLAYERS) + 2)))
    assert np.isnan(full.depth_weights[-1][2][3:]).all()
    assert full.reads_of("mlp") == [1, 3, 5]


def test_report_has_the_section_the_figures_and_the_papers_words(tmp_path: Path) -> None:
    folder = write_probes(tmp_path)
    assert main(["study=s", f"runs_dir={tmp_path}"]) == 0
    text = (folder / "report" / "report.md").read_text()
    assert "| `prenorm` | 3,000 | 8, 24 | 3.00 | 7.00 | 0.5, 0.17 | 3.00 |  |" in text
    entropy = PROBES * np.log(np.arange(1, len(SUBLAYERS) + 2)).mean()
    (line,) = [line for line in text.splitlines() if line.startswith("| `attnres_full` | 3")]
    assert f"{entropy:.2f}" in line
    assert "The paper's Figure 5 (its scale; read off its curves)" in text
    for figure in ("differences", "magnitudes", "magnitudes_training", "depth_weights"):
        assert f"({figure}.png)" in text
        assert (folder / "report" / f"{figure}.svg").stat().st_size > 1000
    results = json.loads((folder / "report" / "results.json").read_text())
    assert results["dynamics"]["rules"]["attnres_full"]["block_output_rms"][0] == [2, 4, 6]


def test_figures_draw_the_probes(tmp_path: Path) -> None:
    write_probes(tmp_path)
    dynamics = read_dynamics(load_study(tmp_path, "s"))
    prenorm = dynamics.rules["prenorm"]
    output, read, gradient = magnitudes(dynamics).axes
    assert output.lines[0].get_ydata() == pytest.approx(prenorm.block_output_rms[-1])
    assert read.lines[0].get_ydata() == pytest.approx(prenorm.read_rms[-1, [0, 2, 4]])
    assert gradient.lines[1].get_ydata() == pytest.approx([0.5, 0.25, 0.5 / 3])
    grid = over_training(dynamics).axes
    assert [len(axes.lines) for axes in grid[:4]] == [PROBES] * 4
    assert grid[0].lines[1].get_ydata() == pytest.approx(prenorm.block_output_rms[1])
    attention, mlp, *_ = depth_weights(dynamics).axes
    full = dynamics.rules["attnres_full"].depth_weights
    assert full is not None
    for axes, reads in ((attention, [0, 2, 4]), (mlp, [1, 3, 5])):
        image = np.ma.filled(axes.images[0].get_array(), np.nan)
        assert np.array_equal(image, full[-1][reads], equal_nan=True)


def test_trials_without_probes_are_named(tmp_path: Path) -> None:
    folder = write_probes(tmp_path)
    (record_path(folder, "attnres_full", 1).parent / "probes.npz").unlink()
    dynamics = read_dynamics(load_study(tmp_path, "s"))
    assert dynamics.rules["attnres_full"].seeds == ("0",)
    (note,) = dynamics.notes
    assert note.startswith("no probes.npz of one-attnres_full-s1")
    for path in folder.glob("*/probes.npz"):
        path.unlink()
    assert main(["study=s", f"runs_dir={tmp_path}"]) == 0
    assert "no probes.npz of one-prenorm-s0" in (folder / "report" / "report.md").read_text()


def test_foreign_and_torn_probes_are_refused(tmp_path: Path) -> None:
    folder = write_probes(tmp_path)
    path = record_path(folder, "prenorm").parent / "probes.npz"
    np.savez(path, **probes("another", 1.0, False))
    with pytest.raises(UserError, match="is schema 1 of trial another"):
        read_dynamics(load_study(tmp_path, "s"))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="probes.npz: cannot be read") as caught:
        read_dynamics(load_study(tmp_path, "s"))
    assert "\n" not in str(caught.value)
    moved = probes(path.parent.name, 1.0, False)
    np.savez(path, **{**moved, "tokens": moved["tokens"] + 1})
    with pytest.raises(UserError, match="the probes of prenorm seed 1 are at other token counts"):
        read_dynamics(load_study(tmp_path, "s"))


def test_of_several_sizes_the_largest_is_probed(tmp_path: Path) -> None:
    small = trials({rule: LOSSES[rule][:1] for rule in RULES}, size="small")
    large = trials({rule: LOSSES[rule][:1] for rule in RULES}, size="large")
    tables = [large.assign(compute=large["compute"] * 9), small]
    folder = write(tmp_path, pd.concat(tables, ignore_index=True), "dynamics")
    for path in folder.glob("*/record.json"):
        np.savez(path.parent / "probes.npz", **probes(path.parent.name, 1.0, False))
    dynamics = read_dynamics(load_study(tmp_path, "s"))
    assert dynamics.size == "large" and dynamics.notes == ("probes of large only, the largest size",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"read_rms": np.ones((PROBES, 5))}, "read_rms is float64 (4, 5), not numbers (4, 7)"),
        ({"block_output_rms": np.ones(PROBES)}, "block_output_rms is float64 (4,), not numbers (4, 3)"),
        ({"depth_weights": np.ones((PROBES, 7, 3))}, "depth_weights is float64 (4, 7, 3)"),
        ({"depth_weights": None}, "depth_weights and depth_entropy_nats: one is missing"),
        ({"depth_weights": None, "depth_entropy_nats": None}, "have other reads or sources"),
        ({"read": np.array("attention_1")}, "read_rms is float64 (4, 7), not numbers (4, 1)"),
        ({"read": np.array(["attention_1", "mlp_1"])}, "has no probes"),
        ({"tokens": np.zeros(0)}, "has no probes"),
        ({"tokens": np.array(3.0)}, "has no probes"),
        ({"read_rms": np.full((PROBES, 7), np.nan)}, "read_rms has values that are no magnitudes"),
        ({"block_output_rms": np.full((PROBES, 3), -1.0)}, "block_output_rms has values that are no"),
        ({"loss_nats": np.full(PROBES, 1j)}, "loss_nats is complex128"),
        ({"about": np.array("[1]")}, "is schema None of trial None"),
        ({"about": np.array(json.dumps({"schema": 1, "trial_id": "zz"}))}, "is schema 1 of trial zz"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_probes_of_another_form_are_refused(
    tmp_path: Path, change: dict[str, Any], said: str, seed: int
) -> None:
    folder = write_probes(tmp_path)
    path = record_path(folder, "attnres_full", seed).parent
    arrays = {**probes(path.name, 1.0, True), **change}
    np.savez(path / "probes.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(UserError) as caught:
        read_dynamics(load_study(tmp_path, "s"))
    assert said in str(caught.value) and str(caught.value).count(str(path)) <= 1
