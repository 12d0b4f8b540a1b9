"""The study `smoke` on this machine, on a Ray of two nodes and on a Slurm of two nodes: the same losses.

A tenth of its tokens, unless FULL_SMOKE=1 is set: then it is trained as shipped (three times some minutes).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray_lab
import slurm_support
from fault_support import results
from kill_launch import Launch

from attnres.metrics import METRICS_FILE, TIMING_KEYS, read_rows
from sweeps.study import Study, load_study

WHY_NOT = slurm_support.WHY_NOT or ray_lab.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.usefixtures("lab"),
]
FULL = os.environ.get("FULL_SMOKE") == "1"
TOKENS = () if FULL else ("budget.tokens_per_parameter=0.2",)
TRIALS = 9


def rows(study: Study) -> dict[str, list[dict[str, Any]]]:
    """All lines of all metrics files, without times."""
    found = {}
    for planned in study.trials:
        lines = read_rows(planned.trial.folder / METRICS_FILE)
        found[planned.trial.id] = [{k: v for k, v in line.items() if k not in TIMING_KEYS} for line in lines]
    return found


def smoke(root: Path, name: str, *executor: str) -> Study:
    """`python -m sweeps.launch study=smoke`, and what came of it."""
    words = ["study=smoke", f"runs_dir={root / name}", "tracking=none", *TOKENS, *executor]
    launch = Launch(root / name, words)
    assert launch.process.wait(3000) == 0, (root / name / "launch.log").read_text()
    return load_study(words)


def test_the_study_smoke_has_the_same_losses_everywhere(tmp_path: Path, ray_cluster: ray_lab.RayLab) -> None:
    local = smoke(tmp_path, "local")
    on_slurm = smoke(tmp_path, "slurm", "executor=slurm", f"executor.folder={tmp_path / 'submitit'}")
    on_ray = smoke(tmp_path, "ray", "executor=ray", f"executor.address={ray_cluster.address}")
    expected = results(local)
    assert len(expected) == TRIALS
    for there in (on_slurm, on_ray):
        assert results(there) == expected
        assert rows(there) == rows(local)
