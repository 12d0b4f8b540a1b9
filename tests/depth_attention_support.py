"""A slow AttnRes in float64, written from the equations and importing nothing of the package; a toy network.

The network is what a model is to the operator: L sublayers tanh(h W_l) between reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-8


@dataclass
class Toy:
    """Parameters of a toy network of L sublayers in blocks of `block_size`, and its input [B, T, D]."""

    block_size: int
    embedding: Tensor
    queries: Tensor
    gains: Tensor
    weights: list[Tensor]
    readout: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {f"weights.{index}": weight for index, weight in enumerate(self.weights)}
        return {"embedding": self.embedding, "queries": self.queries, "gains": self.gains, **named}

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(t) if t.grad is None else t.grad.clone()
            for name, t in self.tensors.items()
        }

    def loss(self, read_all: list[Tensor]) -> Tensor:
        """Depends on the output read only, as a model's loss does."""
        return (read_all[-1] * self.readout).sum()


def make_toy(
    layers: int,
    block_size: int,
    batch: int = 2,
    tokens: int = 3,
    width: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Toy:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    toy = Toy(
        block_size,
        draw(batch, tokens, width),
        draw(layers, width) * min(1.0, 3 / width**0.5),  # logits of a few units at any width
        draw(layers, width),
        [draw(width, width) * min(1.0, 3 / width**0.5) for _ in range(layers)],
        draw(batch, tokens, width),
    )
    for tensor in toy.tensors.values():
        tensor.requires_grad_()
    return toy


def sublayer(h: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(h @ weight)


def attend(sources: list[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    """h = sum_i a_i v_i with a = softmax(q . (g * v_i / rms(v_i)))."""
    logits = []
    for source in sources:
        rms = ((source * source).mean(-1) + EPS).sqrt()
        logits.append((query * gain * source).sum(-1) / rms)
    largest = torch.stack(logits).amax(0).detach()
    exponentials = [(logit - largest).exp() for logit in logits]
    total = sum(exponentials)
    return sum((e / total)[..., None] * source for e, source in zip(exponentials, sources, strict=True))


def expected_reads(toy: Toy, apply: Callable[[Tensor, Tensor], Tensor] = sublayer) -> list[Tensor]:
    """What sublayers 0 .. L-1 and the output read, by the definition: a source is a sum of some outputs."""
    layers = len(toy.weights)
    outputs: list[Tensor] = []
    reads = []
    for layer in range(layers + 1):
        blocks = [outputs[start : start + toy.block_size] for start in range(0, layer, toy.block_size)]
        sources = [toy.embedding] + [torch.stack(block).sum(0) for block in blocks]
        if layer == 0:
            h = toy.embedding
        else:
            h = attend(sources, toy.queries[layer - 1], toy.gains[layer - 1])
        reads.append(h)
        if layer < layers:
            outputs.append(apply(h, toy.weights[layer]))
    return reads


def fused_reads(toy: Toy, apply: Callable[[Tensor, Tensor], Tensor] = sublayer) -> list[Tensor]:
    from attnres.depth_attention import DepthAttentionState

    state = DepthAttentionState(toy.queries, toy.gains, toy.block_size, EPS, toy.embedding)
    reads = []
    for layer, weight in enumerate(toy.weights):
        reads.append(state.read(layer))
        state.write(layer, apply(reads[-1], weight))
    return [*reads, state.finish()]


def relative_error(value: Tensor, expected: Tensor) -> float:
    scale = expected.abs().max().item()
    return (value.double() - expected.double()).abs().max().item() / (scale or 1.0)
