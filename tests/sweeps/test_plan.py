"""The plan: its numbers, its estimates, its words."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from sweeps_support import SIZE, Workplace, write

from analysis.simulate import Truth, simulate_table
from analysis.simulate import write_study as write_records
from attnres.cli import run_command
from attnres.errors import UserError
from attnres.record import write_text_atomic
from sweeps import calibration, launch, plan, status, timing
from sweeps.calibration import Calibration, evaluation_windows, makespan
from sweeps.power_lines import size_costs
from sweeps.study import Study
from sweeps.table import duration, number, plain_table


def remember(study: Study, seconds_per_step: float) -> None:
    """Put a calibration of every shape into the cache."""
    for planned in study.trials:
        path = calibration.cache_path(planned, study.workers)
        write_text_atomic(path, json.dumps(asdict(Calibration(seconds_per_step, 0.5, 2.0, 400_000_000))))


def test_plan_numbers(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("study.sizes=[tiny_a]", "study.seeds=[0,1,2,3]", "launch.workers=3")
    study = workplace.study(*words)
    remember(study, 0.25)
    assert run_command(plan.main, [*workplace.arguments(*words), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["workers"], data["threads"], len(data["trials"])) == (3, 1, 8)
    # 40 steps; 1024 validation tokens are 32 windows at the end, 512 are 16 at four evaluations before.
    assert [evaluation_windows(planned) for planned in study.trials] == [32 + 4 * 16] * 8
    assert [trial["seconds"] for trial in data["trials"]] == [2 + 40 * 0.25 + 96 * 0.5] * 8
    assert data["totals"]["wall_seconds"] == 3 * 60  # 8 trials of 60 s on 3 workers
    assert data["totals"]["flops"] == sum(planned.flops for planned in study.trials)
    assert {trial["state"] for trial in data["trials"]} == {"pending"}
    assert not study.folder.exists()  # a plan launches and writes nothing


def test_plan_table(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    study = workplace.study("study.sizes=[tiny_b]", "study.seeds=[0,1]", "study.axes.optim.beta2=[0.9,0.95]")
    rows = plan.plan_rows(study, {})
    plan.print_plan(study, rows, each=False)
    lines = capsys.readouterr().out.splitlines()
    header = lines[1].split()
    assert header[:4] == ["size", "rule", "optim.beta2", "seeds"]
    assert len([line for line in lines if line.startswith("tiny_")]) == 4
    row = next(line.split() for line in lines if line.startswith("tiny_b  attnres_block_n2"))
    assert row[2:4] == ["0.9", "0,1"]
    assert "2.56 k" in " ".join(row)
    assert row[-5:] == ["?", ">=", "300", "MB", "0/2"]
    plan.print_plan(study, rows, each=True)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("tiny_")]) == 8


def test_plan_warns_of_too_many_epochs(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("budget.tokens=1_000_000", "study.sizes=[tiny_a]")
    assert run_command(plan.main, [*workplace.arguments(*words), "--no-calibrate"]) == 0
    out = capsys.readouterr().out
    assert out.count("warning: ") == 1
    assert "tiny_a prenorm, tiny_a attnres_block_n2: " in out


def test_a_torn_calibration_is_not_used(workplace: Workplace) -> None:
    study = workplace.study("study.sizes=[tiny_a]")
    remember(study, 0.25)
    assert calibration.known(study)["tiny_a prenorm"] == Calibration(0.25, 0.5, 2.0, 400_000_000)
    calibration.cache_path(study.trials[0], study.workers).write_text("{")
    assert "tiny_a prenorm" not in calibration.known(study)


def test_a_cache_that_cannot_be_written_costs_a_warning(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, said = workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]"), list[str]()
    folder = calibration.cache_path(study.trials[0], 1).parent
    folder.write_text("a file where a folder should be")
    timed = Calibration(0.25, 0.5, 2.0, 400_000_000)
    monkeypatch.setattr(timing, "_measure", lambda *_: (timed, None))
    assert timing.calibrate(study, said.append) == {"tiny_a prenorm": timed}
    (warning,) = [line for line in said if line.startswith("warning")]
    assert str(folder) in warning and "the time of tiny_a prenorm is not kept" in warning


def test_calibration_is_of_a_shape_on_a_machine(workplace: Workplace) -> None:
    one = workplace.study("study.sizes=[tiny_a]", "optim.beta2=0.9", "budget.tokens=640").trials
    same = workplace.study("study.sizes=[tiny_a]", "study.seeds=[5]").trials
    other = workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]", "runtime.threads=2").trials
    muon = workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]", "optim=muon").trials
    keys = [calibration.cache_key(planned, 1) for planned in one]
    assert keys == [calibration.cache_key(planned, 1) for planned in same]
    another_rule, another_thread_count = keys[1], calibration.cache_key(other[0], 1)
    another_worker_count, another_optimizer = (
        calibration.cache_key(one[0], 2),
        calibration.cache_key(muon[0], 1),
    )
    assert len({keys[0], another_rule, another_thread_count, another_worker_count, another_optimizer}) == 5


def test_makespan() -> None:
    assert makespan([5, 4, 3, 3, 3], 2) == 10  # 5 + 3, 4 + 3 + 3
    assert makespan([5, 4, 3, 3, 3], 1) == 18
    assert makespan([1], 8) == 1


def test_numbers_for_people() -> None:
    assert [number(value) for value in (0, 12, 1234, 56_100, 4.1e6, 3.2e9)] == [
        "0",
        "12",
        "1.23 k",
        "56.1 k",
        "4.1 M",
        "3.2 B",
    ]
    assert [duration(value) for value in (None, 3.2, 90, 6000)] == ["?", "3 s", "1.5 min", "1.7 h"]


def test_plain_table_aligns() -> None:
    text = plain_table("title", ["name", "value"], [["a", "1"], ["bcd", "1000000"]], ["name"])
    assert text.splitlines() == [
        "title",
        "name    value",
        "----  -------",
        "a           1",
        "bcd   1000000",
    ]


@pytest.mark.parametrize("module", [plan, launch, status])
def test_help_shows_groups_and_examples(module: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(module.main, ["--help"]) == 0  # type: ignore[attr-defined]
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m sweeps.")
    assert "scaling_law, shape, smoke" in out
    assert "Examples:" in out


@pytest.mark.parametrize("module", ["plan", "launch", "status"])
def test_a_mistake_is_one_line_and_exit_code_2(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"sweeps.{module}", "study=smok"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: study=smok: did you mean smoke?")
    assert done.stderr.count("\n") == 1


def test_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(plan.main, ["study=smoke", "--jsn"]) == 2
    assert capsys.readouterr().err == "error: --jsn: unknown option; --help lists the options\n"


@pytest.mark.slow
def test_calibration_times_real_steps_once(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    words = workplace.arguments("study.sizes=[tiny_a]", "launch.workers=2")
    assert run_command(plan.main, [*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert "timing 2 shapes on this machine" in captured.err
    trials = json.loads(captured.out)["trials"]
    assert all(0 < trial["seconds"] < 600 for trial in trials)
    assert run_command(plan.main, [*words, "--json"]) == 0
    again = capsys.readouterr()
    assert "timing" not in again.err
    assert json.loads(again.out)["trials"] == trials


def test_a_measurement_that_is_killed_names_the_signal(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]")
    killed = subprocess.CompletedProcess[str]([], -signal.SIGKILL, "", "")
    monkeypatch.setattr(timing.Children, "run", lambda *_: killed)
    with pytest.raises(
        UserError, match=r"timing tiny_a prenorm failed: killed by SIGKILL \(out of memory\?\)"
    ):
        timing.calibrate(study, lambda line: None)


def test_a_measurement_says_how_long_it_waited_for_a_core(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, said = workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]"), list[str]()
    figures = {**asdict(Calibration(0.25, 0.5, 2.0, 400_000_000)), "waiting_share": 0.375}
    done = subprocess.CompletedProcess[str]([], 0, f"{json.dumps(figures)}\n", "")
    monkeypatch.setattr(timing.Children, "run", lambda *_: done)
    assert timing.calibrate(study, said.append) == {
        "tiny_a prenorm": Calibration(0.25, 0.5, 2.0, 400_000_000)
    }
    assert len([line for line in said if line.startswith("warning: ") and "38%" in line]) == 1


@pytest.mark.slow
def test_a_shape_that_cannot_be_timed_is_one_line(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    words = workplace.arguments("study.sizes=[tiny_a]", "runtime.device=cuda")
    assert run_command(plan.main, words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: timing tiny_a prenorm failed: ")
    assert "--no-calibrate" in error


POWER = ("study.sizes=[tiny_a,tiny_b,tiny_c]", "study.seeds=[0,1]", "study.axes.optim.beta2=[0.9,0.95]")


def third_size(workplace: Workplace) -> None:
    write(workplace.configs / "model" / "tiny_c.yaml", SIZE.format(name="tiny_c", width=32))


def test_power_of_a_plan_without_records(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    third_size(workplace)
    study = workplace.study(*POWER)
    remember(study, 0.25)
    assert run_command(plan.main, [*workplace.arguments(*POWER), "--json"]) == 0
    power = json.loads(capsys.readouterr().out)["power"]
    assert (power["study"]["sizes"], power["study"]["seeds"]) == (3, 2)
    # One seed at one value of the axis: half of a half of the study.
    assert power["study"]["flops"] / 2 == sum(planned.flops for planned in study.trials) / 4
    assert power["study"]["hours"] > 0
    assert power["pilot"] is None and power["smallest"] is None
    assert [(d["sizes"], d["seeds"]) for d in power["designs"]] == [(3, k) for k in (1, 2, 3, 5, 8)]
    assert run_command(plan.main, workplace.arguments(*POWER)) == 0
    out = capsys.readouterr().out
    assert "assumed noise of ln L per run 0.005" in out and "there are no records yet" in out
    assert "this study, 3 sizes x 2 seeds" in out
    assert "none of the 5 designs can tell 1.25x from 1.333x" in out
    assert run_command(plan.main, [*workplace.arguments(*POWER), "--no-power"]) == 0
    assert "this study" not in capsys.readouterr().out


def test_hours_of_a_design_are_shared_by_the_workers(workplace: Workplace) -> None:
    third_size(workplace)
    study = workplace.study(*POWER, "launch.workers=3")
    remember(study, 0.25)
    rows = plan.plan_rows(study, calibration.known(study))
    seconds = sum(
        row.seconds or 0.0
        for row in rows
        if row.planned.seed == 0 and row.planned.axes == rows[0].planned.axes
    )
    assert seconds > 0
    hours = sum(cost.hours or 0.0 for cost in size_costs(study, rows))
    assert hours == pytest.approx(seconds / 3 / 3600)


def test_power_from_a_pilot(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    third_size(workplace)
    table = simulate_table(Truth(sizes=4, seeds=4, noise=0.0003, alpha=0.07), np.random.default_rng(0))
    write_records(workplace.runs / "pilot", table)
    words = [*workplace.arguments(*POWER), "--no-calibrate"]
    assert run_command(plan.main, [*words, "--pilot", "pilot", "--json"]) == 0
    power = json.loads(capsys.readouterr().out)["power"]
    assert power["noise"] == power["pilot"]["noise"] == pytest.approx(0.0003, rel=0.5)
    assert power["alpha"] == pytest.approx(0.07, abs=0.005)
    assert power["smallest"]["sizes"] == 3 and power["smallest"]["hours"] is None
    assert run_command(plan.main, [*words, "--pilot", "pilot"]) == 0
    out = capsys.readouterr().out
    assert "pilot pilot: 32 finished runs" in out and "at the upper end of the pilot's noise" in out
    assert "is the smallest design that can tell 1.25x from 1.333x" in out and " FLOPs)" in out
    assert run_command(plan.main, [*words, "--pilot", "pilot", "--budget-flops", "1"]) == 0
    assert "no design is within the budget" in capsys.readouterr().out
    write_records(workplace.runs / "same", table.assign(loss=table["compute"] ** -0.05))
    assert run_command(plan.main, [*words, "--pilot", "same"]) == 2
    assert "error: --pilot=same: its runs do not differ (noise " in capsys.readouterr().err


def test_a_plan_that_power_has_nothing_to_say_about(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*workplace.arguments(), "--no-calibrate"]
    assert run_command(plan.main, words) == 0
    assert "power: 2 sizes, fewer than the 3 that a comparison needs" in capsys.readouterr().out
    assert run_command(plan.main, [*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["power"] is None
    for option, message in [
        ("--pilot=../x", "--pilot=../x: name a study"),
        ("--budget-hours=-1", "--budget-hours=-1: a positive number"),
        ("--budget-flops=x", "--budget-flops=x: a positive number"),
    ]:
        assert run_command(plan.main, [*words, option]) == 2
        assert message in capsys.readouterr().err
    third_size(workplace)
    assert run_command(plan.main, [*workplace.arguments(*POWER), "--no-calibrate", "--pilot", "gone"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_study_that_asks_for_no_multiplier_has_no_power(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    third_size(workplace)
    assert run_command(plan.main, [*workplace.arguments(*POWER, "study.report=rows"), "--no-calibrate"]) == 0
    assert "power: study.report=rows: no multiplier to plan for" in capsys.readouterr().out
