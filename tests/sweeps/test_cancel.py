"""Cancelling: what runs stops with a checkpoint, what waits is not started, a new launch goes on."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from sweeps_support import Notes, Workplace, run_study, wait_until

from attnres.cli import run_command
from attnres.data.corpus import PackedCorpus
from attnres.lock import TrialLock
from attnres.status import boot_id
from attnres.trial import Trial
from sweeps import cancel
from sweeps.executor import LocalExecutor
from sweeps.interrupts import Interrupts
from sweeps.jobs import FailurePolicy
from sweeps.launch import launch
from sweeps.launches import LaunchFile, running_launches
from sweeps.runner import Runner
from sweeps.state import read_state
from sweeps.study import Study, write_study
from sweeps.trial_process import train_trial

LONG = ("budget.tokens=640000", "schedule.warmup_fraction=0")  # far longer than the test


ONE = ("study.sizes=[tiny_a]", "study.rules=[prenorm]")


def hang(trial: Trial, corpus: PackedCorpus) -> int:
    """Holds the lock, and sees nothing."""
    with TrialLock(trial.folder):
        time.sleep(600)
    return 0


def start_slowly(trial: Trial, corpus: PackedCorpus) -> int:
    """Not yet training, as during the import of a large library."""
    (trial.folder / "starting").touch()
    time.sleep(600)
    return train_trial(trial, corpus)


class Background:
    """A launch in a thread."""

    def __init__(self, study: Study, target: object = train_trial, grace_seconds: float = 20) -> None:
        self.notes = Notes()
        # Made here: a thread must not start the fork server.
        self.executor = LocalExecutor(1, grace_seconds, target)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._run, args=(study,))
        self.thread.start()

    def _run(self, study: Study) -> None:
        self.notes.progress = launch(study, self.executor, self.notes, Interrupts())

    def ends(self, seconds: float = 30) -> bool:
        self.thread.join(seconds)
        return not self.thread.is_alive()


def command(workplace: Workplace, *words: str) -> int:
    return run_command(cancel.main, ["study=tiny", f"runs_dir={workplace.runs}", *words])


def states(study: Study) -> list[str]:
    return [read_state(planned.trial.folder).state for planned in study.trials]


def trains(study: Study) -> bool:
    return any((read_state(planned.trial.folder).step or 0) > 0 for planned in study.trials)


def test_cancelling_a_launch_stops_it_and_a_new_one_goes_on(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    study = workplace.study("launch.workers=2", *LONG)
    running = Background(study)
    assert wait_until(lambda: trains(study) and len(running_launches(study.folder)[0].running) == 2, 60)
    (note,) = running_launches(study.folder)
    assert len(note.trials) == 4 and not note.detached
    assert command(workplace) == 0
    said = capsys.readouterr().out
    assert "2 running trials save a checkpoint and stop, 2 waiting ones are not started" in said
    assert said.count("saves a checkpoint and stops") == said.count("is not started any more") == 2
    assert running.ends()
    assert states(study) == ["cancelled"] * 4
    assert running_launches(study.folder) == []
    saved = [planned for planned in study.trials if (planned.trial.folder / "checkpoint.pt").exists()]
    assert saved
    assert "cancelled" in running.notes.about(saved[0].trial.name)[-1]
    status = json.loads((saved[0].trial.folder / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("cancelled", "cancelled")
    # Nothing to do a second time.
    assert command(workplace) == 0
    assert capsys.readouterr().out == "nothing runs, and nothing waits in a launch\n"
    # A new launch wants them again.
    again = Background(study)
    assert wait_until(lambda: running_launches(study.folder) != [] and trains(study), 60)
    log = saved[0].trial.folder / "log.txt"
    assert wait_until(lambda: "continues at step" in log.read_text(), 60)
    assert command(workplace) == 0
    assert again.ends()


def test_one_of_them(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    study = workplace.study("launch.workers=1", "study.sizes=[tiny_a]", "budget.tokens=32000")
    running = Background(study)
    assert wait_until(lambda: any(note.running for note in running_launches(study.folder)), 60)
    waiting = [p.trial for p in study.trials if p.trial.id in running_launches(study.folder)[0].pending]
    assert len(waiting) == 1
    assert command(workplace, waiting[0].name) == 0
    assert f"{waiting[0].name} ({waiting[0].id}): is not started any more" in capsys.readouterr().out
    assert running.ends(60)
    assert sorted(states(study)) == ["cancelled", "finished"]
    assert not (waiting[0].folder / "config.yaml").exists()
    done = next(p.trial for p in study.trials if p.trial != waiting[0])
    assert command(workplace, done.id[:6], waiting[0].id) == 0
    said = capsys.readouterr().out
    assert f"{done.name} ({done.id}): has finished; nothing to cancel" in said
    assert "no launch is about to start it; nothing to cancel" in said
    run_study(study, LocalExecutor(1, 20))
    assert states(study) == ["finished"] * 2


@pytest.mark.parametrize("target", [hang, start_slowly])
def test_a_trial_that_does_not_see_the_file_is_ended(workplace: Workplace, target: object) -> None:
    study = workplace.study(*ONE, "launch.grace_seconds=2")
    running = Background(study, target, grace_seconds=2)
    folder = study.trials[0].trial.folder
    assert wait_until(lambda: read_state(folder).locked or (folder / "starting").exists(), 60)
    assert command(workplace) == 0
    assert running.ends()
    assert states(study) == ["cancelled"], read_state(study.trials[0].trial.folder)


def test_a_trial_of_another_process_is_cancelled_too(workplace: Workplace) -> None:
    """The launch waits for it, and does not take it over afterwards."""
    study = workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]", *LONG)
    write_study(study)
    first = Runner(LocalExecutor(1, 20), Notes(), 1, 0, 20, FailurePolicy())
    thread = threading.Thread(target=first.run, args=([study.trials[0]], lambda: 0))
    thread.start()
    assert wait_until(lambda: trains(study), 60)
    second = Background(study)
    assert wait_until(lambda: any(note.elsewhere for note in running_launches(study.folder)), 30)
    assert command(workplace, study.trials[0].trial.id) == 0
    assert second.ends()
    thread.join(30)
    assert states(study) == ["cancelled"], read_state(study.trials[0].trial.folder)


def test_unknown_and_ambiguous_ids(shared_workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    study = shared_workplace.study("study.seeds=[0,1,2,3,4,5,6,7,8]")  # more than hexadecimal digits
    write_study(study)
    assert command(shared_workplace, "nobody") == 2
    assert "nobody: no trial of study tiny has this id or name" in capsys.readouterr().err
    beginnings = [planned.trial.id[0] for planned in study.trials]
    twice = next(letter for letter in beginnings if beginnings.count(letter) > 1)
    assert command(shared_workplace, twice) == 2
    said = capsys.readouterr().err
    assert f"{twice}: begins the ids of" in said and said.count("\n") == 1
    assert not list(study.folder.glob("*/cancel"))


def test_a_dead_launch_is_none(tmp_path: Path) -> None:
    with LaunchFile(tmp_path, "local") as note:
        assert running_launches(tmp_path) == []  # it has not said anything yet
        note.write(pending=["a"], running=[], elsewhere=[], done=0, eta_seconds=None)
        assert [launch.trials for launch in running_launches(tmp_path)] == [("a",)]
        text = (note.folder / "launch.json").read_text()
    assert running_launches(tmp_path) == [] and not note.folder.exists()
    dead = tmp_path / "launches" / "here-1" / "launch.json"
    dead.parent.mkdir(parents=True)
    dead.write_text(text)
    assert running_launches(tmp_path) == []
    # Of another machine, whose locks may not be seen here, the heartbeat tells.
    dead.write_text(text.replace(str(boot_id()), "another"))
    assert len(running_launches(tmp_path)) == 1
    dead.write_text(text)
    with LaunchFile(tmp_path, "local"):
        assert not dead.exists()


@pytest.fixture(autouse=True)
def _no_other_threads_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
