"""Residual rules without torch: options, checks, and what each costs.

A rule is two small classes: a spec here (its options as YAML gives them, checked against a model's shape, and its
cost), and a module of the same name in the family's file (its equation, as start / read / write / finish).
`SPECS` is the closed list of rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class RuleSpec:
    """Base of all rules' options. `layers` below is L, the number of sublayers; `width` is d."""

    rule: ClassVar[str]

    def check(self, layers: int, width: int) -> None:
        """Raise ConfigError (field `residual.<option>`) if these options do not fit a model of this shape."""

    def label(self) -> str:
        """Short name for tables and plots, unique among differently configured rules of a study."""
        return self.rule

    def parameters(self, layers: int, width: int) -> int:
        """Number of parameters that the rule adds."""
        return 0

    def flops_per_token(self, layers: int, width: int) -> int:
        """FLOPs of the rule's own work in one forward pass, per token (a multiply-add is two)."""
        raise NotImplementedError


@dataclass(frozen=True)
class PreNorm(RuleSpec):
    """h_l = v_0 + ... + v_{l-1}; no parameters."""

    rule: ClassVar[str] = "prenorm"

    def flops_per_token(self, layers: int, width: int) -> int:
        return layers * width  # one addition per sublayer output


SPECS: Mapping[str, type[RuleSpec]] = {spec.rule: spec for spec in (PreNorm,)}
