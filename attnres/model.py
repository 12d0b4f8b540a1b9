"""Decoder-only Transformer, blind to which residual rule it runs.

Shapes: B sequences, T tokens, D channels of the model, H heads, C channels of a head, P = C/2 pairs of them,
V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnres.autocast import Linear, causal_attention, linear
from attnres.config import ModelConfig
from attnres.normalise import RMSNorm
from attnres.residual.registry import make_rule
from attnres.residual.specs import RuleSpec


def rotary_table(
    tokens: int, channels: int, base: float, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Cosine and sine of t base^(-2p/C) for position t and channel pair p (RoPE, 2104.09864): [T, P, 2].

    Computed in float64 and rounded once: in float32 late positions would lose digits of their angle.
    """
    even_P = torch.arange(0, channels, 2, dtype=torch.float64, device=device)
    positions_T = torch.arange(tokens, dtype=torch.float64, device=device)
    angles_TP = torch.outer(positions_T, base ** (-even_P / channels))
    return torch.stack((angles_TP.cos(), angles_TP.sin()), dim=-1).to(dtype)


def rotate(x_BTHC: Tensor, table_TP2: Tensor) -> Tensor:
    """Turn each pair of neighbouring channels by the angle of its position."""
    pairs_BTHP2 = x_BTHC.unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # fuses this, and knows no complex numbers
        (even_BTHP, odd_BTHP), (cos_T1P, sin_T1P) = pairs_BTHP2.unbind(-1), table_TP2[:, None].unbind(-1)
        turned = (even_BTHP * cos_T1P - odd_BTHP * sin_T1P, even_BTHP * sin_T1P + odd_BTHP * cos_T1P)
        return torch.stack(turned, dim=-1).flatten(-2)
    # One complex product: measured three times faster on a CPU than the same in real numbers.
    table_T1P = torch.view_as_complex(table_TP2)[:, None]
    return torch.view_as_real(torch.view_as_complex(pairs_BTHP2) * table_T1P).flatten(-2)


class Attention(nn.Module):
    """Causal multi-head attention of RMSNorm(h), with RoPE and with RMSNorm on queries and keys (QK-norm).

    Three projections and not one that is split: the backward pass would copy. Measured 10 % faster on a CPU.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head_shape = (model.heads, model.head_channels)
        inner = model.heads * model.head_channels
        self.norm = RMSNorm(model.width, model.norm_eps)
        self.query = Linear(model.width, inner)
        self.key = Linear(model.width, inner)
        self.value = Linear(model.width, inner)
        self.query_norm = RMSNorm(model.head_channels, model.norm_eps)  # gain shared by the heads
        self.key_norm = RMSNorm(model.head_channels, model.norm_eps)
        self.output = Linear(inner, model.width)

    def forward(self, h_BTD: Tensor, table_TP2: Tensor) -> Tensor:
        x_BTD = self.norm(h_BTD)
        query_BTHC = rotate(self.query_norm(self.query(x_BTD).unflatten(-1, self.head_shape)), table_TP2)
        key_BTHC = rotate(self.key_norm(self.key(x_BTD).unflatten(-1, self.head_shape)), table_TP2)
        value_BTHC = self.value(x_BTD).unflatten(-1, self.head_shape)
        dtype = value_BTHC.dtype  # bfloat16 under autocast, where the norms gave float32
        query_BHTC, key_BHTC, value_BHTC = (
            x_BTHC.to(dtype).transpose(1, 2) for x_BTHC in (query_BTHC, key_BTHC, value_BTHC)
        )
        mixed_BHTC = causal_attention(query_BHTC, key_BHTC, value_BHTC)
        return self.output(mixed_BHTC.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (2002.05202) of RMSNorm(h): down(silu(gate) * up).

    Gate and up are not one projection that is split, for the same reason; measured 20 to 30 % faster.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(model.width, model.norm_eps)
        self.gate = Linear(model.width, model.mlp_width)
        self.up = Linear(model.width, model.mlp_width)
        self.down = Linear(model.mlp_width, model.width)

    def forward(self, h_BTD: Tensor, table_TP2: Tensor) -> Tensor:
        x_BTD = self.norm(h_BTD)
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """The two sublayers of a transformer block; what they read is the rule's business."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(model)
        self.mlp = MLP(model)


class Transformer(nn.Module):
    """A language model of one size under one residual rule. Call `initialise` before use."""

    rotary_TP2: Tensor

    def __init__(self, model: ModelConfig, spec: RuleSpec, vocabulary: int) -> None:
        super().__init__()
        self.config = model
        self.checkpoint_activations = False  # True: compute each sublayer again in the backward pass
        self.embedding = nn.Embedding(vocabulary, model.width)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.depth))
        self.final_norm = RMSNorm(model.width, model.norm_eps)
        table_TP2 = rotary_table(model.context, model.head_channels, model.rope_base, torch.float64)
        self.register_buffer("rotary_TP2", table_TP2, persistent=False)
        self.residual = make_rule(spec, model.layers, model.width, model.norm_eps)
        if not model.tie_embeddings:
            self.unembedding = Linear(model.width, vocabulary)

    def forward(self, inputs_BT: Tensor) -> Tensor:
        """Token ids [B, T] -> logits [B, T, V] in float32 at least. T is at most the configured context."""
        config, tokens = self.config, inputs_BT.shape[1]
        assert tokens <= config.context, (tokens, config.context)
        embedding_BTD = self.embedding(inputs_BT)
        dtype = torch.promote_types(embedding_BTD.dtype, torch.float32)
        table_TP2 = self.rotary_TP2[:tokens].to(dtype)
        state = self.residual.start(embedding_BTD)
        for layer, sublayer in enumerate(self._sublayers()):
            state.write(layer, self._run(sublayer, state.read(layer), table_TP2))
        table_VD = self.embedding.weight if config.tie_embeddings else self.unembedding.weight
        return linear(self.final_norm(state.finish()), table_VD).to(dtype)

    def _sublayers(self) -> list[nn.Module]:
        return [block.get_submodule(name) for block in self.blocks for name in ("attention", "mlp")]

    def _run(self, sublayer: nn.Module, h_BTD: Tensor, table_TP2: Tensor) -> Tensor:
        # Takes the module and not its number: torch.compile makes a graph for each number, and gives up after
        # eight.
        if self.checkpoint_activations and torch.is_grad_enabled():
            return checkpoint(sublayer, h_BTD, table_TP2, use_reentrant=False)
        return sublayer(h_BTD, table_TP2)

    def loss(
        self, inputs_BT: Tensor, targets_BT: Tensor, reduction: Literal["mean", "none"] = "mean"
    ) -> Tensor:
        """Cross-entropy in nats: a scalar, or one value per token [B, T] with reduction "none"."""
        logits_BTV = self(inputs_BT)
        losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction=reduction)
        return losses.view_as(targets_BT) if reduction == "none" else losses

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every parameter from a generator of its own, seeded by (seed, name).

        So a rule's parameters cannot shift the draws of the shared weights: they are equal across rules. The
        rule sets its own parameters; nothing generic touches them.
        """
        for name, parameter in self.named_parameters():
            if name.startswith("residual."):
                continue
            if name.endswith(".gain"):
                parameter.fill_(1.0)
                continue
            # Drawn on the CPU in float32 whatever the parameter is: one seed means one model everywhere.
            values = torch.randn(parameter.shape, generator=_generator(seed, name))
            parameter.copy_(values * self._initial_std(name, parameter))
        self.residual.initialise()

    def _initial_std(self, name: str, parameter: Tensor) -> float:
        std = 1 / math.sqrt(parameter.shape[1])  # fan-in; for the two tables, the width
        if name.endswith((".output.weight", ".down.weight")):
            std /= math.sqrt(self.config.layers)  # so that the sum of all outputs does not grow with depth
        return std


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
