"""Options and costs of the rules that keep n streams: hyper-connections and their constrained forms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from attnres.errors import ConfigError
from attnres.residual.rule_spec import RuleSpec

MOST_LITE_STREAMS = 6  # mhc_lite weighs n! matrices: 720 of them


@dataclass(frozen=True)
class _Streams(RuleSpec):
    """n streams, each a copy of the embedding at start; the output is their sum."""

    streams: int

    def check(self, layers: int, width: int) -> None:
        if self.streams < 1:
            raise ConfigError("residual.streams", self.streams, "must be at least 1")

    def label(self) -> str:
        return f"{self.rule}_n{self.streams}"

    def mixing_flops(self, layers: int, width: int) -> int:
        """Per sublayer: a read of n terms, n new streams of n terms, n terms written; the sum at the end."""
        terms = self.streams + self.streams**2 + self.streams
        return layers * terms * 2 * width + (self.streams - 1) * width


@dataclass(frozen=True)
class HyperConnections(_Streams):
    """Streams H: f reads A_m^T H, then H <- A_r^T H + B^T f; the matrices learned, and, where `dynamic`,
    moved by each token's streams (2409.19606)."""

    rule: ClassVar[str] = "hyper_connections"

    dynamic: bool

    def label(self) -> str:
        return super().label() if self.dynamic else f"{super().label()}_static"

    def parameters(self, layers: int, width: int) -> int:
        columns = self.streams + 2  # of [A_m A_r B]
        static = self.streams * columns
        return layers * (static + (width + width * columns + 2 if self.dynamic else 0))

    def flops_per_token(self, layers: int, width: int) -> int:
        norm_and_products = self.streams * (2 * width + 2 * width * (self.streams + 2))
        return self.mixing_flops(layers, width) + (layers * norm_and_products if self.dynamic else 0)


@dataclass(frozen=True)
class _Constrained(_Streams):
    """What mHC and mHC-lite share: weights made from all streams of a token together."""

    def mixing_logits(self) -> int:
        """How many numbers the mixing matrix is made from."""
        raise NotImplementedError

    def check(self, layers: int, width: int) -> None:
        if self.streams < 2:
            raise ConfigError("residual.streams", self.streams, "must be at least 2: one has nothing to mix")

    def parameters(self, layers: int, width: int) -> int:
        logits = 2 * self.streams + self.mixing_logits()
        return layers * (self.streams * width * logits + logits + 3)

    def flops_per_token(self, layers: int, width: int) -> int:
        """Sinkhorn and the sum over permutations do not grow with d: not counted."""
        logits = 2 * self.streams + self.mixing_logits()
        norm_and_product = self.streams * (2 * width + 2 * width * logits)
        return self.mixing_flops(layers, width) + layers * norm_and_product


@dataclass(frozen=True)
class MHC(_Constrained):
    """Hyper-connections whose mixing matrix is made doubly stochastic by Sinkhorn's steps (2512.24880)."""

    rule: ClassVar[str] = "mhc"

    sinkhorn_steps: int

    def check(self, layers: int, width: int) -> None:
        super().check(layers, width)
        if self.sinkhorn_steps < 1:
            raise ConfigError("residual.sinkhorn_steps", self.sinkhorn_steps, "must be at least 1")

    def label(self) -> str:
        return super().label() if self.sinkhorn_steps == 20 else f"{super().label()}_k{self.sinkhorn_steps}"

    def mixing_logits(self) -> int:
        return self.streams**2


@dataclass(frozen=True)
class MHCLite(_Constrained):
    """As mHC, the mixing matrix a convex combination of the n! permutation matrices (2601.05732)."""

    rule: ClassVar[str] = "mhc_lite"

    def check(self, layers: int, width: int) -> None:
        super().check(layers, width)
        if self.streams > MOST_LITE_STREAMS:
            why = f"must be at most {MOST_LITE_STREAMS}: it weighs {self.streams}! permutations"
            raise ConfigError("residual.streams", self.streams, why)

    def mixing_logits(self) -> int:
        return math.factorial(self.streams)
