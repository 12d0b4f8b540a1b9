"""Parameters equal numel by part; FLOPs what torch counts, and the rules' own what their equations need."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_support import TINY, VOCABULARY, block, full
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnres.config import ModelConfig
from attnres.counts import CONVENTIONS, count
from attnres.model import Transformer
from attnres.residual import specs

# Tied tables; attention narrower than the width; a short last depth block.
SIZES = {
    "tiny": TINY,
    "tied": replace(TINY, width=24, depth=3, mlp_width=64, tie_embeddings=True, context=16),
    "narrow_heads": replace(TINY, width=20, depth=4, heads=2, head_width=8, mlp_width=28, context=12),
}
# The reference form of the rules: it uses no matrix product, so that those counted are the model's.
SPECS = {
    "prenorm": specs.PreNorm(),
    "full": full("reference"),
    "block_s2": block(2, "reference"),
    "block_s3": block(3, "reference"),
    "block_n4": specs.AttnResBlock("reference", num_blocks=4, block_size=None),
}
every_case = pytest.mark.parametrize(("size", "rule"), [(s, r) for s in SIZES for r in SPECS])


def part_of(name: str) -> str:
    if name.endswith(".gain"):
        return "norm"
    return next(part for part in ("attention", "mlp", "residual", "unembedding", "embedding") if part in name)


@every_case
def test_parameters_are_counted_by_part(size: str, rule: str) -> None:
    config, spec = SIZES[size], SPECS[rule]
    counted = dict.fromkeys(("embedding", "unembedding", "attention", "mlp", "norm", "residual"), 0)
    model = Transformer(config, spec, VOCABULARY)
    for name, parameter in model.named_parameters():
        counted[part_of(name)] += parameter.numel()
    counts = count(config, spec, VOCABULARY)
    assert counts.parameters == counted
    assert counts.total_parameters == sum(parameter.numel() for parameter in model.parameters())


def torch_flops(config: ModelConfig, spec: specs.RuleSpec) -> list[dict[str, float]]:
    """FLOPs per token of matrix products and batched products, as torch counts them: forward, then all.

    Attention runs in torch's plain backend: two batched products over the full square, and four in the
    backward pass. Faster backends compute the scores again in the backward pass and are counted with five.
    """
    model = Transformer(config, spec, VOCABULARY)
    model.initialise(0)
    tokens = torch.zeros(2, config.context, dtype=torch.long)
    counted = []
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = model.loss(tokens, tokens)
        counted.append(dict(counter.get_flop_counts()["Global"]))
        loss.backward()
        counted.append(dict(counter.get_flop_counts()["Global"]))
    names = ({str(op).removeprefix("aten."): n / tokens.numel() for op, n in ops.items()} for ops in counted)
    return list(names)


@every_case
def test_matrix_products_are_those_that_torch_counts(size: str, rule: str) -> None:
    config, spec = SIZES[size], SPECS[rule]
    counts = count(config, spec, VOCABULARY)
    forward = counts.forward_flops_per_token
    products = forward["attention_projections"] + forward["mlp"] + forward["unembedding"]
    square = 2 * forward["attention_scores"]  # causal: this project counts half the square
    once, all_of_it = torch_flops(config, spec)
    assert once == {"mm": products, "bmm": square}
    assert all_of_it == {"mm": 3 * products, "bmm": 3 * square}
    assert counts.training_flops_per_token()["without_residual"] == 3 * products + 3 * square / 2


def flops_of_reads(layers: int, width: int, size: int) -> int:
    """One token through the rule, product by product, counted by torch; running sums counted by hand."""
    v = torch.randn(layers + 1, width)
    sources, running, normed, additions = [v[0]], None, [], 0
    with FlopCounterMode(display=False) as counter:
        for layer in range(layers + 1):
            visible = sources + ([running] if running is not None else [])
            if len(visible) > 1:
                for source in visible:
                    if not any(source is known for known in normed):  # a source's norm is computed once
                        normed.append(source)
                        torch.mm(source[None], source[:, None])
                matrix_ND = torch.stack(visible)
                weights_N1 = torch.softmax(torch.mm(matrix_ND, torch.randn(width, 1)), 0)
                torch.mm(weights_N1.T, matrix_ND)
            if layer < layers:
                additions += 0 if running is None else width
                running = v[layer + 1] if running is None else running + v[layer + 1]
                if (layer + 1) % size == 0:
                    sources.append(running)
                    running = None
    return counter.get_total_flops() + additions


@pytest.mark.parametrize("layers", [2, 10, 14])
@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_a_rules_own_flops_are_those_of_its_reads(layers: int, size: int) -> None:
    spec = block(min(size, layers))
    assert spec.flops_per_token(layers, 12) == flops_of_reads(layers, 12, min(size, layers))
    if size == 1:
        assert full().flops_per_token(layers, 12) == spec.flops_per_token(layers, 12)


def test_prenorm_adds_each_output_once() -> None:
    assert specs.PreNorm().flops_per_token(layers=10, width=12) == 10 * 12


def test_conventions() -> None:
    counts = count(SIZES["tied"], full(), VOCABULARY)
    flops = counts.training_flops_per_token()
    assert flops.keys() == CONVENTIONS.keys()
    table = VOCABULARY * SIZES["tied"].width
    assert counts.parameters["unembedding"] == 0 and counts.parameters["embedding"] == table
    assert flops["6nd"] == flops["6nd_non_embedding"] + 6 * table == flops["6nd_all"]
    assert flops["total"] - flops["without_residual"] == 3 * full().flops_per_token(6, 24)
