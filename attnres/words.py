"""Numbers in sentences."""

from __future__ import annotations


def counted(count: int, one: str, many: str | None = None) -> str:
    """`1 trial`, `2 trials`: the count and what it counts. `many` is for other plurals than by an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
