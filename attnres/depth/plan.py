"""Which depth-attention read sees which source; free of tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Reads and sources of a model of L `layers` in depth blocks of `block_size` S (1: full AttnRes).

    Group n, the reads of sublayers nS .. nS+S-1, sees sources 0..n (embedding and finished blocks) and its
    own running sum; the last group is the output's read alone. Source n is complete before group n reads.
    With a `window` W (and S = 1) a read sees the embedding and the last W sources only.
    """

    layers: int
    block_size: int
    window: int | None = None

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

    def readers(self, group: int) -> slice:
        """Rows of the reads that see source `group`."""
        first = self.rows(group).start
        stop = self.layers if self.window is None or group == 0 else min(first + self.window, self.layers)
        return slice(first, stop)

    def seen(self, row: int) -> list[slice]:
        """The finished sources that a read sees, as ranges without gaps."""
        stop = self.group_of(row + 1) + 1
        first = 1 if self.window is None else max(1, stop - self.window)
        return [slice(0, stop)] if first == 1 else [slice(0, 1), slice(first, stop)]
