"""Which depth-attention read sees which source; free of tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Reads and sources of a model of L `layers` in depth blocks of `block_size` S (1: full AttnRes).

    Group n, the reads of sublayers nS .. nS+S-1, sees sources 0..n (embedding and finished blocks) and its
    own running sum; the last group is the output's read alone. Source n is complete before group n reads.
    """

    layers: int
    block_size: int

    @property
    def groups(self) -> int:
        return -(-self.layers // self.block_size) + 1

    def rows(self, group: int) -> slice:
        """Rows of the query table that a group reads with. Sublayer 0 has one source and no row."""
        first = min(group * self.block_size, self.layers)
        last = min(first + self.block_size, self.layers) if first < self.layers else self.layers + 1
        return slice(max(first, 1) - 1, last - 1)

    def group_of(self, layer: int) -> int:
        """The group that sublayer `layer` reads in; `layers` is the output."""
        return self.groups - 1 if layer == self.layers else layer // self.block_size

    def finishes(self, layer: int) -> bool:
        """Whether the output of this sublayer completes a block."""
        return (layer + 1) % self.block_size == 0 or layer + 1 == self.layers
