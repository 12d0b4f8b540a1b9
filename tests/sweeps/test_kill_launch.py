"""Launches killed, stopped or started twice: nothing is lost, nothing is left, nothing runs twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kill_launch import Launch, Outcome, check, compare, run_undisturbed
from sweeps_support import Workplace, assert_trained_once, wait_until

from sweeps import executor
from sweeps.state import read_state

# Long enough to be caught in the middle on a fast machine: some hundred steps a trial.
LONGER = ("study.sizes=[tiny_a]", "budget.tokens=19200", "runtime.checkpoint_seconds=0.3")


def arguments(workplace: Workplace, *more: str) -> list[str]:
    """Of a launch in a folder of its own; records name their runs_dir, which must be the same text."""
    return [word for word in workplace.arguments(*LONGER, *more) if not word.startswith("runs_dir=")]


def some_trial_runs(workplace: Workplace, folder: str) -> bool:
    states = [read_state(path.parent) for path in (workplace.root / folder).glob("runs/tiny/*/status.json")]
    return any(state.state == "running" and state.step is not None for state in states)


def test_a_launcher_that_is_told_to_stop_saves_its_trials_and_leaves_nothing(workplace: Workplace) -> None:
    launch = Launch(workplace.root / "stopped", arguments(workplace))
    assert wait_until(lambda: some_trial_runs(workplace, "stopped"), 60)
    assert len(launch.alive()) >= 3  # launcher, fork server, a trial
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.wait(30) == 128 + signal.SIGTERM
    assert launch.gone(30)  # the fork server needs a moment to unload torch
    folders = [path.parent for path in (workplace.root / "stopped").glob("runs/tiny/*/status.json")]
    for folder in folders:
        assert read_state(folder).state in ("preempted", "finished")
        assert (folder / "checkpoint.pt").exists() == (read_state(folder).state == "preempted")
    log = (workplace.root / "stopped" / "launch.log").read_text()
    assert "Traceback" not in log
    assert "stopped; the same command goes on from the checkpoints" in log


@pytest.mark.slow
def test_a_stopped_study_goes_on_as_if_nothing_had_happened(workplace: Workplace) -> None:
    launch = Launch(workplace.root / "stopped", arguments(workplace))
    assert wait_until(lambda: some_trial_runs(workplace, "stopped"), 60)
    launch.process.send_signal(signal.SIGINT)
    assert launch.process.wait(30) == 128 + signal.SIGINT
    run_undisturbed(workplace.root / "stopped", arguments(workplace))
    run_undisturbed(workplace.root / "undisturbed", arguments(workplace))
    outcome = Outcome()
    compare(workplace.root / "undisturbed", workplace.root / "stopped", outcome)
    assert (outcome.compared, outcome.differing) == (2, [])


@pytest.mark.slow
def test_two_launchers_at_once_train_each_trial_once(workplace: Workplace) -> None:
    words = arguments(workplace, "launch.workers=1")
    first, second = (Launch(workplace.root / "shared", words) for _ in range(2))
    assert [first.process.wait(120), second.process.wait(120)] == [0, 0]
    folders = [path.parent for path in (workplace.root / "shared").glob("runs/tiny/*/config.yaml")]
    assert len(folders) == 2
    for folder in folders:
        assert_trained_once(folder)


@pytest.mark.slow
def test_trials_end_when_their_launcher_is_killed(workplace: Workplace) -> None:
    launch = Launch(workplace.root / "killed", arguments(workplace))
    assert wait_until(lambda: some_trial_runs(workplace, "killed"), 60)
    launch.kill()
    started = time.monotonic()
    assert launch.gone(20), launch.alive()
    assert time.monotonic() - started < 20
    folders = [path.parent for path in (workplace.root / "killed").glob("runs/tiny/*/status.json")]
    assert {read_state(folder).state for folder in folders} <= {"preempted", "finished"}


@pytest.mark.slow
@pytest.mark.parametrize("trials", [False, True], ids=["launcher", "trials too"])
def test_kills_at_random_moments_change_no_record(workplace: Workplace, trials: bool) -> None:
    outcome = check(workplace.root, arguments(workplace), kills=2, seed=5 + trials, trials=trials)
    assert outcome.kills == 2
    assert outcome.compared >= 2
    assert (outcome.differing, outcome.leftovers) == ([], 0)


@pytest.mark.parametrize(
    "ready",
    [
        pytest.param(lambda launch: bool(launch.fork_server()), id="while it loads"),
        pytest.param(lambda launch: len(launch.trials()) == 2, id="with trials", marks=pytest.mark.slow),
    ],
)
def test_a_killed_fork_server_costs_nothing(workplace: Workplace, ready: Callable[[Launch], bool]) -> None:
    launch = Launch(workplace.root / "run", arguments(workplace, "launch.workers=2"))
    assert wait_until(lambda: ready(launch), 60)
    for pid in launch.fork_server():
        os.kill(pid, signal.SIGKILL)
    assert launch.process.wait(120) == 0
    log = (workplace.root / "run" / "launch.log").read_text()
    assert "2 of 2 trials finished" in log and "Traceback" not in log
    for record in (workplace.root / "run" / "runs" / "tiny").glob("*/record.json"):
        assert_trained_once(record.parent)
    assert launch.gone(30), launch.alive()


@pytest.mark.slow
def test_trials_without_their_fork_server_are_stopped_with_the_launch(workplace: Workplace) -> None:
    launch = Launch(workplace.root / "run", arguments(workplace, "launch.workers=2"))
    assert wait_until(lambda: some_trial_runs(workplace, "run") and len(launch.trials()) == 2, 60)
    for pid in launch.fork_server():
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    assert len(launch.trials()) == 2
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.wait(30) == 128 + signal.SIGTERM
    assert launch.gone(30), launch.alive()
    folders = [path.parent for path in (workplace.root / "run").glob("runs/tiny/*/status.json")]
    assert [read_state(folder).state for folder in folders] == ["preempted"] * 2


def lost(process: subprocess.Popen[bytes], **more: Any) -> Any:
    """As a trial's handle is once its fork server has died. Its sentinel can be read, for ever."""
    return SimpleNamespace(exitcode=255, pid=process.pid, **more)


def leader() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "input()"]
    return subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE)


def test_an_ended_process_that_nobody_collects_does_not_go_on() -> None:
    ended, lives = leader(), leader()
    try:
        ended.stdin.close()  # type: ignore[union-attr]
        stat = Path(f"/proc/{ended.pid}/stat")
        assert wait_until(lambda: stat.read_text().split()[2] == "Z", 30)
        assert [executor._goes_on_alone(lost(process)) for process in (ended, lives)] == [False, True]
        assert not executor._goes_on_alone(cast(Any, SimpleNamespace(exitcode=0, pid=lives.pid)))
    finally:
        lives.communicate(b"\n")
        ended.wait()
    assert not executor._goes_on_alone(lost(lives))


def test_a_trial_without_its_fork_server_is_waited_for_and_can_be_killed() -> None:
    local, trial = executor.LocalExecutor(1, 20), leader()
    read, write = os.pipe()
    os.close(write)
    handle = lost(trial, sentinel=read, kill=lambda: None)
    try:
        start = time.monotonic()
        local.wait([handle], 0.2)
        assert time.monotonic() - start > 0.15 and local.poll(handle) is None
        local.stop(handle, force=True)
        assert trial.wait(30) == -signal.SIGKILL
        assert local.poll(handle) == 255
    finally:
        trial.kill()
        trial.communicate()
        os.close(read)
