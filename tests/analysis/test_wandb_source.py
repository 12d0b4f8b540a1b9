"""W&B runs as a study: attempts joined, histories checked, the same refusals as for records on disk.

The runs here are made up from simulated records. There is no W&B account in the tests, so the online part
runs against a stand-in for `wandb.Api` with the few attributes that analysis.wandb_online uses; that the real
service answers in this form is not tested. Real local files are read in test_wandb_offline.py.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis import wandb_online
from analysis.load import load_study
from analysis.report import main
from analysis.simulate import Truth, simulate_table, write_study
from analysis.study_data import StudyData
from analysis.wandb_source import load_wandb
from attnres.cli import run_command
from attnres.errors import UserError

SOURCE = "wandb:team/project"


class Project:
    """A project of the service: runs as the API shows them, and what it was asked."""

    def __init__(self, folder: Path, table: pd.DataFrame, with_plan: bool = True, axes: str = "") -> None:
        write_study(folder, table, axes=axes)
        self.folder = folder
        self.plan = (folder / "study.json").read_text()
        self.filters: Any = None
        self.runs_of_project: list[Any] = []
        for trial in json.loads(self.plan)["trials"]:
            record = json.loads((folder / trial["id"] / "record.json").read_text())
            record["timing"]["ended"] = "2026-01-01T00:00:00+00:00"
            self.add(record, with_plan)

    def add(self, record: Mapping[str, Any], with_plan: bool = True, attempt: int = 1) -> Any:
        rows = [
            {
                "_step": evaluation["step"],
                "tokens": evaluation["tokens"],
                "validation/loss_nats": evaluation["loss_nats"],
                "train/loss_nats": evaluation["loss_nats"],
            }
            for evaluation in record["evaluations"]
        ]
        summary = {"record": json.dumps(record), "status": record["status"], "history_rows": len(rows)}
        run = SimpleNamespace(
            path=[
                "team",
                "project",
                record["trial_id"] if attempt == 1 else f"{record['trial_id']}-{attempt}",
            ],
            name=record["name"],
            group=record["study"],
            config={
                **record["config"],
                "model": {"name": record["size"]},
                "trial_id": record["trial_id"],
                "attempt": attempt,
                "rule": record["rule"],
                "seed": record["seed"],
                "study_name": record["study"],
            },
            summary_metrics=summary | ({"study_plan": self.plan} if with_plan else {}),
            rows=rows,
        )
        run.scan_history = lambda: iter(run.rows)
        self.runs_of_project.append(run)
        return run

    def runs(self, path: str, filters: Mapping[str, Any], order: str) -> list[Any]:
        if path != "team/project":
            raise ValueError(f"Could not find project {path}")
        self.filters = filters
        return [run for run in self.runs_of_project if run.group == filters.get("group", run.group)]

    def of(self, size: str, rule: str, seed: int = 0) -> Any:
        (run,) = [
            run
            for run in self.runs_of_project
            if (run.config["model"]["name"], run.config["rule"], run.config["seed"]) == (size, rule, seed)
        ]
        return run

    def edit(self, run: Any, **changes: Any) -> None:
        record = json.loads(run.summary_metrics["record"])
        for key, value in changes.items():
            place = record
            *parents, last = key.split("__")
            for parent in parents:
                place = place[parent]
            place[last] = value
        run.summary_metrics["record"] = json.dumps(record)


def table(**truth: Any) -> pd.DataFrame:
    return simulate_table(Truth(**{"sizes": 4, "seeds": 2} | truth), np.random.default_rng(0))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    return serve(Project(tmp_path / "s", table()), monkeypatch)


def serve(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb_online, "open_api", lambda: project)
    return project


def load(**options: Any) -> StudyData:
    return load_wandb(SOURCE, **options)


def refusal(**options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(**options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_project_is_the_study_of_its_records(project: Project, tmp_path: Path) -> None:
    data, records = load(), load_study(tmp_path, "s")
    pd.testing.assert_frame_equal(data.table, records.table, check_exact=True)
    assert (data.name, data.folder, data.notes) == ("s", Path("s-wandb"), ())
    assert data.rules == records.rules
    out = tmp_path / "out"
    assert run_command(main, [f"source={SOURCE}", f"out={out}", "draws=100", "--no-figures"]) == 0
    results = json.loads((out / "report" / "results.json").read_text())
    assert results["comparisons"]["attnres_block"]["multiplier"] == pytest.approx(1.25, rel=0.05)


def test_group_is_asked_of_the_service(project: Project) -> None:
    load(group="s")
    assert project.filters == {"group": "s"}
    assert "of 0 runs none was written by this project" in refusal(group="t")


def test_rows_missing_from_a_history(project: Project) -> None:
    run = project.of("size2", "prenorm")
    del run.rows[2]
    text = refusal()
    assert f"team/project/{run.config['trial_id']} has 4 rows of history, its summary says 5" in text
    assert "--allow history" in text
    data = load(allow=["history"])
    assert len(data.table) == 16 and "4 rows" in data.let_pass[0]
    del run.summary_metrics["history_rows"]
    assert "its summary says None" in refusal()


def test_a_history_that_is_not_that_of_the_record(project: Project) -> None:
    run = project.of("size1", "attnres_block", 1)
    run.rows[-1] = {**run.rows[-1], "validation/loss_nats": 1.5}
    assert "ends with 1.5 at step 100, its record with" in refusal()
    for row in run.rows:
        row.pop("validation/loss_nats")
    assert "ends with no validation loss" in refusal()
    run.rows[:] = run.rows[:-1] + [run.rows[-2]]  # as many rows, one of them twice
    assert "rows of history" in refusal()


def test_attempts_are_joined_and_the_finished_one_wins(project: Project) -> None:
    """A killed attempt, one that was cut back to its checkpoint at step 40, and the one that finished."""
    run = project.of("size1", "prenorm")
    record = json.loads(run.summary_metrics["record"])
    second = project.add(record, attempt=2)
    second.rows[:] = second.rows[2:]
    run.summary_metrics = {"status": "preempted"}
    run.rows[:] = run.rows[:4]
    run.rows[3] = {**run.rows[3], "train/loss_nats": 99.0}  # done again by the second attempt
    data = load()
    assert len(data.table) == 16
    assert data.curves is not None and 99.0 not in data.curves[record["trial_id"]][1]
    assert len(data.curves[record["trial_id"]][0]) == 5
    diverged = {**record, "status": "diverged", "validation": None, "reason": "x"}
    diverged["timing"] = {**record["timing"], "ended": "2027-01-01T00:00:00+00:00"}
    project.add(diverged, attempt=3)
    assert "several results of 1 trial: " in refusal()
    assert len(load(allow=["conflict"]).table) == 16
    run.rows[:] = run.rows[:1]
    assert "has 4 rows of history, its summary says 5" in refusal(allow=["conflict"])


@pytest.mark.parametrize("ended", ["2025-01-01T00:00:00+00:00", "2027-01-01T00:00:00+00:00"])
def test_two_results_of_one_trial_are_no_choice_of_ours(project: Project, ended: str) -> None:
    """As two machines that trained it both would leave; the same result twice is none."""
    record = json.loads(project.of("size1", "prenorm").summary_metrics["record"])
    again = {**record, "timing": {**record["timing"], "ended": ended}}
    twice = project.add(again, attempt=2)
    assert len(load().table) == 16
    project.edit(twice, validation__loss_nats=1.5)
    twice.rows[-1] = {**twice.rows[-1], "validation/loss_nats": 1.5}
    loss = record["validation"]["loss_nats"]
    text = refusal()
    assert f"finished at {loss} in team/project/" in text and "finished at 1.5 in team/project/" in text
    data = load(allow=["conflict"])
    assert data.let_pass[0].startswith("conflict: several results of 1 trial")
    chosen = data.table.loc[data.table["id"] == record["trial_id"], "loss"].item()
    assert chosen == (1.5 if ended > "2026" else loss)


def test_a_plan_that_not_all_runs_carry_is_noted(project: Project) -> None:
    run = project.of("size1", "prenorm")
    plan = json.loads(run.summary_metrics["study_plan"])
    run.summary_metrics["study_plan"] = json.dumps({**plan, "baseline": "attnres_block"})
    project.edit(run, timing__ended="2027-01-01T00:00:00+00:00")
    (note,) = load().notes
    last = f"the plan of the study is that of the run that ended last, {run.name}; "
    assert note.startswith(f"{last}another is carried by 15 runs: ")


def test_a_record_of_another_trial_is_no_record(project: Project) -> None:
    project.edit(project.of("size1", "prenorm"), trial_id="0123456789ab")
    assert "trial_id=0123456789ab: the record of another trial than the run's" in refusal()


@pytest.mark.parametrize("name", ["../evil", "a/b", "", "x" * 65])
def test_the_report_stays_in_its_folder(project: Project, name: str) -> None:
    for run in project.runs_of_project:
        run.config["study_name"] = name
    assert f"study_name={name}: of a run in source=wandb:team/project" in refusal()


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, True])
@pytest.mark.parametrize("key", ["train/loss_nats", "tokens", "validation/loss_nats"])
def test_a_history_of_what_is_no_number(project: Project, key: str, value: object) -> None:
    run = project.of("size1", "prenorm")
    run.rows[1] = {**run.rows[1], key: value}
    assert f"has {key}={str(value)!r} at step {run.rows[1]['_step']}" in refusal()
    assert len(load(allow=["history"]).table) == 16


@pytest.mark.parametrize("step", ["1", None, [1], float("nan"), 1.5])
def test_steps_that_are_none(project: Project, step: object) -> None:
    run = project.of("size1", "prenorm")
    run.rows[1] = {**run.rows[1], "_step": step}
    assert "history: " in refusal() and f"_step={str(step)!r}" in refusal()


def test_a_run_without_plan_and_record_may_say_anything(project: Project) -> None:
    for run in project.runs_of_project:
        run.summary_metrics.pop("study_plan")
    odd = project.of("size1", "prenorm")
    odd.summary_metrics = {}
    odd.config |= {"seed": [1], "rule": {"a": 1}}
    assert "trials have no record" in refusal()
    assert len(load(allow=["missing"]).table) == 15


def test_the_checks_of_records(project: Project) -> None:
    kept = copy.deepcopy([run.summary_metrics for run in project.runs_of_project])

    def restore() -> None:
        for run, summary in zip(project.runs_of_project, kept, strict=True):
            run.summary_metrics = copy.deepcopy(summary)

    run = project.of("size1", "prenorm")
    for change, kind, message in [
        ({"data__fingerprint": "other"}, "mixed_data", "the training data is not the same"),
        ({"data__validation_fingerprint": "other"}, "mixed_validation", "the validation set is not the same"),
        ({"schedule_complete": False}, "unfinished", "1 of 16 trials ended before their schedule"),
        ({"planned_steps": 7}, "mixed_settings", "planned_steps is not the same within a size"),
        ({"status": "diverged", "validation": None}, "diverged", "1 of 16 trials diverged"),
        ({"seed": 7}, None, "says seed=7, the plan seed=0"),
        ({"schema": 2}, "torn", "schema=2: this version reads"),
    ]:
        project.edit(run, **change)
        text = refusal()
        assert message in text and text.startswith("source=wandb:team/project: ")
        if kind:
            assert f"--allow {kind}" in text
            assert any(line.startswith(kind) for line in load(allow=[kind]).let_pass)
        restore()
    run.summary_metrics = {"status": "failed"}
    assert "1 of 16 trials failed: size1-prenorm-s0" in refusal()
    run.summary_metrics = {}
    assert "1 of 16 trials have no record: size1-prenorm-s0" in refusal()
    data = load(allow=["missing"])
    assert "1 W&B runs have no record" in data.notes[0] and "running or killed" in data.notes[0]
    run.summary_metrics = {"record": "{torn"}
    assert "torn or not JSON" in refusal()
    project.runs_of_project.remove(run)
    assert "1 of 16 trials have no record: size1-prenorm-s0" in refusal()  # the plan knows of it


def test_without_a_plan_the_grid_is_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = serve(Project(tmp_path / "s", table(), with_plan=False), monkeypatch)
    data = load()
    assert data.rules == ("prenorm", "attnres_block") and len(data.table) == 16
    assert list(dict.fromkeys(data.table["size"])) == ["size1", "size2", "size3", "size4"]
    assert "no run carries the study's plan" in data.notes[0]
    assert load(baseline="attnres_block").rules == ("attnres_block", "prenorm")
    assert "baseline=mhc: is not a rule of this study" in refusal(baseline="mhc")
    project.runs_of_project.remove(project.of("size3", "prenorm", 1))
    assert "size3 prenorm seed 1" in refusal()


def test_without_a_plan_settings_that_differ_are_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = table(seeds=1)
    rates = pd.concat([base.assign(rate=rate) for rate in (0.004, 0.006)], ignore_index=True)
    rates = rates.rename(columns={"rate": "optim.learning_rate"})
    serve(Project(tmp_path / "s", rates, with_plan=False, axes="optim.learning_rate"), monkeypatch)
    assert "optim.learning_rate has the values 0.004, 0.006; choose one" in refusal()
    assert len(load(where={"optim.learning_rate": "0.004"}).table) == 8


def test_runs_of_others(project: Project, tmp_path: Path) -> None:
    other = SimpleNamespace(
        path=["team", "project", "x"],
        name="gentle-sun-1",
        group=None,
        config={"trial_id": "3", "model": "x"},
        summary_metrics={},
    )
    project.runs_of_project.append(other)
    assert load().notes == ("ignored, of other programs: 1 W&B run: gentle-sun-1",)
    second = Project(tmp_path / "t", table())
    project.runs_of_project += second.runs_of_project
    assert "runs of 2 studies: choose study=s or study=t" in refusal()
    assert load(study="t").name == "t"
    project.runs_of_project[:] = [other]
    assert "of 1 run none was written by this project" in refusal()


def test_what_the_service_refuses(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="^source=wandb:team/gone: Could not find project team/gone$"):
        load_wandb("wandb:team/gone")

    def broken() -> Any:
        raise OSError(f"no way there\nwith {'0' * 40}")

    project.runs_of_project[0].scan_history = broken
    text = refusal()
    assert "history: no way there with ***" in text


def test_no_key_is_one_line_and_no_question(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "analysis.report", "source=wandb:team/project"]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: source=wandb:team/project: there is no such folder; for a project, there is no W&B key "
        "(WANDB_API_KEY, or `wandb login`)\n"
    )


def test_keys_of_this_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, ["source=wandb:team/project", "columns=a=b"]) == 2
    assert "columns=a=b: unknown key; one of source, study, group" in capsys.readouterr().err
    assert run_command(main, ["source=wandb:team/project", "--allow", "all"]) == 2
    assert "--allow=all: one of missing" in capsys.readouterr().err
