"""Faults on a real Ray: others finish, the reason is named, a relaunch completes, records are unchanged."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from cluster_support import assert_records_as_on_this_machine, is_alive, log, trial_pid
from held_trial import HELD, go_on
from kill_launch import Launch
from ray_lab import RayLab, raylet
from ray_support import WHY_NOT, executor, node_of, on, start
from sweeps_support import Workplace, assert_trained_once, run_study, wait_until

from attnres.data.corpus import PackedCorpus
from attnres.trial import Trial
from sweeps.state import read_state
from sweeps.trial_process import train_trial

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.filterwarnings("default"),  # Ray's own
]
UNSEEN_SECONDS = 15
TWO = (*HELD, "study.seeds=[0,1]")  # a trial for each node


def die_if_prenorm(trial: Trial, corpus: PackedCorpus) -> int:
    if trial.config.residual.rule == "prenorm":
        os.kill(os.getpid(), signal.SIGKILL)
    return train_trial(trial, corpus)


def end_raylet(node: Any) -> None:
    """Kill a node's daemon; the kernel may forget it, without which its workers believe that it lives."""
    os.kill(raylet(node), signal.SIGKILL)
    node.all_processes["raylet"][0].process.wait()


@pytest.mark.parametrize("end", ["removed", "killed", "raylet killed"])
def test_a_node_that_goes_costs_its_trial_a_retry(
    workplace: Workplace, ray_cluster: RayLab, end: str
) -> None:
    launch, study = start(workplace, *on(ray_cluster), *TWO, held=2)
    folders = [planned.trial.folder for planned in study.trials]
    node, pid = node_of(ray_cluster, folders[0]), trial_pid(folders[0])
    assert node is not node_of(ray_cluster, folders[1])
    if end == "raylet killed":
        end_raylet(node)
    else:
        ray_cluster.remove(node, gracefully=end == "removed")
    assert wait_until(lambda: not is_alive(pid), 120), "the trial outlives its node"
    go_on(study)
    assert launch.process.wait(300) == 0, log(workplace)
    assert [read_state(folder).attempts for folder in folders] == [2, 1], log(workplace)
    said = log(workplace)
    assert said.count("tried again") == 1
    assert f"{study.trials[0].trial.name}: its node failed; tried again" in said, said
    assert "continues at step" in (folders[0] / "log.txt").read_text()
    assert_records_as_on_this_machine(workplace, study, *TWO)


def test_a_trial_that_outlives_its_node_is_waited_for(workplace: Workplace, ray_cluster: RayLab) -> None:
    """Its raylet is dead and the cluster knows, but the trial's process does not notice: nobody trains beside
    it.
    """
    launch, study = start(workplace, *on(ray_cluster), *TWO, held=2)
    folder = study.trials[0].trial.folder
    node, pid = node_of(ray_cluster, folder), trial_pid(folder)
    os.kill(raylet(node), signal.SIGKILL)  # and not forgotten, so it looks alive
    assert not wait_until(lambda: launch.process.poll() is not None or not is_alive(pid), UNSEEN_SECONDS)
    go_on(study)
    assert launch.process.wait(300) == 0, log(workplace)
    for planned in study.trials:
        assert_trained_once(planned.trial.folder)
    assert_records_as_on_this_machine(workplace, study, *TWO)


def test_a_launcher_that_is_killed_and_the_next_one(workplace: Workplace, ray_cluster: RayLab) -> None:
    launch, study = start(workplace, *on(ray_cluster), *TWO, held=2)
    folders = [planned.trial.folder for planned in study.trials]
    pids = [trial_pid(folder) for folder in folders]
    launch.kill()
    assert wait_until(lambda: not any(map(is_alive, pids)), 120)
    go_on(study)
    again = Launch(workplace.root, workplace.arguments(*on(ray_cluster), *TWO))
    assert again.process.wait(300) == 0, log(workplace)
    for folder in folders:
        assert read_state(folder).attempts == 2
        assert "continues at step" in (folder / "log.txt").read_text()
    assert_records_as_on_this_machine(workplace, study, *TWO)


def test_a_launcher_that_is_told_to_end_leaves_no_process(workplace: Workplace, ray_cluster: RayLab) -> None:
    launch, study = start(workplace, *on(ray_cluster), *TWO, held=2)
    folders = [planned.trial.folder for planned in study.trials]
    pids = [trial_pid(folder) for folder in folders]
    launch.process.terminate()
    assert launch.process.wait(60) == 128 + signal.SIGTERM, log(workplace)
    assert launch.gone(30), launch.alive()
    assert wait_until(lambda: not any(map(is_alive, pids)), 30)
    assert [read_state(folder).state for folder in folders] == ["preempted"] * 2
    go_on(study)
    run_study(study, executor(study))
    assert [read_state(folder).attempts for folder in folders] == [2, 2]
    assert_records_as_on_this_machine(workplace, study, *TWO)


def test_a_worker_that_is_always_killed_fails_and_the_others_finish(
    workplace: Workplace, ray_cluster: RayLab
) -> None:
    more = ("study.sizes=[tiny_a]", "launch.max_retries=1")
    study = workplace.study(*on(ray_cluster), *more)
    struck, spared = (planned.trial for planned in study.trials)
    notes = run_study(study, executor(study, die_if_prenorm))
    assert read_state(struck.folder).reason == "killed by SIGKILL (out of memory?), 2 times", notes.lines
    assert (struck.folder / "log.txt").read_text().count("---") == 2
    assert_trained_once(spared.folder)
    before = (spared.folder / "record.json").stat().st_mtime_ns
    run_study(study, executor(study))
    assert (spared.folder / "record.json").stat().st_mtime_ns == before
    assert_records_as_on_this_machine(workplace, study, *more)
