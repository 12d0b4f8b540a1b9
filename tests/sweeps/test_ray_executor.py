"""Trials as tasks of a real Ray of two nodes on this machine: losses, stops, workers that are killed."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kill_launch import Launch
from sweeps_support import Workplace, assert_trained_once, be_killed_once, run_study, wait_until

from attnres.errors import UserError
from attnres.status import read_status
from sweeps.executor import LocalExecutor
from sweeps.executor_config import RayConfig
from sweeps.ray_executor import RayExecutor
from sweeps.state import read_state
from sweeps.study import Study
from sweeps.trial_process import Target, train_trial

HERE = importlib.util.find_spec("ray") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HERE, reason="ray is not installed: pip install '.[ray]'"),
    pytest.mark.filterwarnings("default"),  # Ray's own
]
ONE = ("study.sizes=[tiny_a]", "study.rules=[prenorm]")
LONGER = ("budget.tokens=96000", "runtime.checkpoint_seconds=0.3")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes with one core each."""
    from ray.cluster_utils import Cluster

    root = Path(__file__).resolve().parents[2]
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests")])  # the workers' too
    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


def executor(study: Study, target: Target = train_trial) -> RayExecutor:
    settings = study.config.executor
    assert isinstance(settings, RayConfig)
    return RayExecutor(settings, study, target)


def losses(study: Study) -> list[float | None]:
    return [read_state(planned.trial.folder).loss_nats for planned in study.trials]


def start(workplace: Workplace, *more: str) -> tuple[Launch, Study]:
    """A launcher in a process of its own, once the first trial trains."""
    study = workplace.study(*more)
    folder = study.trials[0].trial.folder
    launch = Launch(workplace.root, workplace.arguments(*more))
    started = wait_until(lambda: read_state(folder).state == "running" and bool(read_state(folder).step), 90)
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


def test_what_ray_cannot_do_is_one_line(workplace: Workplace) -> None:
    study = workplace.study("executor=ray", "executor.address=127.0.0.1:1", *ONE)
    with pytest.raises(UserError, match="executor.address=127.0.0.1:1: cannot be reached: ") as raised:
        executor(study)
    assert "\n" not in str(raised.value)
    study = workplace.study("executor=ray", "executor.cpus=1000", *ONE)
    with pytest.raises(UserError, match="executor=ray: no node has what a trial asks for .1000 CPU"):
        executor(study)
