"""Attention Residuals (arXiv:2603.15031): each sublayer attends over depth to choose what it reads.

Shapes: B sequences, T tokens, D channels, N sources, R reads that have a choice, H depth heads. Notation: v_0
is the embedding, v_i the output of sublayer i = 1..L, q and g a read's query and key gain. The code's `layer`
is l - 1.

All rules start as pre-norm in effect (window where W >= L): zero queries, and zero scalars, weigh all sources
equally, the mixture is what pre-norm reads times a number (1 / n by softmax, 1/2 by sigmoid), and the
pre-norm inside each sublayer removes the factor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn

from attnres.depth.kernel import KernelReads
from attnres.depth.plan import Plan
from attnres.depth.query import input_query
from attnres.depth_attention import DepthAttentionState
from attnres.depth_variants import VariantState
from attnres.residual import attnres_specs as specs
from attnres.residual.rule import ResidualRule, ResidualState


def depth_attention(
    sources: Sequence[Tensor],
    query_D: Tensor,
    gain_D: Tensor | None,
    eps: float,
    *,
    heads: int = 1,
    normaliser: Literal["softmax", "sigmoid"] = "softmax",
) -> Tensor:
    """sum_i a_i v_i with a = softmax_i(q . (g * v_i / sqrt(mean(v_i^2) + eps))); raw values, no 1/sqrt(d).

    Sources are [B, T, D] of any float type; the query is [D], or [B, T, D] where each token has its own.
    Without a gain the keys are the sources as they are. With several heads, q . k is a sum over the channels
    of each head. Computed in float32 (float64 for float64 sources) whatever autocast says, and cast once, to
    the type of the first source, the embedding.
    """
    with torch.autocast(sources[0].device.type, enabled=False):
        v_NBTD = _stack(sources)
        key_query_D = query_D.to(v_NBTD.dtype)
        products_NBTD = v_NBTD
        if gain_D is not None:
            products_NBTD = v_NBTD * torch.rsqrt(v_NBTD.square().mean(-1, keepdim=True) + eps)
            key_query_D = gain_D.to(v_NBTD.dtype) * key_query_D
        logits_NBTH = (products_NBTD * key_query_D).unflatten(-1, (heads, -1)).sum(-1)
        return _weigh(v_NBTD, logits_NBTH, normaliser).to(sources[0].dtype)


def static_mixture(
    sources: Sequence[Tensor], scalars_NH: Tensor, normaliser: Literal["softmax", "sigmoid"] = "softmax"
) -> Tensor:
    """As `depth_attention` with logits that are parameters: the same for all tokens, whatever they hold."""
    with torch.autocast(sources[0].device.type, enabled=False):
        v_NBTD = _stack(sources)
        logits_NBTH = scalars_NH.to(v_NBTD.dtype)[:, None, None]
        return _weigh(v_NBTD, logits_NBTH, normaliser).to(sources[0].dtype)


def _stack(sources: Sequence[Tensor]) -> Tensor:
    dtype = reduce(torch.promote_types, (source.dtype for source in sources), torch.float32)
    return torch.stack([source.to(dtype) for source in sources])


def _weigh(v_NBTD: Tensor, logits_NBTH: Tensor, normaliser: str) -> Tensor:
    weights_NBTH = torch.softmax(logits_NBTH, 0) if normaliser == "softmax" else torch.sigmoid(logits_NBTH)
    v_NBTHC = v_NBTD.unflatten(-1, (logits_NBTH.shape[-1], -1))
    return (weights_NBTH[..., None] * v_NBTHC).sum(0).flatten(-2)


class AttnRes(ResidualRule):
    """What all three share: the parameters, and a depth attention for each read but the first.

    The first sublayer has one source, the embedding, and no query: a parameter that no gradient reaches would
    stop DistributedDataParallel. Row `layer - 1` belongs to sublayer `layer`, the last row to the output.

    2 L d parameters: q = 0 and g = 1 at start; L d without key norm. A query from the input is
    q + W RMSNorm(latest source), W = 0 at start: L d^2 more. Static weights have instead one scalar per read,
    source and depth head, 0 at start.
    """

    def __init__(self, spec: specs.AttnRes, layers: int, width: int, norm_eps: float) -> None:
        super().__init__()
        self.spec = spec
        self.block_size = spec.resolved_block_size(layers)
        self.window = spec.resolved_window(layers)
        self.implementation = spec.implementation
        self.layers = layers
        self.eps = norm_eps
        self.counts = [count for count in spec.sources(layers) if count > 1]  # sources of each row's read
        if spec.weights == "static":
            self.scalars_PH = nn.Parameter(
                torch.zeros(sum(self.counts), spec.heads)
            )  # a row per read and source
            return
        self.queries_RD = nn.Parameter(torch.zeros(layers, width))
        if spec.key_norm:
            self.gains_RD = nn.Parameter(torch.ones(layers, width))
        if spec.query == "input":
            self.query_weights_RDD = nn.Parameter(torch.zeros(layers, width, width))

    def initialise(self) -> None:
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, 1.0 if name == "gains_RD" else 0.0)

    def start(self, embedding_BTD: Tensor) -> ResidualState:
        if self.implementation == "reference":
            return self.start_reference(embedding_BTD)
        if self.implementation == "kernel":
            most = max(self.counts)
            kernel = KernelReads(
                self.queries_RD, self.gains_RD, self.eps, embedding_BTD, most, depth_attention
            )
            return self.start_reference(embedding_BTD, kernel)
        if self.spec.plain() and self.window >= self.layers:
            return DepthAttentionState(
                self.queries_RD, self.gains_RD, self.block_size, self.eps, embedding_BTD
            )
        plan = Plan(self.layers, self.block_size, self.window)
        return VariantState(plan, self.spec, dict(self.named_parameters()), self.eps, embedding_BTD)

    @abstractmethod
    def start_reference(self, embedding_BTD: Tensor, kernel: KernelReads | None = None) -> ResidualState:
        """The plain implementation: it stacks the sources at every read, unless a kernel reads them."""


class AttnResFull(AttnRes):
    """h_l = sum_{i<l} a_il v_i, and the same over v_0..v_L for the output. L + 1 live tensors."""

    def start_reference(self, embedding_BTD: Tensor, kernel: KernelReads | None = None) -> ResidualState:
        return _FullState(self, embedding_BTD, kernel)


class AttnResWindow(AttnRes):
    """As full over v_0 and the last W of the v_i, the output's read too. W + 1 live tensors."""

    def start_reference(self, embedding_BTD: Tensor, kernel: KernelReads | None = None) -> ResidualState:
        return _FullState(self, embedding_BTD, kernel)


class AttnResBlock(AttnRes):
    """As full over coarser sources: v_0, the finished blocks b_n (sums of S outputs), and, from the second
    sublayer of a block on, the running sum of that block.

    The running sum restarts with every block and never holds the embedding. The output reads v_0 and all
    blocks; the last one may be short. S = 1 is full. ceil(L / S) + 2 live tensors.
    """

    def start_reference(self, embedding_BTD: Tensor, kernel: KernelReads | None = None) -> ResidualState:
        return _BlockState(self, embedding_BTD, kernel)


class _SourcesState(ResidualState):
    """Keeps the sources of one pass and attends over them."""

    def __init__(self, rule: AttnRes, embedding_BTD: Tensor, kernel: KernelReads | None = None) -> None:
        self.rule = rule
        self.kernel = kernel
        self.sources = [embedding_BTD]
        if rule.spec.weights == "static":
            self.scalars = rule.scalars_PH.split(rule.counts)
        if rule.spec.query == "input":  # at once: the gradient of a single matrix is as large as all of them
            self.matrices = rule.query_weights_RDD.unbind()

    def attend(self, sources: Sequence[Tensor], row: int) -> Tensor:
        rule, spec = self.rule, self.rule.spec
        if self.kernel is not None:
            return self.kernel.read(sources, row)
        if spec.weights == "static":
            return static_mixture(sources, self.scalars[row], spec.normaliser)
        query, gain_D = rule.queries_RD[row], rule.gains_RD[row] if spec.key_norm else None
        if spec.query == "input":
            query = input_query(sources[-1], query, self.matrices[row], rule.eps)
        return depth_attention(sources, query, gain_D, rule.eps, heads=spec.heads, normaliser=spec.normaliser)

    def read(self, layer: int) -> Tensor:
        sources = self.readable()
        return sources[0] if layer == 0 else self.attend(sources, layer - 1)

    def finish(self) -> Tensor:
        return self.attend(self.readable(), self.rule.layers - 1)

    @abstractmethod
    def readable(self) -> Sequence[Tensor]:
        """The sources of the next read, the latest one last."""


class _FullState(_SourcesState):
    def write(self, layer: int, output_BTD: Tensor) -> None:
        # The kernel takes sources of one type; what is stacked is cast there.
        self.sources.append(output_BTD if self.kernel is None else output_BTD.to(self.sources[0].dtype))

    def readable(self) -> Sequence[Tensor]:
        embedding_BTD, *outputs = self.sources
        return [embedding_BTD, *outputs[-self.rule.window :]]


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
