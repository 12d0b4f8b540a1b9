"""What every rule's options have in common, and the checks that several rules share. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnres.errors import ConfigError


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


def check_blocks(num_blocks: int | None, block_size: int | None, layers: int) -> None:
    """Exactly one of the two is given and fits L sublayers, or ConfigError."""
    if num_blocks is not None and block_size is not None:
        why = f"and residual.block_size={block_size} are both given; set one of them to null"
        raise ConfigError("residual.num_blocks", num_blocks, why)
    if num_blocks is None and block_size is None:
        raise ConfigError("residual.num_blocks", None, "give num_blocks, or block_size in sublayers")
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if value is not None and value < 1:
            raise ConfigError(f"residual.{name}", value, "must be at least 1")
        if value is not None and value > layers:
            why = f"is more than the model's {layers} sublayers (2 x model.depth={layers // 2})"
            raise ConfigError(f"residual.{name}", value, why)


def sublayers_per_block(num_blocks: int | None, block_size: int | None, layers: int) -> int:
    """S: as given, or ceil(L / N)."""
    if block_size is not None:
        return block_size
    assert num_blocks is not None
    return -(-layers // num_blocks)
