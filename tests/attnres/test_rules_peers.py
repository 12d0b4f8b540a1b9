"""hyper_connections and mhc against the package hyper-connections, where it is installed (extra `peers`).

Semantics coincide for hyper-connections, dynamic part included (an RMSNorm, tanh, one scale for read and
mixing). mHC differs there in two ways: the dynamic part looks at one stream at a time, not at all of a
token's, and Sinkhorn divides rows first. So only the static part is compared, with Sinkhorn near its limit,
and to float32, which the package computes it in.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_support import run_rule
from rules_support import CASES, random_rule
from torch import Tensor, nn

from attnres.residual.rule import ResidualRule

peer = pytest.importorskip("hyper_connections", reason="pip install -e '.[peers]'")
LAYERS, WIDTH, STREAMS = 6, 7, 4


def random_outputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return list(torch.randn(LAYERS + 1, 2, 3, WIDTH, generator=generator, dtype=torch.float64))


def peer_reads(layers: list[nn.Module], expand_reduce: Any, v: list[Tensor]) -> list[Tensor]:
    """All reads of a stack of the package's modules whose branches put out v_1 .. v_L."""
    expand, reduce = expand_reduce
    streams, reads = expand(v[0]), []
    for layer, output in zip(layers, v[1:], strict=True):
        read, add_output = layer(streams)
        reads.append(read)
        streams = add_output(output)
    return [*reads, reduce(streams)]


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    assert parameter.shape == values.shape
    parameter.copy_(values)


def test_hyper_connections_are_those_of_the_package() -> None:
    rule = random_rule(CASES["hyper_connections_n4"], LAYERS, WIDTH)
    rule.eps = 1e-24  # type: ignore[assignment]  # the package has none, but a floor under the norm
    layers = []
    for layer in range(LAYERS):
        module = peer.HyperConnections(STREAMS, dim=WIDTH, layer_index=layer).double()
        static_NK, gain_D, dynamic_DK, scale_2 = (p[layer] for p in rule.parameters())
        fill(module.static_alpha, static_NK[:, :-1])
        fill(module.static_beta, static_NK[:, -1])
        fill(module.norm.gamma, gain_D - 1)
        fill(module.dynamic_alpha_fn, dynamic_DK[:, :-1])
        fill(module.dynamic_beta_fn, dynamic_DK[:, -1])
        fill(module.dynamic_alpha_scale, scale_2[0])
        fill(module.dynamic_beta_scale, scale_2[1])
        layers.append(module)
    v = random_outputs()
    ours = run_rule(rule, v)
    theirs = peer_reads(layers, peer.get_expand_reduce_stream_functions(STREAMS), v)
    for a, b in zip(ours, theirs, strict=True):
        assert float(((a - b).norm() / b.norm()).detach()) < 1e-10


def test_hyper_connections_start_as_the_package_starts() -> None:
    rule: ResidualRule = random_rule(CASES["hyper_connections_n4"], LAYERS, WIDTH)
    rule.initialise()
    for layer in range(LAYERS):
        module = peer.HyperConnections(STREAMS, dim=WIDTH, layer_index=layer)
        static_NK, _, dynamic_DK, scale_2 = (p[layer].float() for p in rule.parameters())
        assert torch.equal(static_NK[:, :-1], module.static_alpha)
        assert torch.equal(static_NK[:, -1], module.static_beta)
        assert torch.equal(dynamic_DK[:, :-1], module.dynamic_alpha_fn)
        assert torch.equal(scale_2[0], module.dynamic_alpha_scale)
        assert torch.equal(scale_2[1], module.dynamic_beta_scale)


def test_static_mhc_is_that_of_the_package() -> None:
    rule = random_rule(CASES["mhc_n4"], LAYERS, WIDTH)
    with torch.no_grad():
        rule.projections_LVK.zero_()
    layers = []
    for layer in range(LAYERS):
        module = peer.mHC(STREAMS, dim=WIDTH, layer_index=layer).double()
        pre_N, post_N, res_NN = rule.biases_LK[layer].split((STREAMS, STREAMS, STREAMS**2))
        # The package's matrix is from stream (row) to stream (column): ours transposed.
        alpha = torch.cat((pre_N[:, None], res_NN.view(STREAMS, STREAMS).T), dim=1)
        fill(module.static_alpha, alpha)
        fill(module.static_beta, post_N)
        layers.append(module)
    v = random_outputs()
    ours = run_rule(rule, v)
    theirs = peer_reads(layers, peer.mc_get_expand_reduce_stream_functions(STREAMS), v)
    for a, b in zip(ours, theirs, strict=True):
        assert float(((a - b).norm() / b.norm()).detach()) < 1e-5
