"""The four verbs of a residual rule. Shapes: B sequences, T tokens, D channels."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class ResidualState(ABC):
    """The sources of one forward pass. It dies with the pass: nothing of it may be kept on the module."""

    @abstractmethod
    def read(self, layer: int) -> Tensor:
        """h_BTD, what sublayer `layer` (0 .. L-1, in order) reads."""

    @abstractmethod
    def write(self, layer: int, output_BTD: Tensor) -> None:
        """Take the output of sublayer `layer`, computed from what it read."""

    @abstractmethod
    def finish(self) -> Tensor:
        """The tensor for the final norm, [B, T, D], after the last write."""


class ResidualRule(nn.Module, ABC):
    """How the input of each sublayer is made from what came before. The module holds only parameters."""

    @abstractmethod
    def start(self, embedding_BTD: Tensor) -> ResidualState:
        """Begin a forward pass with v_0."""

    def initialise(self) -> None:
        """Set the parameters to the values that the rule starts from. No other code may touch them."""
