"""optim=muon: who gets Muon, what an update is, rates, and a resumed run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from model_support import make_model
from rules_support import default_spec
from tiny_trial import tiny_trial
from torch.utils._python_dispatch import TorchDispatchMode

from attnres import optim
from attnres.compose import compose_trial
from attnres.config import MUON_GROUP
from attnres.data import sampler
from attnres.learner import Learner
from attnres.model import Transformer
from attnres.optim import Optimizers, learning_rate, make_optimizer, muon_groups
from attnres.residual.specs import SPECS


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rule", SPECS)
def test_muon_has_the_projections_of_the_blocks_and_nothing_else(rule: str, tied: bool) -> None:
    model = make_model(default_spec(rule), tie_embeddings=tied)
    names = {parameter: name for name, parameter in model.named_parameters()}
    (matrices,), others = muon_groups(model.named_parameters(), 0.1)
    muon = {names[parameter] for parameter in matrices["params"]}
    projections = ("query", "key", "value", "output", "gate", "up", "down")
    assert muon == {
        f"blocks.{block}.{'mlp' if index > 3 else 'attention'}.{projection}.weight"
        for block in range(model.config.depth)
        for index, projection in enumerate(projections)
    }
    rest = [names[parameter] for group in others for parameter in group["params"]]
    assert sorted([*muon, *rest]) == sorted(names.values())  # each parameter once
    decay = {names[parameter]: group["weight_decay"] for group in others for parameter in group["params"]}
    assert {name for name, value in decay.items() if value} == ({"unembedding.weight"} - muon & decay.keys())
    assert all(decay[name] == 0 for name in decay if name.startswith(("residual.", "embedding.")))


def muon_model(*overrides: str) -> tuple[Transformer, Optimizers]:
    config = compose_trial(["residual=attnres_full", "optim=muon", *overrides])
    model = Transformer(config.model, config.residual, 257)
    model.initialise(0)
    optimizer = make_optimizer(model, config.optim)
    assert isinstance(optimizer, Optimizers)
    return model, optimizer


@pytest.mark.parametrize(("adjust", "factor"), [("original", 1.0), ("match_rms_adamw", 0.2 * 24**0.5)])
def test_an_update_is_orthogonal_and_the_rest_is_adamw(adjust: str, factor: float) -> None:
    rates = ("optim.learning_rate=0.01", "optim.muon_learning_rate=0.05", "optim.weight_decay=0.5")
    model, optimizer = muon_model(f"optim.adjust_lr_fn={adjust}", *rates)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    before = copy.deepcopy(model)
    optimizer.step()

    old, new = (m.blocks[0].get_submodule("attention.query").weight.detach() for m in (before, model))
    update = (old * (1 - 0.05 * 0.5) - new) / (0.05 * factor)
    singular = torch.linalg.svdvals(update)
    assert 0.6 < float(singular.min()) and float(singular.max()) < 1.3  # Newton and Schulz, five steps
    gradient = model.residual.queries_RD.grad
    moved = model.residual.queries_RD.detach() - before.residual.queries_RD.detach()
    torch.testing.assert_close(moved, -0.01 * gradient.sign(), rtol=1e-4, atol=1e-7)


class ProductsInBfloat16(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        product = func.name().removeprefix("aten::").split(".")[0] in ("mm", "addmm", "bmm", "matmul")
        self.count += product and any(isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 for a in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("nesterov", [True, False])
def test_without_bfloat16_arithmetic_float32_gives_torchs_update(
    nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three updates of a wide and a tall matrix; the momentum is not touched by the rounding."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in ((12, 30), (30, 12), (16, 16))]
    gradients = [[torch.randn(w.shape, generator=generator) for w in starts] for _ in range(3)]
    moved, momenta, counts = [], [], []
    for lacks in (False, True):
        monkeypatch.setattr(optim, "lacks_bfloat16", lambda lacks=lacks: lacks)
        weights = [torch.nn.Parameter(w.clone()) for w in starts]
        optimizer = optim.Muon(weights, lr=0.1, nesterov=nesterov, weight_decay=0.0)
        with ProductsInBfloat16() as products:
            for step in gradients:
                for weight, gradient in zip(weights, step, strict=True):
                    weight.grad = gradient.clone()
                optimizer.step()
        counts.append(products.count)
        moved.append([(w - start).detach() for w, start in zip(weights, starts, strict=True)])
        momenta.append([optimizer.state[w]["momentum_buffer"] for w in weights])
    assert counts == [3 * 3 * 5 * 3, 0]  # updates, matrices, steps of Newton and Schulz, products
    for slow, fast in zip(*moved, strict=True):
        assert 0 < float((fast - slow).norm() / slow.norm()) < 0.02  # bfloat16 has three digits
    for slow, fast in zip(*momenta, strict=True):
        assert torch.equal(slow, fast)


def test_the_options_of_muon_are_those_of_the_config() -> None:
    options = {"nesterov": False, "ns_steps": 3, "momentum": 0.8, "weight_decay": 0.3}
    _, optimizer = muon_model(*(f"optim.{key}={str(value).lower()}" for key, value in options.items()))
    (group,) = optimizer.optimizers[0].param_groups
    assert {key: group[key] for key in options} == options


def test_the_schedule_scales_both_rates(tmp_path: Path) -> None:
    more = ("optim.learning_rate=0.01", "optim.muon_learning_rate=0.05")
    trial, corpus = tiny_trial(tmp_path, "optim=muon", *more)
    learner, tokens, config = Learner(trial), corpus.train(), trial.config
    for step in (1, 2, 15, trial.steps):
        result = learner.step(step, *sampler.batch(tokens, 0, step, config.model.batch_size, 32))
        rates = {group["name"]: group["lr"] for group in learner.optimizer.param_groups}
        share = learning_rate(step, trial.steps, trial.warmup_steps, 1.0, config.schedule)
        assert rates.pop(MUON_GROUP) == pytest.approx(0.05 * share)
        assert set(rates.values()) == {result.learning_rate}
        assert result.learning_rate == pytest.approx(0.01 * share)
        assert all(parameter.grad is None for parameter in learner.model.parameters())


def test_a_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    trial, corpus = tiny_trial(tmp_path, "optim=muon", "residual=attnres_full")
    tokens, straight, resumed = corpus.train(), Learner(trial), Learner(trial)
    steps = [(s, *sampler.batch(tokens, 0, s, trial.config.model.batch_size, 32)) for s in range(1, 7)]
    for arguments in steps[:3]:
        straight.step(*arguments)
    resumed.load_state(copy.deepcopy(straight.state()))
    losses = [[learner.step(*a).loss_nats for a in steps[3:]] for learner in (straight, resumed)]
    assert losses[0] == losses[1]
    for p, q in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)
