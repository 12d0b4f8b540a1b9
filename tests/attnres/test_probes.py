"""Probes: what each read is made of, magnitudes, and a training run that does not notice them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attnres_options_support
import numpy as np
import pytest
import reference_attnres
import rules_support
import torch
from model_support import run_rule
from rules_support import random_rule, reference_options
from tiny_trial import tiny_trial
from torch import Tensor

from attnres.compose import compose_trial
from attnres.data import sampler
from attnres.depth_mixing import CONTENT, fixed, reads
from attnres.errors import ConfigError
from attnres.learner import Learner
from attnres.probe_file import AXES, PROBES_FILE
from attnres.probes import measure
from attnres.record import comparable
from attnres.residual import specs
from attnres.residual.registry import make_rule
from attnres.train import train

OPTIONS = attnres_options_support.CASES
CASES: dict[str, specs.RuleSpec] = {
    "prenorm": specs.PreNorm(),
    "full": attnres_options_support.spec_of("full", "plain"),
    "s3": attnres_options_support.spec_of("s3", "plain"),
    **OPTIONS,
    **rules_support.CASES,
}
SOFTMAX = {name: spec for name, spec in CASES.items() if getattr(spec, "normaliser", "") == "softmax"}
LAYERS, WIDTH = 10, 12


def outputs(layers: int = LAYERS, width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(layers + 1, 2, 3, width, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_mixing_gives_every_read_of_the_rule(name: str) -> None:
    rule, v = random_rule(CASES[name], LAYERS, WIDTH), outputs()
    found = list(reads(rule, v))
    for layer, (read, h_BTD) in enumerate(zip(found, run_rule(rule, v), strict=True)):
        assert len(read.mixing_SBTD) == layer + 1
        assert float((read.of(v) - h_BTD).norm() / h_BTD.norm()) < 1e-10


@torch.no_grad()
def test_a_content_dependent_rule_taken_for_a_fixed_one_is_noticed() -> None:
    for name in ("full", "rms_block_s2", "highway", "mhc_n4", "hyper_connections_n4"):
        rule, v = random_rule(CASES[name], LAYERS, WIDTH), outputs()
        assert type(rule) in CONTENT
        errors = [
            float((read.of(v) - h_BTD).norm() / h_BTD.norm())
            for read, h_BTD in zip(fixed(rule, v), run_rule(rule, v), strict=True)
        ]
        assert max(errors) > 0.01


@pytest.mark.parametrize("name", SOFTMAX)
@torch.no_grad()
def test_softmax_weights_sum_to_one_and_are_equal_at_start(name: str) -> None:
    for read in reads(random_rule(SOFTMAX[name], LAYERS, WIDTH), outputs()):
        assert read.weights_NBTH is not None
        assert float((read.weights_NBTH.sum(0) - 1).abs().max()) < 1e-12
    rule = make_rule(SOFTMAX[name], LAYERS, WIDTH, 1e-9).double()
    rule.initialise()
    for read in reads(rule, outputs()):
        count = len(read.sources)
        assert read.weights_NBTH is not None
        assert float((read.weights_NBTH - 1 / count).abs().max()) < 1e-12


class SpyRun:
    """A Run of the independent implementation that keeps the weights it multiplies sources with."""

    class Meter:
        def __init__(self) -> None:
            self.weights: list[list[Tensor]] = []

        def add(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

        def times(self, x: Tensor, y: Tensor) -> Tensor:
            return x * y

        def dot(self, x: Tensor, y: Tensor) -> Tensor:
            return (x * y).sum(-1, keepdim=True)

        def weighted(self, weights: list[Tensor], xs: list[Tensor]) -> Tensor:
            self.weights.append(weights)
            return sum(w * x for w, x in zip(weights, xs, strict=True))  # type: ignore[return-value]

    def __init__(self, parameters: dict[str, Any], options: dict[str, Any], v: list[Tensor]) -> None:
        self.parameters, self.options, self.v = parameters, options, v
        self.layers, self.eps, self.meter, self.reads = len(v) - 1, 1e-9, self.Meter(), []  # type: ignore[var-annotated]

    def output(self, layer: int, h: Tensor) -> Tensor:
        return self.v[layer + 1]


@pytest.mark.parametrize("name", [name for name in CASES if isinstance(CASES[name], specs.AttnRes)])
@torch.no_grad()
def test_weights_are_those_of_the_independent_implementation(name: str) -> None:
    spec, v = CASES[name], outputs()
    rule = random_rule(spec, LAYERS, WIDTH)
    run = SpyRun(dict(rule.named_parameters()), reference_options(spec, LAYERS), v)
    reference_attnres.attnres(run, v[0])
    heads = spec.heads  # type: ignore[attr-defined]
    rows = run.meter.weights
    found = list(reads(rule, v))[1:]
    assert len(rows) == heads * len(found)
    for layer, read in enumerate(found):
        of_heads = rows[layer * heads : (layer + 1) * heads]
        expected = torch.stack([torch.stack(list(row)) for row in of_heads])[..., 0].movedim(0, -1)
        assert read.weights_NBTH is not None
        assert float((read.weights_NBTH - expected).abs().max()) < 1e-12


def probe(tmp_path: Path, *more: str, steps: int = 5) -> tuple[Learner, dict[str, Any], tuple[Any, Any]]:
    """A learner after some steps at a high rate, its probe, and the windows."""
    trial, corpus = tiny_trial(tmp_path, "optim.learning_rate=0.02", *more)
    learner, tokens = Learner(trial), corpus.train()
    for step in range(steps):
        learner.step(step + 1, *sampler.batch(tokens, 0, step, 4, 32))
    windows = sampler.validation_windows(corpus, 8 * 32, 32)
    return learner, measure(learner, *windows), windows


def test_prenorm_sums_what_was_before(tmp_path: Path) -> None:
    _, found, _ = probe(tmp_path)
    assert found["mixing"].tolist() == np.tril(np.ones((5, 5))).tolist()
    assert float(found["mixing_error"].max()) < 1e-6 and "depth_weights" not in found


@pytest.mark.parametrize("rule", specs.SPECS)
def test_every_rule_is_explained_as_trained(tmp_path: Path, rule: str) -> None:
    small = ("residual.num_blocks=2",) if rule in ("attnres_block", "rms_block") else ()
    _, found, _ = probe(tmp_path, f"residual={rule}", *small)
    assert float(found["mixing_error"].max()) < 1e-5
    assert all(np.isfinite(value).all() for name, value in found.items() if not name.startswith("depth"))
    assert np.triu(found["mixing"], 1).max() == 0
    if rule.startswith(("attnres", "rms")):
        weights = found["depth_weights"]
        np.testing.assert_allclose(np.nansum(weights, axis=1), 1, rtol=1e-6)
        counts = (~np.isnan(weights)).sum(axis=1)
        assert (found["depth_entropy_nats"] <= np.log(counts) + 1e-6).all()
        assert found["depth_entropy_nats"][0] == 0 < found["depth_entropy_nats"][-1]


def test_magnitudes_are_those_that_hooks_see(tmp_path: Path) -> None:
    learner, found, (inputs, targets) = probe(tmp_path, "residual=attnres_full")
    model = learner.model
    seen, parts = {}, [part for block in model.blocks for part in (block.attention, block.mlp)]

    def note(index: int) -> Any:
        def hook(module: object, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            output.retain_grad()
            seen[index] = arguments[0].detach(), output

        return hook

    handles = [part.register_forward_hook(note(i)) for i, part in enumerate(parts)]
    model.loss(learner.move(inputs), learner.move(targets), reduction="none").sum().backward()
    for handle in handles:
        handle.remove()

    def rms(x: Tensor) -> float:
        return float(x.detach().square().mean().sqrt())

    n = len(parts)
    assert found["read_rms"][:n] == pytest.approx([rms(seen[i][0]) for i in range(n)], rel=1e-5)
    assert found["output_rms"][1:] == pytest.approx([rms(seen[i][1]) for i in range(n)], rel=1e-5)
    gradients = [rms(seen[i][1].grad) for i in range(n)]
    assert found["output_gradient_rms"][1:] == pytest.approx(gradients, rel=1e-4)
    sums = [rms(seen[i][1] + seen[i + 1][1]) for i in range(0, n, 2)]
    assert found["block_output_rms"] == pytest.approx(sums, rel=1e-5)
    norms = [
        math.sqrt(sum(float(p.grad.double().square().sum()) for p in b.parameters())) / inputs.size  # type: ignore[union-attr]
        for b in model.blocks
    ]
    assert found["block_gradient_norm"] == pytest.approx(norms, rel=1e-4)
    assert found["loss_nats"] == pytest.approx(float(learner.window_losses(inputs, targets).mean()), rel=1e-6)


def test_microbatches_do_not_matter(tmp_path: Path) -> None:
    learner, whole, windows = probe(tmp_path, "residual=attnres_block", "residual.num_blocks=2")
    learner.microbatch_size = 2
    parts = measure(learner, *windows)
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, rtol=1e-4, atol=1e-6)


def load(folder: Path) -> dict[str, Any]:
    with np.load(folder / PROBES_FILE, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def test_training_does_not_notice_and_the_file_says_what_it_holds(tmp_path: Path) -> None:
    records, weights, steps = [], [], 20
    for name, at in (("with", "[0,0.25,0.5,1]"), ("without", "[]")):
        more = (f"tracking.probes_at={at}", f"runs_dir={tmp_path / name}", "runtime.keep_weights=true")
        trial, corpus = tiny_trial(tmp_path, "residual=attnres_full", *more, steps=steps)
        record = comparable(train(trial, corpus))
        records.append({key: value for key, value in record.items() if key != "config"})
        weights.append(torch.load(trial.folder / "weights.pt", weights_only=True)["model"])
        assert (trial.folder / PROBES_FILE).exists() == (name == "with")
        if name == "with":
            found, tokens = load(trial.folder), trial.batch_tokens
    assert records[0] == records[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    assert found["step"].tolist() == [0, 5, 10, 20]
    assert found["tokens"].tolist() == [tokens * step for step in (0, 5, 10, 20)]
    axes = json.loads(str(found["axes"]))
    assert axes == {name: list(AXES[name]) for name in AXES}
    for name, of_array in axes.items():
        for length, axis in zip(found[name].shape, of_array, strict=True):
            assert length == (4 if axis == "probe" else len(found[axis]))
    names = ["embedding", "attention_1", "mlp_1", "attention_2", "mlp_2"]
    assert found["read"].tolist() == [*names[1:], "output"]
    assert found["source"].tolist() == found["depth_source"].tolist() == names
    start = found["depth_weights"][0]
    for layer in range(5):  # equal before the first step
        np.testing.assert_allclose(start[layer, : layer + 1], 1 / (layer + 1), rtol=1e-6)
        assert np.isnan(start[layer, layer + 1 :]).all()
    assert np.nanmax(np.abs(found["depth_weights"][-1] - start)) > 1e-3


def test_rows_past_the_checkpoint_are_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file may be ahead of the checkpoint, or be that of a run that started over, or be damaged."""
    trial, corpus = tiny_trial(tmp_path, "tracking.probes_at=[0.5,1]", steps=10)
    train(trial, corpus)
    (trial.folder / "record.json").unlink()
    expected = load(trial.folder)
    train(trial, corpus)  # from step 0
    for name, value in load(trial.folder).items():
        np.testing.assert_array_equal(value, expected[name])
    (trial.folder / "record.json").unlink()
    (trial.folder / PROBES_FILE).write_bytes(b"torn")
    train(trial, corpus)
    warning = capsys.readouterr().err
    assert PROBES_FILE in warning and "cannot be read" in warning
    np.testing.assert_array_equal(load(trial.folder)["step"], expected["step"])


def test_default_probes_are_at_the_end_alone() -> None:
    config = compose_trial([])
    assert config.tracking.probes_at == (1.0,)
    with pytest.raises(ConfigError, match=r"tracking\.probes_at=1\.5: fractions of training are in \[0, 1\]"):
        compose_trial(["tracking.probes_at=[0.5,1.5]"])
