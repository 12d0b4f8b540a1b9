"""Attention Residuals (arXiv:2603.15031): each sublayer attends over depth to choose what it reads.

Shapes: B sequences, T tokens, D channels, N sources, R reads that have a choice. Notation: v_0 is the
embedding, v_i the output of sublayer i = 1..L, q and g a read's query and key gain. The code's `layer` is
l - 1.

Both rules start as pre-norm in effect: zero queries weigh all sources equally, the mixture is what pre-norm
reads divided by the number of sources, and the pre-norm inside each sublayer removes the factor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from attnres.depth_attention import DepthAttentionState
from attnres.residual import specs
from attnres.residual.rule import ResidualRule, ResidualState


def depth_attention(sources: Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """sum_i a_i v_i with a = softmax_i(q . (g * v_i / sqrt(mean(v_i^2) + eps))); raw values, no 1/sqrt(d).

    Sources are [B, T, D] of any float type. Computed in float32 (float64 for float64 sources) whatever
    autocast says, and cast once, to the type of the first source, the embedding.
    """
    embedding_BTD = sources[0]
    with torch.autocast(embedding_BTD.device.type, enabled=False):
        dtype = reduce(torch.promote_types, (source.dtype for source in sources), torch.float32)
        v_NBTD = torch.stack([source.to(dtype) for source in sources])
        inverse_rms_NBT1 = torch.rsqrt(v_NBTD.square().mean(-1, keepdim=True) + eps)
        key_query_D = gain_D.to(dtype) * query_D.to(dtype)
        logits_NBT1 = (v_NBTD * inverse_rms_NBT1 * key_query_D).sum(-1, keepdim=True)
        weights_NBT1 = torch.softmax(logits_NBT1, dim=0)
        return (weights_NBT1 * v_NBTD).sum(0).to(embedding_BTD.dtype)


class AttnRes(ResidualRule):
    """What full and block share: the parameters, and a depth attention for each read but the first.

    The first sublayer has one source, the embedding, and no query: a parameter that no gradient reaches would
    stop DistributedDataParallel. Row `layer - 1` belongs to sublayer `layer`, the last row to the output.
    2 L d parameters.
    """

    def __init__(self, spec: specs.AttnRes, layers: int, width: int, norm_eps: float) -> None:
        super().__init__()
        self.block_size = spec.resolved_block_size(layers)
        self.implementation = spec.implementation
        self.layers = layers
        self.eps = norm_eps
        self.queries_RD = nn.Parameter(torch.zeros(layers, width))
        self.gains_RD = nn.Parameter(torch.ones(layers, width))

    def initialise(self) -> None:
        nn.init.zeros_(self.queries_RD)
        nn.init.ones_(self.gains_RD)

    def start(self, embedding_BTD: Tensor) -> ResidualState:
        if self.implementation == "reference":
            return self.start_reference(embedding_BTD)
        return DepthAttentionState(self.queries_RD, self.gains_RD, self.block_size, self.eps, embedding_BTD)

    @abstractmethod
    def start_reference(self, embedding_BTD: Tensor) -> ResidualState:
        """The plain implementation: it stacks the sources at every read."""


class AttnResFull(AttnRes):
    """h_l = sum_{i<l} a_il v_i, and the same over v_0..v_L for the output. L + 1 live tensors."""

    def start_reference(self, embedding_BTD: Tensor) -> ResidualState:
        return _FullState(self, embedding_BTD)


class AttnResBlock(AttnRes):
    """As full over coarser sources: v_0, the finished blocks b_n (sums of S outputs), and, from the second
    sublayer of a block on, the running sum of that block.

    The running sum restarts with every block and never holds the embedding. The output reads v_0 and all
    blocks; the last one may be short. S = 1 is full. ceil(L / S) + 2 live tensors.
    """

    def start_reference(self, embedding_BTD: Tensor) -> ResidualState:
        return _BlockState(self, embedding_BTD)


class _SourcesState(ResidualState):
    """Keeps the sources of one pass and attends over them."""

    def __init__(self, rule: AttnRes, embedding_BTD: Tensor) -> None:
        self.rule = rule
        self.sources = [embedding_BTD]

    def attend(self, sources: Sequence[Tensor], row: int) -> Tensor:
        rule = self.rule
        return depth_attention(sources, rule.queries_RD[row], rule.gains_RD[row], rule.eps)

    def read(self, layer: int) -> Tensor:
        sources = self.readable()
        return sources[0] if layer == 0 else self.attend(sources, layer - 1)

    def finish(self) -> Tensor:
        return self.attend(self.readable(), self.rule.layers - 1)

    @abstractmethod
    def readable(self) -> Sequence[Tensor]:
        """The sources of the next read."""


class _FullState(_SourcesState):
    def write(self, layer: int, output_BTD: Tensor) -> None:
        self.sources.append(output_BTD)

    def readable(self) -> Sequence[Tensor]:
        return self.sources


class _BlockState(_SourcesState):
    """`sources` holds the embedding and the finished blocks; `running_BTD` the unfinished one, if any."""

    running_BTD: Tensor | None = None

    def write(self, layer: int, output_BTD: Tensor) -> None:
        # Summed in the embedding's type, as pre-norm sums: bfloat16 outputs are not added in bfloat16.
        output_BTD = output_BTD.to(self.sources[0].dtype)
        self.running_BTD = output_BTD if self.running_BTD is None else self.running_BTD + output_BTD
        if (layer + 1) % self.rule.block_size == 0:
            self.sources.append(self.running_BTD)
            self.running_BTD = None

    def readable(self) -> Sequence[Tensor]:
        return self.sources if self.running_BTD is None else [*self.sources, self.running_BTD]
