"""Options and costs of block AttnRes over sums of normalised outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnres.residual.rule_spec import RuleSpec, check_blocks, sublayers_per_block


@dataclass(frozen=True)
class RMSBlock(RuleSpec):
    """As attnres_block, but a finished block is sum_j v_j r_j, the sum of its outputs at unit RMS.

    Exactly one of `num_blocks` (N) and `block_size` (S, in sublayers), as in attnres_block.
    """

    rule: ClassVar[str] = "rms_block"

    num_blocks: int | None
    block_size: int | None

    def check(self, layers: int, width: int) -> None:
        check_blocks(self.num_blocks, self.block_size, layers)

    def resolved_block_size(self, layers: int) -> int:
        """S: how many consecutive sublayers make one source."""
        return sublayers_per_block(self.num_blocks, self.block_size, layers)

    def label(self) -> str:
        given = f"n{self.num_blocks}" if self.block_size is None else f"s{self.block_size}"
        return f"{self.rule}_{given}"

    def parameters(self, layers: int, width: int) -> int:
        """A query and a gain for every sublayer but the first, and for the output."""
        return 2 * layers * width

    def flops_per_token(self, layers: int, width: int) -> int:
        """Two sums per block: of outputs at unit RMS, and the running sum, which is read but not kept."""
        size = self.resolved_block_size(layers)
        reads = [1 + layer // size + (layer % size > 0) for layer in range(1, layers + 1)]
        norms = 1 + layers  # keys: the embedding, each running sum, each finished block
        finished = layers // size * size  # outputs that end up in a finished block: a norm and a term each
        running = layers // size * max(0, size - 2) + max(0, layers % size - 1)
        return width * (4 * sum(reads) + 2 * norms + 4 * finished + running)
