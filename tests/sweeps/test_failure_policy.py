"""What a failed trial means for the rest of its launch, and which trials a launch leaves alone."""

from __future__ import annotations

import time

import pytest
from sweeps_support import Notes, Workplace, run_study

from attnres.cli import run_command
from attnres.data.corpus import PackedCorpus
from attnres.trial import Trial
from sweeps import launch
from sweeps.executor import LocalExecutor
from sweeps.launch import chosen_trials, report
from sweeps.state import read_state
from sweeps.study import Study
from sweeps.trial_process import train_trial

LONG = ("budget.tokens=640000", "schedule.warmup_fraction=0")  # far longer than the test
ONE_SIZE = "study.sizes=[tiny_a]"


def fail_one_train_the_other(trial: Trial, corpus: PackedCorpus) -> int:
    """prenorm raises once the other one has begun; the other one trains."""
    if trial.config.residual.rule == "prenorm":
        others = [path for path in trial.folder.parent.glob("*/config.yaml") if path.parent != trial.folder]
        deadline = time.monotonic() + 60
        while not others and time.monotonic() < deadline:
            others = [p for p in trial.folder.parent.glob("*/config.yaml") if p.parent != trial.folder]
            time.sleep(0.05)
        raise RuntimeError("no such luck")
    return train_trial(trial, corpus)


def fail(trial: Trial, corpus: PackedCorpus) -> int:
    raise RuntimeError("no such luck")


def run(study: Study, target: object) -> Notes:
    return run_study(study, LocalExecutor(1, 20, target))  # type: ignore[arg-type]


def test_stop_saves_what_runs_and_starts_no_more(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    study = workplace.study("launch.workers=2", "launch.on_failure=stop", *LONG, "study.seeds=[0,1]")
    notes = run(study, fail_one_train_the_other)
    states = [read_state(planned.trial.folder).state for planned in study.trials]
    assert sorted(states) == ["failed", *["pending"] * 6, "preempted"]
    saved = study.trials[states.index("preempted")].trial
    assert (saved.folder / "checkpoint.pt").exists()
    assert report(study, 1.0, None, notes.progress) == 1
    said = capsys.readouterr().out
    assert "stopped after a failure (launch.on_failure=stop)" in said
    assert "--retry-failed with what failed of its own" in said


def test_after_so_many_failures_no_more_is_started(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    study = workplace.study("launch.workers=1", "launch.max_failures=2")
    notes = run(study, fail)
    states = [read_state(planned.trial.folder).state for planned in study.trials]
    assert sorted(states) == ["failed", "failed", "pending", "pending"]
    assert report(study, 1.0, None, notes.progress) == 1
    said = capsys.readouterr().out
    assert "2 trials were not started after 2 failures (launch.max_failures=2)" in said
    # Those of earlier launches do not count against the next one, and are named once.
    notes = run(workplace.study("launch.workers=1", "launch.max_failures=1"), train_trial)
    states = [read_state(planned.trial.folder).state for planned in study.trials]
    assert sorted(states) == ["failed", "failed", "finished", "finished"]
    assert report(study, 1.0, None, notes.progress) == 1
    said = capsys.readouterr().out
    assert "2 trials had failed of their own before and were left as they are; --retry-failed" in said
    assert "next: " not in said  # there is no whole study to report on


def test_what_runs_goes_on_to_its_end_after_too_many_failures(workplace: Workplace) -> None:
    study = workplace.study("launch.workers=2", "launch.max_failures=1", ONE_SIZE)
    run(study, fail_one_train_the_other)
    assert sorted(read_state(p.trial.folder).state for p in study.trials) == ["failed", "finished"]


def test_one_trial_by_id(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    study = workplace.study("launch.workers=1", ONE_SIZE)
    first, second = (planned.trial for planned in study.trials)
    run(study, fail)
    assert run_command(launch.main, [*workplace.arguments(ONE_SIZE), "--trial", first.id[:5]]) == 0
    assert [read_state(trial.folder).state for trial in (first, second)] == ["finished", "failed"]
    assert "1 of 1 trial finished" in capsys.readouterr().out
    assert [p.trial for p in chosen_trials(study, f"{second.name},{first.id}")] == [first, second]
    begun = "study tiny: preparing its trials and their corpus\n"
    for wrong, said in (
        ("zzz", f"{begun}error: zzz: no trial of study tiny has this id or name; sweeps.status lists them\n"),
        ("", "error: --trial: needs a value\n"),
        (f"{first.id},", f"{begun}error: --trial={first.id},: names an empty trial; write ID, or "),
    ):
        assert run_command(launch.main, [*workplace.arguments(ONE_SIZE), "--trial", wrong]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith(said) and shown.count("\n") == 1 + said.startswith(begun)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--on-failure", "explode"], "launch.on_failure=explode: one of continue, stop"),
        (["--max-failures=0"], "launch.max_failures=0: must be positive"),
        (["--max-failures", "2", "launch.max_failures=3"], "launch.max_failures=2: is given twice"),
        (["--on-failure"], "--on-failure: needs a value"),
    ],
)
def test_mistakes_are_one_line(
    shared_workplace: Workplace, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(launch.main, [*shared_workplace.arguments(), *words]) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1
