"""What an exit code means: which attempts are tried again, and whose failure it was."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from sweeps_support import Workplace

from attnres.lock import EXIT_BUSY
from attnres.stop import EXIT_CANCELLED
from sweeps.endings import from_outside, last_words
from sweeps.study import PlannedTrial


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-signal.SIGKILL, "killed by SIGKILL (out of memory?)"),
        (-signal.SIGTERM, "killed by SIGTERM"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-40, "killed by signal 40"),
        (143, "stopped from outside"),
        (130, "stopped from outside"),
        (128 + signal.SIGKILL, "one of its processes was killed by SIGKILL"),
        (128 + signal.SIGBUS, "one of its processes was killed by SIGBUS"),
        (255, "lost"),
    ],
)
def test_signals_and_lost_processes_are_tried_again(code: int, said: str) -> None:
    assert from_outside(code) == said


@pytest.mark.parametrize("code", [0, 1, 2, 3, EXIT_BUSY, EXIT_CANCELLED])
def test_whatever_would_come_again_is_not(code: int) -> None:
    assert from_outside(code) is None


@pytest.fixture(scope="module")
def planned(shared_workplace: Workplace) -> PlannedTrial:
    return shared_workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]").trials[0]


@pytest.mark.parametrize(
    ("code", "log", "reason", "origin"),
    [
        (2, "a\nerror: model.width=0: no\n", "model.width=0: no", "own"),
        (2, "usage\n", "exit code 2: usage (see", "own"),
        (1, "a\nb\n\n", "exit code 1: b (see", "outside"),
        (1, None, "exit code 1 (see", "outside"),
    ],
)
def test_the_last_line_of_the_log_is_the_reason(
    planned: PlannedTrial, code: int, log: str | None, reason: str, origin: str
) -> None:
    path: Path = planned.trial.folder / "log.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if log is not None:
        path.write_text(log)
    said, whose = last_words(planned, code)
    assert said.startswith(reason) and whose == origin
