"""A launch of trials of two processes each: they share the cores, and end as trials of one process do."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from processes_support import workers
from sweeps_support import Notes, Workplace, run_study, wait_until

from attnres.data.corpus import PackedCorpus
from attnres.trial import Trial
from sweeps.executor import LocalExecutor
from sweeps.ray_executor import task_options
from sweeps.state import read_state
from sweeps.timing import calibrate
from sweeps.trial_process import train_trial

DDP = ("runtime=ddp", "runtime.threads=2")


def test_a_trial_counts_with_all_its_cores(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweeps.config.available_cores", lambda: 12)
    study = workplace.study(*DDP, "executor=ray")
    assert (study.threads, study.processes, study.cores, study.workers) == (2, 2, 4, 3)
    settings = study.config.executor
    asked = task_options(settings, study.cores, study.processes)  # type: ignore[arg-type]
    assert (asked["num_cpus"], asked["num_gpus"]) == (4, 2)


def test_several_processes_are_said_not_to_be_timed(workplace: Workplace) -> None:
    said: list[str] = []
    assert calibrate(workplace.study(*DDP), said.append) == {}
    assert said == ["not timed: tiny_a prenorm and 3 other shapes: a trial runs in several processes"]


def kill_a_process_once(trial: Trial, corpus: PackedCorpus) -> int:
    """In the trial's own process: a thread kills the second of its processes in the first attempt."""
    import threading

    marker, me = trial.folder / "was_here", os.getpid()

    def kill() -> None:
        wait_until(lambda: len(workers(me)) == 2 and (trial.folder / "status.json").exists(), 60)
        os.kill(workers(me)[1], signal.SIGKILL)

    if not marker.exists():
        marker.touch()
        threading.Thread(target=kill, daemon=True).start()
    return train_trial(trial, corpus)


@pytest.mark.slow
def test_a_killed_process_is_tried_again(workplace: Workplace) -> None:
    study = workplace.study("runtime=ddp", "study.sizes=[tiny_a]", "study.rules=[prenorm]")
    executor = LocalExecutor(1, grace_seconds=20, target=kill_a_process_once)
    notes: Notes = run_study(study, executor)
    (planned,) = study.trials
    state = read_state(planned.trial.folder)
    assert (state.state, state.attempts) == ("finished", 2), notes.lines
    assert any("one of its processes was killed by SIGKILL; tried again" in line for line in notes.lines)
    log = (planned.trial.folder / "log.txt").read_text()
    assert "process 1 of 2 was killed by SIGKILL" in log and "step 1/" in log


@pytest.mark.slow
def test_records_of_a_launch_with_one_and_two_processes(tmp_path: Path) -> None:
    losses = []
    for how in ((), ("runtime=fsdp",)):
        workplace = Workplace(tmp_path / str(len(how)))
        study = workplace.study(*how, "study.sizes=[tiny_a]")
        run_study(study, LocalExecutor(1, grace_seconds=20))
        records = [json.loads((p.trial.folder / "record.json").read_text()) for p in study.trials]
        losses.append([record["validation"]["loss_nats"] for record in records])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
