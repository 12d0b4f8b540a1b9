"""A trial, its files or its disk fail under it: the others finish, the reason is named, a relaunch completes
the study, and the records are those of an undisturbed one. docs/faults.md lists the faults.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from fault_support import (
    assert_completes,
    clock_jumps,
    free,
    full,
    full_at_checkpoint,
    full_at_metrics,
    full_at_record,
    killed,
    launch,
    mounted,
    raises,
    reason,
    results,
    silent,
    spared,
    states,
    struck,
    terminated,
    undisturbed,
)
from sweeps_support import Workplace

from attnres.cli import run_command
from attnres.metrics import read_rows
from attnres.record import read_record
from sweeps import launch as launcher
from sweeps import status
from sweeps.state import read_state
from sweeps.trial_process import Target

# A checkpoint every few steps: a struck trial has something to go on from.
OFTEN = ("study.sizes=[tiny_a]", "runtime.checkpoint_seconds=0.02", "runtime.log_every_steps=1")
ONCE = (*OFTEN, "launch.max_retries=0")


@pytest.fixture(autouse=True)
def _no_other_threads_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), *OFTEN)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (killed, "killed by SIGKILL"),
        pytest.param(terminated, "stopped at step 24 of 40|stopped from outside", marks=pytest.mark.slow),
        (silent, "its process ended without an error and without a finished record"),
    ],
    ids=["kill -9", "SIGTERM", "exit 0 without a record"],
)
def test_a_struck_trial_costs_only_itself(
    workplace: Workplace, expected: dict[str, Any], target: Target, said: str
) -> None:
    study = workplace.study(*ONCE)
    launch(study, target)
    for trial in spared(study):
        assert read_state(trial.folder).state == "finished"
    (trial,) = struck(study)
    assert read_state(trial.folder).state in ("failed", "preempted", "stale")
    assert any(words in reason(trial) for words in said.split("|")), reason(trial)
    assert_completes(study, expected)
    assert "continues at step" in (trial.folder / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("target", [killed, terminated], ids=["kill -9", "SIGTERM"])
def test_a_struck_trial_is_tried_again_by_the_same_launch(
    workplace: Workplace, expected: dict[str, Any], target: Target
) -> None:
    study = workplace.study(*OFTEN)
    launch(study, target)
    assert results(study) == expected


@pytest.mark.slow
def test_a_disk_that_is_full_at_every_checkpoint_costs_a_warning(
    workplace: Workplace, expected: dict[str, Any]
) -> None:
    study = workplace.study(*ONCE)
    (trial,) = struck(study)
    with mounted(trial.folder, "4m"):
        launch(study, full_at_checkpoint)
        assert results(study) == expected
        log = (trial.folder / "log.txt").read_text()
        assert log.count("checkpoint.pt: No space left on device: training goes on") == 1
        assert not list(trial.folder.glob(".*.tmp"))


def test_a_disk_that_is_full_at_a_metrics_row_loses_no_row(
    workplace: Workplace, expected: dict[str, Any]
) -> None:
    study = workplace.study(*ONCE)
    (trial,) = struck(study)
    with mounted(trial.folder, "4m"):
        launch(study, full_at_metrics)
        assert results(study) == expected
        assert "metrics.jsonl: No space left on device" in (trial.folder / "log.txt").read_text()
        steps = [row["step"] for row in read_rows(trial.folder / "metrics.jsonl") if row["kind"] == "train"]
        other = read_rows(spared(study)[0].folder / "metrics.jsonl")
        assert steps == [row["step"] for row in other if row["kind"] == "train"]


def test_a_disk_that_is_full_at_the_record_is_named_and_the_next_launch_goes_on(
    workplace: Workplace, expected: dict[str, Any]
) -> None:
    study = workplace.study(*ONCE)
    (trial,) = struck(study)
    with mounted(trial.folder, "4m"):
        notes = launch(study, full_at_record)
        assert any("No space left on device" in line for line in notes.about(trial.name)), notes.lines
        assert "\n" not in "".join(notes.lines)
        assert all(read_state(other.folder).state == "finished" for other in spared(study))
        free(trial.folder)
        assert_completes(study, expected)
        log = (trial.folder / "log.txt").read_text()
        assert "continues at step" in log and log.count("step 1/40") == 1  # went on, did not begin anew


@pytest.mark.slow
def test_a_disk_that_is_full_below_the_token_cache_is_one_line(
    workplace: Workplace, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with mounted(workplace.root / "cache", "4m") as cache:
        with full(cache):
            assert run_command(launcher.main, workplace.arguments(*ONCE)) == 2
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(said) == 1 and str(cache) in said[0] and "No space left on device" in said[0]
        assert not list(cache.glob(".build-*"))
        study = workplace.study(*ONCE)
        launch(study)
        assert results(study) == expected


def test_a_read_only_folder_of_one_trial_costs_only_that_trial(
    workplace: Workplace, expected: dict[str, Any]
) -> None:
    study = workplace.study(*ONCE)
    (trial,) = struck(study)
    with mounted(trial.folder, "1m", readonly=True):
        notes = launch(study)
        assert any("Read-only file system" in line for line in notes.about(trial.name)), notes.lines
        assert "failed" in notes.about(trial.name)[-1]
    assert_completes(study, expected)


def test_a_read_only_runs_folder_is_one_line(
    workplace: Workplace, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with mounted(workplace.runs, "1m", readonly=True):
        assert run_command(launcher.main, workplace.arguments(*ONCE)) == 1
        (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert str(workplace.runs) in said and "Read-only file system" in said
        assert run_command(status.main, workplace.arguments(*OFTEN)) == 0
    study = workplace.study(*ONCE)
    launch(study)
    assert results(study) == expected


TORN = {"empty": b"", "cut": b'{"schema": 1, "sta', "zeros": b"\x00" * 64}
FILES = ("record.json", "checkpoint.pt", "metrics.jsonl", "status.json", "../study.json")
FAST = (("record.json", "cut"), ("checkpoint.pt", "zeros"), ("metrics.jsonl", "zeros"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param(
            name, TORN[kind], id=f"{name} {kind}", marks=() if (name, kind) in FAST else pytest.mark.slow
        )
        for name in FILES
        for kind in TORN
    ],
)
def test_a_torn_file_is_named_and_mended(
    workplace: Workplace, expected: dict[str, Any], name: str, content: bytes
) -> None:
    study = workplace.study(*ONCE)
    launch(study, killed)
    (trial,) = struck(study)
    assert (trial.folder / "checkpoint.pt").exists()
    (trial.folder / name).write_bytes(content)
    if name == "record.json":
        assert "record.json: torn" in reason(trial) or "not" in reason(trial)
    assert_completes(study, expected)
    log = (trial.folder / "log.txt").read_text()
    if name in ("record.json", "checkpoint.pt", "status.json", "metrics.jsonl"):
        (warning,) = [line for line in log.splitlines() if line.startswith("warning: ")]
        assert name in warning
    plan = json.loads((study.folder / "study.json").read_text())
    assert len(plan["trials"]) == 2
    for row in read_rows(trial.folder / "metrics.jsonl"):
        assert row["step"] >= 1
    assert not list(trial.folder.glob(".*.tmp"))


@pytest.mark.slow
def test_a_torn_record_of_a_finished_trial_is_set_aside_and_trained_again(
    workplace: Workplace, expected: dict[str, Any]
) -> None:
    study = workplace.study(*ONCE)
    launch(study)
    (trial,) = struck(study)
    whole = (trial.folder / "record.json").read_text()
    (trial.folder / "record.json").write_text(whole[:200])
    assert read_state(trial.folder).state != "finished"
    assert_completes(study, expected)
    assert (trial.folder / "record.damaged").read_text() == whole[:200]


def test_a_clock_that_jumps_loses_and_ends_nothing(
    workplace: Workplace, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the trials and in the launcher, forth and back, at every look."""
    study = workplace.study(*ONCE)
    real, looks = time.time, [0]

    def jumping() -> float:
        looks[0] += 1
        return real() + 1e6 * (-1) ** looks[0]

    monkeypatch.setattr(time, "time", jumping)
    notes = launch(study, clock_jumps)
    assert set(states(study).values()) == {"finished"}
    assert results(study) == expected
    for planned in study.trials:
        assert read_record(planned.trial.folder / "record.json")["timing"]["attempts"] == 1
        assert read_record(planned.trial.folder / "record.json")["timing"]["wall_seconds"] < 1e5
        assert sum("started" in line for line in notes.about(planned.trial.name)) == 1


def test_the_reason_of_an_exception_survives_a_clock_that_jumps_back(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's clock is ahead of the trial's: what the trial wrote looks older than its start."""
    study = workplace.study(*ONCE)
    (trial,) = struck(study)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 1e6)
    notes = launch(study, raises)
    assert read_state(trial.folder).state == "failed"
    assert "RuntimeError: no such luck" in reason(trial)
    assert "no such luck" in notes.about(trial.name)[-1]
