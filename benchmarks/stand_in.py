"""A yardstick of nanoGPT's design: LayerNorm, one QKV product, GELU, learned positions, tied embedding.

It has no biases. Its products are this project's, so that designs are compared, not how two libraries do
without bfloat16 arithmetic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.autocast import Linear, causal_attention, linear


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.query_key_value = Linear(width, 3 * width)
        self.output = Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        products = self.query_key_value(self.norm_attention(x_BTD)).chunk(3, dim=-1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in products)
        mixed = causal_attention(query, key, value)
        x_BTD = x_BTD + self.output(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm_mlp(x_BTD))))


class StandInGPT(nn.Module):
    """Its MLP of 4 d GELU units has as many parameters and products as SwiGLU of 8/3 d."""

    def __init__(self, width: int, depth: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(inputs_BT) + self.positions(
            torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        )
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = linear(self.norm(x_BTD), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets_BT.flatten())
