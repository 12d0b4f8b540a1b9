"""Products that stay fast under autocast to bfloat16 on a CPU that has no bfloat16 arithmetic.

There torch's own fall back to slow code, above all in the backward pass: measured on AVX2, 3 to 85 times the
time of float32 for a product of 2048 x 256 x 4096 and 8 times for attention. A bfloat16 product is one of
rounded numbers, summed in float32 and rounded once; float32 arithmetic gives just that.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@functools.cache
def lacks_bfloat16() -> bool:
    """Whether this processor is of the x86 kind whose vectors are too narrow for bfloat16 arithmetic."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def _emulates(x: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and x.dtype != torch.float64  # which autocast leaves alone
        and lacks_bfloat16()
        and not torch.compiler.is_compiling()
    )


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x [..., I] times the transposed weight -> [..., O], in bfloat16 under autocast to it."""
    return _Bfloat16Product.apply(x, weight_OI) if _emulates(weight_OI) else F.linear(x, weight_OI)


def causal_attention(query_BHTC: Tensor, key_BHTC: Tensor, value_BHTC: Tensor) -> Tensor:
    """Causal softmax attention -> [B, H, T, C] of the type of the arguments."""
    if not _emulates(value_BHTC):
        return F.scaled_dot_product_attention(query_BHTC, key_BHTC, value_BHTC, is_causal=True)
    with torch.autocast("cpu", enabled=False):
        mixed_BHTC = F.scaled_dot_product_attention(
            query_BHTC.float(), key_BHTC.float(), value_BHTC.float(), is_causal=True
        )
    return mixed_BHTC.to(value_BHTC.dtype)


class Linear(nn.Linear):
    """A projection without bias, through `linear`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class _Bfloat16Product(torch.autograd.Function):
    """As torch under autocast: both factors, the product and both gradients are rounded to bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight_OI.dtype)
        x_MI, weight_OI = x.flatten(0, -2).bfloat16(), weight_OI.bfloat16()
        ctx.save_for_backward(x_MI, weight_OI)
        with torch.autocast("cpu", enabled=False):
            product_MO = torch.mm(x_MI.float(), weight_OI.float().t()).bfloat16()
        return product_MO.view(*x.shape[:-1], len(weight_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x_MI, weight_OI = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            gradient_MO = gradient.flatten(0, -2).float()
            x_gradient_MI = torch.mm(gradient_MO, weight_OI.float()).bfloat16()
            weight_gradient_OI = torch.mm(gradient_MO.t(), x_MI.float()).bfloat16()
        return x_gradient_MI.view(ctx.shape).to(ctx.dtypes[0]), weight_gradient_OI.to(ctx.dtypes[1])
