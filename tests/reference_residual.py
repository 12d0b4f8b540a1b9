"""An independent, slow implementation of the rules and of the model, in float64, written from the equations.

It imports nothing of the package. Every read is made from the list of all outputs so far, v = [v_0, v_1, ..],
one source at a time: no state, no running sums, no stacking. Parameters come as a plain dict from name to
tensor (that of the model under test); gradients come from autograd over this code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """What the parameters do not say."""

    depth: int
    heads: int
    rope_base: float
    eps: float
    block_size: int | None  # None: pre-norm; 1: full AttnRes; S: block AttnRes of S sublayers


def rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) / x.shape[-1] + eps)


def mix_over_depth(sources: list[Tensor], query: Tensor, gain: Tensor, eps: float) -> Tensor:
    """h = sum_i softmax_i(q . (g * RMSNorm(v_i))) v_i."""
    exponentials = [torch.exp((rms(v, eps) * gain * query).sum(dim=-1, keepdim=True)) for v in sources]
    total = sum(exponentials)
    return sum(e / total * v for e, v in zip(exponentials, sources, strict=True))


def sources_of_read(v: list[Tensor], block_size: int) -> list[Tensor]:
    """v_0, each finished block's sum, and the running sum of a block that has begun, from v_0 .. v_{l-1}."""
    outputs = v[1:]
    finished = len(outputs) // block_size
    sources = [v[0]]
    for block in range(finished):
        sources.append(sum(outputs[block * block_size : (block + 1) * block_size]))
    if len(outputs) % block_size:
        sources.append(sum(outputs[finished * block_size :]))
    return sources


def read(v: list[Tensor], parameters: dict[str, Tensor], shape: Shape) -> Tensor:
    """h_l from v_0 .. v_{l-1}; with all of v_0 .. v_L, what the final norm reads."""
    if shape.block_size is None:
        return sum(v)
    if len(v) == 1:
        return v[0]
    row = len(v) - 2  # the first read has no parameters; the second has the first row
    query, gain = parameters["residual.queries_RD"][row], parameters["residual.gains_RD"][row]
    return mix_over_depth(sources_of_read(v, shape.block_size), query, gain, shape.eps)


def rope(x: Tensor, base: float) -> Tensor:
    """Rotate the pair (2p, 2p + 1) at position t by the angle t base^(-2p/C); x is [B, T, C]."""
    _, tokens, channels = x.shape
    turned = torch.empty_like(x)
    for p in range(channels // 2):
        angle = torch.arange(tokens, dtype=x.dtype) * base ** (-2 * p / channels)
        even, odd = x[..., 2 * p], x[..., 2 * p + 1]
        turned[..., 2 * p] = even * torch.cos(angle) - odd * torch.sin(angle)
        turned[..., 2 * p + 1] = even * torch.sin(angle) + odd * torch.cos(angle)
    return turned


def attention(h: Tensor, weights: dict[str, Tensor], shape: Shape) -> Tensor:
    x = rms(h, shape.eps) * weights["norm.gain"]
    query, key, value = (x @ weights[f"{name}.weight"].T for name in ("query", "key", "value"))
    channels = query.shape[-1] // shape.heads
    tokens = h.shape[1]
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    mixed = []
    for head in range(shape.heads):
        part = slice(head * channels, (head + 1) * channels)
        q = rope(rms(query[..., part], shape.eps) * weights["query_norm.gain"], shape.rope_base)
        k = rope(rms(key[..., part], shape.eps) * weights["key_norm.gain"], shape.rope_base)
        scores = (q @ k.transpose(1, 2) / math.sqrt(channels)).masked_fill(future, -math.inf)
        mixed.append(torch.softmax(scores, dim=-1) @ value[..., part])
    return torch.cat(mixed, dim=-1) @ weights["output.weight"].T


def mlp(h: Tensor, weights: dict[str, Tensor], shape: Shape) -> Tensor:
    x = rms(h, shape.eps) * weights["norm.gain"]
    gate, up = x @ weights["gate.weight"].T, x @ weights["up.weight"].T
    return (gate / (1 + torch.exp(-gate)) * up) @ weights["down.weight"].T


def logits(parameters: dict[str, Tensor], shape: Shape, inputs_BT: Tensor) -> Tensor:
    """Logits [B, T, V] of the whole model; tied when there is no unembedding."""
    table = parameters["embedding.weight"]
    v = [table[inputs_BT]]
    for block in range(shape.depth):
        for name, sublayer in (("attention", attention), ("mlp", mlp)):
            prefix = f"blocks.{block}.{name}."
            weights = {k.removeprefix(prefix): p for k, p in parameters.items() if k.startswith(prefix)}
            v.append(sublayer(read(v, parameters, shape), weights, shape))
    h = rms(read(v, parameters, shape), shape.eps) * parameters["final_norm.gain"]
    return h @ parameters.get("unembedding.weight", table).T


def loss_nats(parameters: dict[str, Tensor], shape: Shape, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy."""
    z = logits(parameters, shape, inputs_BT)
    chosen = z.gather(-1, targets_BT[..., None])[..., 0]
    return (torch.log(torch.exp(z).sum(-1)) - chosen).mean()
