"""A trial that is killed or stopped, at any moment, and run again gives the record of an undisturbed run."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_trial import tiny_overrides

from attnres.checkpoint import Checkpoints
from attnres.cli import run_command
from attnres.compose import compose_trial
from attnres.data.corpus import open_corpus
from attnres.errors import UserError
from attnres.metrics import METRICS_FILE, TIMING_KEYS, read_rows
from attnres.record import comparable, read_record
from attnres.status import read_status
from attnres.train import main, train
from attnres.trial import Trial, resolve

STEPS = 80
# Checkpoints after every step and a row for each: kills then often fall into the middle of writing one.
OFTEN = (
    "runtime.checkpoint_seconds=0.0001",
    "runtime.log_every_steps=1",
    "residual=attnres_full",
    "tracking.probes_at=[0.1,0.3,0.5,0.55,1]",
)

# As the launcher does it: processes forked from one that has imported torch already.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["attnres.learner", "attnres.train"])


def _child(overrides: list[str]) -> None:
    raise SystemExit(run_command(main, overrides))


def start(overrides: list[str]) -> BaseProcess:
    process = _server.Process(target=_child, args=(overrides,))
    process.start()
    return process


def finish(overrides: list[str]) -> int | None:
    process = start(overrides)
    process.join(300)
    return process.exitcode


def the_trial(overrides: list[str]) -> Trial:
    config = compose_trial(overrides)
    return resolve(config, open_corpus(config.data, config.model.context))


def rows_without_timing(folder: Path) -> list[dict[str, Any]]:
    rows = read_rows(folder / METRICS_FILE)
    return [{key: value for key, value in row.items() if key not in TIMING_KEYS} for row in rows]


def probes(folder: Path) -> dict[str, Any]:
    """The arrays of probes.npz as lists; NaN, which equals nothing, as None."""
    with np.load(folder / "probes.npz", allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    assert arrays["step"].tolist() == [8, 24, 40, 44, 80]
    return {
        name: np.where(array == array, array.astype(object), None).tolist() for name, array in arrays.items()
    }


def results(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """What must be equal, without what names the folder."""
    record = comparable(read_record(folder / "record.json"))
    record["config"].pop("runs_dir")
    return record, rows_without_timing(folder), probes(folder)


def wait_for(condition: Callable[[], bool], process: BaseProcess) -> None:
    while process.is_alive() and not condition():
        time.sleep(0.003)


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def overrides_for(root: Path, name: str, *more: str) -> list[str]:
    return tiny_overrides(root, *OFTEN, f"runs_dir={root / name}", *more, steps=STEPS)


def kill_at(overrides: list[str], folder: Path, row: int, delay_seconds: float) -> bool:
    """Start the trial and kill -9 it soon after its metrics have `row` rows; False if it ended before."""
    process = start(overrides)
    wait_for(lambda: lines(folder / METRICS_FILE) >= row, process)
    time.sleep(delay_seconds)
    alive = process.is_alive()
    if alive:
        os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.join()
    return alive


def check_kills(root: Path, rows: list[int]) -> None:
    calm, harried = overrides_for(root, "calm"), overrides_for(root, "harried")
    assert finish(calm) == 0
    expected = results(the_trial(calm).folder)

    folder, generator = the_trial(harried).folder, random.Random(1)
    kills = 0
    for index, row in enumerate(rows):
        kills += kill_at(harried, folder, row, generator.uniform(0, 0.02))
        if index % 2 and (folder / METRICS_FILE).exists():
            with open(folder / METRICS_FILE, "a") as file:
                file.write('{"kind": "train", "st')  # as a kill in the middle of a long row
    assert kills == len(rows), "the trial ended before all kills: make it longer"
    assert finish(harried) == 0
    assert results(folder) == expected
    # A kill before the trial had its folder leaves no trace of that attempt.
    assert len(rows) <= read_record(folder / "record.json")["timing"]["attempts"] <= len(rows) + 1
    left = {path.name for path in folder.iterdir()}
    assert left == {"config.yaml", "lock", "metrics.jsonl", "probes.npz", "record.json", "status.json"}


def test_killed_trial_gives_the_same_record(tmp_path: Path) -> None:
    check_kills(tmp_path, [0, 3, 40])


@pytest.mark.slow
def test_killed_at_many_moments(tmp_path: Path) -> None:
    generator = random.Random(2)
    check_kills(tmp_path, sorted(generator.randrange(0, STEPS - 10) for _ in range(20)))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, 143, marks=pytest.mark.slow),
    ],
)
def test_stop_signals_checkpoint_first(tmp_path: Path, number: signal.Signals, code: int) -> None:
    more = "runtime.checkpoint_seconds=1000"
    calm, stopped = overrides_for(tmp_path, "calm", more), overrides_for(tmp_path, "stopped", more)
    folder = the_trial(stopped).folder
    process = start(stopped)
    wait_for(lambda: lines(folder / METRICS_FILE) >= 20, process)
    os.kill(process.pid, number)  # type: ignore[arg-type]
    process.join(60)
    assert process.exitcode == code
    status = read_status(folder)
    assert status is not None and status["state"] == "preempted" and number.name in status["reason"]
    saved = Checkpoints(folder, folder.name).load()
    assert saved is not None and saved["run"]["step"] == status["step"] >= 20
    assert not (folder / "record.json").exists()
    assert finish(stopped) == finish(calm) == 0
    assert results(folder) == results(the_trial(calm).folder)


@pytest.mark.slow
def test_a_damaged_checkpoint_starts_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calm, damaged = overrides_for(tmp_path, "calm"), overrides_for(tmp_path, "damaged")
    folder = the_trial(damaged).folder
    assert kill_at(damaged, folder, 30, 0)
    checkpoint = folder / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    assert run_command(main, damaged) == finish(calm) == 0
    assert "checkpoint.damaged" in capsys.readouterr().err
    assert results(folder) == results(the_trial(calm).folder)


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    overrides = overrides_for(tmp_path, "runs")
    trial = the_trial(overrides)
    trial.folder.mkdir(parents=True)
    Checkpoints(trial.folder, "another").save({})
    config = compose_trial(overrides)
    with pytest.raises(UserError, match="belongs to trial another"):
        train(trial, open_corpus(config.data, config.model.context))
