"""From a rule's options to its module: the closed list of rules that torch runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attnres.residual import attnres, denseformer, multi_stream, prenorm, rms_block, single_stream, specs
from attnres.residual.rule import ResidualRule

# One line per rule. A factory takes (spec, layers L, width d, norm eps).
RULES: Mapping[type[specs.RuleSpec], Callable[[Any, int, int, float], ResidualRule]] = {
    specs.PreNorm: lambda spec, layers, width, eps: prenorm.PreNorm(),
    specs.AttnResFull: attnres.AttnResFull,
    specs.AttnResBlock: attnres.AttnResBlock,
    specs.AttnResWindow: attnres.AttnResWindow,
    specs.RMSBlock: rms_block.RMSBlock,
    specs.DenseFormer: lambda spec, layers, width, eps: denseformer.DenseFormer(layers),
    specs.HyperConnections: multi_stream.HyperConnections,
    specs.MHC: multi_stream.MHC,
    specs.MHCLite: multi_stream.MHCLite,
    specs.ReZero: lambda spec, layers, width, eps: single_stream.ReZero(layers),
    specs.LayerScale: lambda spec, layers, width, eps: single_stream.LayerScale(spec, layers, width),
    specs.Highway: lambda spec, layers, width, eps: single_stream.Highway(spec, layers, width),
    specs.X0Lambdas: lambda spec, layers, width, eps: single_stream.X0Lambdas(spec, layers),
}


def make_rule(spec: specs.RuleSpec, layers: int, width: int, norm_eps: float) -> ResidualRule:
    """The rule's module for a model of L `layers` sublayers and `width` channels.

    Raises ConfigError if the options do not fit the shape.
    """
    spec.check(layers, width)
    return RULES[type(spec)](spec, layers, width, norm_eps)
