"""The rules without a depth attention of their own kind, once more: slow, in float64, from the equations.

It imports nothing of the package. Streams are lists of tensors, coefficients are taken one at a time, every
product of d channels goes through a Meter that counts its FLOPs per token. Parameters come as a plain dict
from name to tensor; gradients come from autograd over this code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import reference_attnres
import reference_residual
import torch
from torch import Tensor

Sublayer = Callable[[int, Tensor], Tensor]


class Meter:
    """Work on vectors of d channels, counted per token: the leading axes are tokens."""

    flops = 0

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        self.flops += x.shape[-1]
        return x + y

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        self.flops += x.shape[-1]
        return x * y

    def weighted(self, coefficients: list[Tensor], xs: list[Tensor]) -> Tensor:
        """sum_i c_i x_i; c_i is a number, [.., 1] per token, or [d] per channel."""
        self.flops += 2 * xs[0].shape[-1] * len(xs)
        return sum(c * x for c, x in zip(coefficients, xs, strict=True))

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        self.flops += 2 * x.shape[-1]
        return (x * y).sum(dim=-1, keepdim=True)


@dataclass
class Run:
    """One rule on one forward pass; `reads` are what each sublayer and the final norm read."""

    parameters: dict[str, Tensor]
    layers: int
    eps: float
    options: dict[str, Any]
    sublayer: Sublayer
    meter: Meter = field(default_factory=Meter)
    reads: list[Tensor] = field(default_factory=list)

    def output(self, layer: int, h: Tensor) -> Tensor:
        self.reads.append(h)
        return self.sublayer(layer, h)


def rezero(run: Run, v0: Tensor) -> None:
    x = v0
    for layer in range(run.layers):
        f = run.output(layer, x)
        x = x + run.meter.weighted([run.parameters["scales_L"][layer]], [f])
    run.reads.append(x)


def layerscale(run: Run, v0: Tensor) -> None:
    x = v0
    for layer in range(run.layers):
        f = run.output(layer, x)
        x = x + run.meter.weighted([run.parameters["scales_LD"][layer]], [f])
    run.reads.append(x)


def highway(run: Run, v0: Tensor) -> None:
    x = v0
    for layer in range(run.layers):
        f = run.output(layer, x)
        weight = run.parameters["weights_LDD"][layer]
        products = torch.cat([run.meter.dot(x, weight[channel]) for channel in range(x.shape[-1])], dim=-1)
        t = 1 / (1 + torch.exp(-run.meter.add(products, run.parameters["biases_LD"][layer])))
        x = run.meter.weighted([t, 1 - t], [f, x])
    run.reads.append(x)


def x0_lambdas(run: Run, v0: Tensor) -> None:
    x = v0
    for block in range(run.layers // 2):
        r, b = (run.parameters[f"{name}_scales_K"][block] for name in ("stream", "embedding"))
        x = run.meter.weighted([r, b], [x, v0])
        for layer in (2 * block, 2 * block + 1):
            x = run.meter.add(x, run.output(layer, x))
    run.reads.append(x)


def denseformer(run: Run, v0: Tensor) -> None:
    states, y, used = [v0], v0, 0
    for block in range(run.layers // 2):
        for layer in (2 * block, 2 * block + 1):
            y = run.meter.add(y, run.output(layer, y))
        states.append(y)
        weights = list(run.parameters["weights"][used : used + len(states)])
        used += len(states)
        y = run.meter.weighted(weights, states)
    run.reads.append(y)


def finish_streams(run: Run, streams: list[Tensor]) -> None:
    total = streams[0]
    for stream in streams[1:]:
        total = run.meter.add(total, stream)
    run.reads.append(total)


def hyper_connections(run: Run, v0: Tensor) -> None:
    n, p = run.options["streams"], run.parameters
    streams = [v0] * n
    for layer in range(run.layers):
        a = [[p["static_LNK"][layer, s, k] for k in range(n + 2)] for s in range(n)]
        if run.options["dynamic"]:
            for s, x in enumerate(streams):
                rms = torch.sqrt(run.meter.dot(x, x) / x.shape[-1] + run.eps)
                for k in range(n + 2):
                    scale = p["scales_L2"][layer, 0 if k <= n else 1]
                    column = p["gains_LD"][layer] * p["dynamic_LDK"][layer, :, k]
                    a[s][k] = a[s][k] + scale * torch.tanh(run.meter.dot(x, column) / rms)
        f = run.output(layer, run.meter.weighted([a[s][0] for s in range(n)], streams))
        streams = [
            run.meter.weighted([*(a[s][1 + t] for s in range(n)), a[t][n + 1]], [*streams, f])
            for t in range(n)
        ]
    finish_streams(run, streams)


def constrained(run: Run, v0: Tensor, mixing: Callable[[list[Tensor], int], list[list[Tensor]]]) -> None:
    n, p = run.options["streams"], run.parameters
    streams, d = [v0] * n, v0.shape[-1]
    for layer in range(run.layers):
        squares = sum(run.meter.dot(x, x) for x in streams)
        rms = torch.sqrt(squares / (n * d) + run.eps)
        logits = []
        for k in range(p["biases_LK"].shape[1]):
            columns = p["projections_LVK"][layer, :, k].split(d)
            product = sum(run.meter.dot(x, column) for x, column in zip(streams, columns, strict=True))
            scale = p["scales_L3"][layer, min(k // n, 2)]
            logits.append(scale * product / rms + p["biases_LK"][layer, k])
        pre = [1 / (1 + torch.exp(-z)) for z in logits[:n]]
        post = [2 / (1 + torch.exp(-z)) for z in logits[n : 2 * n]]
        h_res = mixing(logits[2 * n :], n)
        f = run.output(layer, run.meter.weighted(pre, streams))
        streams = [run.meter.weighted([*h_res[t], post[t]], [*streams, f]) for t in range(n)]
    finish_streams(run, streams)


def sinkhorn(matrix: list[list[Tensor]], steps: int) -> list[list[Tensor]]:
    """Columns divided by their sums, then rows, `steps` times."""
    n = len(matrix)
    for _ in range(steps):
        sums = [sum(matrix[i][j] for i in range(n)) for j in range(n)]
        matrix = [[matrix[i][j] / sums[j] for j in range(n)] for i in range(n)]
        matrix = [[x / sum(row) for x in row] for row in matrix]
    return matrix


def mhc(run: Run, v0: Tensor) -> None:
    def mixing(logits: list[Tensor], n: int) -> list[list[Tensor]]:
        exponentials = [[torch.exp(logits[i * n + j]) for j in range(n)] for i in range(n)]
        return sinkhorn(exponentials, run.options["sinkhorn_steps"])

    constrained(run, v0, mixing)


def mhc_lite(run: Run, v0: Tensor) -> None:
    def mixing(logits: list[Tensor], n: int) -> list[list[Tensor]]:
        exponentials = [torch.exp(z) for z in logits]
        total, orders = sum(exponentials), list(itertools.permutations(range(n)))

        def entry(i: int, j: int) -> Tensor:
            chosen = [e for e, order in zip(exponentials, orders, strict=True) if order[i] == j]
            return sum(chosen) / total

        return [[entry(i, j) for j in range(n)] for i in range(n)]

    constrained(run, v0, mixing)


def rms_block(run: Run, v0: Tensor) -> None:
    size, meter = run.options["block_size"], run.meter

    def root_mean_square(x: Tensor) -> Tensor:
        return torch.sqrt(meter.dot(x, x) / x.shape[-1] + run.eps)

    finished: list[tuple[Tensor, Tensor]] = [(v0, root_mean_square(v0))]
    running: tuple[Tensor, Tensor] | None = None
    block: list[Tensor] = []
    for layer in range(run.layers + 1):
        sources = [*finished, running] if running is not None else finished
        h = v0
        if layer:
            row = layer - 1
            key_query = run.parameters["queries_RD"][row] * run.parameters["gains_RD"][row]
            exponentials = [torch.exp(meter.dot(v, key_query) / rms) for v, rms in sources]
            weights = [e / sum(exponentials) for e in exponentials]
            h = meter.weighted(weights, [v for v, _ in sources])
        if layer == run.layers:
            run.reads.append(h)
            return
        block.append(run.output(layer, h))
        if len(block) == size:
            source = meter.weighted([1 / root_mean_square(v) for v in block], block)
            finished.append((source, root_mean_square(source)))
            running, block = None, []
        else:
            total = block[0] if running is None else meter.add(running[0], block[-1])
            running = (total, root_mean_square(total))


RULES: dict[str, Callable[[Run, Tensor], None]] = {
    function.__name__: function
    for function in (
        rezero,
        layerscale,
        highway,
        x0_lambdas,
        denseformer,
        hyper_connections,
        mhc,
        mhc_lite,
        rms_block,
    )
} | dict.fromkeys(("attnres_full", "attnres_block", "attnres_window"), reference_attnres.attnres)


def loss_nats(
    rule: str,
    options: dict[str, Any],
    parameters: dict[str, Tensor],
    shape: reference_residual.Shape,
    inputs_BT: Tensor,
    targets_BT: Tensor,
) -> Tensor:
    """Mean cross-entropy of the whole model under one of the rules above."""

    def sublayer(layer: int, h: Tensor) -> Tensor:
        name = ("attention", "mlp")[layer % 2]
        prefix = f"blocks.{layer // 2}.{name}."
        weights = {k.removeprefix(prefix): p for k, p in parameters.items() if k.startswith(prefix)}
        function = reference_residual.mlp if layer % 2 else reference_residual.attention
        return function(h, weights, shape)

    own = {k.removeprefix("residual."): p for k, p in parameters.items() if k.startswith("residual.")}
    table = parameters["embedding.weight"]
    run = Run(own, 2 * shape.depth, shape.eps, options, sublayer)
    RULES[rule](run, table[inputs_BT])
    h = reference_residual.rms(run.reads[-1], shape.eps) * parameters["final_norm.gain"]
    z = h @ parameters.get("unembedding.weight", table).T
    assert math.isfinite(float(z.detach().abs().max()))
    chosen = z.gather(-1, targets_BT[..., None])[..., 0]
    return (torch.log(torch.exp(z).sum(-1)) - chosen).mean()
