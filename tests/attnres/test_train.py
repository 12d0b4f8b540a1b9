"""Training one trial: what is learned, what is recorded, and how it ends."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_trial import tiny_overrides, tiny_trial

from attnres import train as train_module
from attnres.cli import run_command
from attnres.data import sampler
from attnres.errors import RecordError, UserError
from attnres.evaluate import summarise
from attnres.learner import Learner
from attnres.lock import TrialBusy, TrialLock
from attnres.metrics import METRICS_FILE, read_rows
from attnres.record import RECORD_FILE, read_record
from attnres.run_state import DIVERGENCE_MARGIN_NATS, RECENT_STEPS, Diverged, RunState
from attnres.status import StatusFile, read_status
from attnres.stop import Preempted
from attnres.train import main, train
from sweeps.state import read_state

# The compiler of torch 2.13 imports parts of torch that torch has deprecated.
TORCH_WARNS_OF_ITSELF = pytest.mark.filterwarnings("default")
GOLDEN = {
    "prenorm": [5.8939157, 5.4462805, 5.3222899, 4.9531679],
    "attnres_full": [5.8939152, 5.4409309, 5.2770848, 4.8797440],
}


@pytest.mark.parametrize("rule", GOLDEN)
def test_golden_steps(tmp_path: Path, rule: str) -> None:
    trial, corpus = tiny_trial(tmp_path, f"residual={rule}", "optim.learning_rate=0.01")
    learner, tokens = Learner(trial), corpus.train()
    model = trial.config.model
    losses = [
        learner.step(s + 1, *sampler.batch(tokens, 0, s, model.batch_size, model.context)).loss_nats
        for s in range(4)
    ]
    assert losses == pytest.approx(GOLDEN[rule], rel=1e-4), (
        "the first losses of a fixed model on fixed text have changed. Update the numbers only in a change "
        "that means to alter initial values, the model's or a rule's equations, the sampler, the optimizer "
        "or the schedule, and say so in its message: records from before and after it must not be compared"
    )


def test_learns_and_records(tmp_path: Path) -> None:
    """Random words: bytes alone cost the unigram entropy; within words the next byte is nearly certain."""
    trial, corpus = tiny_trial(
        tmp_path, "residual=attnres_block", "residual.num_blocks=2", "optim.learning_rate=0.02", steps=150
    )
    text = corpus.validation()
    frequencies = np.bincount(text) / len(text)
    unigram_nats = -sum(p * math.log(p) for p in frequencies if p)
    record = train(trial, corpus)

    assert record["status"] == "finished" and record["reason"] is None
    assert record["validation"]["loss_nats"] < 0.6 * unigram_nats
    assert record == read_record(trial.folder / "record.json")
    assert (record["steps"], record["tokens"], record["schedule_complete"]) == (150, 150 * 128, True)
    assert [row["step"] for row in record["evaluations"]] == [50, 100, 150]
    assert [row["tokens_evaluated"] for row in record["evaluations"]] == [256, 256, 1024]
    final = record["evaluations"][-1]
    assert {key: record["validation"][key] for key in ("loss_nats", "standard_error", "bits_per_byte")} == {
        key: final[key] for key in ("loss_nats", "standard_error", "bits_per_byte")
    }
    assert record["training"]["first_loss_nats"] > record["training"]["last_loss_nats"]
    assert record["training_flops"]["total"] == trial.counts.flops_per_token * trial.tokens
    timing = record["timing"]
    assert 0 < timing["train_seconds"] < timing["wall_seconds"]
    assert timing["train_seconds"] + timing["evaluation_seconds"] <= timing["wall_seconds"]

    rows = read_rows(trial.folder / METRICS_FILE)
    training = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in training] == [1, *range(10, 151, 10)]
    assert training[-1]["learning_rate"] == 0.1 * 0.02
    assert all(row["flops"] == row["tokens"] * trial.counts.flops_per_token for row in rows)
    status = read_status(trial.folder)
    assert status is not None and status["state"] == "finished" and status["step"] == 150
    assert not (trial.folder / "checkpoint.pt").exists()

    # A second call trains nothing and returns the record as it is.
    before = (trial.folder / "record.json").stat().st_mtime_ns
    assert train(trial, corpus) == record
    assert (trial.folder / "record.json").stat().st_mtime_ns == before


def test_microbatches_give_the_same_loss_and_gradient(tmp_path: Path) -> None:
    gradients, losses = [], []
    for size in ("null", "1", "2"):
        trial, corpus = tiny_trial(tmp_path, f"runtime.microbatch_size={size}")
        learner = Learner(trial)
        losses.append(learner.accumulate_gradients(*sampler.batch(corpus.train(), 0, 0, 4, 32)).item())
        gradients.append([p.grad for p in learner.model.parameters() if p.grad is not None])
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_gradient_is_clipped_to_the_limit(tmp_path: Path) -> None:
    """With Adam a clipped step is hard to see, so look at the gradient itself."""
    trial, corpus = tiny_trial(tmp_path, "optim.grad_clip=0.01")
    learner, seen = Learner(trial), []

    def note(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        grads = [p.grad for p in learner.model.parameters() if p.grad is not None]
        seen.append(torch.nn.utils.get_total_norm(grads).item())

    learner.optimizer.register_step_pre_hook(note)
    result = learner.step(1, *sampler.batch(corpus.train(), 0, 0, 4, 32))
    assert result.grad_norm > 0.1
    assert seen == [pytest.approx(0.01, rel=1e-3)]


@pytest.mark.parametrize(
    ("option", "tolerance"),
    [
        ("runtime.dtype=bfloat16", 1e-2),
        ("runtime.checkpoint_activations=true", 1e-6),
        pytest.param("runtime.compile=true", 1e-4, marks=[pytest.mark.slow, TORCH_WARNS_OF_ITSELF]),
    ],
)
def test_options_of_the_runtime_keep_the_losses(tmp_path: Path, option: str, tolerance: float) -> None:
    losses = []
    for more in ([], [option]):
        trial, corpus = tiny_trial(tmp_path, "residual=attnres_full", *more)
        learner, tokens = Learner(trial), corpus.train()
        losses.append([learner.step(s + 1, *sampler.batch(tokens, 0, s, 4, 32)).loss_nats for s in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


@pytest.mark.slow
@TORCH_WARNS_OF_ITSELF
def test_compiling_is_start_up_and_not_training(tmp_path: Path) -> None:
    trial, corpus = tiny_trial(tmp_path, "runtime.compile=true", steps=5)
    timing = train(trial, corpus)["timing"]
    assert timing["startup_seconds"] > 10 * timing["train_seconds"]


def test_a_non_finite_loss_is_recorded_as_diverged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["optim.learning_rate=1e30", "optim.grad_clip=null", "schedule.warmup_fraction=0"]
    trial, corpus = tiny_trial(tmp_path, *options)
    record = train(trial, corpus)
    assert record["status"] == "diverged" and record["validation"] is None
    assert record["steps"] < trial.steps and not record["schedule_complete"]
    assert record["reason"] in capsys.readouterr().err
    last = read_rows(trial.folder / METRICS_FILE)[-1]
    assert last["kind"] == "diverged" and last["reason"] == record["reason"]
    assert main(tiny_overrides(tmp_path, *options)) == 3  # known already: not trained again
    status = read_status(trial.folder)
    assert status is not None and (status["state"], status["reason"]) == ("diverged", record["reason"])


def test_a_loss_above_the_start_for_long_is_divergence() -> None:
    state = RunState()
    state.finish_step(5.0)
    for _ in range(RECENT_STEPS):  # a margin for noise
        state.finish_step(5.0 + DIVERGENCE_MARGIN_NATS / 2)
    with pytest.raises(Diverged, match="above the 5.000 of the first step"):
        for _ in range(RECENT_STEPS):
            state.finish_step(6.0)
    state = RunState()
    for loss in [5.0] + [9.0] * 10 + [3.0] * 500:  # a spike that heals
        state.finish_step(loss)


def test_a_validation_loss_that_is_not_finite_diverges() -> None:
    with pytest.raises(Diverged, match="validation loss is nan"):
        summarise(np.array([1.0, math.nan]), np.zeros((2, 4), dtype=np.int64))


def test_standard_error_and_bits_per_byte() -> None:
    targets = np.full((4, 8), 65)
    targets[0, 0] = 256  # ends a document: costs bits, is no byte
    evaluation = summarise(np.array([1.0, 2.0, 3.0, 4.0]), targets)
    assert evaluation.loss_nats == 2.5
    assert evaluation.standard_error == pytest.approx(math.sqrt(5 / 3) / 2)
    assert evaluation.bits_per_byte == pytest.approx(2.5 * 32 / (math.log(2) * 31))
    assert summarise(np.array([1.0]), targets[:1]).standard_error is None


def test_a_single_validation_window_has_no_standard_error(tmp_path: Path) -> None:
    """Its record can be written: the training was not for nothing."""
    trial, corpus = tiny_trial(
        tmp_path, "data.validation_tokens=32", "data.interim_validation_tokens=32", steps=4
    )
    record = train(trial, corpus)
    assert (record["status"], record["validation"]["windows"]) == ("finished", 1)
    assert record["validation"]["standard_error"] is None
    assert read_record(trial.folder / RECORD_FILE) == record


def test_a_failure_is_recorded_and_does_not_block(tmp_path: Path) -> None:
    trial, corpus = tiny_trial(tmp_path)
    broken = dataclasses.replace(corpus, folder=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        train(trial, broken)
    record = read_record(trial.folder / "record.json")
    assert record["status"] == "failed" and "nowhere" in record["reason"] and "\n" not in record["reason"]
    assert record["validation"] is None and record["training"] is None
    status = read_status(trial.folder)
    assert status is not None and status["state"] == "failed"
    assert train(trial, corpus)["status"] == "finished"
    assert read_record(trial.folder / "record.json")["timing"]["attempts"] == 2


def test_what_follows_a_failed_attempt_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch would leave a trial whose failure was its own as it is."""
    trial, corpus = tiny_trial(tmp_path, steps=4)
    step = Learner.step

    def strike(self: Learner, number: int, *batch: Any) -> Any:
        if read_state(trial.folder).attempts == 1:
            raise ValueError("no luck")
        assert (read_status(trial.folder) or {})["saved_step"] is None  # it had none to go on from
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self, number, *batch)

    monkeypatch.setattr(Learner, "step", strike)
    with pytest.raises(ValueError, match="no luck"):
        train(trial, corpus)
    assert (read_state(trial.folder).state, read_state(trial.folder).origin) == ("failed", "own")
    StatusFile(trial.folder, trial.steps, new_attempt=False).saved(3)  # of a checkpoint that is gone
    (trial.folder / ".record.json.1.tmp").touch()  # of a kill in the midst of writing
    (trial.folder / ".checkpoint.pt.1.tmp").touch()
    with pytest.raises(Preempted):
        train(trial, corpus)
    assert read_state(trial.folder).state == "preempted"
    assert (read_status(trial.folder) or {})["saved_step"] == 1
    assert not list(trial.folder.glob(".*.tmp"))
    monkeypatch.setattr(Learner, "step", step)
    record = train(trial, corpus)
    (trial.folder / "checkpoint.pt").touch()  # a kill between the record and the end
    assert train(trial, corpus) == record and not (trial.folder / "checkpoint.pt").exists()


def test_a_busy_trial_is_left_alone(tmp_path: Path) -> None:
    trial, corpus = tiny_trial(tmp_path)
    with TrialLock(trial.folder), pytest.raises(TrialBusy):
        train(trial, corpus)
    assert [path.name for path in trial.folder.iterdir()] == ["lock"]


def test_a_torn_record_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial, corpus = tiny_trial(tmp_path, steps=5)
    trial.folder.mkdir(parents=True)
    (trial.folder / "record.json").write_text("{")
    assert train(trial, corpus)["status"] == "finished"
    assert (trial.folder / "record.damaged").read_text() == "{"
    assert "record.damaged" in capsys.readouterr().err


def test_a_record_of_another_schema_is_not_overwritten(tmp_path: Path) -> None:
    trial, corpus = tiny_trial(tmp_path)
    trial.folder.mkdir(parents=True)
    (trial.folder / "record.json").write_text('{"schema": 99}')
    with pytest.raises(UserError, match=r"record\.json.*schema=99"):
        train(trial, corpus)
    assert (trial.folder / "record.json").read_text() == '{"schema": 99}'


def test_weights_are_kept_when_asked(tmp_path: Path) -> None:
    trial, corpus = tiny_trial(tmp_path, "runtime.keep_weights=true", steps=5)
    train(trial, corpus)
    weights = torch.load(trial.folder / "weights.pt", weights_only=True)
    learner = Learner(trial)
    learner.model.load_state_dict(weights["model"])
    moved = [
        not torch.equal(a, b)
        for a, b in zip(Learner(trial).model.parameters(), learner.model.parameters(), strict=True)
    ]
    assert all(moved) and weights["trial_id"] == trial.id


def test_command_prints_record_and_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tiny_overrides(tmp_path, "runtime.progress=lines", steps=5)) == 0
    captured = capsys.readouterr()
    record_line, result_line = captured.out.splitlines()
    record = read_record(Path(record_line.removeprefix("record: ")))
    assert f"{record['validation']['loss_nats']:.4f}" in result_line
    assert "step 5/5" in captured.err and "tokens/s" in captured.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model.wdith=3"], "model.wdith=3"),
        (["--sed", "1"], "--sed"),
        (["-m", "model.hads=1,2"], "model.hads=1,2"),
    ],
)
def test_a_typo_is_one_fast_line(tmp_path: Path, arguments: list[str], expected: str) -> None:
    code = (
        "import sys; from attnres.cli import run_command; from attnres.train import main; "
        "code = run_command(main, sys.argv[1:]); print(code, 'torch' in sys.modules, 'wandb' in sys.modules)"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(train_module.__file__).parents[1])},
    )
    assert done.stdout.split() == ["2", "False", "False"], done.stderr
    assert done.stderr.count("\n") == 1 and expected in done.stderr
    assert not list(tmp_path.glob("**/record.json")) and not list(tmp_path.glob("**/lock"))
    assert time.perf_counter() - start < 30  # it takes 0.5 s on an idle machine


def test_a_value_given_twice_to_a_multirun_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, ["-m", "residual=prenorm,prenorm", "seed=0"]) == 2
    assert capsys.readouterr().err == "error: residual=prenorm: is given twice\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=cpu_50k,nosuch,cpu_100k"], "model=nosuch: one of cpu_100k"),
        (["residual=attnres_block,prenorm", "residual.num_blocks=4"], "residual.num_blocks=4: unknown key"),
        (["seed=0,1", "seed=2"], "seed=2: is given twice, also as seed=0,1"),
        (["model=1.5,cpu_50k"], "model=1.5: one of cpu_100k"),
        (["residual=glob(pre*)"], "residual=glob(pre*): write the names themselves"),
    ],
)
def test_a_grid_with_a_trial_that_cannot_be_composed_trains_none(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(main, ["-m", *arguments, f"runs_dir={tmp_path / 'runs'}", "tracking=none"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_multirun_passes_over_what_another_process_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", *tiny_overrides(tmp_path, "seed=0,1", steps=2)]
    assert run_command(main, words) == 0
    first, second = sorted(tmp_path.glob("runs/*/*/record.json"))
    first.unlink()
    capsys.readouterr()
    with TrialLock(first.parent):
        assert run_command(main, words) == 2
    said = capsys.readouterr()
    assert "2 trials: 1 finished, 1 being trained by another process" in said.out
    assert said.err.startswith(f"error: {first.parent}: process {os.getpid()} is already training this trial")
    assert not first.exists() and second.exists()


def test_a_short_run_that_ends_above_its_start_has_diverged(tmp_path: Path) -> None:
    trial, corpus = tiny_trial(tmp_path, "optim.learning_rate=1000", "optim.grad_clip=null")
    assert trial.steps < RECENT_STEPS
    record = train(trial, corpus)
    assert record["status"] == "diverged"
    assert "above the" in record["reason"] or "is nan" in record["reason"] or "is inf" in record["reason"]
    state = RunState(first_loss_nats=5.5)
    state.check_final(5.5)
    with pytest.raises(Diverged, match="6.4e"):
        state.check_final(6.4e10)


def test_the_record_of_another_trial_does_not_count(tmp_path: Path) -> None:
    trial, corpus = tiny_trial(tmp_path)
    other = tiny_trial(tmp_path, "seed=1")[0]
    train(trial, corpus)
    other.folder.mkdir(parents=True)
    (other.folder / "record.json").write_bytes((trial.folder / "record.json").read_bytes())
    with pytest.raises(RecordError, match=f"trial_id={trial.id}: belongs to another trial"):
        train(other, corpus)
