"""What a folder says about its trial, whatever a crash left in it; and the status command."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from sweeps_support import Workplace, finished_record

from attnres.cli import run_command
from attnres.lock import TrialLock
from attnres.status import StatusFile, boot_id, note_failure, uptime_seconds
from attnres.stop import ask_to_cancel, forget_cancel
from sweeps import status
from sweeps.state import foreign_trials, read_state
from sweeps.study import write_study

STATUS = {
    "state": "running",
    "pid": 1,
    "host": "here",
    "started": 1.0,
    "first_started": 1.0,
    "heartbeat": 1.0,
    "step": 12,
    "steps": 40,
    "tokens": 768,
    "loss_nats": 2.5,
    "tokens_per_second": 900.0,
    "eta_seconds": 3.0,
    "reason": None,
    "attempts": 1,
}


def write_status(folder: Path, **fields: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps(STATUS | fields))


def test_nothing_there_is_pending(tmp_path: Path) -> None:
    assert read_state(tmp_path / "nowhere").state == "pending"
    assert read_state(tmp_path).state == "pending"


def test_a_held_lock_is_running_and_an_old_heartbeat_is_shown(tmp_path: Path) -> None:
    write_status(tmp_path, heartbeat=time.time())
    with TrialLock(tmp_path):
        state = read_state(tmp_path)
        assert (state.state, state.reason, state.step, state.loss_nats) == ("running", None, 12, 2.5)
        write_status(tmp_path, heartbeat=time.time() - 500)
        state = read_state(tmp_path)
        assert (state.state, state.locked, state.at_work) == ("stale", True, True)
        assert state.reason is not None
        assert state.reason.startswith("no heartbeat for 500 s, but process 1 on here holds its lock")


@pytest.mark.parametrize("jump", [1e6, -1e6])
def test_a_clock_that_jumped_is_no_stale_heartbeat(tmp_path: Path, jump: float) -> None:
    now = {"boot_id": boot_id(), "uptime_seconds": uptime_seconds()}
    write_status(tmp_path, heartbeat=time.time() + jump, **now)
    with TrialLock(tmp_path):
        assert (read_state(tmp_path).state, read_state(tmp_path).reason) == ("running", None)
    write_status(tmp_path, heartbeat=time.time(), boot_id=boot_id(), uptime_seconds=uptime_seconds() - 500)
    with TrialLock(tmp_path):
        assert read_state(tmp_path).state == "stale"


def test_a_fresh_heartbeat_of_a_machine_whose_locks_are_not_seen_is_running(tmp_path: Path) -> None:
    write_status(tmp_path, heartbeat=time.time(), boot_id="of another machine")
    state = read_state(tmp_path)
    assert (state.state, state.locked, state.at_work) == ("running", False, True)
    assert "whose locks are not seen here" in (state.reason or "")
    # Its uptime says nothing here.
    write_status(tmp_path, heartbeat=time.time(), boot_id="of another machine", uptime_seconds=0.0)
    assert read_state(tmp_path).state == "running"
    write_status(tmp_path, heartbeat=time.time() - 500, boot_id="of another machine", uptime_seconds=1e9)
    assert read_state(tmp_path).state == "stale"
    # The lock tells for sure between processes of one machine, however fresh the heartbeat.
    write_status(tmp_path, heartbeat=time.time(), boot_id=boot_id(), uptime_seconds=uptime_seconds())
    assert read_state(tmp_path).state == "stale"


def test_a_cancel_file_is_cancelled_once_nobody_trains(tmp_path: Path) -> None:
    ask_to_cancel(tmp_path)
    assert read_state(tmp_path).state == "cancelled"
    write_status(tmp_path, heartbeat=time.time())
    with TrialLock(tmp_path):
        assert read_state(tmp_path).state == "running"
    found = read_state(tmp_path)
    assert (found.state, found.step) == ("cancelled", 12)
    assert found.reason == "stopped at step 12 of 40; a new launch goes on with it"
    forget_cancel(tmp_path)
    assert read_state(tmp_path).state == "stale"


def test_the_origin_of_a_failure_is_told(tmp_path: Path) -> None:
    write_status(tmp_path, state="failed", reason="no luck", origin="own")
    assert read_state(tmp_path).origin == "own"
    note_failure(tmp_path, 40, "killed by SIGKILL", "outside")
    found = read_state(tmp_path)
    assert (found.origin, found.reason, found.step, found.attempts) == ("outside", "killed by SIGKILL", 12, 1)
    note_failure(tmp_path / "new", 40, "could not be started", "outside")
    found = read_state(tmp_path / "new")
    assert (found.state, found.attempts, found.steps) == ("failed", 0, 40)


def test_a_new_attempt_does_not_show_the_words_of_the_last_one(tmp_path: Path) -> None:
    write_status(tmp_path, state="failed", reason="no luck", heartbeat=time.time())
    with TrialLock(tmp_path):
        state = read_state(tmp_path)
    assert (state.state, state.reason, state.step) == ("running", None, None)


@pytest.mark.parametrize(
    ("said", "state", "reason"),
    [
        ("running", "stale", "its process ended at step 12 of 40 without a record"),
        ("preempted", "preempted", "stopped at step 12 of 40; a launch goes on from there"),
        ("cancelled", "cancelled", "stopped at step 12 of 40; a new launch goes on with it"),
        ("failed", "failed", "out of luck"),
        ("finished", "failed", "its status says finished, but it has no readable record"),
    ],
)
def test_without_a_lock_and_a_record_the_status_tells(
    tmp_path: Path, said: str, state: str, reason: str
) -> None:
    write_status(tmp_path, state=said, reason="out of luck")
    found = read_state(tmp_path)
    assert (found.state, found.reason) == (state, reason)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff", '{"schema": 99}'])
def test_torn_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text, encoding="latin-1")
    (tmp_path / "status.json").write_text(text, encoding="latin-1")
    found = read_state(tmp_path)
    assert found.state == "pending"
    assert found.reason is not None
    assert "record.json" in found.reason and "status.json" in found.reason
    assert "\n" not in found.reason


def test_foreign_trials_are_counted(tmp_path: Path) -> None:
    for name in ("aaa", "bbb", "report"):
        (tmp_path / name).mkdir()
    (tmp_path / "aaa" / "config.yaml").touch()
    (tmp_path / "bbb" / "record.json").touch()
    assert foreign_trials(tmp_path, ["bbb"]) == ["aaa"]
    assert foreign_trials(tmp_path / "nowhere", []) == []


def test_status_command(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    study = workplace.study("study.sizes=[tiny_a]")
    first = study.trials[0]
    write_status(first.trial.folder, state="preempted")
    (study.folder / "0123456789ab").mkdir()
    (study.folder / "0123456789ab" / "config.yaml").touch()
    # Before a launch the plan is the configuration's; afterwards it is what was launched.
    assert run_command(status.main, workplace.arguments("study.sizes=[tiny_a]")) == 0
    before = capsys.readouterr().out
    write_study(study)
    assert run_command(status.main, ["study=tiny", f"runs_dir={workplace.runs}"]) == 0
    after = capsys.readouterr().out
    assert before == after
    assert "2 planned: 1 preempted, 1 pending" in after
    assert "1 other trial folder is not in this plan" in after
    assert "stopped at step 12 of 40" in after
    assert run_command(status.main, ["study=tiny", f"runs_dir={workplace.runs}", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["counts"]["pending"] == 1
    assert data["foreign"] == ["0123456789ab"]
    assert [trial["state"] for trial in data["trials"]] == ["preempted", "pending"]


def test_status_has_the_values_of_axes_and_names_other_seeds(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    axis = ("study.sizes=[tiny_a]", "study.axes.optim.learning_rate=[0.01,0.02]")
    earlier, study = workplace.study(*axis, "study.seeds=[0]"), workplace.study(*axis, "study.seeds=[7]")
    for planned in earlier.trials:
        planned.trial.folder.mkdir(parents=True)
        place = {"seed": 0, "size": planned.size, "rule": planned.rule, "planned_steps": planned.trial.steps}
        record = {**finished_record(planned.trial.id), **place}
        (planned.trial.folder / "record.json").write_text(json.dumps(record))
    write_study(study)
    assert run_command(status.main, ["study=tiny", f"runs_dir={workplace.runs}"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^trial +optim.learning_rate +state", out, re.M)
    for planned in study.trials:
        rate = planned.axes["optim.learning_rate"]
        assert re.search(rf"^{planned.trial.name} +{rate} +pending$", out, re.M)
        assert planned.title == f"{planned.trial.name} (optim.learning_rate={rate})"
    assert "4 other trial folders are not in this plan: seed 0 where the plan has 7; " in out
    assert "(study.seeds=[0,7], say)" in out
    record = {**finished_record(earlier.trials[0].trial.id), "seed": 0, "size": "a\x1b[31m\nb"}
    (earlier.trials[0].trial.folder / "record.json").write_text(json.dumps(record))
    assert run_command(status.main, ["study=tiny", f"runs_dir={workplace.runs}"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "size a" in out.splitlines()[-1]


def test_status_before_the_first_launch_packs_nothing(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(status.main, [*workplace.arguments("study.sizes=[tiny_a]"), "--json"]) == 0
    said = capsys.readouterr()
    data = json.loads(said.out)
    assert said.err == "" and not (workplace.root / "cache").exists() and not workplace.runs.exists()
    assert [trial["id"] for trial in data["trials"]] == [None, None]
    assert [trial["name"] for trial in data["trials"]] == ["tiny_a-prenorm-s0", "tiny_a-attnres_block_n2-s0"]
    assert data["counts"]["pending"] == 2 and "is not packed yet" in data["unknown"]
    for words, code in (([], 0), (["--watch"], 1)):
        assert run_command(status.main, [*workplace.arguments("study.sizes=[tiny_a]"), *words]) == code
        assert "2 planned: 2 pending" in capsys.readouterr().out
    assert run_command(status.main, [*workplace.arguments(), "abc"]) == 2
    assert "abc: data.path=" in capsys.readouterr().err


def test_status_of_some_trials(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    study = workplace.study()
    write_study(study)
    first, _, _, last = (planned.trial for planned in study.trials)
    where = ["study=tiny", f"runs_dir={workplace.runs}"]
    assert run_command(status.main, [*where, "--json", last.id[:8], first.name]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [trial["id"] for trial in data["trials"]] == [first.id, last.id]
    assert data["foreign"] == []
    assert run_command(status.main, [*where, "nobody"]) == 2
    assert "no trial of study tiny has this id or name" in capsys.readouterr().err
    for words in (["--json", "--watch"], ["--every", "0"], ["--every", "x"]):
        assert run_command(status.main, [*where, *words]) == 2


def test_status_refuses_a_torn_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "study.json").write_text('{"trials": [{"id": 1}]}')
    assert run_command(status.main, ["study=tiny", f"runs_dir={tmp_path}"]) == 2
    assert "study.json: name: is missing; not a study's plan" in capsys.readouterr().err


def test_the_launch_that_goes_on_does_not_announce_another(tmp_path: Path) -> None:
    for state in ("cancelled", "preempted"):
        write_status(tmp_path, state=state)
        assert read_state(tmp_path).past == "stopped at step 12 of 40"
    (tmp_path / "status.json").unlink()
    (tmp_path / "cancel").touch()
    assert read_state(tmp_path).past == ""


def test_an_unknown_study_is_told_of_the_users_own_files(
    shared_workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(status.main, ["study=tiny", "runs_dir=nowhere"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("; your own files need --config-dir DIR\n") and said.count("\n") == 1
    assert run_command(status.main, [*shared_workplace.arguments("study=tinny"), "--json"]) == 2
    said = capsys.readouterr().err
    assert "study=tinny: did you mean tiny?" in said and "--config-dir" not in said


def test_a_killed_trial_names_the_step_of_its_checkpoint(tmp_path: Path) -> None:
    status_file = StatusFile(tmp_path, 40)
    status_file.saved(8)
    status_file.update(step=12)
    write_status(tmp_path, **{**status_file.fields})
    assert read_state(tmp_path).reason == (
        "its process ended at step 12 of 40 without a record; its checkpoint is of step 8"
    )
    assert StatusFile(tmp_path, 40).fields["saved_step"] == 8  # until the next attempt has looked
