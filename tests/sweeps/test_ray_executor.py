"""Trials as tasks of a real Ray of two nodes on this machine: losses, stops, workers that are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from kill_launch import Launch
from ray_lab import RayLab
from ray_support import WHY_NOT, executor
from sweeps_support import Workplace, assert_trained_once, be_killed_once, run_study, wait_until

from attnres.errors import UserError
from attnres.status import read_status
from sweeps.executor import LocalExecutor
from sweeps.state import read_state
from sweeps.study import Study

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.filterwarnings("default"),  # Ray's own
]
ONE = ("study.sizes=[tiny_a]", "study.rules=[prenorm]")
LONGER = ("budget.tokens=96000", "runtime.checkpoint_seconds=0.3")


@pytest.fixture
def address(ray_cluster: RayLab) -> str:
    return ray_cluster.address


def losses(study: Study) -> list[float | None]:
    return [read_state(planned.trial.folder).loss_nats for planned in study.trials]


def start(workplace: Workplace, *more: str) -> tuple[Launch, Study]:
    """A launcher in a process of its own, once the first trial trains."""
    study = workplace.study(*more)
    folder = study.trials[0].trial.folder
    launch = Launch(workplace.root, workplace.arguments(*more))
    started = wait_until(lambda: read_state(folder).state == "running" and bool(read_state(folder).step), 300)
    assert started, (workplace.root / "launch.log").read_text()
    return launch, study


def test_a_study_on_two_nodes_has_the_losses_of_this_machine(workplace: Workplace, address: str) -> None:
    study = workplace.study("executor=ray", f"executor.address={address}")
    notes = run_study(study, executor(study))
    for planned in study.trials:
        assert notes.about(planned.trial.name)[0] == "submitted"
        assert_trained_once(planned.trial.folder)
    local = workplace.study(f"runs_dir={workplace.root / 'local'}")
    run_study(local, LocalExecutor(1, 20))
    assert losses(study) == losses(local)
    assert None not in losses(study)


def test_a_killed_worker_is_retried_by_the_runner_alone(workplace: Workplace, address: str) -> None:
    study = workplace.study("executor=ray", f"executor.address={address}", "study.sizes=[tiny_a]")
    notes = run_study(study, executor(study, be_killed_once))
    for planned in study.trials:
        assert read_state(planned.trial.folder).state == "finished"
        assert "killed by SIGKILL (out of memory?); tried again" in notes.about(planned.trial.name)
        assert (planned.trial.folder / "log.txt").read_text().count("---") == 2


def test_an_interrupt_saves_checkpoints_and_the_next_launch_goes_on(
    workplace: Workplace, address: str
) -> None:
    launch, study = start(workplace, "executor=ray", f"executor.address={address}", *ONE, *LONGER)
    launch.process.send_signal(signal.SIGINT)
    assert launch.process.wait(60) == 128 + signal.SIGINT
    folder = study.trials[0].trial.folder
    assert read_state(folder).state == "preempted"
    assert (folder / "checkpoint.pt").exists()
    run_study(study, executor(study))
    assert (read_state(folder).state, read_state(folder).attempts) == ("finished", 2)


def test_a_worker_that_is_killed_from_outside_goes_on(workplace: Workplace, address: str) -> None:
    launch, study = start(workplace, "executor=ray", f"executor.address={address}", *ONE, *LONGER)
    folder = study.trials[0].trial.folder
    status: Any = read_status(folder)
    os.kill(status["pid"], signal.SIGKILL)
    assert launch.process.wait(120) == 0
    assert read_state(folder).attempts == 2


def test_trials_end_when_their_launcher_is_killed(workplace: Workplace, address: str) -> None:
    launch, study = start(workplace, "executor=ray", f"executor.address={address}", *ONE, *LONGER)
    launch.kill()
    folder = study.trials[0].trial.folder
    assert wait_until(lambda: read_state(folder).state in ("stale", "preempted"), 60)
    run_study(study, executor(study))
    assert read_state(folder).state == "finished"


def test_ray_that_the_launch_started_ends_with_it(workplace: Workplace) -> None:
    launch, study = start(workplace, "executor=ray", *ONE, *LONGER)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.wait(60) == 128 + signal.SIGTERM
    assert launch.gone(30), launch.alive()
    assert read_state(study.trials[0].trial.folder).state == "preempted"


def test_trials_on_ray_of_the_launch_end_with_a_killed_launcher(workplace: Workplace) -> None:
    launch, study = start(workplace, "executor=ray", *ONE, *LONGER)
    status: Any = read_status(study.trials[0].trial.folder)
    launch.kill()
    assert wait_until(lambda: not Path(f"/proc/{status['pid']}").exists(), 30)
    assert read_state(study.trials[0].trial.folder).state in ("stale", "preempted")


def test_a_ray_that_does_not_come_up_is_one_line(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def init(**options: object) -> None:
        raise Exception("The current node timed out\nduring startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UserError, match="^executor=ray: during startup.$"):
        executor(workplace.study("executor=ray", *ONE))


def test_what_ray_cannot_do_is_one_line(workplace: Workplace) -> None:
    study = workplace.study("executor=ray", "executor.address=127.0.0.1:1", *ONE)
    with pytest.raises(UserError, match="executor.address=127.0.0.1:1: cannot be reached: ") as raised:
        executor(study)
    assert "\n" not in str(raised.value)
    study = workplace.study("executor=ray", "executor.cpus=1000", *ONE)
    with pytest.raises(UserError, match="executor=ray: no node has what a trial asks for .1000 CPU"):
        executor(study)
