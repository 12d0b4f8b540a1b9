"""A launch in the background: it outlives what started it, is seen, watched and stopped by others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_launch import MARKER, ROOT
from sweeps_support import Workplace, processes_with, wait_until

from sweeps.launches import running_launches
from sweeps.state import read_state

LONG = ("budget.tokens=640000", "schedule.warmup_fraction=0", "study.sizes=[tiny_a]", "launch.workers=1")
SHORT = ("study.sizes=[tiny_a]", "launch.workers=2")


class Shell:
    """Commands that share a marker, so that what they leave is found."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace, self.marker = workplace, f"{MARKER}={os.urandom(8).hex()}"
        self.folder = workplace.runs / "tiny"

    def run(self, module: str, *words: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", module, *words]
        name, value = self.marker.split("=")
        environment = os.environ | {name: value, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def launch(self, *more: str) -> subprocess.CompletedProcess[str]:
        return self.run("sweeps.launch", *self.workplace.arguments(*more), "--detach")

    def of_study(self, module: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(module, "study=tiny", f"runs_dir={self.workplace.runs}", *words)

    def states(self) -> list[str]:
        plan = json.loads((self.folder / "study.json").read_text())
        return [read_state(self.folder / trial["id"]).state for trial in plan["trials"]]


@pytest.fixture
def shell(workplace: Workplace) -> Iterator[Shell]:
    shell = Shell(workplace)
    yield shell
    for pid in processes_with(shell.marker):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_it_goes_on_is_watched_and_stopped_by_others(shell: Shell) -> None:
    started = shell.launch(*LONG)
    assert started.returncode == 0, started.stderr
    (note,) = running_launches(shell.folder)
    assert note.detached and f"process {note.pid}" in started.stdout
    assert os.getsid(note.pid) != os.getsid(0)
    for number in range(3):  # nothing of the shell's is held open
        assert not os.readlink(f"/proc/{note.pid}/fd/{number}").startswith(("/dev/pts", "pipe:"))
    assert wait_until(lambda: "running" in shell.states(), 60)
    # A second one in the background would fill the same log and take the same cores.
    second = shell.launch(*LONG)
    assert second.returncode == 2
    assert "is in the background already" in second.stderr.splitlines()[-1]
    status = json.loads(shell.of_study("sweeps.status", "--json").stdout)
    assert [launch["pid"] for launch in status["launches"]] == [note.pid]
    assert shell.of_study("sweeps.cancel").returncode == 0
    assert wait_until(lambda: not processes_with(shell.marker), 30)
    assert shell.states() == ["cancelled", "cancelled"]
    log = (shell.folder / "launch.log").read_text()
    assert "2 trials were cancelled" in log and "Traceback" not in log


@pytest.mark.slow
def test_watching_ends_with_the_launch(shell: Shell) -> None:
    assert shell.launch(*SHORT, "budget.tokens=25600").returncode == 0
    watched = shell.of_study("sweeps.status", "--watch", "--every", "0.5")
    assert watched.returncode == 0, watched.stderr
    lines = watched.stdout.splitlines()
    assert " of 2 finished, " in lines[0]
    assert any("finished, loss" in line for line in lines)
    assert lines[-1] == "2 planned: 2 finished"
    assert running_launches(shell.folder) == []
    # Nothing runs any more: it says where the study is, and ends.
    assert shell.of_study("sweeps.status", "--watch").stdout.splitlines()[-1] == "2 planned: 2 finished"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_it(shell: Shell, number: signal.Signals) -> None:
    assert shell.launch(*LONG).returncode == 0
    assert wait_until(lambda: "running" in shell.states(), 60)
    os.kill(running_launches(shell.folder)[0].pid, number)
    assert wait_until(lambda: not processes_with(shell.marker), 30)
    assert sorted(shell.states()) == ["pending", "preempted"]
    assert "stopped; the same command goes on" in (shell.folder / "launch.log").read_text()


def test_mistakes_are_told_before_it_begins(shell: Shell) -> None:
    for words, line in (
        (["launch.workers=0"], "launch.workers=0: must be positive"),
        (["executor=ray", "executor.address=127.0.0.1:9"], "executor.address=127.0.0.1:9: cannot be reached"),
    ):
        done = shell.launch(*words)
        assert done.returncode == 2
        if "executor=ray: needs" not in done.stderr:
            assert line in done.stderr
        assert len([text for text in done.stderr.splitlines() if text.startswith("error: ")]) == 1
    assert wait_until(lambda: not processes_with(shell.marker), 30)
    assert running_launches(shell.folder) == []


@pytest.mark.slow
def test_what_is_left_of_a_killed_launch_does_not_count(shell: Shell, tmp_path: Path) -> None:
    assert shell.launch(*LONG).returncode == 0
    (note,) = running_launches(shell.folder)
    os.kill(note.pid, signal.SIGKILL)
    assert wait_until(lambda: running_launches(shell.folder) == [], 10)
    assert wait_until(lambda: not processes_with(shell.marker), 60)
    time.sleep(0.1)
    assert shell.launch(*LONG).returncode == 0
    assert len(list((shell.folder / "launches").iterdir())) == 1
