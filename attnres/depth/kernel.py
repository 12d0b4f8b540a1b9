"""Depth attention by a package's kernels (`residual.implementation=kernel`): `fused_attnres` of fla-core.

For CUDA devices. The package computes one read: the mixture of a list of sources, and the gradients of all
of them. It is believed only after a comparison with the plain operator on the device and at the width at
hand: a kernel that a compiler or a processor gets wrong would otherwise be found in a loss, if at all.

Shapes: B sequences of T tokens, D channels, R reads that have a choice, N sources.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attnres.errors import ConfigError, UserError

FIELD = "residual.implementation"
PACKAGE = "fla-core"
# The largest difference over the largest value, of float32 sums in another order.
TOLERANCE = 1e-4
CHECKED_ELEMENTS = 2**24  # of all sources together: 64 MiB, and a few times that while comparing
CHECKED_TOKENS = 1024

# (sources [B, T, D], query [D], gain [D], eps) -> [B, T, D]
Operator = Callable[[Sequence[Tensor], Tensor, Tensor, float], Tensor]


def load_operator() -> Operator:
    """The package's operator. Raises UserError if it is not installed or cannot be loaded here."""
    try:
        from fla.ops.attnres import fused_attnres
    except ImportError as error:
        raise UserError(
            f"{FIELD}=kernel: {PACKAGE} or triton cannot be imported ({error}); "
            "pip install 'attnres-study[kernel]', or use fused"
        ) from None

    def operator(sources: Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        # Level 0 keeps each read's mixture for the backward pass instead of reading all sources once more.
        result: Tensor = fused_attnres(query_D, sources, gain_D, rms_eps=eps, checkpoint_level=0)
        return result

    return operator


class KernelReads:
    """The reads of one forward pass. Sources must be of the embedding's type and device."""

    def __init__(
        self,
        queries_RD: Tensor,
        gains_RD: Tensor,
        eps: float,
        embedding_BTD: Tensor,
        max_sources: int,
        reference: Operator,
    ) -> None:
        if not embedding_BTD.is_cuda:
            raise ConfigError(FIELD, "kernel", f"is for CUDA devices; this one is {embedding_BTD.device}")
        if embedding_BTD.dtype != torch.float32:
            raise ConfigError(FIELD, "kernel", f"has no {embedding_BTD.dtype} sources; use fused")
        width = embedding_BTD.shape[-1]
        self.operator = checked_operator(embedding_BTD.device, width, max_sources, eps, reference)
        self.eps = eps
        # All at once: the gradient of a single row is as large as the whole.
        self.queries, self.gains = queries_RD.unbind(), gains_RD.unbind()

    @torch.compiler.disable
    def read(self, sources: Sequence[Tensor], row: int) -> Tensor:
        with torch.autocast(sources[0].device.type, enabled=False):
            return self.operator(sources, self.queries[row], self.gains[row], self.eps)


@functools.lru_cache
def checked_operator(
    device: torch.device, width: int, max_sources: int, eps: float, reference: Operator
) -> Operator:
    """The package's operator, once its outputs and gradients agree with the reference's on this device.

    Compared at 2 and at `max_sources` sources. Raises UserError that says what differs, and by how much.
    """
    operator = load_operator()
    for count in sorted({2, max_sources}):
        name, error = largest_difference(operator, reference, device, width, count, eps)
        if not error <= TOLERANCE:  # a NaN does not agree
            package = f"{PACKAGE} {importlib.metadata.version(PACKAGE)} on {device}"
            where = f"{name} (width {width}, {count} sources; allowed {TOLERANCE:g})"
            raise UserError(
                f"{FIELD}=kernel: {package} differs from the reference by {error:.1e} in {where}; use fused"
            )
    return operator


def largest_difference(
    operator: Operator, reference: Operator, device: torch.device, width: int, count: int, eps: float
) -> tuple[str, float]:
    """Where two operators differ most, and by how much of the largest value there: output or a gradient."""
    generator = torch.Generator().manual_seed(count)
    tokens = max(1, min(CHECKED_TOKENS, CHECKED_ELEMENTS // (width * count)))

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(device)

    # Sources of very different size, and logits of a few units, as in a trained model.
    sources = [draw(1, tokens, width, scale=4.0 ** (i % 3 - 1)) for i in range(count)]
    query_D, gain_D = draw(width, scale=3 * width**-0.5), 1 + draw(width, scale=0.1)
    gradient_BTD = draw(1, tokens, width)
    values = [
        _values(function, sources, query_D, gain_D, gradient_BTD, eps) for function in (operator, reference)
    ]
    names = ["the output", "the query's gradient", "the gain's gradient"]
    names += [f"the gradient of source {i}" for i in range(count)]
    errors = [
        ((ours - theirs).abs().max() / theirs.abs().max()).item()
        for ours, theirs in zip(*values, strict=True)
    ]
    # A NaN is larger than anything here.
    worst = max(range(len(errors)), key=lambda i: errors[i] if errors[i] == errors[i] else float("inf"))
    return names[worst], errors[worst]


@torch.enable_grad()
def _values(
    function: Operator,
    sources: Sequence[Tensor],
    query_D: Tensor,
    gain_D: Tensor,
    gradient_BTD: Tensor,
    eps: float,
) -> list[Tensor]:
    """Output and all gradients, query and gain first."""
    leaves = [tensor.clone().requires_grad_() for tensor in (query_D, gain_D, *sources)]
    with torch.autocast(gradient_BTD.device.type, enabled=False):
        output_BTD = function(leaves[2:], leaves[0], leaves[1], eps)
    return [output_BTD.detach(), *torch.autograd.grad(output_BTD, leaves, gradient_BTD)]
