"""The soak in short: a dozen trials under random kills lose nothing. `python tests/soak.py` has 200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from soak import Counts, Records, as_json, count, soak
from tiny_trial import tiny_trial

from attnres.train import train


@pytest.mark.slow
def test_a_dozen_trials_under_random_kills_lose_nothing(tmp_path: Path) -> None:
    counts = soak(tmp_path, trials=12, seed=1)
    assert counts.trials == 12
    assert counts.kills.total() > 0
    assert counts.wrong == 0, as_json(counts)


def test_what_is_lost_doubled_or_different_is_counted(tmp_path: Path) -> None:
    for name in ("left", "right"):
        trial, corpus = tiny_trial(
            tmp_path, f"runs_dir={tmp_path / name / 'runs'}", "study_name=tiny", steps=4
        )
        train(trial, corpus)
    records = Records(tmp_path / "right" / "runs" / "tiny")
    records.look()
    (path,) = records.first
    status = json.loads((path.parent / "status.json").read_text())
    (path.parent / "status.json").write_text(json.dumps(status | {"attempts": 2}))
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"seed": 7}))
    records.look()
    (tmp_path / "right" / "launch.log").write_text("Traceback (most recent call last):\n")
    counts = Counts()
    count(tmp_path / "right", tmp_path / "left", records, counts)
    assert (counts.trials, counts.lost, counts.duplicated, counts.mismatching) == (1, 1, 1, 1)
    assert (counts.tracebacks, counts.wrong) == (1, 4)
