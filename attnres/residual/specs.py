"""Residual rules without torch: options, checks, and what each costs.

A rule is two small classes: a spec here (its options as YAML gives them, checked against a model's shape, and
its cost), and a module of the same name in the family's file (its equation, in four verbs).
`SPECS` is the closed list of rules.

FLOPs of a rule are those of its equation, whatever implementation runs it: an addition of d channels is d; a
dot product, a sum of squares or a term of a weighted sum is 2d (a multiply-add is two). Work that does not
grow with d (softmax, scaling a logit by its key's norm) and work per parameter (gain times query) are not
counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attnres.residual.attnres_specs import AttnRes as AttnRes
from attnres.residual.attnres_specs import AttnResBlock, AttnResFull, AttnResWindow
from attnres.residual.multi_stream_specs import MHC, HyperConnections, MHCLite
from attnres.residual.rms_block_spec import RMSBlock
from attnres.residual.rule_spec import RuleSpec
from attnres.residual.single_stream_specs import DenseFormer, Highway, LayerScale, ReZero, X0Lambdas


@dataclass(frozen=True)
class PreNorm(RuleSpec):
    """h_l = v_0 + ... + v_{l-1}; no parameters."""

    rule: ClassVar[str] = "prenorm"

    def flops_per_token(self, layers: int, width: int) -> int:
        return layers * width  # one addition per sublayer output


_ALL: tuple[type[RuleSpec], ...] = (
    PreNorm,
    AttnResFull,
    AttnResBlock,
    AttnResWindow,
    RMSBlock,
    DenseFormer,
    HyperConnections,
    MHC,
    MHCLite,
    ReZero,
    LayerScale,
    Highway,
    X0Lambdas,
)
SPECS: Mapping[str, type[RuleSpec]] = {spec.rule: spec for spec in _ALL}
