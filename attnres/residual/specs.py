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
from typing import ClassVar, Literal

from attnres.residual.multi_stream_specs import MHC, HyperConnections, MHCLite
from attnres.residual.rms_block_spec import RMSBlock
from attnres.residual.rule_spec import RuleSpec, check_blocks, sublayers_per_block
from attnres.residual.single_stream_specs import DenseFormer, Highway, LayerScale, ReZero, X0Lambdas


@dataclass(frozen=True)
class PreNorm(RuleSpec):
    """h_l = v_0 + ... + v_{l-1}; no parameters."""

    rule: ClassVar[str] = "prenorm"

    def flops_per_token(self, layers: int, width: int) -> int:
        return layers * width  # one addition per sublayer output


@dataclass(frozen=True)
class AttnRes(RuleSpec):
    """What both AttnRes rules share. Full is block with one sublayer per block."""

    implementation: Literal["fused", "reference"]  # how it is computed; never what is computed

    def resolved_block_size(self, layers: int) -> int:
        """S: how many consecutive sublayers make one source."""
        raise NotImplementedError

    def sources(self, layers: int) -> tuple[int, ...]:
        """How many sources each of the L + 1 reads has: one per sublayer, then the output's.

        v_0, every finished block, and, inside a block, its running sum.
        """
        size = self.resolved_block_size(layers)
        reads = [1 + layer // size + (layer % size > 0) for layer in range(layers)]
        return (*reads, 1 + -(-layers // size))

    def parameters(self, layers: int, width: int) -> int:
        """A query and a gain of d channels for each read that has a choice."""
        return 2 * width * sum(count > 1 for count in self.sources(layers))

    def flops_per_token(self, layers: int, width: int) -> int:
        """Per read and source one logit and one term of the mixture; per source one norm; running sums."""
        pairs = sum(count for count in self.sources(layers) if count > 1)
        norms = 1 + layers  # the embedding, and the running sum after each sublayer (the last is the block's)
        blocks = -(-layers // self.resolved_block_size(layers))
        additions = layers - blocks  # a block's first output is added to nothing
        return width * (4 * pairs + 2 * norms + additions)


@dataclass(frozen=True)
class AttnResFull(AttnRes):
    """h_l = sum over i < l of softmax_i(q_l . (g_l * RMSNorm(v_i))) v_i."""

    rule: ClassVar[str] = "attnres_full"

    def resolved_block_size(self, layers: int) -> int:
        return 1


@dataclass(frozen=True)
class AttnResBlock(AttnRes):
    """As full, over the embedding, sums of `block_size` sublayer outputs and the current block's running sum.

    Exactly one of `num_blocks` (N, which gives block_size = ceil(L / N)) and `block_size` (S, in sublayers).
    Where N does not divide L there may be fewer blocks than N: L = 20 and N = 8 give S = 3 and seven blocks.
    """

    rule: ClassVar[str] = "attnres_block"

    num_blocks: int | None
    block_size: int | None

    def check(self, layers: int, width: int) -> None:
        check_blocks(self.num_blocks, self.block_size, layers)

    def resolved_block_size(self, layers: int) -> int:
        return sublayers_per_block(self.num_blocks, self.block_size, layers)

    def label(self) -> str:
        return (
            f"{self.rule}_n{self.num_blocks}"
            if self.block_size is None
            else f"{self.rule}_s{self.block_size}"
        )


_ALL: tuple[type[RuleSpec], ...] = (
    PreNorm,
    AttnResFull,
    AttnResBlock,
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
