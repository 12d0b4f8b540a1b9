"""Products over depth with depth heads: channels split in H groups of C, each with weights of its own.

Shapes: T tokens, R reads, N sources, K = T H pairs of token and head. Sources are [.., K, C], so that `mix`
sees H times as many, narrower tokens. Queries that are the same for all tokens are [R, H, C].
"""

from __future__ import annotations

import torch
from torch import Tensor


def head_dots(vector_KC: Tensor, values_NKC: Tensor) -> Tensor:
    """vector[k, :] . values[n, k, :] -> [N, K]."""
    products_K1N = torch.bmm(vector_KC[:, None], values_NKC.permute(1, 2, 0))
    return products_K1N.squeeze(1).t().contiguous()


def query_dots(queries_RHC: Tensor, value_KC: Tensor) -> Tensor:
    """queries[r, h, :] . value[t, h, :] -> [R, K]."""
    value_THC = value_KC.unflatten(0, (-1, queries_RHC.shape[1]))
    return torch.einsum("rhc,thc->rth", queries_RHC, value_THC).flatten(1)


def query_mix(factors_RK: Tensor, queries_RHC: Tensor) -> Tensor:
    """sum_r factors[r, t, h] queries[r, h, :] -> [K, C]."""
    factors_RTH = factors_RK.unflatten(1, (-1, queries_RHC.shape[1]))
    return torch.einsum("rth,rhc->thc", factors_RTH, queries_RHC).flatten(0, 1)


def query_sums(factors_RK: Tensor, value_KC: Tensor, heads: int) -> Tensor:
    """sum_t factors[r, t, h] value[t, h, :] -> [R, D]."""
    factors_RTH, value_THC = factors_RK.unflatten(1, (-1, heads)), value_KC.unflatten(0, (-1, heads))
    return torch.einsum("rth,thc->rhc", factors_RTH, value_THC).flatten(1)
