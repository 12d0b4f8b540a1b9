"""RMSNorm (1910.07467) that a CPU runs fast at small widths.

torch's own rms_norm is one kernel on a GPU and in compiled code, but a dozen passes on a CPU. The one here
makes three passes forward and four back, and keeps one tensor; measured 1.5 to 3 times faster on a CPU at
widths 24 to 64.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _UnitRMS(torch.autograd.Function):
    """y = r x with r = (mean(x^2) + eps)^(-1/2) over the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse_rms = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        y = x * inverse_rms
        ctx.save_for_backward(y, inverse_rms)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:
        """dx = r (dy - y mean(dy y)), since dr/dx = -r^2 y / D."""
        y, inverse_rms = ctx.saved_tensors
        along_y = (grad_y * y).sum(-1, keepdim=True).div_(-y.shape[-1])
        return torch.addcmul(grad_y, y, along_y).mul_(inverse_rms), None


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
        return _UnitRMS.apply(x, self.eps) * self.gain
