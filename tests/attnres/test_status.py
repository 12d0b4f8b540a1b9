"""status.json: throttled, atomic, counting attempts."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest

from attnres.errors import RecordError
from attnres.status import STATUS_FILE, StatusFile, read_status


def test_fields_and_throttle(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    status = StatusFile(tmp_path, steps=10)
    status.update(step=1, tokens=100, loss_nats=3.0, tokens_per_second=5.0, eta_seconds=9.0)
    status.update(step=2)  # too soon to be written
    seen = read_status(tmp_path)
    assert seen is not None
    assert (seen["state"], seen["step"], seen["steps"], seen["pid"]) == ("running", 1, 10, os.getpid())
    assert abs(seen["heartbeat"] - time.time()) < 5
    status.end("finished", step=10)
    seen = read_status(tmp_path)
    assert seen is not None and (seen["state"], seen["step"], seen["tokens"]) == ("finished", 10, 100)
    assert set(seen) >= {"host", "started", "loss_nats", "tokens_per_second", "eta_seconds", "reason"}


def test_attempts_are_counted_and_the_first_start_kept(tmp_path: Path) -> None:
    first = StatusFile(tmp_path, steps=10)
    first.update(step=1)
    time.sleep(0.01)
    second = StatusFile(tmp_path, steps=10)
    second.end("failed", "ValueError: no")
    seen = read_status(tmp_path)
    assert seen is not None and seen["attempts"] == 2 and seen["reason"] == "ValueError: no"
    assert seen["first_started"] == first.first_started < seen["started"]


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    for text in ("{", "[]", json.dumps({"state": 1})):
        (tmp_path / STATUS_FILE).write_text(text)
        with pytest.raises(RecordError, match=STATUS_FILE):
            read_status(tmp_path)


def test_a_disk_that_refuses_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = StatusFile(tmp_path, steps=10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # as a full disk: no file may grow past 10 bytes
    try:
        status.end("running", step=1)
        status.end("running", step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err.count(STATUS_FILE) == 1
    assert list(tmp_path.iterdir()) == []
    status.end("finished")
    assert (tmp_path / STATUS_FILE).exists()


@pytest.mark.parametrize("text", ['{"sta', "[]", '{"state": "running", "attempts": "x", "first_started": 1}'])
def test_a_torn_status_is_written_anew(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / STATUS_FILE).write_text(text)
    status = StatusFile(tmp_path, 10)
    assert status.attempts == 1
    assert STATUS_FILE in capsys.readouterr().err
    status.end("finished")
    after = read_status(tmp_path)
    assert after is not None and after["state"] == "finished"
