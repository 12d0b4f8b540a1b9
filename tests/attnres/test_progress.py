"""The progress views, and what a record says of the machine."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest
from tiny_trial import tiny_trial

from attnres.environment import describe
from attnres.progress import Bar, Lines, Silence, duration, open_progress


def test_lines_come_at_an_interval_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines("name", steps=5, seconds=1000)
    for step in range(1, 6):
        lines.update(step, loss_nats=2.5, tokens_per_second=1234.0, eta_seconds=61.0)
    printed = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in printed] == ["1/5", "5/5"]
    assert all(text in printed[0] for text in ("loss 2.500", "1,234 tokens/s", "1:01 left"))


def test_bar_shows_the_figures_and_keeps_lines(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar("name", steps=2)
    bar.update(2, loss_nats=2.5, tokens_per_second=1234.0, eta_seconds=0.0)
    bar.say("a line [with brackets]")
    bar.close()
    printed = capsys.readouterr().err
    assert "a line [with brackets]" in printed and "loss 2.500" in printed and "100%" in printed


def test_auto_is_lines_where_there_is_no_terminal() -> None:
    assert isinstance(open_progress("auto", "name", 1), Lines)
    assert isinstance(open_progress("none", "name", 1), Silence)


def test_duration() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.6, 3599, 3600, 90061)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "25:01:01",
    ]


def test_environment_names_no_person_and_no_host(tmp_path: Path) -> None:
    trial, _ = tiny_trial(tmp_path)
    facts = describe(trial)
    assert facts["threads"] == trial.config.runtime.threads and facts["device"] == "cpu" and facts["cpu"]
    assert facts["commit"] is None or len(facts["commit"]) == 40
    words = " ".join(map(str, facts.values())).split()
    assert socket.gethostname() not in words and getpass.getuser() not in words
