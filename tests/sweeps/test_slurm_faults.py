"""Faults on a real Slurm: others finish, the reason is named, a relaunch completes, records are unchanged."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_support import assert_records_as_on_this_machine, log, parents, trial_pid
from held_trial import HELD, go_on, is_held
from kill_launch import Launch
from slurm_lab import NODES, SlurmLab
from slurm_support import SLURM, WHY_NOT, executor, job_of, start
from sweeps_support import Workplace, assert_trained_once, run_study, wait_until

from sweeps.state import read_state

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.usefixtures("lab"),
]


def step_daemon(folder: Path) -> int:
    """The slurmstepd above a trial's process."""
    above = [pid for pid in parents(trial_pid(folder)) if "slurmstepd" in command(pid)]
    return above[0]


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def end_orphaned_srun(job: str) -> None:
    """Without its slurmstepd, an srun waits for ever; a cluster's cgroups would end it."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        pid = int(path.parent.name)
        try:
            if f"SLURM_JOB_ID={job}\0".encode() in path.read_bytes() and command(pid).startswith("srun"):
                os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


def test_one_launch_loses_nothing_to_many_faults(workplace: Workplace, lab: SlurmLab) -> None:
    more = (*HELD, "study.seeds=[0,1,2,3,4]")
    launch, study = start(workplace, *more, held=5)
    folders = [planned.trial.folder for planned in study.trials]
    names = [planned.trial.name for planned in study.trials]
    jobs = [job_of(study, index) for index in range(5)]
    os.kill(trial_pid(folders[0]), signal.SIGKILL)
    number = re.search(r"JobId=(\d+)", lab.run("scontrol", "show", "job", jobs[1]))
    assert number is not None
    os.kill(step_daemon(folders[1]), signal.SIGKILL)  # the trial goes on without it, Slurm sees nothing
    lab.run("scancel", jobs[2])
    lab.run("scancel", "--signal=USR2", jobs[3])  # as before a time limit
    assert wait_until(lambda: lab.states()[jobs[3]] == "PENDING", 60), lab.states()
    go_on(study)
    assert launch.process.wait(120) == 1
    end_orphaned_srun(number[1])
    states = [read_state(folder) for folder in folders]
    ended = ["finished", "finished", "preempted", "finished", "finished"]
    assert [state.state for state in states] == ended, log(workplace)
    assert [state.attempts for state in states] == [2, 1, 1, 2, 1]
    said = log(workplace)
    assert f"{names[0]}: killed by SIGKILL; tried again" in said
    assert f"{names[2]}: preempted: its job was cancelled; a launch submits it again" in said
    assert said.count("tried again") == 1
    assert job_of(study, 3) == jobs[3]  # requeued, not submitted again
    assert "stopped by SIGUSR2 after a checkpoint" in (folders[3] / "log.txt").read_text()
    assert lab.states()[jobs[1]] in ("CANCELLED", "COMPLETING")  # and does not hold its node for ever
    run_study(study, executor(study))
    assert [read_state(folder).attempts for folder in folders] == [2, 1, 2, 2, 1]
    assert_records_as_on_this_machine(workplace, study, *more)


def test_preempted_jobs_go_on_with_grace_and_without(tmp_path: Path, lab: SlurmLab) -> None:
    places = {name: Workplace(tmp_path / name) for name in ("low", "requeued", "cancelled")}
    launches, studies = {}, {}
    for name, place in places.items():
        partition = f"executor.partition={name}"
        launches[name] = Launch(place.root, place.arguments(*SLURM, *HELD, partition), "held_trial")
        studies[name] = place.study(*SLURM, *HELD, partition)
    folders = {name: study.trials[0].trial.folder for name, study in studies.items()}
    assert wait_until(lambda: all(map(is_held, folders.values())), 90)
    jobs = {name: job_of(study) for name, study in studies.items()}
    lab.run("sbatch", "-phigh", "-N2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    waiting = {"low": "PENDING", "requeued": "PENDING", "cancelled": "PREEMPTED"}
    for name, state in waiting.items():
        assert wait_until(lambda name=name, state=state: lab.states()[jobs[name]] == state, 60), name
    for name, study in studies.items():
        go_on(study)
        assert launches[name].process.wait(120) == 0, log(places[name])
        assert (read_state(folders[name]).state, read_state(folders[name]).attempts) == ("finished", 2)
        assert "continues at step" in (folders[name] / "log.txt").read_text()
        assert "stopped by SIGTERM after a checkpoint" in (folders[name] / "log.txt").read_text(), name
    again = {name: log(places[name]).count("tried again") for name in places}
    assert again == {"low": 0, "requeued": 0, "cancelled": 1}
    assert "its job was preempted; tried again" in log(places["cancelled"])
    assert_records_as_on_this_machine(places["cancelled"], studies["cancelled"], *HELD)


def test_a_node_that_fails_costs_nothing(workplace: Workplace, lab: SlurmLab) -> None:
    """Its slurmd dies; the trial's process lives on, unseen, and is waited for."""
    launch, study = start(workplace, *HELD)
    folder, job = study.trials[0].trial.folder, job_of(study)
    node = lab.run("squeue", "-h", "-r", f"-j{job}", "-o%N").strip()
    assert node in NODES
    lab.stop(node, signal.SIGKILL)
    try:
        lab.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        assert wait_until(lambda: (folder / "log.txt").read_text().count("---") == 2, 60), log(workplace)
        go_on(study)
        assert launch.process.wait(120) == 0, log(workplace)
        assert_trained_once(folder)
    finally:
        lab.start_node(node)
        lab.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    assert wait_until(lambda: "idle" in lab.run("sinfo", "-h", f"-n{node}", "-plow", "-o%T"), 60)


def test_a_job_without_enough_memory_is_named(workplace: Workplace) -> None:
    memory = ("executor.memory=100M", "launch.max_retries=0")
    launch = Launch(workplace.root, workplace.arguments(*SLURM, *HELD, *memory), "held_trial")
    study = workplace.study(*SLURM, *HELD)
    go_on(study)
    assert launch.process.wait(120) == 1
    assert "failed: its job needed more memory than it asked for" in log(workplace)
    run_study(study, executor(study))
    assert read_state(study.trials[0].trial.folder).state == "finished"


@pytest.mark.slow
def test_at_a_real_time_limit_a_job_saves_and_goes_on(workplace: Workplace) -> None:
    """Slurm sends USR2 up to a minute early: at once, or after half a minute."""
    launch, study = start(workplace, *HELD, "executor.time_minutes=1")
    folder, job = study.trials[0].trial.folder, job_of(study)
    assert wait_until(lambda: "SIGUSR2" in (folder / "log.txt").read_text(), 90)
    go_on(study)
    assert launch.process.wait(120) == 0
    assert (read_state(folder).state, job_of(study)) == ("finished", job)
    assert "tried again" not in log(workplace)


def test_a_second_launch_waits_for_the_first_ones_jobs(workplace: Workplace) -> None:
    launch, study = start(workplace, *HELD)
    second = Launch(workplace.root / "second", workplace.arguments(*SLURM, *HELD), "held_trial")
    said = workplace.root / "second" / "launch.log"
    assert wait_until(lambda: "another process is training it" in said.read_text(), 60)
    go_on(study)
    assert [launch.process.wait(120), second.process.wait(120)] == [0, 0]
    assert_trained_once(study.trials[0].trial.folder)


def test_cancelled_trials_save_and_those_that_wait_leave_the_queue(
    workplace: Workplace, lab: SlurmLab
) -> None:
    whole = ("study.seeds=[0,1]", "executor.cpus=4", "executor.parameters=['nodelist=one']")
    launch, study = start(workplace, *HELD, *whole)
    words = [f"runs_dir={workplace.runs}", "--config-dir", str(workplace.configs)]
    command = [sys.executable, "-m", "sweeps.cancel", "study=tiny", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert launch.process.wait(60) == 1
    assert sorted(read_state(planned.trial.folder).state for planned in study.trials) == ["cancelled"] * 2
    assert not set(lab.states().values()) & {"RUNNING", "PENDING"}
    go_on(study)
    run_study(study, executor(study))
    assert {read_state(planned.trial.folder).state for planned in study.trials} == {"finished"}
