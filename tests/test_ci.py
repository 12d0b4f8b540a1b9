"""What .ci/run makes of failures, with a make that only says what it is asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = """#!/usr/bin/env bash
echo "make $1"
if [ "$1" = "$LONG" ]; then echo $$ >>"$PIDS"; exec sleep 60; fi
if [ "$1" = "$BAD" ]; then echo "$1 is bad"; exit 2; fi
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    return os.environ | {
        "PATH": f"{make.parent}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path / "tmp"),
        "PIDS": str(tmp_path / "pids"),
        "BAD": "",
        "LONG": "",
    }


def start(tmp_path: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = ["bash", str(tmp_path / ".ci" / "run")]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("bad", ["", "setup", "check", "test", "setup-clusters", "study", "test-clusters"])
def test_each_step_that_fails_fails_the_run_and_is_shown(
    tmp_path: Path, environment: dict[str, str], bad: str
) -> None:
    process = start(tmp_path, environment | {"BAD": bad})
    said, _ = process.communicate(timeout=60)
    assert process.returncode == {"": 0, "check": 1, "test-clusters": 1}.get(bad, 2)
    assert f"{bad} is bad" in said or not bad
    assert "cat:" not in said
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("end", ["failure", "signal"])
def test_nothing_is_left_running(tmp_path: Path, environment: dict[str, str], end: str) -> None:
    """Neither what runs beside the tests when they fail, nor the tests when the run is told to end."""
    long = {"failure": "check", "signal": "test"}[end]
    pids = tmp_path / "pids"
    environment |= {"LONG": long, "BAD": "test" if end == "failure" else ""}
    process = start(tmp_path, environment)
    if end == "signal":
        while not pids.exists() or not pids.read_text().endswith("\n"):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=50)  # its output is closed by all of them
    assert process.returncode == (2 if end == "failure" else -signal.SIGTERM)
