"""What a launch is asked on a cluster: cancel, stop on failures, try failed ones again, several processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray_lab
import ray_support
import slurm_support
from cluster_support import assert_records_as_on_this_machine
from held_trial import HELD, go_on, is_held, train_held
from kill_launch import Launch
from sweeps_support import Workplace, assert_trained_once, run_study, wait_until

from attnres.data.corpus import PackedCorpus
from attnres.trial import Trial
from sweeps.executor import LocalExecutor
from sweeps.launches import running_launches
from sweeps.state import read_state
from sweeps.study import Study

TESTS = Path(__file__).resolve().parents[1]
SLURM_HERE = pytest.mark.skipif(slurm_support.WHY_NOT is not None, reason=slurm_support.WHY_NOT or "")
RAY_HERE = pytest.mark.skipif(ray_lab.why_not() is not None, reason=ray_lab.why_not() or "")
RAY_WARNINGS = pytest.mark.filterwarnings("default")
pytestmark = pytest.mark.slow
# A trial for each core; further ones wait in the cluster's queue.
ONE_SIZE = ("study.sizes=[tiny_a]", "runtime.checkpoint_seconds=0.1")
WAITING = (*HELD, "study.seeds=[0,1,2]")


class Place:
    """A cluster of two trials at once, and how the tests launch there."""

    def __init__(self, words: tuple[str, ...], executor: Callable[..., Any]) -> None:
        self.words, self.executor = words, executor


@pytest.fixture(
    params=[
        pytest.param("slurm", marks=[pytest.mark.slurm, SLURM_HERE]),
        pytest.param("ray", marks=[RAY_HERE, RAY_WARNINGS]),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "slurm":
        request.getfixturevalue("lab")
        two = ("executor.parameters=['nodelist=one']", "executor.cpus=2")  # of the node's four
        return Place((*slurm_support.SLURM, *two), slurm_support.executor)
    cluster = request.getfixturevalue("ray_cluster")
    return Place((*ray_support.on(cluster), "executor.cpus=1"), ray_support.executor)


def states(study: Study) -> list[str]:
    return sorted(read_state(planned.trial.folder).state for planned in study.trials)


def fail_beside_a_held_one(trial: Trial, corpus: PackedCorpus) -> int:
    """prenorm raises once another trial is held in the middle of its training."""
    if trial.config.residual.rule != "prenorm":
        return train_held(trial, corpus)
    others = [path for path in trial.folder.parent.glob("*/") if path != trial.folder]
    while not any(map(is_held, others)):
        time.sleep(0.05)
        others = [path for path in trial.folder.parent.glob("*/") if path != trial.folder]
    raise RuntimeError("no such luck")


def fail_if_prenorm(trial: Trial, corpus: PackedCorpus) -> int:
    if trial.config.residual.rule == "prenorm":
        raise RuntimeError("no such luck")
    return train_held(trial, corpus)


def test_cancelling_ends_what_runs_and_what_waits(workplace: Workplace, place: Place) -> None:
    study = workplace.study(*place.words, *WAITING)
    launch = Launch(workplace.root, workplace.arguments(*place.words, *WAITING), "held_trial")
    folders = [planned.trial.folder for planned in study.trials]
    assert wait_until(lambda: sum(map(is_held, folders)) == 2, 300)
    words = [f"runs_dir={workplace.runs}", "--config-dir", str(workplace.configs)]
    command = [sys.executable, "-m", "sweeps.cancel", "study=tiny", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = "2 running trials save a checkpoint and stop, 1 waiting one is not started"
    assert said in done.stdout, done.stdout + done.stderr
    assert launch.process.wait(60) == 1
    assert states(study) == ["cancelled"] * 3
    assert running_launches(study.folder) == []
    go_on(study)
    run_study(study, place.executor(study))
    assert sorted(read_state(folder).attempts or 0 for folder in folders) == [1, 2, 2]
    assert_records_as_on_this_machine(workplace, study, *WAITING)


def test_on_failure_stop_saves_what_runs(workplace: Workplace, place: Place) -> None:
    study = workplace.study(*place.words, *ONE_SIZE, "launch.on_failure=stop")
    run_study(study, place.executor(study, fail_beside_a_held_one))
    assert states(study) == ["failed", "preempted"]
    go_on(study)
    notes = run_study(study, place.executor(study))
    assert states(study) == ["failed", "finished"]  # what failed of its own is left alone
    assert notes.progress.failed_before == 1
    run_study(study, place.executor(study), retry_failed=True)
    assert states(study) == ["finished"] * 2
    assert_records_as_on_this_machine(workplace, study, *ONE_SIZE)


def test_after_too_many_failures_what_waits_in_the_queue_is_taken_back(
    workplace: Workplace, place: Place
) -> None:
    more = (*ONE_SIZE, "study.seeds=[0,1,2,3]", "launch.max_failures=2")
    study = workplace.study(*place.words, *more)
    go_on(study)
    notes = run_study(study, place.executor(study, fail_if_prenorm))
    found = states(study)
    assert set(found) <= {"failed", "finished", "pending", "preempted"} and found.count("failed") >= 2, found
    assert found.count("finished") + found.count("failed") < 8, notes.lines
    assert len(notes.progress.left) == found.count("pending") + found.count("preempted")
    run_study(study, place.executor(study), retry_failed=True)
    assert states(study) == ["finished"] * 8


def test_a_trial_of_two_processes_has_the_loss_of_this_machine(workplace: Workplace, place: Place) -> None:
    more = ("runtime=ddp", "runtime.processes=2", "study.sizes=[tiny_a]", "study.rules=[prenorm]")
    study = workplace.study(*place.words, *more)
    run_study(study, place.executor(study))
    assert_trained_once(study.trials[0].trial.folder)
    local = workplace.study(*more, f"runs_dir={workplace.root / 'local'}")
    run_study(local, LocalExecutor(1, 20))
    losses = [read_state(s.trials[0].trial.folder).loss_nats for s in (study, local)]
    assert losses[0] == losses[1]
