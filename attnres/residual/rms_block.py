"""Block AttnRes whose finished blocks are sums of normalised outputs. Shapes as in attnres.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnres.residual.attnres import depth_attention
from attnres.residual.rms_block_spec import RMSBlock as Spec
from attnres.residual.rule import ResidualRule, ResidualState


class RMSBlock(ResidualRule):
    """As AttnResBlock, but a finished block is b_n = sum_j v_j r_j, r_j = (mean(v_j^2) + eps)^(-1/2).

    So no output outweighs the others of its block by its size. The running sum of the block at work is plain,
    and so is a short last block, which never finishes. Zero queries at start, but the sources are not
    pre-norm's: neither are the reads. 2 L d parameters; 3 live tensors more than the ceil(L / S) + 1 sources.
    Plain implementation only: it stacks the sources at every read.
    """

    def __init__(self, spec: Spec, layers: int, width: int, norm_eps: float) -> None:
        super().__init__()
        self.block_size = spec.resolved_block_size(layers)
        self.layers, self.eps = layers, norm_eps
        self.queries_RD = nn.Parameter(torch.zeros(layers, width))
        self.gains_RD = nn.Parameter(torch.ones(layers, width))

    def initialise(self) -> None:
        nn.init.zeros_(self.queries_RD)
        nn.init.ones_(self.gains_RD)

    def start(self, embedding_BTD: Tensor) -> ResidualState:
        return _RMSBlockState(self, embedding_BTD)


class _RMSBlockState(ResidualState):
    def __init__(self, rule: RMSBlock, embedding_BTD: Tensor) -> None:
        self.rule = rule
        self.sources = [embedding_BTD]
        self.running_BTD: Tensor | None = None
        self.normed_BTD: Tensor | None = None  # becomes the finished block
        self.parameters = list(zip(rule.queries_RD.unbind(), rule.gains_RD.unbind(), strict=True))

    def read(self, layer: int) -> Tensor:
        return self._attend(layer - 1) if layer else self.sources[0]

    def finish(self) -> Tensor:
        return self._attend(self.rule.layers - 1)

    def _attend(self, row: int) -> Tensor:
        running = [] if self.running_BTD is None else [self.running_BTD]
        return depth_attention([*self.sources, *running], *self.parameters[row], self.rule.eps)

    def write(self, layer: int, output_BTD: Tensor) -> None:
        dtype = self.sources[0].dtype
        wide_BTD = output_BTD.to(torch.promote_types(output_BTD.dtype, torch.float32))
        inverse_rms_BT1 = torch.rsqrt(wide_BTD.square().mean(-1, keepdim=True) + self.rule.eps)
        self.normed_BTD = _plus(self.normed_BTD, (wide_BTD * inverse_rms_BT1).to(dtype))
        self.running_BTD = _plus(self.running_BTD, output_BTD.to(dtype))
        if (layer + 1) % self.rule.block_size == 0:
            self.sources.append(self.normed_BTD)
            self.running_BTD = self.normed_BTD = None


def _plus(total: Tensor | None, addend: Tensor) -> Tensor:
    return addend if total is None else total + addend
