"""A launcher that is told to stop at any moment of its life leaves no process behind."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from kill_launch import MARKER, ROOT, Launch, new_marker
from sweeps_support import Workplace, processes_with, wait_until

from sweeps.state import read_state

# Generous: a launcher needs seconds of processor time before its first trial, which are minutes where many
# processes share a core. Nothing is asserted about how long it takes.
SOON = 400.0

TEN = (
    "study.seeds=[0,1,2]",
    "launch.workers=10",
    "budget.tokens=640000",
    "schedule.warmup_fraction=0",
    "launch.grace_seconds=3000",  # longer than any wait here: nothing ends only because a grace time is over
)


def arguments(workplace: Workplace, *more: str) -> list[str]:
    return [word for word in workplace.arguments(*TEN, *more) if not word.startswith("runs_dir=")]


def started(workplace: Workplace, folder: str) -> int:
    """Trials that the launcher says it has started."""
    log = workplace.root / folder / "launch.log"
    return log.read_text().count(": started") if log.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("after", ["packing", "first", "fifth", "tenth"])
def test_during_the_start_of_ten_trials(workplace: Workplace, number: signal.Signals, after: str) -> None:
    launch = Launch(workplace.root / "run", arguments(workplace))
    trials = {"packing": 0, "first": 1, "fifth": 5, "tenth": 10}[after]
    cache = workplace.root / "cache"
    assert wait_until(lambda: cache.exists() and started(workplace, "run") >= trials, SOON)
    launch.process.send_signal(number)
    assert launch.process.wait(SOON) in (128 + number, -number)
    assert launch.gone(SOON), launch.alive()
    states = {read_state(path.parent).state for path in workplace.root.glob("run/runs/tiny/*/lock")}
    assert states <= {"preempted", "pending", "stale"}
    assert "Traceback" not in (workplace.root / "run" / "launch.log").read_text()


@pytest.mark.slow
def test_a_second_interrupt_kills(workplace: Workplace) -> None:
    launch = Launch(workplace.root / "run", arguments(workplace))
    assert wait_until(lambda: started(workplace, "run") >= 10, SOON)
    assert wait_until(lambda: len(launch.trials()) >= 10, SOON)  # each once it leads a session of its own
    trials = launch.trials()
    # Not the fork server: suspended, it would tell of no trial's end.
    for pid in trials:  # they would not save within the grace time
        os.kill(pid, signal.SIGSTOP)
    launch.process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert launch.process.poll() is None
    launch.process.send_signal(signal.SIGINT)
    assert launch.process.wait(SOON) == 128 + signal.SIGINT
    assert launch.gone(SOON), launch.alive()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "closing"])
def test_on_a_terminal(workplace: Workplace, how: str) -> None:
    """The terminal's signals reach the whole process group, and what is printed then goes nowhere."""
    marker = new_marker()
    environment = os.environ | {MARKER: marker, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sweeps.launch", *workplace.arguments(*TEN, "launch.workers=2")]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command, environment)
    os.set_blocking(terminal, False)
    shown = b""

    def shows(text: bytes) -> bool:
        nonlocal shown
        try:
            shown += os.read(terminal, 65536)
        except BlockingIOError:
            pass
        return text in shown

    assert wait_until(lambda: shows(b"tokens/s"), SOON)
    runs = workplace.runs / "tiny"
    assert wait_until(lambda: shows(b"running") and any(runs.glob("*/status.json")), SOON)
    if how == "closing":
        os.close(terminal)
    else:
        os.write(terminal, b"\x03")

    def has_ended() -> bool:
        if how == "Ctrl-C":
            shows(b"")  # a full terminal would hold it up
        return os.waitpid(pid, os.WNOHANG) != (0, 0)

    assert wait_until(has_ended, SOON)
    left = processes_with(f"{MARKER}={marker}")
    assert wait_until(lambda: not processes_with(f"{MARKER}={marker}"), SOON), left
    states = [read_state(path.parent).state for path in runs.glob("*/status.json")]
    assert states and set(states) == {"preempted"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_plan_that_times_the_shapes(workplace: Workplace, number: signal.Signals) -> None:
    marker = new_marker()
    environment = os.environ | {MARKER: marker, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sweeps.plan", *workplace.arguments("launch.workers=4")]
    plan = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert wait_until(lambda: len(processes_with(f"{MARKER}={marker}")) >= 3, SOON)
    plan.send_signal(number)
    assert plan.wait(SOON) in (128 + number, -number)
    assert wait_until(lambda: not processes_with(f"{MARKER}={marker}"), SOON)
