"""What each read of a residual rule is made of: h_l = sum_i M_li v_i, and the weights of the rule itself.

For probes only; training never comes here. M has its coefficients as they were for the tokens at hand: they
are held fixed, not differentiated. Shapes: S outputs v_0 .. v_l known at a read, B sequences, T tokens, D
channels, H depth heads, N sources of a depth attention, M = 1 + N rows of a stream rule. An axis that does
not matter has length 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnres.depth.query import input_query
from attnres.residual.attnres import AttnRes, AttnResBlock, AttnResFull, AttnResWindow
from attnres.residual.denseformer import DenseFormer
from attnres.residual.multi_stream import MHC, HyperConnections, MHCLite
from attnres.residual.rms_block import RMSBlock
from attnres.residual.rule import ResidualRule
from attnres.residual.single_stream import Highway


@dataclass(frozen=True)
class Read:
    """`mixing_SBTD` weighs v_0 .. v_l; `weights_NBTH` the rule's own sources, numbered by `sources`.

    Source 0 is the embedding. Source n is depth block n, finished or running (full and window: output n), or
    DenseFormer's state after transformer block n.
    """

    mixing_SBTD: Tensor
    weights_NBTH: Tensor | None = None
    sources: tuple[int, ...] = ()

    def of(self, v: Sequence[Tensor]) -> Tensor:
        """sum_i M_i v_i, [B, T, D]."""
        total_BTD = torch.zeros_like(v[0])
        for weight_BTD, v_BTD in zip(self.mixing_SBTD, v, strict=False):
            total_BTD = total_BTD.addcmul(weight_BTD.expand_as(v_BTD), v_BTD)
        return total_BTD


Reads = Iterator[Read]


def reads(rule: ResidualRule, v: Sequence[Tensor]) -> Reads:
    """The L + 1 reads, the output's last, of outputs v_0 .. v_L (each [B, T, D], float32 at least).

    Rules without an entry in CONTENT are taken to weigh all outputs alike whatever they hold. The caller
    compares `Read.of` with what was read: that shows where it is not so.
    """
    return CONTENT.get(type(rule), fixed)(rule, v)


def fixed(rule: ResidualRule, v: Sequence[Tensor]) -> Reads:
    """Coefficients of a rule that does not look at what it mixes, by running it: output i is ones in sequence
    i of a batch and zeros in all others, so sequence i of a read is M_li for every channel.
    """
    identity_SS = torch.eye(len(v), dtype=v[0].dtype, device=v[0].device)
    labels = [row_S[:, None, None].expand(-1, 1, v[0].shape[-1]).contiguous() for row_S in identity_SS]
    state = rule.start(labels[0])
    for layer, label in enumerate(labels[1:]):
        yield Read(state.read(layer)[: layer + 1, None])
        state.write(layer, label)
    yield Read(state.finish()[:, None])


def denseformer(rule: DenseFormer, v: Sequence[Tensor]) -> Reads:
    """As `fixed`; its weights a_kj are those of the read after each transformer block k."""
    rows = rule.weights.split(rule.counts)
    for layer, read in enumerate(fixed(rule, v)):
        if layer and layer % 2 == 0:
            weights_N = rows[layer // 2 - 1]
            yield Read(read.mixing_SBTD, weights_N[:, None, None, None], tuple(range(len(weights_N))))
        else:
            yield read


def attention_weights(
    sources: Sequence[Tensor],
    query: Tensor,
    gain_D: Tensor | None,
    eps: float,
    heads: int = 1,
    normaliser: str = "softmax",
) -> Tensor:
    """a_i = softmax_i(q . (g * v_i / sqrt(mean(v_i^2) + eps))), or sigmoid (2603.15031): [N, B, T, H]."""
    v_NBTD = torch.stack(list(sources))
    if gain_D is not None:
        v_NBTD = v_NBTD * torch.rsqrt(v_NBTD.square().mean(-1, keepdim=True) + eps)
        query = query * gain_D
    return _normalise((v_NBTD * query).unflatten(-1, (heads, -1)).sum(-1), normaliser)


def _normalise(logits_NBTH: Tensor, normaliser: str) -> Tensor:
    return torch.softmax(logits_NBTH, 0) if normaliser == "softmax" else torch.sigmoid(logits_NBTH)


def attnres(rule: AttnRes, v: Sequence[Tensor]) -> Reads:
    """Full, block and window with all options. The sources are kept by the rule's plain implementation."""
    spec, size = rule.spec, rule.block_size
    state: Any = rule.start_reference(v[0])
    for layer in range(len(v)):
        sources, row = list(state.readable()), layer - 1
        begun = math.ceil(layer / size)  # depth blocks; of these the latest are read
        numbers = (0, *range(begun - len(sources) + 2, begun + 1))
        if layer == 0:
            weights_NBTH = v[0].new_ones(1, 1, 1, 1)
        elif spec.weights == "static":
            scalars_NH = rule.scalars_PH.split(rule.counts)[row]
            weights_NBTH = _normalise(scalars_NH[:, None, None], spec.normaliser)
        else:
            query, gain_D = rule.queries_RD[row], rule.gains_RD[row] if spec.key_norm else None
            if spec.query == "input":
                query = input_query(sources[-1], query, rule.query_weights_RDD[row], rule.eps)
            weights_NBTH = attention_weights(sources, query, gain_D, rule.eps, spec.heads, spec.normaliser)
        by_channel_NBTD = weights_NBTH
        if weights_NBTH.shape[-1] > 1:
            by_channel_NBTD = weights_NBTH.repeat_interleave(v[0].shape[-1] // weights_NBTH.shape[-1], -1)
        weight_of = dict(zip(numbers, by_channel_NBTD, strict=True))
        unread = torch.zeros_like(by_channel_NBTD[0])
        mixing = [weight_of.get(math.ceil(i / size), unread) for i in range(layer + 1)]
        yield Read(torch.stack(mixing), weights_NBTH, numbers)
        if layer + 1 < len(v):
            state.write(layer, v[layer + 1])


def rms_block(rule: RMSBlock, v: Sequence[Tensor]) -> Reads:
    """As block AttnRes; an output in a finished block counts r_j times its block's weight."""
    size = rule.block_size
    inverse_rms = [torch.rsqrt(x_BTD.square().mean(-1, keepdim=True) + rule.eps) for x_BTD in v]
    finished, running = [v[0]], None
    for layer in range(len(v)):
        sources = [*finished, *([] if running is None else [running])]
        weights_NBTH = v[0].new_ones(1, 1, 1, 1)
        if layer:
            row = layer - 1
            weights_NBTH = attention_weights(sources, rule.queries_RD[row], rule.gains_RD[row], rule.eps)
        mixing = [weights_NBTH[0].expand(*v[0].shape[:-1], 1)]
        for i in range(1, layer + 1):
            block = math.ceil(i / size)
            mixing.append(weights_NBTH[block] * (inverse_rms[i] if block < len(finished) else 1.0))
        yield Read(torch.stack(mixing), weights_NBTH, tuple(range(len(sources))))
        if layer + 1 == len(v):
            return
        running = v[layer + 1] if running is None else running + v[layer + 1]
        if (layer + 1) % size == 0:
            block_outputs = range(layer + 2 - size, layer + 2)
            finished.append(torch.stack([v[j] * inverse_rms[j] for j in block_outputs]).sum(0))
            running = None


def streams(rule: HyperConnections | MHC | MHCLite, v: Sequence[Tensor]) -> Reads:
    """The coefficients come from the true streams; beside them run streams of labels, one per output."""
    rows = [list(row) for row in zip(*(p.unbind() for p in rule.parameters()), strict=True)]
    x_BTND = torch.stack([v[0]] * rule.streams, dim=-2)
    labels_BTNS = x_BTND.new_zeros(1, 1, rule.streams, len(v))
    labels_BTNS[..., 0] = 1.0
    for layer, row in enumerate(rows):
        weights_BTMN, write_BTN = rule.coefficients(row, x_BTND)
        mixed_BTMD, mixed_BTMS = weights_BTMN @ x_BTND, weights_BTMN @ labels_BTNS
        yield Read(_labelled(mixed_BTMS[..., 0, :], layer))
        x_BTND = mixed_BTMD[..., 1:, :] + write_BTN.unsqueeze(-1) * v[layer + 1].unsqueeze(-2)
        new_S = F.one_hot(torch.tensor(layer + 1), len(v)).to(v[0])
        labels_BTNS = mixed_BTMS[..., 1:, :] + write_BTN.unsqueeze(-1) * new_S
    yield Read(_labelled(labels_BTNS.sum(-2), len(rows)))


def _labelled(labels_BTS: Tensor, layer: int) -> Tensor:
    return labels_BTS[..., : layer + 1].movedim(-1, 0).unsqueeze(-1)


def highway(rule: Highway, v: Sequence[Tensor]) -> Reads:
    """Gates t per channel: what is carried loses t of its weight, the new output has t."""
    x_BTD, mixing = v[0], [torch.ones_like(v[0])]
    for layer, (weight_DD, bias_D) in enumerate(zip(rule.weights_LDD, rule.biases_LD, strict=True)):
        yield Read(torch.stack(mixing))
        gate_BTD = torch.sigmoid(F.linear(x_BTD, weight_DD, bias_D))
        x_BTD = torch.lerp(x_BTD, v[layer + 1], gate_BTD)
        mixing = [*(weight_BTD * (1 - gate_BTD) for weight_BTD in mixing), gate_BTD]
    yield Read(torch.stack(mixing))


CONTENT: Mapping[type[ResidualRule], Callable[[Any, Sequence[Tensor]], Reads]] = {
    AttnResFull: attnres,
    AttnResBlock: attnres,
    AttnResWindow: attnres,
    RMSBlock: rms_block,
    DenseFormer: denseformer,
    HyperConnections: streams,
    MHC: streams,
    MHCLite: streams,
    Highway: highway,
}
