"""The time that a trial has left counts its evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_trial import tiny_trial

from attnres.eta import Eta, windows_of


def test_evaluations_and_checkpoints_count(tmp_path: Path) -> None:
    trial, _ = tiny_trial(tmp_path, steps=30)  # evaluations of 8, 8 and 32 windows, batches of 4 sequences
    first, second, last = trial.evaluation_steps
    assert [windows_of(trial, step) for step in trial.evaluation_steps] == [8, 8, 32]
    seconds = {"train": 5.0, "evaluation": 7.0, "checkpoint": 1.0, "probe": 0.0}  # of earlier attempts
    eta = Eta(trial, 0, seconds)
    assert eta.left(0, -1) is None
    seconds["train"] += 2.0 * first
    # Not evaluated yet: a window is taken to cost a third of a training sequence.
    assert eta.left(first, -1) == pytest.approx(2.0 * (30 - first) + 48 * 2.0 / 4 / 3)
    seconds["evaluation"] += 8 * 0.5
    eta.evaluating(8)
    eta.evaluated(first)
    assert eta.left(first, first) == pytest.approx(2.0 * (30 - first) + 40 * 0.5)
    seconds["checkpoint"] += 1.0 * first  # a second for each step
    assert eta.left(first, first) == pytest.approx(3.0 * (30 - first) + 40 * 0.5)
    # In the middle of the last evaluation.
    seconds["train"] += 2.0 * (30 - first)
    seconds["evaluation"] += 8 * 0.5
    eta.evaluated(second)
    eta.evaluating(24)
    assert eta.left(30, second) == pytest.approx(8 * 0.5)
    eta.evaluated(last)
    assert eta.left(30, last) == 0.0
