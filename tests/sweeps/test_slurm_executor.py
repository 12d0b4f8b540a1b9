"""Trials as jobs of a real Slurm of one node: arrays, losses, preemption, time limits, launchers that die."""

from __future__ import annotations

import signal
import threading

import pytest
from held_trial import HELD, go_on
from slurm_lab import CPUS, MAX_ARRAY, SlurmLab
from slurm_support import ONE, SLURM, WHY_NOT, executor, job_of, losses, start
from sweeps_support import Workplace, assert_trained_once, fail_by_size_and_rule, run_study, wait_until

from attnres.errors import UserError
from sweeps.executor import LocalExecutor
from sweeps.state import read_state

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.usefixtures("lab"),
]


def test_a_study_in_arrays_has_the_losses_of_this_machine(workplace: Workplace, lab: SlurmLab) -> None:
    study = workplace.study(*SLURM)
    assert len(study.trials) == MAX_ARRAY + 1
    notes = run_study(study, executor(study))
    assert {read_state(planned.trial.folder).state for planned in study.trials} == {"finished"}
    jobs = [job_of(study, index) for index in range(4)]
    assert len({job.partition("_")[0] for job in jobs}) == 2, jobs  # an array holds three
    for planned in study.trials:
        assert_trained_once(planned.trial.folder)
        assert notes.about(planned.trial.name)[0] == "submitted"
    local = workplace.study(f"runs_dir={workplace.root / 'local'}")
    run_study(local, LocalExecutor(1, 20))
    assert losses(local) == losses(study)
    assert None not in losses(local)
    before = set(lab.states())
    assert run_study(study, executor(study)).lines == []  # a second launch submits nothing
    assert set(lab.states()) == before


def test_a_finished_job_that_is_requeued_does_nothing(workplace: Workplace, lab: SlurmLab) -> None:
    study = workplace.study(*SLURM, *ONE)
    run_study(study, executor(study))
    folder, job = study.trials[0].trial.folder, job_of(study)
    record = (folder / "record.json").stat().st_mtime_ns
    lab.run("scontrol", "requeue", job)
    assert wait_until(lambda: (folder / "log.txt").read_text().count("---") == 2, 60)
    assert wait_until(lambda: lab.states()[job] == "COMPLETED", 30)
    assert (folder / "record.json").stat().st_mtime_ns == record
    assert_trained_once(folder)


def test_without_requeues_the_launcher_tries_again(workplace: Workplace, lab: SlurmLab) -> None:
    launch, study = start(workplace, *HELD, "executor.requeues=0")
    job = job_of(study)
    lab.run("scancel", "--signal=USR2", job)
    go_on(study)
    assert launch.process.wait(120) == 0
    assert read_state(study.trials[0].trial.folder).attempts == 2
    assert job_of(study) != job
    assert "stopped from outside; tried again" in (workplace.root / "launch.log").read_text()


def test_jobs_outlive_a_killed_launcher_and_the_next_one_waits_for_them(
    workplace: Workplace, lab: SlurmLab
) -> None:
    # Each job asks for the whole node: one runs, and one waits.
    rules = "study.rules=[prenorm,{rule: attnres_block, num_blocks: 2}]"
    whole = (f"executor.cpus={CPUS}", "executor.parameters=['nodelist=one']")
    launch, study = start(workplace, *HELD, rules, *whole)
    launch.kill()
    before = set(lab.states())
    threading.Timer(2, go_on, [study]).start()
    notes = run_study(study, executor(study))
    assert set(lab.states()) == before  # nothing was submitted again
    said = [notes.about(planned.trial.name)[0] for planned in study.trials]
    assert "another process is training it" in said
    assert any(line.endswith("of an earlier launch is in the queue") for line in said)
    for planned in study.trials:
        assert_trained_once(planned.trial.folder)


@pytest.mark.parametrize("on_interrupt", ["cancel", "leave"])
def test_an_interrupt_cancels_the_jobs_or_leaves_them(
    workplace: Workplace, lab: SlurmLab, on_interrupt: str
) -> None:
    launch, study = start(workplace, *HELD, f"executor.on_interrupt={on_interrupt}")
    folder, job = study.trials[0].trial.folder, job_of(study)
    launch.process.send_signal(signal.SIGINT)
    assert launch.process.wait(60) == 128 + signal.SIGINT
    if on_interrupt == "cancel":
        assert lab.states()[job] == "CANCELLED"
        assert read_state(folder).state == "preempted"
        assert (folder / "checkpoint.pt").exists()
    else:
        assert lab.states()[job] == "RUNNING"
        go_on(study)
        assert wait_until(lambda: read_state(folder).state == "finished", 120)


def test_a_closed_terminal_cancels_nothing(workplace: Workplace, lab: SlurmLab) -> None:
    launch, study = start(workplace, *HELD)
    launch.process.send_signal(signal.SIGHUP)
    assert launch.process.wait(30) == -signal.SIGHUP
    assert lab.states()[job_of(study)] == "RUNNING"


def test_a_controller_that_restarts_costs_nothing(workplace: Workplace, lab: SlurmLab) -> None:
    launch, study = start(workplace, *HELD)
    lab.stop("slurmctld")
    assert not wait_until(lambda: launch.process.poll() is not None, 3)
    lab.start_controller()
    go_on(study)
    assert launch.process.wait(120) == 0
    assert_trained_once(study.trials[0].trial.folder)


def test_what_slurm_refuses_is_one_line(workplace: Workplace) -> None:
    study = workplace.study(*SLURM, *ONE, "executor.partition=nowhere")
    with pytest.raises(UserError, match="executor=slurm: .*invalid partition") as raised:
        run_study(study, executor(study))
    assert "\n" not in str(raised.value)


def test_a_job_that_ends_without_a_record_has_failed(workplace: Workplace) -> None:
    study = workplace.study(*SLURM, "study.sizes=[tiny_b]", "study.rules=[prenorm]")
    run_study(study, executor(study, fail_by_size_and_rule))
    state = read_state(study.trials[0].trial.folder)
    assert state.state == "failed"
    assert state.reason == "its process ended without an error and without a finished record"
