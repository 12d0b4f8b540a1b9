"""A file is whole on the disk before it takes the place of the one that was there: a power cut later finds
the old content or the new.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnres.checkpoint import Checkpoints
from attnres.metrics import METRICS_FILE, MetricsFile
from attnres.record import write_text_atomic
from attnres.status import STATUS_FILE, StatusFile


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """What is asked of the file system: ("fsync" or "replace", name, bytes that are in the file then)."""
    asked: list[tuple[str, str, int]] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(number: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{number}")).name
        asked.append(("fsync", name, os.fstat(number).st_size))
        fsync(number)

    def note_replace(source: Path, target: Path) -> None:
        asked.append(("replace", source.name, source.stat().st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    return asked


@pytest.mark.parametrize("name", ["record.json", "checkpoint.pt", STATUS_FILE])
def test_on_the_disk_first_and_in_its_place_then(
    tmp_path: Path, done: list[tuple[str, str, int]], name: str
) -> None:
    write = {
        "record.json": lambda: write_text_atomic(tmp_path / name, "a record\n"),
        "checkpoint.pt": lambda: Checkpoints(tmp_path, "abc").save({"run": {"step": 3}}),
        STATUS_FILE: lambda: StatusFile(tmp_path, 10).update(step=1),
    }[name]
    for _ in range(2):
        done.clear()
        write()
        size = (tmp_path / name).stat().st_size
        temporary = done[0][1]
        assert temporary != name
        assert size > 0 and done == [("fsync", temporary, size), ("replace", temporary, size)]


def test_rows_that_a_checkpoint_counts_are_on_the_disk(
    tmp_path: Path, done: list[tuple[str, str, int]]
) -> None:
    metrics = MetricsFile(tmp_path, None)
    metrics.write({"step": 1})
    state = metrics.state()
    metrics.close()
    assert done == [("fsync", METRICS_FILE, state["bytes"])] and state["bytes"] > 0
