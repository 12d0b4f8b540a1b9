"""A launch with real processes and real training: what it runs, what failures cost, what it does again."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from sweeps_support import (
    Notes,
    Workplace,
    assert_trained_once,
    be_killed_once,
    fail_by_size_and_rule,
    run_study,
    wait_until,
)

from attnres.lock import TrialLock
from attnres.record import read_record
from sweeps.config import LaunchConfig
from sweeps.executor import LocalExecutor
from sweeps.interrupts import Interrupts
from sweeps.jobs import launch_order
from sweeps.launch import _where, report
from sweeps.runner import Runner
from sweeps.state import read_state
from sweeps.study import Study
from sweeps.trial_process import Target, train_trial


def run(study: Study, target: Target = train_trial, retry_failed: bool = False) -> Notes:
    return run_study(study, LocalExecutor(1, 20, target), retry_failed)


def states(study: Study) -> list[str]:
    return [read_state(planned.trial.folder).state for planned in study.trials]


def record_times(study: Study) -> list[int]:
    return [(planned.trial.folder / "record.json").stat().st_mtime_ns for planned in study.trials]


def test_a_launch_finishes_the_study_and_a_second_one_runs_nothing(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    study = workplace.study()
    run(study)
    assert states(study) == ["finished"] * 4
    plan = json.loads((study.folder / "study.json").read_text())
    for planned, entry in zip(study.trials, plan["trials"], strict=True):
        record = read_record(study.folder / entry["id"] / "record.json")
        assert (record["rule"], record["tokens"]) == (planned.rule, entry["tokens"])
        assert record["training_flops"]["total"] == entry["flops"]
        assert "validation loss" in (planned.trial.folder / "log.txt").read_text()
    before = record_times(study)
    assert run(workplace.study()).lines == []
    assert record_times(study) == before
    assert report(study, 1.0, None) == 0
    assert f"next: python -m analysis.report study=tiny runs_dir={workplace.runs}" in capsys.readouterr().out
    alone = workplace.study("study.rules=[prenorm]")  # of the same trials
    assert report(alone, 1.0, None) == 0
    out = capsys.readouterr().out
    assert "one rule alone: a report compares two or more" in out and "next:" not in out


def test_failures_cost_only_their_own_trial_and_the_next_launch_mends_them(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    study = workplace.study("launch.workers=2", "launch.max_retries=1")
    notes = run(study, fail_by_size_and_rule)
    assert states(study) == ["failed", "failed", "failed", "finished"]
    killed, raised, silent, finished = study.trials
    reasons = [read_state(planned.trial.folder).reason or "" for planned in study.trials]
    assert reasons[0] == "killed by SIGKILL (out of memory?), 2 times"
    assert "no such luck" in reasons[1]
    assert "without a finished record" in reasons[2]
    # Only what came from outside is tried again.
    starts = [sum(line.startswith("started") for line in notes.about(p.trial.name)) for p in study.trials]
    assert starts == [2, 1, 1, 1]
    assert report(study, 1.0, None) == 1
    printed = capsys.readouterr().out
    for planned, reason in zip(study.trials[:3], reasons[:3], strict=True):
        assert f"{planned.trial.name}: failed: {reason}" in printed
    before = (finished.trial.folder / "record.json").stat().st_mtime_ns
    origins = [read_state(planned.trial.folder).origin for planned in study.trials]
    assert origins == ["outside", "own", "outside", None]
    # What failed of its own is left as it is, unless the user wants it.
    again = run(study)
    assert states(study) == ["finished", "failed", "finished", "finished"]
    assert (finished.trial.folder / "record.json").stat().st_mtime_ns == before
    assert not again.about(finished.trial.name) and not again.about(raised.trial.name)
    assert "no such luck" in (read_state(raised.trial.folder).reason or "")
    run(study, retry_failed=True)
    assert states(study) == ["finished"] * 4


def test_a_killed_trial_is_tried_again(workplace: Workplace) -> None:
    study = workplace.study("study.sizes=[tiny_a]")
    notes = run(study, be_killed_once)
    assert states(study) == ["finished", "finished"]
    for planned in study.trials:
        assert "killed by SIGKILL (out of memory?); tried again" in notes.about(planned.trial.name)


def test_a_trial_of_another_process_is_waited_for_and_taken_over(workplace: Workplace) -> None:
    study = workplace.study("study.sizes=[tiny_a]")
    busy = study.trials[0].trial
    lock = TrialLock(busy.folder)
    lock.__enter__()
    release = threading.Timer(3, lock.__exit__, (None, None, None))
    release.start()
    notes = run(study)
    assert not release.is_alive()  # it waited
    assert states(study) == ["finished", "finished"]
    assert notes.about(busy.name)[0] == "another process is training it"


def test_two_launches_at_once_train_each_trial_once(workplace: Workplace) -> None:
    study = workplace.study("launch.workers=1")
    executors = [LocalExecutor(1, 20) for _ in range(2)]
    runners = [Runner(executor, Notes(), 1, max_retries=0, grace_seconds=20) for executor in executors]
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(runner.run, launch_order(study.trials), lambda: 0) for runner in runners]
        assert [end.result().count("finished") for end in ends] == [4, 4]
    for planned in study.trials:
        assert_trained_once(planned.trial.folder)


def test_a_torn_record_is_named_set_aside_and_replaced(workplace: Workplace) -> None:
    study = workplace.study("study.sizes=[tiny_a]")
    torn = study.trials[0].trial
    torn.folder.mkdir(parents=True)
    (torn.folder / "record.json").write_text('{"schema": 1, "sta')
    assert "record.json: torn" in (read_state(torn.folder).reason or "")
    run(study)
    assert states(study) == ["finished", "finished"]
    assert (torn.folder / "record.damaged").read_text() == '{"schema": 1, "sta'


def test_a_diverged_trial_is_reported_and_not_run_again(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    study = workplace.study(
        "study.sizes=[tiny_a]", "study.axes.optim.learning_rate=[1e-3,1e6]", "optim.grad_clip=null"
    )
    run(study)
    diverged = [planned for planned in study.trials if planned.axes["optim.learning_rate"] == 1e6]
    for planned in diverged:
        state = read_state(planned.trial.folder)
        assert state.state == "diverged"
        assert state.reason
    assert states(study).count("finished") == 2
    assert report(study, 1.0, None) == 1
    assert capsys.readouterr().out.count("diverged: ") == 2
    assert run(study).about(diverged[0].title) == [f"diverged: {read_state(diverged[0].trial.folder).reason}"]


def test_order_is_seed_by_seed_and_the_longest_first(shared_workplace: Workplace) -> None:
    study = shared_workplace.study("study.seeds=[3,1]")
    order = launch_order(study.trials)
    assert [planned.seed for planned in order] == [3] * 4 + [1] * 4
    for earlier, later in pairwise(order):
        assert earlier.seed != later.seed or earlier.flops >= later.flops


def test_interrupts_are_counted_and_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    # A shell starts its background jobs with SIGINT ignored, and the tests may be one.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert (interrupts(), interrupts.first) == (0, None)
            # Where there are other threads, a signal may reach its handler a little after kill returns.
            os.kill(os.getpid(), signal.SIGTERM)
            assert wait_until(lambda: interrupts() == 1, 20)
            os.kill(os.getpid(), signal.SIGINT)
            assert wait_until(lambda: interrupts() == 2, 20)
            assert (interrupts(), interrupts.first) == (2, signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, interrupt)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_workers_default_to_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweeps.config.available_cores", lambda: 6)
    settings = LaunchConfig(None, 2, 1, 1, "continue", None)
    assert [settings.worker_count(cores) for cores in (1, 2, 4, 8)] == [6, 3, 1, 1]


@pytest.fixture(autouse=True)
def _no_other_threads_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor sets these for its children; leave the tests' own environment as it was."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


@pytest.mark.parametrize(
    ("runs_dir", "word"),
    [("runs", ""), ("other/runs", " runs_dir=other/runs"), ("my runs", " 'runs_dir=my runs'")],
)
def test_the_next_command_can_be_pasted_into_a_shell(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, runs_dir: str, word: str
) -> None:
    monkeypatch.chdir(workplace.root)
    assert _where(workplace.study(f'runs_dir="{runs_dir}"')) == word
