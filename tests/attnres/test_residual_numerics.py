"""What a rule's weights depend on, and that they are computed in float32 whatever autocast says."""

from __future__ import annotations

import math

import pytest
import torch
from model_support import ATTNRES, TINY, block_size_of, make_model, run_rule
from torch import Tensor

from attnres.residual import specs

every_attnres = pytest.mark.parametrize("name", ATTNRES)


def axis_sources(spec: specs.AttnRes, scales: list[float]) -> list[Tensor]:
    """v_0 .. v_L whose sources lie on an axis each: source n is scales[n] times the n-th unit vector.

    A read's n-th channel is then weight n times scales[n]. A block's outputs are equal parts of its source.
    """
    size = spec.resolved_block_size(TINY.layers)
    units = torch.eye(TINY.width, dtype=torch.float64)
    v = [units[0] * scales[0]]
    for layer in range(TINY.layers):
        part = min(size, TINY.layers - layer // size * size)
        v.append(units[1 + layer // size] * scales[1 + layer // size] / part)
    return [x[None, None] for x in v]


@every_attnres
def test_weights_are_the_softmax_of_query_times_gain_and_blind_to_scale(name: str) -> None:
    """The norm of a source on an axis is sqrt(d) there: logit n is sqrt(d) x query x gain of channel n."""
    spec = ATTNRES[name]
    assert isinstance(spec, specs.AttnRes)
    rule = make_model(spec, random_rule=True).residual
    sources = spec.sources(TINY.layers)[-1]
    logits = math.sqrt(TINY.width) * (rule.queries_RD[-1] * rule.gains_RD[-1])[:sources]
    expected = torch.softmax(logits, 0)
    for scales in ([1.0] * 11, [1e-2, 1e3, *[5.0] * 9]):
        output_D = run_rule(rule, axis_sources(spec, scales))[-1][0, 0]
        weights = output_D[:sources] / torch.tensor(scales[:sources], dtype=torch.float64)
        assert torch.allclose(weights, expected, rtol=1e-7, atol=1e-12)


@every_attnres
def test_autocast_changes_nothing_inside_a_rule(name: str) -> None:
    """The same float32 sources give the same reads bit for bit; and bfloat16 ones are summed in float32."""
    model = make_model(ATTNRES[name], random_rule=True, dtype=torch.float32)
    generator = torch.Generator().manual_seed(4)
    v = list(torch.randn(TINY.layers + 1, 2, 5, TINY.width, generator=generator))
    plain = run_rule(model.residual, v)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = run_rule(model.residual, v)
        coarse = run_rule(model.residual, [v[0], *(x.bfloat16() for x in v[1:])])
    rounded = run_rule(model.residual, [v[0], *(x.bfloat16().float() for x in v[1:])])
    for a, b, c, d in zip(plain, under_autocast, coarse, rounded, strict=True):
        assert torch.equal(a, b)
        assert c.dtype == torch.float32
        assert torch.allclose(c, d, rtol=1e-5, atol=1e-6)


def test_autocast_would_change_a_naive_depth_attention() -> None:
    """What the test above can see: einsum under autocast casts float32 down."""
    v_NTD, query_D = torch.randn(4, 5, 12), torch.randn(12)

    def naive() -> Tensor:
        weights_NT = torch.softmax(torch.einsum("ntd,d->nt", v_NTD, query_D), 0)
        return torch.einsum("nt,ntd->td", weights_NT, v_NTD)

    plain = naive()
    with torch.autocast("cpu", torch.bfloat16):
        assert (naive().float() - plain).abs().max() > 1e-3


@every_attnres
def test_gradients_under_autocast_are_near_those_without(name: str) -> None:
    spec = ATTNRES[name]
    model = make_model(spec, dtype=torch.float32, norm_eps=1e-8)
    tokens = torch.arange(16).view(2, 8)
    losses = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(model.loss(tokens, tokens))
    assert losses[1].dtype == torch.float32
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=2e-2)
    queries = [torch.autograd.grad(loss, model.residual.queries_RD)[0] for loss in losses]
    assert float((queries[1] - queries[0]).norm() / queries[0].norm()) < 0.1
    assert block_size_of(spec) is not None
