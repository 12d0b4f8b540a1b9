"""AttnRes with every option over every kind of sources, in both implementations."""

from __future__ import annotations

import dataclasses
from typing import Any

from attnres.residual import specs

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "input": {"query": "input"},
    "static": {"weights": "static"},
    "sigmoid": {"normaliser": "sigmoid"},
    "no_key_norm": {"key_norm": False},
    "h2": {"heads": 2},
    # Options together.
    "input_sigmoid_h2": {"query": "input", "normaliser": "sigmoid", "heads": 2},
    "input_no_key_norm": {"query": "input", "key_norm": False},
    "static_sigmoid_h2": {"weights": "static", "normaliser": "sigmoid", "heads": 2},
    "sigmoid_no_key_norm_h2": {"normaliser": "sigmoid", "key_norm": False, "heads": 2},
}
MAIN = ("input", "static", "sigmoid", "no_key_norm", "h2")  # one option each


def spec_of(sources: str, option: str, implementation: str = "fused") -> specs.AttnRes:
    """`sources` is full, a block size (s3) or a window (w2)."""
    more = OPTIONS[option]
    if sources == "full":
        return specs.AttnResFull(implementation, **more)  # type: ignore[arg-type]
    number = int(sources[1:])
    if sources[0] == "w":
        return specs.AttnResWindow(implementation, window=number, **more)  # type: ignore[arg-type]
    return specs.AttnResBlock(implementation, num_blocks=None, block_size=number, **more)  # type: ignore[arg-type]


def as_reference(spec: specs.AttnRes) -> specs.AttnRes:
    return dataclasses.replace(spec, implementation="reference")


# Beside windows, which have the plain option too: full, blocks of an odd size with a short last one.
CASES: dict[str, specs.AttnRes] = {
    f"{sources}_{option}": spec_of(sources, option)
    for sources in ("full", "s3", "w3")
    for option in OPTIONS
    if sources == "w3" or option != "plain"
} | {
    f"{sources}_{option}": spec_of(sources, option)
    for sources in ("s1", "s2", "s10", "w1", "w10")
    for option in ("input", "static", "sigmoid_no_key_norm_h2")
}
