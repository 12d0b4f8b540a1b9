"""Options and costs of the rules that keep one stream: gates, scales, averages over depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnres.errors import ConfigError
from attnres.residual.rule_spec import RuleSpec


@dataclass(frozen=True)
class ReZero(RuleSpec):
    """x <- x + a_l f_l(x), a scalar a_l per sublayer, zero at start (2003.04887)."""

    rule: ClassVar[str] = "rezero"

    def parameters(self, layers: int, width: int) -> int:
        return layers

    def flops_per_token(self, layers: int, width: int) -> int:
        return layers * 2 * width


@dataclass(frozen=True)
class LayerScale(RuleSpec):
    """x <- x + g_l * f_l(x), a vector g_l per sublayer, `initial` at start (2103.17239)."""

    rule: ClassVar[str] = "layerscale"

    initial: float

    def check(self, layers: int, width: int) -> None:
        if self.initial <= 0:
            raise ConfigError("residual.initial", self.initial, "must be positive (residual=rezero is zero)")

    def label(self) -> str:
        return f"{self.rule}_{self.initial:g}"

    def parameters(self, layers: int, width: int) -> int:
        return layers * width

    def flops_per_token(self, layers: int, width: int) -> int:
        return layers * 2 * width


@dataclass(frozen=True)
class Highway(RuleSpec):
    """x <- (1 - t) * x + t * f_l(x), t = sigmoid(W_l x + b_l), b_l = `gate_bias` at start (1505.00387)."""

    rule: ClassVar[str] = "highway"

    gate_bias: float

    def label(self) -> str:
        return f"{self.rule}_b{self.gate_bias:g}"

    def parameters(self, layers: int, width: int) -> int:
        return layers * (width * width + width)

    def flops_per_token(self, layers: int, width: int) -> int:
        gate = 2 * width * width + width  # the product and the bias
        return layers * (gate + 2 * 2 * width)


@dataclass(frozen=True)
class X0Lambdas(RuleSpec):
    """x <- r_k x + b_k v_0 before transformer block k; r = 1 and b = `initial_x0` at start (nanochat)."""

    rule: ClassVar[str] = "x0_lambdas"

    initial_x0: float

    def label(self) -> str:
        return f"{self.rule}_{self.initial_x0:g}"

    def parameters(self, layers: int, width: int) -> int:
        return 2 * (layers // 2)

    def flops_per_token(self, layers: int, width: int) -> int:
        return layers * width + layers // 2 * 2 * 2 * width


@dataclass(frozen=True)
class DenseFormer(RuleSpec):
    """After transformer block k its state X_k is replaced by sum_{j <= k} a_kj X_j (2402.02622)."""

    rule: ClassVar[str] = "denseformer"

    def parameters(self, layers: int, width: int) -> int:
        blocks = layers // 2
        return blocks * (blocks + 3) // 2  # k + 1 weights after block k = 1 .. depth

    def flops_per_token(self, layers: int, width: int) -> int:
        return layers * width + 2 * width * self.parameters(layers, width)
