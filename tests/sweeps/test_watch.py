"""Looking at a study from outside: what cannot be checked is alive while its heartbeat moves."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from attnres.lock import TrialLock
from sweeps import watch as watching
from sweeps.launches import LaunchFile, running_launches
from sweeps.live import Moment
from sweeps.signs import SignsOfLife
from sweeps.status import status_json
from sweeps.watch import watch

PLAN = {"name": "s", "trials": [{"id": "a", "name": "trial a", "steps": 40, "parameters": 7}]}
AHEAD = 1e6  # seconds that the clock of another machine is ahead


class Heard:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.moments = 0

    def due(self, trials: int = 1) -> bool:
        return True

    def show(self, moment: Moment) -> None:
        self.moments += 1

    def say(self, line: str) -> None:
        self.lines.append(line)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.01)


def ends(folder: Path, screen: Heard, patience: float = 0.1, seconds: float = 10.0) -> bool:
    """Whether watching ends; a thread that waits for ever is left behind."""
    arguments = (folder, PLAN, screen, SignsOfLife(patience))
    thread = threading.Thread(target=watch, args=arguments, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def write_status(folder: Path, **fields: Any) -> None:
    status = {"state": "running", "attempts": 1, "first_started": 1.0, "host": "far", "boot_id": "another"}
    folder.mkdir(exist_ok=True)
    (folder / "status.json").write_text(json.dumps(status | fields))


def test_watching_ends_when_a_heartbeat_of_the_future_stands_still(tmp_path: Path) -> None:
    write_status(tmp_path / "a", heartbeat=time.time() + AHEAD)
    screen = Heard()
    assert ends(tmp_path, screen)
    assert screen.moments > 0
    assert [line.partition(":")[::2] for line in screen.lines] == [
        ("trial a", " stale: by its heartbeat from far, whose locks are not seen here, which no longer moves")
    ]


def test_watching_ends_when_the_launch_of_another_machine_is_silent(tmp_path: Path) -> None:
    with LaunchFile(tmp_path, "local") as note:
        note.write(pending=["a"], running=[], elsewhere=[], done=0, eta_seconds=None)
        fields = json.loads((note.folder / "launch.json").read_text())
    path = tmp_path / "launches" / "far-1" / "launch.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(fields | {"boot_id": "another", "heartbeat": time.time() + AHEAD}))
    assert [launch.locked for launch in running_launches(tmp_path)] == [False]
    assert ends(tmp_path, Heard())


def test_a_launch_that_holds_its_lock_is_alive_however_silent(tmp_path: Path) -> None:
    screen = Heard()
    with LaunchFile(tmp_path, "local") as note:
        note.write(pending=["a"], running=[], elsewhere=[], done=0, eta_seconds=None)
        assert [launch.locked for launch in running_launches(tmp_path)] == [True]
        assert not ends(tmp_path, screen, patience=0.02, seconds=0.2)
    (tmp_path / "a").mkdir()
    with TrialLock(tmp_path / "a"):
        write_status(tmp_path / "a", heartbeat=time.time())
        assert not ends(tmp_path, screen, patience=0.02, seconds=0.2)


def test_a_heartbeat_that_moves_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    signs = SignsOfLife(100.0)
    for second in range(0, 1000, 50):
        now[0] = float(second)
        assert not signs.silent("far", float(second))
    now[0] += 101.0
    assert signs.silent("far", 950.0) and not signs.silent("other", 950.0)


def test_json_has_the_planned_steps_of_a_trial_that_never_started(tmp_path: Path) -> None:
    (trial,) = status_json(tmp_path, PLAN)["trials"]
    assert (trial["state"], trial["step"], trial["steps"]) == ("pending", None, 40)
    write_status(tmp_path / "a", heartbeat=time.time(), step=3, steps=50)
    (trial,) = status_json(tmp_path, PLAN)["trials"]
    assert (trial["step"], trial["steps"]) == (3, 50)
    older = {**PLAN, "trials": [{"id": "b", "name": "trial b"}]}
    assert status_json(tmp_path, older)["trials"][0]["steps"] is None


def test_json_has_every_field_of_the_docs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "launching.md").read_text(encoding="utf-8")
    table = text.partition("`sweeps.status --json`:")[2].partition("\n\n| field")[2].partition("\n\n")[0]
    described: dict[str, str] = {}  # what a row says of its fields
    for line in table.splitlines()[2:]:
        names, _, words = line.strip("| ").partition(" | ")
        described |= {name.strip(" |"): words for name in names.split(",")}
    with LaunchFile(tmp_path, "local") as note:
        note.write(pending=["a"], running=[], elsewhere=[], done=0, eta_seconds=None)
        data = status_json(tmp_path, PLAN)
    assert set(data) == set(described)
    for group in ("launches", "trials"):
        (one,) = data[group]
        told = set(re.findall(r"[a-z_]+", described[group]))
        assert set(one) <= told, set(one) - told
        assert not {"heartbeat", "eta_seconds", "pid", "host", "locked"} - set(one)
    assert data["launches"][0]["pending"] == ("a",)
