"""AttnRes with all its options once more: slow, in float64, one source and one head at a time.

It imports nothing of the package. `run` is a Run of tests/reference_streams.py: its meter counts what is done
to vectors of d channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Source = tuple[Tensor, Tensor | None]  # a value, and its root mean square where keys are normed


def root_mean_square(run: Any, x: Tensor) -> Tensor:
    return torch.sqrt(run.meter.dot(x, x) / x.shape[-1] + run.eps)


def query_of(run: Any, sources: list[Source], row: int) -> Tensor:
    """The query, times the gain where keys are normed: [d], or [.., d] per token."""
    query, options = run.parameters["queries_RD"][row], run.options
    if options["query"] == "learned":
        return query * run.parameters["gains_RD"][row] if options["key_norm"] else query
    latest, rms = sources[-1]
    unit = latest / (root_mean_square(run, latest) if rms is None else rms)
    matrix = run.parameters["query_weights_RDD"][row]
    product = torch.cat([run.meter.dot(unit, matrix[channel]) for channel in range(len(query))], dim=-1)
    query = run.meter.add(product, query)
    return run.meter.times(query, run.parameters["gains_RD"][row]) if options["key_norm"] else query


def mixture(run: Any, sources: list[Source], row: int, scalars: Tensor | None) -> Tensor:
    """h of one read; `scalars` are its rows of the static weights."""
    query = query_of(run, sources, row) if scalars is None else None
    width, heads = sources[0][0].shape[-1], run.options["heads"]
    mixed = []
    for head in range(heads):
        part = slice(head * width // heads, (head + 1) * width // heads)
        logits = []
        for index, (v, rms) in enumerate(sources):
            if scalars is not None:
                logits.append(scalars[index, head].expand(*v.shape[:-1], 1))
            else:
                product = run.meter.dot(v[..., part], query[..., part])
                logits.append(product if rms is None else product / rms)
        if run.options["normaliser"] == "softmax":
            exponentials = [torch.exp(z) for z in logits]
            weights = [e / sum(exponentials) for e in exponentials]
        else:
            weights = [1 / (1 + torch.exp(-z)) for z in logits]
        mixed.append(run.meter.weighted(weights, [v[..., part] for v, _ in sources]))
    return torch.cat(mixed, dim=-1)


def attnres(run: Any, v0: Tensor) -> None:
    """Full is block with S = 1; window W keeps the last W finished sources beside the embedding."""
    options, size, window = run.options, run.options["block_size"], run.options["window"]
    static = options["weights"] == "static"

    def source(x: Tensor) -> Source:
        return x, root_mean_square(run, x) if options["key_norm"] and not static else None

    embedding, finished, used = source(v0), [], 0
    running: Source | None = None
    for layer in range(run.layers + 1):
        sources = [embedding, *finished[-window:], *([running] if running is not None else [])]
        h = v0
        if layer:
            scalars = run.parameters["scalars_PH"][used : used + len(sources)] if static else None
            used += len(sources)
            h = mixture(run, sources, layer - 1, scalars)
        if layer == run.layers:
            run.reads.append(h)
            return
        output = run.output(layer, h)
        running = source(output if running is None else run.meter.add(running[0], output))
        if (layer + 1) % size == 0:
            finished.append(running)
            running = None
