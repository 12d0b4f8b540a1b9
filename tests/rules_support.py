"""Every rule of tests/reference_streams.py with options, and checks that wrong forms of them must fail."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import reference_residual
import reference_streams
import torch
from model_support import loss_and_gradients, make_batch, make_model, relative_error, run_rule
from torch import Tensor

from attnres.compose import compose_trial
from attnres.model import Transformer
from attnres.residual import specs
from attnres.residual.registry import make_rule
from attnres.residual.rule import ResidualRule

CASES: dict[str, specs.RuleSpec] = {
    "rezero": specs.ReZero(),
    "layerscale": specs.LayerScale(initial=0.1),
    "highway": specs.Highway(gate_bias=-2.0),
    "x0_lambdas": specs.X0Lambdas(initial_x0=0.1),
    "denseformer": specs.DenseFormer(),
    "hyper_connections_n4": specs.HyperConnections(streams=4, dynamic=True),
    "hyper_connections_n1": specs.HyperConnections(streams=1, dynamic=True),
    "hyper_connections_static_n3": specs.HyperConnections(streams=3, dynamic=False),
    "mhc_n4": specs.MHC(streams=4, sinkhorn_steps=20),
    "mhc_n2_k3": specs.MHC(streams=2, sinkhorn_steps=3),
    "mhc_lite_n4": specs.MHCLite(streams=4),
    "mhc_lite_n2": specs.MHCLite(streams=2),
    "rms_block_s1": specs.RMSBlock(num_blocks=None, block_size=1),
    "rms_block_s2": specs.RMSBlock(num_blocks=None, block_size=2),
    "rms_block_s3": specs.RMSBlock(num_blocks=None, block_size=3),
    "rms_block_n1": specs.RMSBlock(num_blocks=1, block_size=None),
}


@functools.cache
def default_spec(rule: str) -> specs.RuleSpec:
    """A rule as its YAML file has it."""
    return compose_trial([f"residual={rule}"]).residual


def reference_options(spec: specs.RuleSpec, layers: int) -> dict[str, Any]:
    if isinstance(spec, specs.RMSBlock):
        return {"block_size": spec.resolved_block_size(layers)}
    if isinstance(spec, specs.AttnRes):
        sources = {"block_size": spec.resolved_block_size(layers), "window": spec.resolved_window(layers)}
        return dataclasses.asdict(spec) | sources
    return dataclasses.asdict(spec)


@torch.no_grad()
def randomise(rule: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in rule.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def random_rule(spec: specs.RuleSpec, layers: int, width: int) -> ResidualRule:
    rule = make_rule(spec, layers, width, 1e-9).double()
    randomise(rule)
    return rule


def reference_reads(
    spec: specs.RuleSpec, rule: ResidualRule, v: list[Tensor]
) -> tuple[list[Tensor], reference_streams.Meter]:
    """All reads where the sublayers put out v_1 .. v_L whatever they read, and the FLOPs that it took."""
    layers = len(v) - 1
    options = reference_options(spec, layers)
    parameters = dict(rule.named_parameters())
    run = reference_streams.Run(parameters, layers, 1e-9, options, lambda layer, h: v[layer + 1])
    reference_streams.RULES[spec.rule](run, v[0])
    return run.reads, run.meter


# The checks. Each is an assertion about one rule, right or wrong.


def check_reads(spec: specs.RuleSpec, rule: ResidualRule, layers: int, width: int, batch: int = 2) -> None:
    """Every read, and the gradients of all of them with respect to outputs and parameters, at 1e-10."""
    generator = torch.Generator().manual_seed(3)
    size = (layers + 1, batch, 3, width)
    v, weights = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    v.requires_grad_()
    expected, _ = reference_reads(spec, rule, list(v))
    values = run_rule(rule, list(v))
    for read, right in zip(values, expected, strict=True):
        assert float(((read - right).norm() / right.norm()).detach()) < 1e-10
    wanted = [v, *rule.parameters()]
    gradients, right_gradients = (
        torch.autograd.grad((torch.stack(reads) * weights).sum(), wanted) for reads in (values, expected)
    )
    for gradient, right in zip(gradients, right_gradients, strict=True):
        assert float((gradient - right).norm()) <= 1e-10 * max(1e-3, float(right.norm()))


def check_model(model: Transformer, spec: specs.RuleSpec) -> None:
    """Loss and all gradients of a whole model with random parameters of the rule, at 1e-10."""
    randomise(model.residual)
    config = model.config
    shape = reference_residual.Shape(config.depth, config.heads, config.rope_base, config.norm_eps, None)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    options = reference_options(spec, config.layers)
    loss = reference_streams.loss_nats(spec.rule, options, parameters, shape, *make_batch(model))
    loss.backward()
    expected = {"loss": loss.detach()} | {name: p.grad for name, p in parameters.items()}
    assert relative_error(loss_and_gradients(model), expected) < 1e-10


def check_is_prenorm(model: Transformer) -> None:
    """The loss and every shared gradient of pre-norm."""
    expected = loss_and_gradients(make_model(specs.PreNorm()))
    assert relative_error(loss_and_gradients(model), expected) < 1e-9


def check_every_parameter_learns(model: Transformer) -> None:
    """At the start each one has a gradient, with random parameters one that is not zero."""
    names = dict(model.named_parameters()).keys()
    assert loss_and_gradients(model).keys() - {"loss"} == names
    randomise(model.residual)
    gradients = loss_and_gradients(model)
    assert all(float(gradients[name].norm()) > 0 for name in names)


def check_blind_to_autocast(rule: ResidualRule, layers: int, width: int) -> None:
    """float32 outputs give the same reads bit for bit, and bfloat16 ones are summed in float32."""
    rule.float()
    v = list(torch.randn(layers + 1, 2, 5, width, generator=torch.Generator().manual_seed(4)))
    plain = run_rule(rule, v)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = run_rule(rule, v)
        coarse = run_rule(rule, [v[0], *(x.bfloat16() for x in v[1:])])
    rounded = run_rule(rule, [v[0], *(x.bfloat16().float() for x in v[1:])])
    for a, b, c, d in zip(plain, under_autocast, coarse, rounded, strict=True):
        assert torch.equal(a, b)
        assert c.dtype == torch.float32
        assert torch.allclose(c, d, rtol=1e-4, atol=1e-5)


def check_streams_part(model: Transformer) -> None:
    """From the first step on, no two streams of a sublayer have the same gradients of their read."""
    reads_LN = loss_and_gradients(model)["residual.biases_LK"][:, : model.residual.streams]
    distances_LNN = (reads_LN.unsqueeze(-1) - reads_LN.unsqueeze(-2)).abs()
    others = ~torch.eye(reads_LN.shape[1], dtype=torch.bool)
    assert float(distances_LNN[1:, others].amax(-1).min()) > 1e-6  # the first sublayer reads equal streams
