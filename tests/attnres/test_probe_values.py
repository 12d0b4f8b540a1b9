"""The numbers of a probe once more in NumPy, from the outputs that a model of a few steps wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_trial import tiny_trial

from attnres import depth_mixing
from attnres.data import sampler
from attnres.learner import Learner
from attnres.probes import measure, recording

LAYERS, WINDOWS = 4, 8


def trained(tmp_path: Path, *more: str) -> tuple[Learner, dict[str, Any], list[np.ndarray]]:
    """A learner after some steps, its probe, and v_0 .. v_L of the probed windows in float64."""
    trial, corpus = tiny_trial(tmp_path, "optim.learning_rate=0.05", *more)
    learner, tokens = Learner(trial), corpus.train()
    for step in range(12):
        learner.step(step + 1, *sampler.batch(tokens, 0, step, 4, 32))
    inputs, targets = sampler.validation_windows(corpus, WINDOWS * 32, 32)
    values = measure(learner, inputs, targets)
    with recording(learner.model) as record, torch.no_grad():
        learner.model.loss(torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(targets.copy()))
    return learner, values, [v.detach().double().numpy() for v in record.outputs]


def softmax_or_sigmoid(logits_NBT: np.ndarray, normaliser: str) -> np.ndarray:
    powers = np.exp(logits_NBT - logits_NBT.max(0))
    return powers / powers.sum(0) if normaliser == "softmax" else 1 / (1 + np.exp(-logits_NBT))


@pytest.mark.parametrize("normaliser", ["softmax", "sigmoid"])
def test_weights_and_entropy_of_full(tmp_path: Path, normaliser: str) -> None:
    more = ("residual=attnres_full", f"residual.normaliser={normaliser}")
    learner, values, v = trained(tmp_path, *more)
    queries, gains = (p.detach().double().numpy() for p in learner.model.residual.parameters())
    eps = learner.trial.config.model.norm_eps
    assert values["depth_weights"].shape == (LAYERS + 1, LAYERS + 1)
    for read in range(1, LAYERS + 1):
        sources = np.stack(v[: read + 1])
        keys = gains[read - 1] * sources / np.sqrt((sources**2).mean(-1, keepdims=True) + eps)
        weights = softmax_or_sigmoid((keys * queries[read - 1]).sum(-1), normaliser)
        row = values["depth_weights"][read]
        assert row[: read + 1] == pytest.approx(weights.mean((1, 2)), rel=1e-4)
        assert np.isnan(row[read + 1 :]).all()
        assert row[: read + 1].std() > 1e-4  # learned: no row is even, nor the same backwards
        shares = weights / weights.sum(0)
        entropy = -(shares * np.log(shares)).sum(0).mean()
        assert values["depth_entropy_nats"][read] == pytest.approx(entropy, rel=1e-4)
        assert values["mixing"][read, : read + 1] == pytest.approx(weights.mean((1, 2)), rel=1e-4)


def test_weights_of_denseformer_are_its_own_rows_and_negative_ones_have_no_entropy(tmp_path: Path) -> None:
    learner, *_ = trained(tmp_path, "residual=denseformer")
    rule = learner.model.residual
    with torch.no_grad():
        rule.weights.copy_(torch.tensor([0.2, 0.8, 0.3, -0.1, 0.9]))
    inputs, targets = (np.tile(np.arange(32) % 97, (2, 1)) for _ in range(2))
    values = measure(learner, inputs, targets)
    read_after = {2: [0.2, 0.8], 4: [0.3, -0.1, 0.9]}  # by sublayers before it
    for read, row in enumerate(values["depth_weights"]):
        expected = read_after.get(read, [])
        assert row[: len(expected)] == pytest.approx(expected, abs=1e-6)
        assert np.isnan(row[len(expected) :]).all()
    entropy = values["depth_entropy_nats"]
    assert entropy[2] == pytest.approx(-(0.2 * np.log(0.2) + 0.8 * np.log(0.8)), rel=1e-5)
    assert np.isnan(entropy[[0, 1, 3, 4]]).all()


def test_a_mixing_that_does_not_explain_the_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule of content taken for a fixed one: the first two reads have no choice that content could make."""
    learner, right, _ = trained(tmp_path, "residual=attnres_full")
    assert not np.isnan(right["mixing"]).any()
    monkeypatch.setattr(depth_mixing, "CONTENT", {})
    inputs, targets = (np.random.default_rng(0).integers(0, 97, (2, 32)) for _ in range(2))
    values = measure(learner, inputs, targets)
    bad = values["mixing_error"] > 1e-3
    assert bad[-1] and not bad[0]
    assert np.isnan(values["mixing"][bad]).all() and not np.isnan(values["mixing"][~bad]).any()


def test_magnitudes(tmp_path: Path) -> None:
    _, values, v = trained(tmp_path, "residual=attnres_block", "residual.num_blocks=2")
    rms = [np.sqrt((x**2).mean()) for x in v]
    assert values["output_rms"] == pytest.approx(rms, rel=1e-4)
    sums = [np.sqrt(((v[1] + v[2]) ** 2).mean()), np.sqrt(((v[3] + v[4]) ** 2).mean())]
    assert values["block_output_rms"] == pytest.approx(sums, rel=1e-4)
