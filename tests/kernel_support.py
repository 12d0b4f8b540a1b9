"""The rules that the tests of `residual.implementation=kernel` run, by name."""

from typing import Any

from attnres.residual import specs


def spec(rule: str, how: Any) -> specs.RuleSpec:
    """`full`, `window_w3`, or `block_sS`, computed as `how` says."""
    if rule.startswith("window_w"):
        return specs.AttnResWindow(how, window=int(rule.removeprefix("window_w")))
    if rule == "full":
        return specs.AttnResFull(how)
    return specs.AttnResBlock(how, num_blocks=None, block_size=int(rule.removeprefix("block_s")))
