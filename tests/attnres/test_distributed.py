"""One trial in several processes: its settings, what is made of their ends, and one short run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes_support import largest_difference, record, rows, the_trial
from ranks_support import Leg, train_in_ranks, train_leg
from tiny_trial import tiny_overrides, tiny_trial

from attnres.calibrate import calibrate
from attnres.compose import compose_trial
from attnres.distributed import launched, messages, parent
from attnres.distributed.group import Group, LostProcess, is_lost_connection
from attnres.errors import ConfigError, UserError
from attnres.lock import TrialBusy
from attnres.peak_memory import training_bytes_at_least
from attnres.record import read_record
from attnres.run_state import RunState
from attnres.status import StatusFile, read_status
from attnres.stop import Preempted
from attnres.train import train


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["runtime.processes=2"], "runtime.processes=2: one trial in several processes needs runtime=ddp"),
        (["runtime=ddp", "runtime.processes=0"], "runtime.processes=0: must be positive"),
        (["runtime=fsdp", "runtime.processes=3"], "runtime.processes=3: does not divide model.batch_size=4"),
        (["runtime=ddp", "runtime.microbatch_size=4"], "runtime.microbatch_size=4: does not divide"),
        (["runtime=fsdp", "optim=muon"], "runtime.parallel=fsdp: optim=muon updates whole matrices"),
        (["runtime.parallel=dp"], "runtime.parallel=dp"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, words: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_trial(tiny_overrides(tmp_path, *words))
    assert named in str(caught.value)


def test_processes_are_not_part_of_the_identity(tmp_path: Path) -> None:
    trials = [tiny_trial(tmp_path, *words)[0] for words in ((), ("runtime=ddp",), ("runtime=fsdp",))]
    assert len({trial.id for trial in trials}) == 1
    assert [trial.config.runtime.cores for trial in trials] == [1, 2, 2]
    alone, replicas, shards = map(training_bytes_at_least, trials)
    assert alone < shards < replicas < 2 * alone


def test_what_torchrun_started_is_what_the_trial_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tiny_trial(tmp_path, "runtime=ddp")[0].config.runtime
    launched.check_world_size(runtime)  # nobody has started anything
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"runtime.processes=2: torchrun has started WORLD_SIZE=3"):
        launched.check_world_size(runtime)
    with pytest.raises(ConfigError, match=r"runtime.parallel=none: .*choose runtime=ddp or runtime=fsdp"):
        launched.check_world_size(replace(runtime, parallel="none", processes=1))
    launched.check_world_size(replace(runtime, processes=3))


def test_several_processes_are_not_timed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runtime.processes=2: a trial of several processes is not timed"):
        calibrate(*tiny_trial(tmp_path, "runtime=ddp"))


def test_more_processes_than_the_machine_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(parent, "_start", lambda *_: pytest.fail("it starts them"))
    trial, corpus = tiny_trial(tmp_path, "runtime=ddp", "runtime.processes=64", "model.batch_size=64")
    with pytest.raises(ConfigError, match=r"runtime\.processes=64: this machine has 2 cores"):
        train(trial, corpus)
    assert not trial.folder.exists()


def test_a_group_of_one_decides_alone() -> None:
    group = Group()
    assert (group.main, group.size, group.any(True), group.any(False)) == (True, 1, True, False)
    assert group.stop_wish(15) == 15 and group.shared(lambda: "it") == "it" and group.mean(2.5) == 2.5


def test_which_errors_mean_that_another_process_is_gone() -> None:
    assert is_lost_connection(LostProcess("gone"))
    assert is_lost_connection(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    assert not is_lost_connection(RuntimeError("size mismatch"))
    assert not is_lost_connection(ValueError("gloo"))


def result(tmp_path: Path, code: int = 1, asked: Preempted | None = None, **files: object) -> None:
    """What the trial's own process makes of the messages that its processes left."""
    trial, corpus = tiny_trial(tmp_path, "runtime=ddp")
    trial.folder.mkdir(parents=True, exist_ok=True)
    StatusFile(trial.folder, trial.steps).update()
    folder = tmp_path / "messages"
    folder.mkdir()
    for name, message in files.items():
        messages.write(folder, name.replace("_", "-") + ".json", message)
    parent._result(trial, corpus, folder, code, asked)


def failure(rank: int, reason: str, origin: str) -> dict[str, object]:
    state = RunState(step=7, first_loss_nats=3.0)
    state.recent_losses.append(2.5)
    told = {"rank": rank, "reason": reason, "origin": origin}
    return told | {"state": state.to_dict(), "environment": {"cpu": "x"}}


def test_outcomes_are_those_of_a_single_process(tmp_path: Path) -> None:
    for name, outcome, kind, said in (
        ("a", {"kind": "stopped", "wish": 15}, Preempted, "stopped by SIGTERM"),
        ("b", {"kind": "busy", "pid": 7}, TrialBusy, "process 7 is already training"),
        ("c", {"kind": "mistake", "text": "x=1: no"}, UserError, "x=1: no"),
    ):
        with pytest.raises(kind, match=said):
            result(tmp_path / name, outcome=outcome)
    with pytest.raises(Preempted, match="SIGINT"):
        result(tmp_path / "d", asked=Preempted(2), agent=[{"rank": 0, "code": -15}])


@pytest.mark.parametrize(
    ("files", "code", "reason"),
    [
        ({"agent": [{"rank": 1, "code": -9}]}, 137, "process 1 of 2 was killed by SIGKILL"),
        ({"agent": [{"rank": 0, "code": 1}, {"rank": 1, "code": -11}]}, 139, "process 1 of 2 was killed by"),
        ({"failure_0": failure(0, "RuntimeError: gloo", "lost")}, 255, "RuntimeError: gloo"),
        ({"agent": [{"rank": 1, "code": 1}]}, 1, "torchrun ended with exit code 1"),
    ],
)
def test_a_process_that_ended_from_outside(
    tmp_path: Path, files: dict[str, object], code: int, reason: str
) -> None:
    with pytest.raises(parent.ProcessesFailed, match=reason) as caught:
        result(tmp_path, **files)
    assert caught.value.exit_code == code
    folder = tiny_trial(tmp_path)[0].folder
    status = read_status(folder)
    assert status is not None and (status["state"], status["attempts"]) == ("failed", 1)
    assert reason in status["reason"] and not (folder / "record.json").exists()


def test_an_exception_of_another_process_is_recorded(tmp_path: Path) -> None:
    told: dict[str, object] = {
        "failure_0": failure(0, "gloo", "lost"),
        "failure_1": failure(1, "ValueError: no", "own"),
    }
    # The first process did not end of its own accord.
    told["agent"] = [{"rank": 0, "code": -9}, {"rank": 1, "code": 1}]
    with pytest.raises(parent.ProcessesFailed) as caught:
        result(tmp_path, **told)
    record = read_record(tiny_trial(tmp_path)[0].folder / "record.json")
    assert record["status"] == "failed" and record["reason"] == "process 1 of 2: ValueError: no"
    assert (record["steps"], record["timing"]["attempts"], caught.value.exit_code) == (7, 1, 1)


def test_two_processes_have_the_curve_and_weights_of_one(tmp_path: Path) -> None:
    """Shards and replicas, and a trial that goes from shards to replicas to one process. A real torchrun
    starts the trials of `test_distributed_runs.py`.
    """
    options = (
        "residual=attnres_full", "runtime.log_every_steps=1", "runtime.keep_weights=true",
        "optim.learning_rate=0.005", "optim.grad_clip=0.5",
        "data.validation_tokens=1056", "tracking.probes_at=[0.5]",
    )  # fmt: skip

    def overrides(name: str, *more: str) -> list[str]:
        return tiny_overrides(tmp_path, *options, f"runs_dir={tmp_path / name}", *more, steps=8)

    alone, shards = overrides("alone"), overrides("shards", "runtime=fsdp")
    replicas = overrides("replicas", "runtime=ddp", "runtime.microbatch_size=1")
    halves, pair = overrides("halves", "runtime.microbatch_size=2"), overrides("pair", "runtime=ddp")
    train_leg(Leg(alone))
    train_leg(Leg(halves))
    moved = [Leg(overrides("moved", f"runtime={kind}"), stop_after=3) for kind in ("fsdp", "ddp")]
    train_in_ranks([Leg(shards), Leg(replicas), Leg(pair), *moved], tmp_path)
    train_leg(Leg(overrides("moved")))
    assert record(alone)["validation"]["windows"] == 33  # an odd share
    assert record(overrides("moved"))["timing"]["attempts"] == 3
    assert any(row["grad_norm"] > 0.5 for row in rows(alone) if row["kind"] == "train")
    weights = weights_of(alone)
    for other in (shards, replicas, overrides("moved")):
        assert record(other)["status"] == "finished"
        assert (the_trial(other).folder / "probes.npz").exists()
        assert largest_difference(alone, other) < 1e-5
        # Adam and clipping hide a gradient that is too large by a factor; its norm does not.
        assert largest_difference(alone, other, "grad_norm") < 1e-4
        for name, value in weights_of(other).items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)
    # Two gradients have one sum: replicas train bit for bit as one process does with the same microbatches.
    assert largest_difference(halves, pair, "grad_norm") == 0
    assert largest_difference(halves, pair) < 1e-6  # only the mean of the losses is taken in another order
    halved = weights_of(halves)
    assert all(torch.equal(value, halved[name]) for name, value in weights_of(pair).items())


def weights_of(overrides: list[str]) -> dict[str, torch.Tensor]:
    file = the_trial(overrides).folder / "weights.pt"
    return dict(torch.load(file, weights_only=True)["model"])


def test_a_process_ends_without_the_destructors_of_libraries() -> None:
    """What Python has registered for its end is run, and its output is whole; what C++ has is left out."""
    code = """
import atexit, ctypes, sys
from attnres.distributed.launched import leave
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)  # as a destructor that goes wrong
atexit.register(print, "registered")
print("said")
leave(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said\nregistered\n", "")
