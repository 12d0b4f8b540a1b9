"""Trials as jobs of a real Slurm of one node: arrays, losses, preemption, time limits, launchers that die."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_launch import Launch
from slurm_lab import CPUS, MAX_ARRAY, SlurmLab, why_not
from sweeps_support import Workplace, assert_trained_once, fail_by_size_and_rule, run_study, wait_until

from attnres.errors import UserError
from attnres.status import read_status
from sweeps.executor import LocalExecutor
from sweeps.executor_config import SlurmConfig
from sweeps.slurm_executor import NOTE_FILE, SlurmExecutor
from sweeps.state import read_state
from sweeps.study import Study
from sweeps.trial_process import Target, train_trial

NO_SUBMITIT = "submitit is not installed: pip install '.[slurm]'"
WHY_NOT = why_not() or (NO_SUBMITIT if importlib.util.find_spec("submitit") is None else None)
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]

SLURM = ("executor=slurm", "executor.poll_seconds=0.5", "executor.signal_seconds=30")
ONE = ("study.sizes=[tiny_a]", "study.rules=[prenorm]")
# Some ten seconds of training: long enough to be caught in the middle.
LONGER = ("budget.tokens=96000", "runtime.checkpoint_seconds=0.3")


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    with SlurmLab() as lab:
        yield lab


@pytest.fixture(autouse=True)
def _use_lab(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("SLURM_CONF", str(lab.config))
    # Jobs import this checkout, and the tests' own targets.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "tests")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    lab.run("scancel", "--user=root", "--signal=KILL", check=False)
    lab.run("scancel", "--user=root", check=False)


def executor(study: Study, target: Target = train_trial) -> SlurmExecutor:
    settings = study.config.executor
    assert isinstance(settings, SlurmConfig)
    return SlurmExecutor(settings, study, target)


def job_of(study: Study, index: int = 0) -> str:
    note = study.trials[index].trial.folder / NOTE_FILE
    return str(json.loads(note.read_text())["job"])


def trains(study: Study) -> bool:
    """Whether a trial is some steps into its training."""
    states = [read_state(planned.trial.folder) for planned in study.trials]
    return any(state.state == "running" and state.step for state in states)


def losses(study: Study) -> list[float | None]:
    return [read_state(planned.trial.folder).loss_nats for planned in study.trials]


def start(workplace: Workplace, *more: str) -> tuple[Launch, Study]:
    """A launcher in a process of its own, once a trial trains."""
    study = workplace.study(*SLURM, *more)
    launch = Launch(workplace.root, workplace.arguments(*SLURM, *more))
    assert wait_until(lambda: trains(study), 60), (workplace.root / "launch.log").read_text()
    return launch, study


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


def test_a_preempted_job_saves_and_goes_on_by_itself(workplace: Workplace, lab: SlurmLab) -> None:
    launch, study = start(workplace, *ONE, *LONGER)
    folder, job = study.trials[0].trial.folder, job_of(study)
    lab.run("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
    assert wait_until(lambda: lab.states()[job] == "PENDING", 40), lab.states()
    assert (folder / "checkpoint.pt").exists()
    assert launch.process.wait(120) == 0
    state = read_state(folder)
    assert (state.state, state.attempts) == ("finished", 2)
    assert job_of(study) == job
    assert "continues at step" in (folder / "log.txt").read_text()
    assert "tried again" not in (workplace.root / "launch.log").read_text()


def test_at_its_time_limit_a_job_saves_and_goes_back_into_the_queue(
    workplace: Workplace, lab: SlurmLab
) -> None:
    launch, study = start(workplace, *ONE, *LONGER)
    folder, job = study.trials[0].trial.folder, job_of(study)
    # The signal that Slurm sends before the limit; a limit takes minutes to come.
    lab.run("scancel", "--signal=USR2", job)
    assert launch.process.wait(120) == 0
    state = read_state(folder)
    assert (state.state, state.attempts) == ("finished", 2)
    assert job_of(study) == job
    assert "stopped by SIGUSR2 after a checkpoint" in (folder / "log.txt").read_text()


def test_without_requeues_the_launcher_tries_again(workplace: Workplace, lab: SlurmLab) -> None:
    launch, study = start(workplace, *ONE, *LONGER, "executor.requeues=0")
    job = job_of(study)
    lab.run("scancel", "--signal=USR2", job)
    assert launch.process.wait(120) == 0
    assert read_state(study.trials[0].trial.folder).attempts == 2
    assert job_of(study) != job
    assert "stopped from outside; tried again" in (workplace.root / "launch.log").read_text()


def test_jobs_outlive_a_killed_launcher_and_the_next_one_waits_for_them(
    workplace: Workplace, lab: SlurmLab
) -> None:
    # Each job asks for the whole node: one runs, and one waits.
    launch, study = start(workplace, "study.sizes=[tiny_a]", *LONGER, f"executor.cpus={CPUS}")
    launch.kill()
    before = set(lab.states())
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
    launch, study = start(workplace, *ONE, *LONGER, f"executor.on_interrupt={on_interrupt}")
    folder, job = study.trials[0].trial.folder, job_of(study)
    launch.process.send_signal(signal.SIGINT)
    assert launch.process.wait(60) == 128 + signal.SIGINT
    if on_interrupt == "cancel":
        assert lab.states()[job] == "CANCELLED"
        assert read_state(folder).state == "preempted"
        assert (folder / "checkpoint.pt").exists()
    else:
        assert lab.states()[job] == "RUNNING"
        assert wait_until(lambda: read_state(folder).state == "finished", 120)


def test_a_closed_terminal_cancels_nothing(workplace: Workplace, lab: SlurmLab) -> None:
    launch, study = start(workplace, *ONE, *LONGER)
    launch.process.send_signal(signal.SIGHUP)
    assert launch.process.wait(30) == -signal.SIGHUP
    assert lab.states()[job_of(study)] == "RUNNING"


def test_a_job_that_its_user_cancels_is_not_submitted_again(workplace: Workplace, lab: SlurmLab) -> None:
    launch, study = start(workplace, *ONE, *LONGER)
    lab.run("scancel", job_of(study))
    assert launch.process.wait(60) == 1
    log = (workplace.root / "launch.log").read_text()
    assert "preempted: its job was cancelled; a launch submits it again" in log
    assert "tried again" not in log


def test_a_killed_trial_is_submitted_again(workplace: Workplace, lab: SlurmLab) -> None:
    launch, study = start(workplace, *ONE, *LONGER)
    status = read_status(study.trials[0].trial.folder)
    assert status is not None
    os.kill(status["pid"], signal.SIGKILL)
    assert launch.process.wait(120) == 0
    assert read_state(study.trials[0].trial.folder).attempts == 2
    assert "killed by SIGKILL; tried again" in (workplace.root / "launch.log").read_text()


def test_a_controller_that_restarts_costs_nothing(workplace: Workplace, lab: SlurmLab) -> None:
    launch, study = start(workplace, *ONE, *LONGER)
    lab.stop("slurmctld")
    assert not wait_until(lambda: launch.process.poll() is not None, 3)
    lab.start_controller()
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
