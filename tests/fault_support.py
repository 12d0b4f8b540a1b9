"""Faults that hit a trial in its own process, and what an undisturbed study comes to.

The targets are given to `LocalExecutor`; each strikes the trials of rule prenorm in their first attempt only,
so that the other trials show whether they were left alone, and a relaunch whether the study completes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from sweeps_support import Notes, Workplace, run_study

from attnres import checkpoint, record, train
from attnres.data.corpus import PackedCorpus
from attnres.learner import Learner
from attnres.metrics import MetricsFile
from attnres.record import comparable, read_record
from attnres.trial import Trial
from sweeps.executor import LocalExecutor
from sweeps.state import read_state
from sweeps.study import Study
from sweeps.trial_process import Target, train_trial

FILLER = ".filler"


def launch(study: Study, target: Target = train_trial) -> Notes:
    return run_study(study, LocalExecutor(1, 20, target))


def states(study: Study) -> dict[str, str]:
    return {planned.trial.id: read_state(planned.trial.folder).state for planned in study.trials}


def reason(trial: Trial) -> str:
    """Why a trial is where it is: one line."""
    found = read_state(trial.folder).reason or ""
    assert "\n" not in found
    return found


def results(study: Study) -> dict[str, Any]:
    """Records by trial, without times, the folders, which differ between two workplaces, and the commit, for
    whoever commits while tests run.
    """
    found = {}
    for planned in study.trials:
        values = comparable(read_record(planned.trial.folder / "record.json"))
        config = dict(values["config"])
        config["data"] = {k: v for k, v in config["data"].items() if k not in ("path", "cache_dir")}
        environment = {
            k: v for k, v in values["environment"].items() if k not in ("commit", "source_modified")
        }
        values |= {"config": config | {"runs_dir": None}, "environment": environment}
        found[planned.trial.id] = values
    return found


def struck(study: Study) -> list[Trial]:
    return [planned.trial for planned in study.trials if planned.rule == "prenorm"]


def spared(study: Study) -> list[Trial]:
    return [planned.trial for planned in study.trials if planned.rule != "prenorm"]


def assert_completes(study: Study, expected: Mapping[str, Any]) -> None:
    """The trials that were spared have finished, a relaunch leaves them alone and mends the others."""
    before = {trial.id: (trial.folder / "record.json").stat().st_mtime_ns for trial in spared(study)}
    launch(study)
    assert set(states(study).values()) == {"finished"}
    for trial in spared(study):
        assert (trial.folder / "record.json").stat().st_mtime_ns == before[trial.id]
    assert results(study) == expected


def first_attempt(trial: Trial) -> bool:
    """Whether this is the first attempt at a trial that is to be struck."""
    marker = trial.folder / "struck"
    if trial.config.residual.rule != "prenorm" or marker.exists():
        return False
    marker.touch()
    return True


def at_step(step: int, action: Callable[[], None]) -> None:
    """Do something before this optimizer step, in this process."""
    original = Learner.step

    def with_action(self: Learner, number: int, *batch: Any) -> Any:
        if number == step:
            action()
        return original(self, number, *batch)

    Learner.step = with_action  # type: ignore[method-assign]


def strike_with(number: int, trial: Trial, corpus: PackedCorpus) -> int:
    if first_attempt(trial):
        at_step(25, lambda: os.kill(os.getpid(), number))
    return train_trial(trial, corpus)


def killed(trial: Trial, corpus: PackedCorpus) -> int:
    return strike_with(signal.SIGKILL, trial, corpus)


def terminated(trial: Trial, corpus: PackedCorpus) -> int:
    return strike_with(signal.SIGTERM, trial, corpus)


def silent(trial: Trial, corpus: PackedCorpus) -> int:
    """Ends as if all were well, without a record."""
    if first_attempt(trial):
        at_step(25, lambda: os._exit(0))
    return train_trial(trial, corpus)


def raises(trial: Trial, corpus: PackedCorpus) -> int:
    """An exception of the trial's own, in the middle of its training."""

    def fail() -> None:
        raise RuntimeError("no such luck")

    if first_attempt(trial):
        at_step(25, fail)
    return train_trial(trial, corpus)


def fill(folder: Path) -> None:
    """Take every byte that the file system has left."""
    handle = os.open(folder / FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for size in (65536, 4096, 1):
            while True:
                os.write(handle, bytes(size))
    except OSError:
        return
    finally:
        os.close(handle)


def free(folder: Path) -> None:
    (folder / FILLER).unlink(missing_ok=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    fill(folder)
    try:
        yield
    finally:
        free(folder)


def full_at_checkpoint(trial: Trial, corpus: PackedCorpus) -> int:
    original = checkpoint.Checkpoints.save

    def save(self: checkpoint.Checkpoints, state: Mapping[str, Any]) -> bool:
        with full(trial.folder):
            assert original(self, state) is False
        return False

    if first_attempt(trial):
        checkpoint.Checkpoints.save = save  # type: ignore[method-assign]
    return train_trial(trial, corpus)


def full_at_metrics(trial: Trial, corpus: PackedCorpus) -> int:
    """From the second to the thirtieth row: the page that the file has already would hold some more."""
    original, calls = MetricsFile.write, [0]

    def write(self: MetricsFile, row: Mapping[str, Any]) -> None:
        calls[0] += 1
        with full(trial.folder) if 2 <= calls[0] <= 30 else nullcontext():
            original(self, row)

    if first_attempt(trial):
        MetricsFile.write = write  # type: ignore[method-assign]
    return train_trial(trial, corpus)


def full_at_record(trial: Trial, corpus: PackedCorpus) -> int:
    """The disk is full from the record on; whoever looks into it later has to make room."""

    def write(folder: Path, values: Mapping[str, Any]) -> Path:
        fill(trial.folder)
        return record.write_record(folder, values)

    if first_attempt(trial):
        train.write_record = write  # type: ignore[attr-defined]
    return train_trial(trial, corpus)


def clock_jumps(trial: Trial, corpus: PackedCorpus) -> int:
    """Wall-clock time goes forth and back by days, at every look."""
    real, looks = time.time, [0]

    def jumping() -> float:
        looks[0] += 1
        return real() + 1e6 * (-1) ** looks[0]

    time.time = jumping
    return train_trial(trial, corpus)


@contextmanager
def mounted(folder: Path, size: str, *, readonly: bool = False) -> Iterator[Path]:
    """A small file system at `folder`, or a skipped test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size}" + (",ro" if readonly else "")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def undisturbed(root: Path, *overrides: str) -> dict[str, Any]:
    """Results of the study `tiny` in a workplace of its own, where nothing goes wrong."""
    study = Workplace(root).study(*overrides)
    launch(study)
    assert set(states(study).values()) == {"finished"}
    return results(study)
