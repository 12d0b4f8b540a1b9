"""Calibration times real steps and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_trial import tiny_overrides

from attnres.calibrate import main


def test_prints_its_numbers_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = tiny_overrides(tmp_path)
    assert main([*overrides, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {
        "seconds_per_step",
        "evaluation_seconds_per_window",
        "startup_seconds",
        "peak_memory_bytes",
        "waiting_share",
    }
    waiting = figures.pop("waiting_share")
    assert waiting is None or 0 <= waiting < 1
    assert all(seconds > 0 for seconds in figures.values())
    # Evaluation is a forward pass of one window; a step is both passes over four, and the update.
    assert figures["evaluation_seconds_per_window"] < figures["seconds_per_step"]
    assert main(overrides) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
