"""Decoder-only Transformer, blind to which residual rule it runs.

Shapes: B sequences, T tokens, D channels of the model, H heads, C channels of a head, P = C/2 pairs, F hidden
units, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnres.config import ModelConfig
from attnres.residual.registry import make_rule
from attnres.residual.specs import RuleSpec


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """gain * x / sqrt(mean(x^2) + eps) over the last axis; in float32 at least, whatever autocast says."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x.to(dtype), gain.shape, gain.to(dtype), eps)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gain, self.eps)


def rotary_table(tokens: int, channels: int, base: float, device: torch.device) -> Tensor:
    """exp(i t base^(-2c/C)) for position t and pair c (RoPE, 2104.09864): complex128 [T, C/2]."""
    pairs = torch.arange(0, channels, 2, dtype=torch.float64, device=device)
    angles_TP = torch.arange(tokens, dtype=torch.float64, device=device)[:, None] * base ** (
        -pairs / channels
    )
    return torch.polar(torch.ones_like(angles_TP), angles_TP)


def rotate(x_BTHC: Tensor, table_TP: Tensor) -> Tensor:
    """Turn each pair of neighbouring channels by the angle of its position."""
    pairs_BTHP = torch.view_as_complex(x_BTHC.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs_BTHP * table_TP[:, None]).flatten(-2)


class Attention(nn.Module):
    """Causal multi-head attention of RMSNorm(h), with RoPE and with RMSNorm on queries and keys (QK-norm)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.heads, self.channels = model.heads, model.head_channels
        self.norm = RMSNorm(model.width, model.norm_eps)
        self.query_key_value = nn.Linear(model.width, 3 * self.heads * self.channels, bias=False)
        self.query_norm = RMSNorm(self.channels, model.norm_eps)  # gain shared by the heads
        self.key_norm = RMSNorm(self.channels, model.norm_eps)
        self.output = nn.Linear(self.heads * self.channels, model.width, bias=False)

    def forward(self, h_BTD: Tensor, table_TP: Tensor) -> Tensor:
        heads_BTKHC = self.query_key_value(self.norm(h_BTD)).unflatten(-1, (3, self.heads, self.channels))
        query_BTHC, key_BTHC, value_BTHC = heads_BTKHC.unbind(2)
        query_BTHC = rotate(self.query_norm(query_BTHC), table_TP).to(value_BTHC.dtype)
        key_BTHC = rotate(self.key_norm(key_BTHC), table_TP).to(value_BTHC.dtype)
        mixed_BHTC = F.scaled_dot_product_attention(
            query_BTHC.transpose(1, 2), key_BTHC.transpose(1, 2), value_BTHC.transpose(1, 2), is_causal=True
        )
        return self.output(mixed_BHTC.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (2002.05202) of RMSNorm(h): down(silu(gate) * up)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(model.width, model.norm_eps)
        self.gate_up = nn.Linear(model.width, 2 * model.mlp_width, bias=False)
        self.down = nn.Linear(model.mlp_width, model.width, bias=False)

    def forward(self, h_BTD: Tensor, table_TP: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_up(self.norm(h_BTD)).chunk(2, dim=-1)
        return self.down(F.silu(gate_BTF) * up_BTF)


class Block(nn.Module):
    """Holds the two sublayers of a transformer block; what they read is the rule's business."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(model)
        self.mlp = MLP(model)


class Transformer(nn.Module):
    """A language model of one size under one residual rule. Parameters are undefined until `initialise`."""

    def __init__(self, model: ModelConfig, spec: RuleSpec, vocabulary: int) -> None:
        super().__init__()
        self.config = model
        self.checkpoint_activations = (
            False  # recompute each sublayer in the backward pass instead of keeping it
        )
        self.embedding = nn.Embedding(vocabulary, model.width)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.depth))
        self.final_norm = RMSNorm(model.width, model.norm_eps)
        self.residual = make_rule(spec, model.layers, model.width, model.norm_eps)
        if not model.tie_embeddings:
            self.unembedding = nn.Linear(model.width, vocabulary, bias=False)

    def forward(self, inputs_BT: Tensor) -> Tensor:
        """Token ids [B, T] -> logits [B, T, V] in float32 at least. T is at most the configured context."""
        config, tokens = self.config, inputs_BT.shape[1]
        assert tokens <= config.context, (tokens, config.context)
        embedding_BTD = self.embedding(inputs_BT)
        complex_dtype = torch.promote_types(embedding_BTD.dtype, torch.float32).to_complex()
        table_TP = rotary_table(tokens, config.head_channels, config.rope_base, inputs_BT.device).to(
            complex_dtype
        )
        state = self.residual.start(embedding_BTD)
        for layer in range(config.layers):
            state.write(layer, self._run(layer, state.read(layer), table_TP))
        unembedding_VD = self.embedding.weight if config.tie_embeddings else self.unembedding.weight
        logits_BTV = F.linear(self.final_norm(state.finish()), unembedding_VD)
        return logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))

    def _run(self, layer: int, h_BTD: Tensor, table_TP: Tensor) -> Tensor:
        block = self.blocks[layer // 2]
        sublayer = block.get_submodule("mlp" if layer % 2 else "attention")
        if self.checkpoint_activations and torch.is_grad_enabled():
            return checkpoint(sublayer, h_BTD, table_TP, use_reentrant=False)
        return sublayer(h_BTD, table_TP)

    def loss(
        self, inputs_BT: Tensor, targets_BT: Tensor, reduction: Literal["mean", "none"] = "mean"
    ) -> Tensor:
        """Cross-entropy in nats: a scalar, or one value per token [B, T] with reduction "none"."""
        logits_BTV = self(inputs_BT)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction=reduction)
        return loss.view_as(targets_BT) if reduction == "none" else loss

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every parameter from a generator of its own, seeded by (seed, name).

        So a rule's parameters cannot shift the draws of the shared weights: they are equal across rules. The
        rule sets its own parameters; nothing generic touches them.
        """
        for name, parameter in self.named_parameters():
            if name.startswith("residual."):
                continue
            if parameter.ndim == 1:
                parameter.fill_(1.0)  # every vector here is a norm's gain
                continue
            values = torch.randn(parameter.shape, generator=_generator(seed, name), dtype=torch.float32)
            parameter.copy_(values * self._initial_std(name, parameter))
        self.residual.initialise()

    def _initial_std(self, name: str, parameter: Tensor) -> float:
        std = 1 / math.sqrt(parameter.shape[1])  # fan-in; the width for the two tables
        if name.endswith(("attention.output.weight", "mlp.down.weight")):
            std /= math.sqrt(
                self.config.layers
            )  # keeps the pre-norm stream's variance from growing with depth
        return std


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
