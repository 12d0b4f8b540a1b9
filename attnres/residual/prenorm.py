"""The baseline: one stream that every output is added to."""

from __future__ import annotations

from torch import Tensor

from attnres.residual.rule import ResidualRule, ResidualState


class PreNorm(ResidualRule):
    """h_l = v_0 + ... + v_{l-1}, and the same sum for the output. No parameters; one live tensor."""

    def start(self, embedding_BTD: Tensor) -> ResidualState:
        return _Stream(embedding_BTD)


class _Stream(ResidualState):
    def __init__(self, embedding_BTD: Tensor) -> None:
        self.sum_BTD = embedding_BTD

    def read(self, layer: int) -> Tensor:
        return self.sum_BTD

    def write(self, layer: int, output_BTD: Tensor) -> None:
        self.sum_BTD = self.sum_BTD + output_BTD

    def finish(self) -> Tensor:
        return self.sum_BTD
