"""The runner's decisions, one at a time: attempts are scripted, what they leave in their folders is real."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest
from sweeps_support import Notes, Workplace, finished_record

from attnres.lock import EXIT_BUSY, TrialLock
from attnres.record import write_record
from attnres.status import StatusFile
from attnres.stop import ask_to_cancel
from sweeps import runner as running
from sweeps.executor import ServerLost, in_training
from sweeps.jobs import FailurePolicy
from sweeps.runner import Runner
from sweeps.signs import SignsOfLife
from sweeps.state import read_state
from sweeps.study import PlannedTrial, Study

Attempt = Callable[[Path], int | None]  # what it does in the trial's folder; its exit code, None: it runs on


class Scripted:
    """An executor whose attempts are given."""

    outlives_launch = False

    def __init__(self, *attempts: Attempt, queues: bool = False) -> None:
        self.attempts, self.queues = list(attempts), queues
        self.withdrawn = 0

    def elsewhere(self, planned: PlannedTrial) -> str | None:
        return in_training(planned)

    def submit(self, planned: PlannedTrial) -> list[int | None]:
        planned.trial.folder.mkdir(parents=True, exist_ok=True)
        return [self.attempts.pop(0)(planned.trial.folder)]

    def poll(self, handle: list[int | None]) -> int | None:
        return handle[0]

    def cause(self, handle: list[int | None]) -> str | None:
        return None

    def wait(self, handles: Iterable[list[int | None]], seconds: float) -> None:
        time.sleep(0.001)

    def stop(self, handle: list[int | None], force: bool = False) -> None:
        handle[0] = 143

    def withdraw(self, handle: list[int | None]) -> None:
        self.withdrawn += 1
        handle[0] = 143

    def close(self) -> None:
        pass


def code(number: int) -> Attempt:
    return lambda folder: number


def finish(folder: Path, number: int = 0) -> int:
    write_record(folder, finished_record(folder.name))
    return number


def diverge(folder: Path) -> int:
    ended = {"status": "diverged", "reason": "loss is nan", "validation": None}
    write_record(folder, finished_record(folder.name) | ended)
    return 3


def fail(folder: Path) -> int:
    StatusFile(folder, 40).end("failed", "no luck", "own")
    return 1


def run(
    study: Study,
    *attempts: Attempt,
    policy: FailurePolicy | None = None,
    queues: bool = False,
    workers: int = 4,
) -> tuple[list[str], Scripted, Notes]:
    """States of all trials, afterwards; each attempt was made."""
    executor, notes = Scripted(*attempts, queues=queues), Notes()
    runner = Runner(executor, notes, workers, max_retries=2, grace_seconds=1, policy=policy)
    runner._signs = SignsOfLife(0.2)
    ends = time.monotonic() + 10  # should it wait for ever
    progress = runner.run(study.trials, lambda: int(time.monotonic() > ends))
    assert not executor.attempts
    notes.progress = progress
    return [read_state(p.trial.folder).state for p in study.trials], executor, notes


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(running, "_FILES_A_SECOND", 10_000)


@pytest.fixture(autouse=True)
def _nothing_has_run(shared_workplace: Workplace) -> None:
    shutil.rmtree(shared_workplace.runs, ignore_errors=True)


@pytest.fixture(scope="module")
def one(shared_workplace: Workplace) -> Study:
    return shared_workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]")


@pytest.fixture(scope="module")
def three(shared_workplace: Workplace) -> Study:
    return shared_workplace.study("study.sizes=[tiny_a]", "study.rules=[prenorm]", "study.seeds=[0,1,2]")


@pytest.mark.parametrize("number", [-signal.SIGKILL, 143, 255, 137])
def test_so_many_retries_and_no_more(one: Study, number: int) -> None:
    states, _, notes = run(one, *[code(number)] * 3)
    assert states == ["failed"] and read_state(one.trials[0].trial.folder).origin == "outside"
    assert ", 3 times" in notes.lines[-1]
    states, _, _ = run(one, *[code(number)] * 2, finish)  # the next launch counts anew
    assert states == ["finished"]


def test_a_failure_that_a_trial_has_told_outweighs_a_lost_exit_code(one: Study) -> None:
    """An exception would come again: it is not tried again because the fork server has died too."""

    def fail_lost(folder: Path) -> int:
        fail(folder)
        return 255

    states, _, notes = run(one, fail_lost)
    assert states == ["failed"] and notes.lines[-1].endswith("failed: no luck")


def test_who_is_lost_while_another_trains_it_has_used_up_no_retry(one: Study) -> None:
    folder, lock = one.trials[0].trial.folder, ExitStack()

    def lose(folder: Path) -> int:
        lock.enter_context(TrialLock(folder))
        return 255

    def killed(folder: Path) -> int:
        return -signal.SIGKILL

    timer = threading.Timer(0.3, lock.close)
    timer.start()
    states, _, _ = run(one, lose, killed, killed, finish)
    timer.join()
    assert states == ["finished"] and folder.exists()


@pytest.mark.parametrize(("losses", "state"), [(2, "finished"), (3, "failed")])
def test_an_attempt_that_could_not_be_started_is_tried_again(one: Study, losses: int, state: str) -> None:
    def lost(folder: Path) -> int:
        raise ServerLost("no memory")

    states, _, notes = run(one, *[lost] * losses, *[finish] * (losses < 3))
    assert states == [state]
    assert sum("could not be started: no memory; tried again" in line for line in notes.lines) == 2
    if state == "failed":
        assert read_state(one.trials[0].trial.folder).origin == "outside"


def test_a_record_outweighs_the_exit_code(one: Study) -> None:
    """Of a process that was killed, or told its launch something else, after it had written its result."""
    for number in (-signal.SIGKILL, 143, 1, EXIT_BUSY):
        states, _, notes = run(one, lambda folder, number=number: finish(folder, number))  # type: ignore[misc]
        assert states == ["finished"] and notes.progress.count("finished") == 1
        (one.trials[0].trial.folder / "record.json").unlink()


def test_exit_code_0_without_a_record_is_a_failure_from_outside(one: Study) -> None:
    states, _, _ = run(one, code(0))
    found = read_state(one.trials[0].trial.folder)
    assert states == ["failed"] and found.origin == "outside"
    assert "without a finished record" in str(found.reason)
    assert run(one, finish)[0] == ["finished"]


def test_what_has_ended_is_not_run_again(three: Study) -> None:
    for _ in range(2):
        states, _, _ = run(three, *([] if three.folder.exists() else [finish, diverge, finish]))
        assert states == ["finished", "diverged", "finished"]


def test_failures_of_earlier_launches_and_diverged_trials_do_not_count(three: Study) -> None:
    first = FailurePolicy(on_failure="stop")
    assert run(three, fail, policy=first, workers=1)[0] == ["failed", "pending", "pending"]
    for policy in (FailurePolicy(max_failures=1), first):
        for planned in three.trials[1:]:
            (planned.trial.folder / "record.json").unlink(missing_ok=True)
        assert run(three, diverge, finish, policy=policy, workers=1)[0] == ["failed", "diverged", "finished"]


def test_whoever_finds_it_taken_has_used_up_no_retry(one: Study) -> None:
    states, _, _ = run(one, *[code(EXIT_BUSY)] * 4, *[code(-signal.SIGKILL)] * 2, finish)
    assert states == ["finished"]


def test_the_reason_is_of_this_attempt(one: Study) -> None:
    policy = FailurePolicy(retry_failed=True)
    states, _, _ = run(one, fail, policy=policy)
    assert states == ["failed"] and read_state(one.trials[0].trial.folder).reason == "no luck"
    states, _, notes = run(one, code(1), policy=policy)  # it came to no word of its own
    assert "exit code 1" in notes.lines[-1] and "no luck" not in notes.lines[-1]
    states, _, notes = run(one, fail, policy=policy)
    assert notes.lines[-1].endswith("failed: no luck")


def test_a_failure_of_its_own_is_not_tried_again(one: Study) -> None:
    assert run(one, fail)[0] == ["failed"]
    states, _, notes = run(one)
    assert states == ["failed"] and notes.progress.failed_before == 1
    assert run(one, finish, policy=FailurePolicy(retry_failed=True))[0] == ["finished"]


def test_a_trial_of_another_machine_is_taken_over_once_its_heartbeat_stands_still(one: Study) -> None:
    """However far ahead its clock is; the locks of that machine are not seen here."""
    folder = one.trials[0].trial.folder
    status = {"state": "running", "attempts": 1, "first_started": 1.0, "boot_id": "another"}
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps(status | {"heartbeat": time.time() + 1e6}))
    started = time.monotonic()
    states, _, notes = run(one, finish)
    assert states == ["finished"] and time.monotonic() - started > 0.2
    assert "running by its heartbeat" in notes.lines[0]


def test_jobs_in_a_queue_are_taken_out_after_too_many_failures(three: Study) -> None:
    def waits(folder: Path) -> None:
        return None

    states, executor, notes = run(
        three, fail, waits, waits, policy=FailurePolicy(max_failures=1), queues=True
    )
    assert executor.withdrawn == 2 and len(notes.progress.left) == 2
    assert sorted(states) == ["failed", "pending", "pending"]


def test_a_cancelled_trial_is_not_tried_again(three: Study) -> None:
    """Nor started, if it is cancelled while it waits."""

    def killed(folder: Path) -> int:
        ask_to_cancel(folder)
        for planned in three.trials[1:]:
            planned.trial.folder.mkdir(parents=True, exist_ok=True)
            ask_to_cancel(planned.trial.folder)
        return -signal.SIGKILL

    states, _, notes = run(three, killed)
    assert states == ["cancelled"] * 3 and notes.progress.count("cancelled") == 3
