"""What the graph keeps grows with the number of sublayers, not with its square."""

from __future__ import annotations

import pytest
import torch
from attnres_options_support import as_reference, spec_of
from rules_support import random_rule
from torch import Tensor

from attnres.residual import specs

TOKENS, WIDTH = 16, 192


def kept_tensors(spec: specs.AttnRes, layers: int) -> float:
    """What autograd saves in a pass over `layers` sublayers, in [tokens, width]; shared storage once."""
    rule, kept = random_rule(spec, layers, WIDTH), {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        embedding = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
        state = rule.start(embedding)
        for layer in range(layers):
            state.write(layer, torch.tanh(state.read(layer)))
        state.finish()
    matrices = {parameter.untyped_storage().data_ptr() for parameter in rule.parameters()}
    of_pass = [t.untyped_storage().nbytes() for address, t in kept.items() if address not in matrices]
    return sum(of_pass) / (TOKENS * WIDTH * 8)


def growth(spec: specs.AttnRes) -> float:
    """How many times as much twice as many sublayers keep."""
    return kept_tensors(spec, 48) / kept_tensors(spec, 24)


NAMES = ["full_plain", "s3_plain", "full_sigmoid", "full_static", "full_no_key_norm", "full_h2", "w3_plain"]


@pytest.mark.parametrize("name", NAMES)
def test_memory_grows_with_depth_and_not_with_its_square(name: str) -> None:
    assert growth(spec_of(*name.split("_", 1))) < 2.5


@pytest.mark.parametrize("name", ["full_plain", "s3_plain", "full_h2"])
def test_sources_stacked_at_every_read_are_seen(name: str) -> None:
    """The plain form does that, and is the wrong variant here."""
    assert growth(as_reference(spec_of(*name.split("_", 1)))) > 3.2
