"""Warnings for people: one line on stderr, never an exception and never lost in a library's filters."""

from __future__ import annotations

import sys

from attnres.wandb_key import hide


def warn(message: str) -> None:
    """Print `warning: <message>` in one line."""
    print(f"warning: {hide(' '.join(message.split()))}", file=sys.stderr, flush=True)
