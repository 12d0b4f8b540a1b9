"""The benchmark of what launching costs: its parts add up. No time is asserted."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "orchestration.py"
sys.path.insert(0, str(SCRIPT.parent))
orchestration = importlib.import_module("orchestration")

TIMING = {
    "train_seconds": 8.0,
    "evaluation_seconds": 1.0,
    "startup_seconds": 0.5,
    "probe_seconds": 0.25,
    "checkpoint_seconds": 0.0,
    "wall_seconds": 10.0,
}


def test_every_second_of_the_workers_is_in_one_part_and_the_formula_is_the_issues() -> None:
    """Two trials on two workers from second 2 to second 14 of a launch of 15 seconds."""
    status = {"started": 102.5, "heartbeat": 113.0}
    slots = [orchestration.Slot(102.0, 114.0, {"timing": TIMING}, status)] * 2
    result = orchestration.summarise(orchestration.Launched(15.0, slots, 2.0, 1.0), workers=2)
    assert result["overhead_per_wall"] == pytest.approx((15 * 2 - 16) / 15)
    assert result["overhead_share"] == pytest.approx((15 * 2 - 16) / 30)
    assert result["overhead_per_wall_without_evaluation"] == pytest.approx((15 * 2 - 18) / 15)
    parts = result["seconds_per_trial"]
    assert sum(parts.values()) * 2 == pytest.approx(15 * 2)
    assert parts["process_start"] == pytest.approx(0.5)
    assert parts["record_and_wandb"] == pytest.approx(0.5)
    assert parts["process_end"] == pytest.approx(1.0)
    assert (parts["launcher_start"], parts["idle_slots"]) == pytest.approx((2.0, 1.0))


@pytest.mark.slow
def test_a_small_run_prints_json() -> None:
    words = ["--trials", "2", "--seconds", "0.5", "--json", "tracking=none"]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert (result["trials"], result["workers"]) == (2, 2)
    parts = result["seconds_per_trial"]
    assert min(parts.values()) > -0.01
    assert sum(parts.values()) * 2 == pytest.approx(2 * result["wall_seconds"])
