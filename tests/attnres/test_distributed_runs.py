"""One trial in several processes, whole runs of it: the same losses, and every way to end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from processes_support import (
    SLOW,
    STEPS,
    descendants,
    is_alive,
    largest_difference,
    overrides_for,
    record,
    run,
    start,
    stop_at,
    the_trial,
    wait_for_rows,
    wait_until,
    workers,
)

from attnres.checkpoint import Checkpoints
from attnres.record import comparable
from attnres.status import read_status

pytestmark = pytest.mark.slow
CLOSE_NATS = 1e-5
FULL = "residual=attnres_full"


@pytest.mark.parametrize(
    "rule", ["prenorm", "attnres_full", "attnres_block", "mhc", "hyper_connections", "denseformer"]
)
def test_curves_of_two_processes_are_those_of_one(tmp_path: Path, rule: str) -> None:
    options = (f"residual={rule}", *(["residual.num_blocks=2"] if rule == "attnres_block" else []))
    alone = overrides_for(tmp_path, "alone", *options)
    run(alone)
    for kind in ("ddp", "fsdp"):
        together = overrides_for(tmp_path, kind, *options, f"runtime={kind}")
        run(together)
        assert largest_difference(alone, together) < CLOSE_NATS
        assert largest_difference(alone, together, "grad_norm") < 10 * CLOSE_NATS
        assert record(together)["trial_id"] == record(alone)["trial_id"]


@pytest.mark.parametrize(
    "options",
    [
        ("runtime.microbatch_size=1",),
        ("runtime.checkpoint_activations=true",),
        ("runtime.dtype=bfloat16",),
        ("model.tie_embeddings=true", "data.validation_tokens=1088"),  # 34 windows: odd shares of 3
        ("residual.query=input", "residual.heads=2"),
        ("optim.grad_clip=0.05",),
    ],
    ids=lambda options: options[0].partition(".")[2],
)
def test_options_with_three_processes(tmp_path: Path, options: tuple[str, ...]) -> None:
    options = (FULL, "model.batch_size=6", *options)
    alone = overrides_for(tmp_path, "alone", *options)
    run(alone)
    for kind in ("ddp", "fsdp"):
        together = overrides_for(tmp_path, kind, *options, f"runtime={kind}", "runtime.processes=3")
        run(together)
        # A sum whose last bit differs may round to another bfloat16.
        tolerance = 2e-2 if "runtime.dtype=bfloat16" in options else CLOSE_NATS
        assert largest_difference(alone, together) < tolerance
        assert largest_difference(alone, together, "grad_norm") < 10 * tolerance


def test_muon_in_replicas(tmp_path: Path) -> None:
    alone, together = (overrides_for(tmp_path, name, "optim=muon") for name in ("alone", "ddp"))
    run(alone)
    run([*together, "runtime=ddp"])
    assert largest_difference(alone, together) < 1e-3  # its products are rounded to bfloat16


def test_resumed_by_the_same_processes_it_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    for kind in ("ddp", "fsdp"):
        options = (*SLOW, FULL, f"runtime={kind}")
        calm, stopped = (overrides_for(tmp_path, f"{kind}-{name}", *options) for name in ("calm", "stopped"))
        run(calm)
        stop_at(stopped, 4)
        run(stopped)
        mine, theirs = comparable(record(stopped)), comparable(record(calm))
        assert {**mine, "config": None} == {**theirs, "config": None}
        assert largest_difference(calm, stopped) == 0


def test_goes_on_with_other_processes(tmp_path: Path) -> None:
    options = (*SLOW, FULL)
    calm, moved = (overrides_for(tmp_path, name, *options, steps=40) for name in ("calm", "moved"))
    run(calm)
    steps = []
    for row, how in (
        (4, ["runtime=ddp"]),
        (9, []),
        (14, ["runtime=fsdp", "runtime.processes=4"]),
        (19, ["runtime=fsdp"]),
        (24, ["runtime=ddp"]),
    ):
        stop_at([*moved, *how], row)
        folder = the_trial(moved).folder
        saved = Checkpoints(folder, folder.name).load()
        assert saved is not None
        steps.append(saved["run"]["step"])
    assert steps == sorted(set(steps)) and steps[-1] < 40
    run(moved)
    assert largest_difference(calm, moved) < CLOSE_NATS
    assert record(moved)["timing"]["attempts"] == 6


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_trial(tmp_path: Path, rank: int) -> None:
    options = (*SLOW, FULL, "runtime=ddp", "runtime.checkpoint_seconds=0.001")
    calm, killed = (overrides_for(tmp_path, name, *options, steps=30) for name in ("calm", "killed"))
    run(calm)
    process = start(killed)
    folder = the_trial(killed).folder
    wait_for_rows(folder, 5, process)
    everyone = descendants(process.pid)
    os.kill(workers(process.pid)[rank], signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL, said
    reason = f"process {rank} of 2 was killed by SIGKILL"
    assert reason in said
    status = read_status(folder)
    assert status is not None and status["state"] == "failed" and status["reason"] == reason
    assert not any(is_alive(pid) for pid in everyone)
    run(killed)
    assert largest_difference(calm, killed) == 0
    assert record(killed)["timing"]["attempts"] == 2


@pytest.mark.parametrize("victim", ["trial", "torchrun"])
def test_no_process_survives(tmp_path: Path, victim: str) -> None:
    overrides = overrides_for(tmp_path, "killed", *SLOW, "runtime=fsdp", steps=500)
    process = start(overrides)
    wait_for_rows(the_trial(overrides).folder, 2, process)
    everyone = descendants(process.pid)
    assert len(everyone) >= 3
    agent = next(pid for pid, words in everyone.items() if "distributed.agent" in words)
    os.kill(process.pid if victim == "trial" else agent, signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    wait_until(lambda: not any(is_alive(pid) for pid in everyone), 20)
    if victim == "torchrun":
        assert process.returncode == 128 + signal.SIGKILL
        assert "torchrun was killed by SIGKILL" in said


@pytest.mark.parametrize("to_all", [False, True], ids=["to the trial", "to all, as Slurm does"])
def test_a_signal_saves_and_stops_all(tmp_path: Path, to_all: bool) -> None:
    overrides = overrides_for(tmp_path, "stopped", *SLOW, "runtime=fsdp", steps=500)
    process = start(overrides)
    folder = the_trial(overrides).folder
    wait_for_rows(folder, 3, process)
    everyone = descendants(process.pid)
    for pid in (process.pid, *everyone) if to_all else (process.pid,):
        os.kill(pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "Traceback" not in said
    status, saved = read_status(folder), Checkpoints(folder, folder.name).load()
    assert status is not None and saved is not None
    assert status["state"] == "preempted" and saved["run"]["step"] == status["step"] >= 3
    assert not any(is_alive(pid) for pid in everyone)


def test_a_signal_to_one_process_alone(tmp_path: Path) -> None:
    overrides = overrides_for(tmp_path, "stopped", *SLOW, "runtime=ddp", steps=500)
    process = start(overrides)
    wait_for_rows(the_trial(overrides).folder, 3, process)
    os.kill(workers(process.pid)[1], signal.SIGUSR2)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "stopped by SIGUSR2" in said


def test_a_signal_before_the_processes_listen(tmp_path: Path) -> None:
    overrides = overrides_for(tmp_path, "stopped", "runtime=ddp", steps=500)
    process = start(overrides)
    wait_until(lambda: len(descendants(process.pid)) >= 1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said, said


def test_diverged_is_found_by_all(tmp_path: Path) -> None:
    overrides = overrides_for(
        tmp_path, "diverged", "runtime=fsdp", "optim.learning_rate=1e4", "optim.grad_clip=null", steps=80
    )
    assert "diverged" in run(overrides, code=3)
    assert record(overrides)["status"] == "diverged"


def test_two_at_once(tmp_path: Path) -> None:
    """The second one finds the trial taken, by the first process of the first one."""
    overrides = overrides_for(tmp_path, "busy", *SLOW, "runtime=ddp", steps=500)
    process = start(overrides)
    wait_for_rows(the_trial(overrides).folder, 2, process)
    assert f"process {workers(process.pid)[0]} is already training" in run(overrides, code=2)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_weights_and_probes_are_whole(tmp_path: Path) -> None:
    options = (FULL, "runtime.keep_weights=true", "tracking.probes_at=[0,0.5,1]")
    import torch

    found = {}
    for name, how in {"alone": [], "ddp": ["runtime=ddp"], "fsdp": ["runtime=fsdp"]}.items():
        overrides = overrides_for(tmp_path, name, *options, *how)
        run(overrides)
        folder = the_trial(overrides).folder
        with np.load(folder / "probes.npz") as file:
            arrays = {key: file[key] for key in file.files if file[key].dtype.kind == "f"}
        found[name] = torch.load(folder / "weights.pt", weights_only=True)["model"], arrays
    weights, arrays = found.pop("alone")
    assert arrays["step" if "step" in arrays else "loss_nats"].shape[0] == 3
    for other_weights, other_arrays in found.values():
        assert other_weights.keys() == weights.keys() and other_arrays.keys() == arrays.keys()
        for key, value in weights.items():
            torch.testing.assert_close(other_weights[key], value, rtol=1e-3, atol=1e-4)
        for key, array in arrays.items():
            np.testing.assert_allclose(other_arrays[key], array, rtol=2e-3, atol=1e-5, equal_nan=True)


def test_torchrun_by_the_user(tmp_path: Path) -> None:
    import subprocess
    import sys

    from processes_support import ROOT

    alone, together = overrides_for(tmp_path, "alone", FULL), overrides_for(tmp_path, "torchrun", FULL)
    run(alone)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "attnres.train", *together, "runtime=fsdp"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("record: ") == 1
    assert largest_difference(alone, together) < CLOSE_NATS

    done = subprocess.run(
        [*command, "runtime.processes=4", f"runs_dir={tmp_path / 'x'}"][:-1],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    assert "runtime.processes=4: torchrun has started WORLD_SIZE=2 processes" in done.stderr
    assert STEPS == 20
