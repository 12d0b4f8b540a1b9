"""metrics.jsonl through resumes, torn lines and full disks."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from attnres.metrics import METRICS_FILE, MetricsFile, read_rows


def rows(count: int) -> list[dict[str, int]]:
    return [{"step": step} for step in range(count)]


def test_resume_cuts_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path, None)
    for row in rows(3):
        metrics.write(row)
    state = metrics.state()
    metrics.write({"step": "lost"})
    metrics.close()
    with open(tmp_path / METRICS_FILE, "a") as file:
        file.write('{"step": 4')  # a kill in the middle of a write
    assert read_rows(tmp_path / METRICS_FILE)[3:] == [{"step": "lost"}]

    metrics = MetricsFile(tmp_path, state)
    metrics.write({"step": 3})
    metrics.close()
    assert read_rows(tmp_path / METRICS_FILE) == rows(4)


def test_a_run_from_the_start_begins_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text("old\n")
    MetricsFile(tmp_path, None).close()
    assert (tmp_path / METRICS_FILE).read_text() == ""


def test_rows_that_are_gone_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = MetricsFile(tmp_path, {"bytes": 1000, "pending": []})
    metrics.write({"step": 9})
    metrics.close()
    assert "1000" in capsys.readouterr().err
    assert read_rows(tmp_path / METRICS_FILE) == [{"step": 9}]


@pytest.mark.parametrize("torn", [b"\x00" * 12, b"\xff{}", b'{"step": ', b"[1]", b"7"])
def test_torn_rows_are_taken_out_and_the_others_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], torn: bytes
) -> None:
    content = b'{"step": 0}\n' + torn + b'\n{"step": 1}\n{"st'
    (tmp_path / METRICS_FILE).write_bytes(content)
    metrics = MetricsFile(tmp_path, {"bytes": len(content), "pending": []})
    metrics.write({"step": 2})
    metrics.close()
    assert read_rows(tmp_path / METRICS_FILE) == rows(3)
    (warning,) = capsys.readouterr().err.splitlines()
    assert METRICS_FILE in warning and f"24 bytes of the {len(content)}" in warning


def test_rows_wait_for_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = MetricsFile(tmp_path, None)
    metrics.write({"step": 0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))  # the second row fits by half
    try:
        metrics.write({"step": 1})
        metrics.write({"step": 2})
        assert metrics.missing_rows == 2
        assert read_rows(tmp_path / METRICS_FILE) == rows(1)  # and no half row
        state = metrics.state()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err.count("warning") == 1
    metrics.write({"step": 3})
    metrics.close()
    assert read_rows(tmp_path / METRICS_FILE) == rows(4)

    # A kill before there was room again: the checkpoint has the rows.
    resumed = MetricsFile(tmp_path, state)
    resumed.close()
    assert read_rows(tmp_path / METRICS_FILE) == rows(3)


def test_a_full_device_costs_the_rows_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    metrics = MetricsFile(tmp_path, None)
    for row in rows(3):
        metrics.write(row)
    metrics.state()
    metrics.close()
    assert metrics.missing_rows == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "3 rows" in lines[1]
