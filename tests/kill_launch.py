"""Kill a launch at random moments and compare what comes out with a launch left alone.

    python tests/kill_launch.py --kills 10 study=smoke budget.tokens_per_parameter=1

Every kill is SIGKILL to the launcher only, at a random moment between its start and its end. Half of the
time the next launch comes at once, while the orphaned trials still save their checkpoints; the other half
only after all processes are gone. In the end the records must equal those of the undisturbed launch, apart
from timing fields. `--trials` kills a random process of a trial half of the time instead. Exit code 0: all
records are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps_support import processes_with, wait_until

from attnres.record import comparable, read_record

MARKER = "ATTNRES_TEST_LAUNCH"
_markers: list[str] = []  # of what was started and may still live
ROOT = Path(__file__).resolve().parents[1]
GONE_SECONDS = 60.0  # that orphaned trials may take to save and end


@dataclass
class Outcome:
    """What the kills did."""

    kills: int = 0
    trial_kills: int = 0
    rounds: int = 0  # fresh runs folders that the kills were spread over
    leftovers: int = 0  # processes still there after GONE_SECONDS
    compared: int = 0
    differing: list[str] = field(default_factory=list)  # names of trials whose records differ


def new_marker() -> str:
    """A value for MARKER in the environment of what a test starts, by which it and its children are found."""
    _markers.append(uuid.uuid4().hex)
    return _markers[-1]


def end_all() -> None:
    """Kill whatever was started with a marker and still lives: a launch of a failed test, and trials that
    were suspended, would burden the machine, or stay for ever.
    """
    while _markers:
        text = f"{MARKER}={_markers.pop()}"
        for pid in _until_none(text):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _until_none(text: str) -> Iterator[int]:
    """A process that is being killed may just have started another one."""
    deadline = time.monotonic() + GONE_SECONDS
    while (pids := processes_with(text)) and time.monotonic() < deadline:
        yield from pids
        time.sleep(0.05)


class Launch:
    """`python -m sweeps.launch ARGUMENTS` in a folder of its own, and all processes that it starts."""

    def __init__(self, folder: Path, arguments: list[str], module: str = "sweeps.launch") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.marker = new_marker()
        environment = os.environ | {MARKER: self.marker, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        command = [sys.executable, "-m", module, *arguments]
        with open(folder / "launch.log", "a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def alive(self) -> list[int]:
        return processes_with(f"{MARKER}={self.marker}")

    def fork_server(self) -> list[int]:
        """The process that trials are forked from, once it has begun to load what they need."""
        return [
            pid
            for pid in self.alive()
            if parent_of(pid) == self.process.pid and "multiprocessing.forkserver" in command_of(pid)
        ]

    def trials(self) -> list[int]:
        """Processes of trials, each once it leads a session of its own; the fork server may be dead."""
        servers = self.fork_server()
        leaders = [pid for pid in self.alive() if pid not in servers and _leads_a_session(pid)]
        return [pid for pid in leaders if "multiprocessing.forkserver" in command_of(pid)]

    def gone(self, seconds: float = GONE_SECONDS) -> bool:
        """Whether all its processes end within the time."""
        return wait_until(lambda: not self.alive(), seconds)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _leads_a_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def run_undisturbed(folder: Path, arguments: list[str]) -> float:
    """Launch and wait; returns the seconds it took."""
    started = time.monotonic()
    launch = Launch(folder, arguments)
    code = launch.process.wait()
    if code:
        raise SystemExit(f"the undisturbed launch ended with {code}; see {folder / 'launch.log'}")
    return time.monotonic() - started


def run_disturbed(
    folder: Path,
    arguments: list[str],
    kills: int,
    seconds: float,
    draw: random.Random,
    trials: bool,
    outcome: Outcome,
) -> None:
    """Launch, kill, launch again, until the study is done or so many kills were made; then let it finish."""
    while outcome.kills < kills:
        launch = Launch(folder, arguments)
        try:
            launch.process.wait(draw.uniform(0, seconds))
            break  # it was faster than the kill
        except subprocess.TimeoutExpired:
            pass
        if trials and draw.random() < 0.5:
            outcome.trial_kills += _kill_a_trial(launch, draw)
        launch.kill()
        outcome.kills += 1
        if draw.random() < 0.5 and not launch.gone():
            outcome.leftovers += len(launch.alive())
    run_undisturbed(folder, arguments)


def _kill_a_trial(launch: Launch, draw: random.Random) -> int:
    trials = [pid for pid in launch.alive() if os.getsid(pid) == pid and pid != launch.process.pid]
    if not trials:
        return 0
    os.kill(draw.choice(trials), signal.SIGKILL)
    time.sleep(0.3)
    return 1


def records(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: read_record(path) for path in folder.glob("runs/*/*/record.json")}


def compare(expected: Path, found: Path, outcome: Outcome) -> None:
    wanted, got = records(expected), records(found)
    assert wanted
    for trial, record in wanted.items():
        outcome.compared += 1
        if trial not in got or comparable(got[trial]) != comparable(record):
            outcome.differing.append(record["name"])


def check(root: Path, arguments: list[str], kills: int, seed: int, trials: bool = False) -> Outcome:
    """The whole check, below `root`. The arguments of sweeps.launch must not have runs_dir among them."""
    draw, outcome = random.Random(seed), Outcome()
    seconds = run_undisturbed(root / "undisturbed", arguments)
    while outcome.kills < kills:
        outcome.rounds += 1
        folder = root / f"disturbed_{outcome.rounds}"
        run_disturbed(folder, arguments, kills, seconds, draw, trials, outcome)
        compare(root / "undisturbed", folder, outcome)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a launch at random moments and compare the records.")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", action="store_true", help="also kill processes of trials")
    options, arguments = parser.parse_known_args()
    root = Path(tempfile.mkdtemp(prefix="kill_launch_"))
    outcome = check(root, arguments, options.kills, options.seed, options.trials)
    print(json.dumps(vars(outcome) | {"folder": str(root)}))
    return 1 if outcome.differing or outcome.leftovers else 0


if __name__ == "__main__":
    sys.exit(main())
