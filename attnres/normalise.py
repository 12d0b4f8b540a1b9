"""RMSNorm (1910.07467) that a CPU runs fast at small widths.

torch's own rms_norm is one kernel on a GPU and in compiled code, but a dozen passes on a CPU. The one here
makes three passes forward, and back it borrows layer norm's kernel; measured 3 to 5 times faster on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    """y = gain r x with r = (mean(x^2) + eps)^(-1/2) over the last axis of D channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse_rms = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain_D, inverse_rms)
        return (x * inverse_rms).mul_(gain_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        """dx = r u - x r^3 mean(u x) and dgain = sum(dy r x), with u = gain dy.

        Layer norm of mean 0 and the same r has the same dgain, and this dx less r mean(u), which is put back.
        """
        x, gain_D, inverse_rms = ctx.saved_tensors
        width = x.shape[-1]
        mean = torch.zeros_like(inverse_rms)
        grad_x, grad_gain_D, _ = torch.ops.aten.native_layer_norm_backward(
            grad_y, x, (width,), mean, inverse_rms, gain_D, None, (True, True, False)
        )
        mean_u = torch.mv(grad_y.reshape(-1, width), gain_D).view_as(inverse_rms).div_(width)
        return grad_x.add_(mean_u.mul_(inverse_rms)), grad_gain_D, None


class RMSNorm(nn.Module):
    """gain * x / sqrt(mean(x^2) + eps) over the last axis, in float32 at least, whatever autocast says."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.rms_norm(x, self.gain.shape, self.gain, self.eps)
        return _RMSNorm.apply(x, self.gain.to(x.dtype), self.eps)
