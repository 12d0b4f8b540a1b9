"""An operator compiled alone is specialised for each number of sources, and falls back after eight of them.

Ours is opaque to torch.compile, which compiles the sublayers between its verbs.
"""

from __future__ import annotations

import pytest
import torch
from attnres_options_support import as_reference, spec_of
from model_support import RULES, make_batch, make_model
from rules_support import random_rule
from torch._dynamo.testing import CompileCounter

from attnres.residual import specs
from attnres.residual.attnres import depth_attention
from attnres.residual.rule import ResidualState

LAYERS, WIDTH = 12, 6


@pytest.fixture
def counter() -> CompileCounter:
    torch._dynamo.reset()
    return CompileCounter()


def test_a_compiled_read_is_compiled_for_each_number_of_sources(counter: CompileCounter) -> None:
    read = torch.compile(lambda sources, q, g: depth_attention(sources, q, g, 1e-8), backend=counter)
    query, gain = torch.zeros(WIDTH), torch.ones(WIDTH)
    for count in range(1, 8):
        read([torch.ones(1, 2, WIDTH) for _ in range(count)], query, gain)
    assert counter.frame_count >= 6


@torch.no_grad()
def graphs_of_a_pass(spec: specs.AttnRes, counter: CompileCounter) -> int:
    """How many graphs torch.compile makes of reading, transforming and writing, over all sublayers."""
    rule, weight = random_rule(spec, LAYERS, WIDTH), torch.eye(WIDTH, dtype=torch.float64)

    @torch.compile(backend=counter)
    def sublayer(state: ResidualState, layer: int) -> None:
        state.write(layer, torch.tanh(state.read(layer) @ weight))

    state = rule.start(torch.ones(1, 2, WIDTH, dtype=torch.float64))
    for layer in range(LAYERS):
        sublayer(state, layer)
    return counter.frame_count


@pytest.mark.parametrize("name", ["full_plain", "s3_plain", "full_sigmoid", "w3_input"])
def test_a_sublayer_is_not_compiled_again_for_more_sources(name: str, counter: CompileCounter) -> None:
    """Once with its number as a constant, once with it as a variable, as for any function of a number."""
    assert graphs_of_a_pass(spec_of(*name.split("_", 1)), counter) <= 2


def test_the_plain_form_is_compiled_again_for_more_sources(counter: CompileCounter) -> None:
    """The wrong variant: verbs that torch.compile looks into."""
    assert graphs_of_a_pass(as_reference(spec_of("full", "plain")), counter) > 3


@pytest.mark.filterwarnings("default")  # of torch's compiler, of itself
@pytest.mark.parametrize("rule", ["full_fused", "block_s3_fused"])
def test_a_model_of_any_depth_is_compiled_in_as_many_graphs(rule: str) -> None:
    """One for the attention sublayers, one for the MLPs; none for each: torch makes eight at most."""
    counts = []
    for depth in (2, 6, 11):
        torch._dynamo.reset()
        counter = CompileCounter()
        model = make_model(RULES[rule], dtype=torch.float32, depth=depth)
        torch.compile(model.loss, backend=counter)(*make_batch(model)).backward()
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] == counts[2] <= 6
