"""The query that looks at the input: q_l = learned vector + W_l RMSNorm(latest source) (2603.15031)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def input_query(latest_XD: Tensor, query_D: Tensor, weight_DD: Tensor, eps: float) -> Tensor:
    """A query per token, [.., D], in float32 at least whatever autocast says. The norm has no gain."""
    with torch.autocast(latest_XD.device.type, enabled=False):
        wide_XD = latest_XD.to(torch.promote_types(latest_XD.dtype, torch.float32))
        normed_XD = wide_XD * torch.rsqrt(wide_XD.square().mean(-1, keepdim=True) + eps)
        return F.linear(normed_XD, weight_DD.to(wide_XD.dtype), query_D.to(wide_XD.dtype))
