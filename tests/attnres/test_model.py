"""The Transformer's own parts: norms, positions, losses, initial values. Its rules are in test_residual."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from model_support import (
    PRENORM,
    TINY,
    VOCABULARY,
    block,
    full,
    loss_and_gradients,
    make_batch,
    make_model,
    relative_error,
)

from attnres.model import rotary_table, rotate
from attnres.normalise import RMSNorm


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_rms_norm_is_torchs_with_its_gradients(eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    norm = RMSNorm(8, eps).double()
    torch.nn.init.normal_(norm.gain, generator=generator)
    values = norm(x)
    expected = F.rms_norm(x, (8,), norm.gain, eps)
    assert torch.allclose(values, expected, rtol=1e-12)
    gradients, right = (torch.autograd.grad(y.sin().sum(), (x, norm.gain)) for y in (values, expected))
    for gradient, wanted in zip(gradients, right, strict=True):
        assert torch.allclose(gradient, wanted, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(norm, (x,))


def test_rms_norm_of_a_zero_vector_is_zero_with_a_finite_gradient() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    y = RMSNorm(8, 1e-8)(x)
    y.sum().backward()
    assert (y == 0).all() and torch.isfinite(x.grad).all()


def test_rms_norm_computes_in_float32_under_autocast() -> None:
    x = torch.randn(4, 8).bfloat16()
    norm = RMSNorm(8, 1e-8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x), norm(x.float()))


def test_rope_makes_scores_depend_on_distance_only() -> None:
    tokens, channels = 12, 6
    table = rotary_table(tokens, channels, 1e4, torch.float64)
    q, k = torch.randn(2, channels, dtype=torch.float64)
    turned_q, turned_k = (
        rotate(x.expand(1, tokens, 1, channels).contiguous(), table)[0, :, 0] for x in (q, k)
    )
    scores = turned_q @ turned_k.T
    for distance in range(1 - tokens, tokens):
        along = scores.diagonal(distance)
        assert torch.allclose(along, along[0].expand_as(along), rtol=0, atol=1e-12)
    assert scores[0].std() > 1e-3  # but it does depend on distance
    assert torch.allclose(turned_q.norm(dim=-1), q.norm().expand(tokens))


def test_the_model_knows_the_order_of_its_inputs() -> None:
    model = make_model(PRENORM)
    tokens = make_batch(model)[0]
    swapped = tokens[:, [1, 0, *range(2, 8)]]
    assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-6


@pytest.mark.parametrize("spec", [PRENORM, full(), block(3)], ids=["prenorm", "full", "block"])
def test_loss_is_the_mean_of_the_losses_of_tokens(spec) -> None:
    model = make_model(spec)
    inputs, targets = make_batch(model)
    with torch.no_grad():
        losses = model.loss(inputs, targets, reduction="none")
        log_probabilities = torch.log_softmax(model(inputs), -1)
        assert losses.shape == targets.shape
        assert torch.allclose(losses, -log_probabilities.gather(-1, targets[..., None])[..., 0])
        assert torch.allclose(losses.mean(), model.loss(inputs, targets))


def test_loss_is_float32_under_autocast() -> None:
    model = make_model(PRENORM, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(make_batch(model)[0]).dtype == torch.float32
        assert model.loss(*make_batch(model), reduction="none").dtype == torch.float32


def test_shorter_inputs_are_a_prefix() -> None:
    model = make_model(PRENORM)
    inputs, _ = make_batch(model)
    assert torch.allclose(model(inputs[:, :5]), model(inputs)[:, :5], atol=1e-12)


@pytest.mark.parametrize("spec", [PRENORM, full(), block(3)], ids=["prenorm", "full", "block"])
def test_checkpointed_activations_change_no_bit(spec) -> None:
    model = make_model(spec, random_rule=True)
    expected = loss_and_gradients(model)
    calls = [0]
    model.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    model.checkpoint_activations = True
    values = loss_and_gradients(model)
    assert calls == [2]  # once forward, once more in the backward pass
    assert all(torch.equal(values[name], value) for name, value in expected.items())


def test_initial_values_follow_seed_and_name() -> None:
    first, again, other = (dict(make_model(PRENORM, seed=seed).named_parameters()) for seed in (0, 0, 1))
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        assert name.endswith(".gain") or not torch.equal(parameter, other[name])
    a, b = "blocks.0.attention.query.weight", "blocks.0.attention.key.weight"
    assert not torch.equal(first[a], first[b])
    # A model of another depth starts with the same first blocks: names, not the order of drawing, decide.
    deeper = dict(make_model(PRENORM, depth=6).named_parameters())
    assert torch.equal(first[a], deeper[a])


def test_initial_scales() -> None:
    parameters = dict(make_model(PRENORM, width=96, mlp_width=160).named_parameters())
    for name, parameter in parameters.items():
        if name.endswith(".gain"):
            assert (parameter == 1).all()
            continue
        std = parameter.shape[1] ** -0.5
        if name.endswith((".output.weight", ".down.weight")):
            std /= math.sqrt(TINY.layers)
        assert float(parameter.detach().std()) == pytest.approx(std, rel=0.05), name


def test_the_loss_starts_near_that_of_a_uniform_guess() -> None:
    for spec in (PRENORM, full(), block(3)):
        loss = float(make_model(spec, width=48, mlp_width=96).loss(*make_batch(make_model(spec))).detach())
        assert math.log(VOCABULARY) - 0.5 < loss < math.log(VOCABULARY) + 1.5


@pytest.mark.slow
@pytest.mark.parametrize("spec", [PRENORM, full("reference"), block(3, "reference")], ids=lambda s: s.rule)
def test_captures_into_one_graph(spec) -> None:
    """runtime.compile needs a model without graph breaks; no compiler is needed to see that."""
    model = make_model(spec, random_rule=True, depth=2)
    expected = loss_and_gradients(model)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    values = loss_and_gradients(model)
    torch.compiler.reset()
    for name, value in expected.items():
        assert torch.allclose(values[name], value, rtol=1e-8, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", [PRENORM, full(), block(3)], ids=["prenorm", "full", "block"])
def test_a_gpu_agrees(spec) -> None:
    """Norms and, in the fused rules, batched products take other paths there."""
    expected = loss_and_gradients(make_model(spec, random_rule=True))
    on_gpu = loss_and_gradients(make_model(spec, random_rule=True).to("cuda"))
    values = {name: value.cpu() for name, value in on_gpu.items()}
    assert relative_error(values, expected) < 1e-9
