"""JSON that a crash or a hand has mangled: named in a line, no traceback and no end of a launch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps_support import TIMES, Workplace, finished_record

from attnres.cli import run_command
from attnres.errors import ConfigError, RecordError
from attnres.record import write_record
from attnres.status import StatusFile, note_failure, read_status
from sweeps import cancel, status
from sweeps.calibration import known
from sweeps.launch import chosen_trials
from sweeps.launches import LaunchFile, running_launches
from sweeps.state import read_state
from sweeps.study import Study, write_study

GOOD = {"state": "running", "attempts": 1, "first_started": 1.0, "step": 3, "steps": 30}
WRONG: tuple[dict[str, object], ...] = (
    {"state": None},
    {"attempts": True},
    {"attempts": -5},
    {"first_started": float("nan")},
    {"step": "abc"},
    {"steps": 2.5},
    {"tokens": []},
    {"reason": 5},
    {"origin": [1]},
    {"loss_nats": "x"},
    {"tokens_per_second": "a"},
    {"eta_seconds": float("inf")},
    {"heartbeat": "now"},
    {"uptime_seconds": {}},
    {"boot_id": 3},
    {"host": []},
    {"pid": "me"},
)


@pytest.fixture(scope="module")
def study(shared_workplace: Workplace) -> Study:
    study = shared_workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]")
    write_study(study)
    return study


def commands(study: Study) -> None:
    """All that look at a study's folder go on, as tables, as data and in a watch."""
    where = ["study=tiny", f"runs_dir={study.config.runs_dir}"]
    for main, words in ((status.main, []), (status.main, ["--json"]), (cancel.main, [])):
        assert run_command(main, [*where, *words]) == 0
    assert run_command(status.main, [*where, "--watch"]) == 1


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
def test_a_status_of_wrong_types(
    study: Study, capsys: pytest.CaptureFixture[str], wrong: dict[str, object]
) -> None:
    folder = study.trials[0].trial.folder
    folder.mkdir(exist_ok=True)
    (folder / "status.json").write_text(json.dumps(GOOD | wrong))
    commands(study)
    state = read_state(folder)
    assert state.state == "pending" and f"status.json: {next(iter(wrong))}=" in str(state.reason)
    assert "status.json" in capsys.readouterr().out
    assert StatusFile(folder, 30).attempts == 1  # the next attempt begins anew
    note_failure(folder, 30, "lost", "outside", attempts=1)
    fields = read_status(folder)
    assert fields is not None and (fields["state"], fields["attempts"]) == ("failed", 1)


def test_a_status_with_too_little_or_nothing_that_can_be_read(
    study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = study.trials[0].trial.folder
    path = folder / "status.json"
    folder.mkdir(exist_ok=True)
    for more in ({"steps": None}, {"step": None}, {"step": None, "steps": None}):
        path.write_text(json.dumps(GOOD | more))
        commands(study)
        assert "None" not in str(read_state(folder).reason)
    path.write_text(json.dumps(GOOD | {"state": "failed", "reason": "[red]a[/b] \x1b[31m\n"}))
    capsys.readouterr()
    commands(study)
    assert "\x1b" not in capsys.readouterr().out
    path.unlink()
    path.mkdir()
    commands(study)
    assert "status.json: cannot be read" in str(read_state(folder).reason)
    path.rmdir()
    folder.rename(folder.with_suffix(".away"))
    folder.write_text("a file in the trial's place")
    commands(study)
    assert "cannot be read" in str(read_state(folder).reason)
    folder.unlink()


@pytest.mark.parametrize(
    "timing",
    [{"tokens_per_second": "a"}, {"train_seconds": []}, {"wall_seconds": float("nan")}, {"attempts": "1"}],
    ids=lambda timing: next(iter(timing)),
)
def test_a_record_of_wrong_times(shared_workplace: Workplace, timing: dict[str, object]) -> None:
    study = shared_workplace.study("study.sizes=[tiny_b]", "study.rules=[prenorm]")
    planned = study.trials[0]
    record = finished_record(planned.trial.id)
    planned.trial.folder.mkdir(parents=True, exist_ok=True)
    path = planned.trial.folder / "record.json"
    path.write_text(json.dumps(record))
    assert read_state(planned.trial.folder).state == "finished"
    path.write_text(json.dumps(record | {"timing": TIMES | timing}))
    state = read_state(planned.trial.folder)
    assert state.state == "pending" and f"timing.{next(iter(timing))}=" in str(state.reason)
    path.write_text(json.dumps(record | {"timing": {}}))
    assert read_state(planned.trial.folder).state == "finished"
    known(study)  # times that are not there are not used
    path.unlink()
    path.mkdir()
    assert "record.json: cannot be read" in str(read_state(planned.trial.folder).reason)
    path.rmdir()


def test_what_is_no_record_is_not_written(tmp_path: Path) -> None:
    record = finished_record(tmp_path.name)
    for wrong in ({"validation": {"loss_nats": float("nan")}}, {"timing": TIMES | {"attempts": True}}):
        with pytest.raises((ValueError, RecordError)):
            write_record(tmp_path, record | wrong)
    assert not list(tmp_path.iterdir())
    write_record(tmp_path, record)
    assert read_state(tmp_path).state == "finished"


Edit = Callable[[dict[str, object]], object]
NOTES: tuple[Edit, ...] = (
    lambda note: note.pop("pending"),
    lambda note: note.update(started="a"),
    lambda note: note.update(pending=[["a"]]),
    lambda note: note.update(running={}),
    lambda note: note.update(eta_seconds="x"),
    lambda note: note.update(detached=1),
    lambda note: note.update(host=None),
    lambda note: note.update(heartbeat=float("nan")),
    lambda note: note.update(pid="1"),
    lambda note: note.update(boot_id=[]),
)


def test_notes_of_launches(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of a machine whose locks are not seen here, and fresh."""
    with LaunchFile(study.folder, "local") as mine:
        mine.write(pending=["a"], running=[], elsewhere=[], done=0, eta_seconds=None)
        good = json.loads((mine.folder / "launch.json").read_text())
    good |= {"boot_id": "another", "heartbeat": time.time()}
    for number, edit in enumerate(NOTES):
        note = dict(good)
        edit(note)
        path = study.folder / "launches" / f"bad-{number}" / "launch.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(note))
    (study.folder / "launches" / "a_file").write_text("")
    assert running_launches(study.folder) == []
    commands(study)
    with LaunchFile(study.folder, "local") as mine:
        assert mine.folder.exists()
    path.write_text(json.dumps(good))
    assert [note.pid for note in running_launches(study.folder)] == [good["pid"]]
    path.unlink()


WHOLE = '{"name": "t", "trials": [{"id": "a", "name": "a", "size": "a", "rule": "b", "seed": 0}]}'
PLANS = (
    ("", "torn or not JSON"),
    ("{}", "name: is missing"),
    ('{"name": "tiny", "trials": []}', "trials=[]"),
    ('{"name": "tiny", "trials": {"a": 1}}', "trials="),
    ('{"name": "tiny", "trials": [3]}', "trials="),
    ('{"name": 3, "trials": [{}]}', "name=3"),
    ('{"name": "tiny", "trials": [{"id": "abc", "name": 5}]}', "trials[0]: name=5"),
    ('{"name": "tiny", "trials": [{"name": "a"}]}', "trials[0]: id: is missing"),
    (WHOLE.replace("0}", "true}"), "trials[0]: seed=True"),
    (WHOLE.replace("0}", '0, "axes": 1}'), "trials[0]: axes=1"),
)


@pytest.mark.parametrize(("text", "said"), PLANS)
def test_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "study.json").write_text(text)
    for main in (status.main, cancel.main):
        assert run_command(main, ["study=tiny", f"runs_dir={tmp_path}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(said in line and "not a study's plan" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["study="], "study=: choose a study: "),
        (["study=tiny", "study=tiny"], "study=tiny: is given twice, also as study=tiny"),
        (["study=tiny", "runs_dir=a", "runs_dir=b"], "runs_dir=b: is given twice, also as runs_dir=a"),
        (["study=tiny", ""], "'': is empty; name a trial"),
        (
            ["study=tiny", "executor=ray", "executor.partition=a"],
            "is an option of executor=slurm, and this is",
        ),
    ],
)
def test_command_lines(study: Study, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    given = any(word.startswith("runs_dir") for word in words)
    where = [] if given else [f"runs_dir={study.config.runs_dir}"]
    for main in (status.main, cancel.main):
        assert run_command(main, [*words, *where]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") and said in line for line in lines)


@pytest.mark.parametrize("words", [",", " ", "a,,b", "a,"])
def test_empty_names_of_trials(study: Study, words: str) -> None:
    with pytest.raises(ConfigError, match="^--trial=.*: names an empty trial"):
        chosen_trials(study, words)
