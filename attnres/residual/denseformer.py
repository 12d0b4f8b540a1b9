"""DenseFormer (2402.02622): after each transformer block, an average over the states of all blocks so far."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnres.residual.rule import ResidualRule, ResidualState


class DenseFormer(ResidualRule):
    """Y_k = sum_{j=0}^{k} a_kj X_j with X_0 = Y_0 = v_0 and X_k = block_k(Y_{k-1}) (section 3, dilation and
    period 1).

    X_k holds Y_{k-1} and the outputs of block k's two sublayers, before it is averaged; the output is Y_K.
    The weights do not depend on the input and may be negative. a_kk = 1 and all others 0 at start: pre-norm.
    K (K + 3) / 2 parameters for K transformer blocks; K + 1 live tensors.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.counts = [block + 1 for block in range(1, layers // 2 + 1)]  # weights after block k
        self.weights = nn.Parameter(torch.empty(sum(self.counts)))  # row after row
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        self.weights.zero_()
        for row in self.weights.split(self.counts):
            row[-1] = 1.0

    def start(self, embedding_BTD: Tensor) -> ResidualState:
        return _DenseState(self, embedding_BTD)


class _DenseState(ResidualState):
    """`states` holds X_0 .. X_k, `x_BTD` what the next sublayer reads."""

    def __init__(self, rule: DenseFormer, embedding_BTD: Tensor) -> None:
        self.rows = rule.weights.split(rule.counts)
        self.states = [embedding_BTD]
        self.x_BTD = embedding_BTD

    def read(self, layer: int) -> Tensor:
        return self.x_BTD

    def write(self, layer: int, output_BTD: Tensor) -> None:
        self.x_BTD = self.x_BTD + output_BTD
        if layer % 2:  # an MLP: the transformer block ends
            self.states.append(self.x_BTD)
            first, *others = zip(self.rows[layer // 2].unbind(), self.states, strict=True)
            average_BTD = first[0] * first[1]
            for weight, state_BTD in others:
                average_BTD = torch.addcmul(average_BTD, state_BTD, weight)
            self.x_BTD = average_BTD.to(self.states[0].dtype)

    def finish(self) -> Tensor:
        return self.x_BTD
