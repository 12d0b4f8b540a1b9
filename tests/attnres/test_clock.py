"""Seconds by activity."""

from __future__ import annotations

import time

import pytest

from attnres.run_state import Clock


def test_an_activity_within_another_counts_once_and_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the start of a tracking run in the midst of training, and one more within that; also if it fails."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    with clock.measure("train"):
        now[0] += 1
        with pytest.raises(KeyError), clock.measure("startup"):
            now[0] += 2
            with clock.measure("checkpoint"):
                now[0] += 4
            raise KeyError
        now[0] += 8
        with clock.measure("startup"):
            now[0] += 16
    with clock.measure_step():
        now[0] += 32
    assert clock.seconds == {"startup": 18, "train": 41, "evaluation": 0, "checkpoint": 4, "probe": 0}
    assert clock.step_seconds == [32]
