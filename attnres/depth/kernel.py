"""Depth attention by a package's kernels (`residual.implementation=kernel`): `fused_attnres` of fla-core.

For CUDA devices. The package computes one read: the mixture of a list of sources, and the gradients of all
of them. It is believed only after a comparison with the plain operator on the device at hand, at its width
and at numbers of sources that make the package compile all its forms: a kernel that a compiler or a processor
gets wrong would otherwise be found in a loss, if at all.

Shapes: B sequences of T tokens, D channels, R reads that have a choice, N sources.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnres.errors import ConfigError, UserError

FIELD = "residual.implementation"
PACKAGE = "fla-core"
# The largest difference over the largest value, of float32 sums in another order.
TOLERANCE = 1e-4
# Of all sources together: 128 MiB, and about ten times that while comparing.
CHECKED_ELEMENTS = 2**25
TOKENS_STEP = 16  # Triton compiles another form for numbers that this does not divide
SMALLEST_BUCKET = 8  # the package compiles a form for up to 8 sources, up to 16, up to 32, ...

_peaks: dict[int, int] = {}  # number of a device -> see `peak_before`

# (sources [B, T, D], query [D], gain [D], eps) -> [B, T, D]
Operator = Callable[[Sequence[Tensor], Tensor, Tensor, float], Tensor]


def load_operator() -> Operator:
    """The package's operator. Raises UserError if it is not installed or cannot be loaded here."""
    try:
        from fla.ops.attnres import fused_attnres
    except Exception as error:  # a missing package, or one that finds no driver or another triton
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{FIELD}=kernel: {PACKAGE} or triton cannot be imported ({why}); "
            "pip install 'attnres-study[kernel]', or use fused"
        ) from None

    def operator(sources: Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        result: Tensor = fused_attnres(query_D, sources, gain_D, rms_eps=eps)
        _allow_one_backward(result)
        return result

    return operator


def _allow_one_backward(output_BTD: Tensor) -> None:
    """Release the sources after the backward pass, and refuse what the package would get wrong after it.

    The package keeps the sources also where autograd does not see them, in an attribute of its node: they
    would live as long as the loss does. Its backward pass counts as a constant for second derivatives.
    """
    node = output_BTD.grad_fn
    while node is not None and not hasattr(node, "res"):
        node = node.next_functions[0][0] if node.next_functions else None
    if node is None:
        return
    alive = weakref.ref(node)

    def check(*_: Any) -> None:
        if torch.is_grad_enabled():  # create_graph
            raise RuntimeError(
                "the kernels of depth attention have no second derivatives; use implementation=reference"
            )
        if (started := alive()) is not None and not started.res:
            raise RuntimeError(
                "the kernels of depth attention go backward once; use implementation=fused to retain a graph"
            )

    def release(*_: Any) -> None:
        if (done := alive()) is not None:
            done.res = ()

    node.register_prehook(check)
    node.register_hook(release)


class KernelReads:
    """The reads of one forward pass. Sources must be of the embedding's type and device."""

    @torch.compiler.disable  # what is compared must be what runs
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
        width, device = embedding_BTD.shape[-1], embedding_BTD.device
        tokens = embedding_BTD.numel() // width
        self.operator = checked_operator(device, width, max_sources, tokens, eps, reference)
        self.eps = eps
        # All at once: the gradient of a single row is as large as the whole.
        self.queries, self.gains = (
            [_aligned(row_D) for row_D in table_RD.unbind()] for table_RD in (queries_RD, gains_RD)
        )

    @torch.compiler.disable
    def read(self, sources: Sequence[Tensor], row: int) -> Tensor:
        with torch.autocast(sources[0].device.type, enabled=False):
            return self.operator(sources, self.queries[row], self.gains[row], self.eps)


def _aligned(row_D: Tensor) -> Tensor:
    """As what is compared: Triton compiles another form for addresses that 16 does not divide."""
    return row_D if row_D.data_ptr() % 16 == 0 else row_D.clone()


def peak_before(device: torch.device) -> int:
    """Most memory in use on a device, in bytes, before comparisons there: these forget what torch counted."""
    return _peaks.get(device.index or 0, 0)


@functools.lru_cache
def checked_operator(
    device: torch.device, width: int, max_sources: int, tokens: int, eps: float, reference: Operator
) -> Operator:
    """The package's operator, once its outputs and gradients agree with the reference's on this device.

    Compared for every form that up to `max_sources` sources make it compile, at `tokens` tokens or, to spare
    memory, at fewer. Raises UserError that says what differs, and by how much.
    """
    operator = load_operator()
    if device.type == "cuda":
        _peaks[device.index or 0] = max(peak_before(device), torch.cuda.max_memory_allocated(device))
    for count in counts_of_sources(max_sources):
        fitting = CHECKED_ELEMENTS // (width * count) // TOKENS_STEP * TOKENS_STEP
        compared = min(tokens, max(TOKENS_STEP, fitting))
        name, error = largest_difference(operator, reference, device, width, count, compared, eps)
        if not error <= TOLERANCE:  # a NaN does not agree
            package = f"{PACKAGE} {_version()} on {device}"
            where = f"{name} (width {width}, {count} sources; allowed {TOLERANCE:g})"
            raise UserError(
                f"{FIELD}=kernel: {package} differs from the reference by {error:.1e} in {where}; use fused"
            )
    if device.type == "cuda":  # a trial's peak is that of its training, which may have begun
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return operator


def counts_of_sources(most: int) -> list[int]:
    """2, the largest, and the full buckets between them: one at least of every form that is compiled."""
    counts, bucket = {2, most}, SMALLEST_BUCKET
    while bucket < most:
        counts.add(bucket)
        bucket *= 2
    return sorted(counts)


def _version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "(of another package)"


@torch.inference_mode(False)  # also where a model is first used in one: tensors made there have no gradients
def largest_difference(
    operator: Operator,
    reference: Operator,
    device: torch.device,
    width: int,
    count: int,
    tokens: int,
    eps: float,
) -> tuple[str, float]:
    """Where two operators differ most, and by how much of the largest value there: output or a gradient."""
    generator = torch.Generator().manual_seed(count)

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
    worst = max(range(len(errors)), key=lambda i: math.inf if math.isnan(errors[i]) else errors[i])
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
