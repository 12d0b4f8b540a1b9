"""The backward pass over depth for the options of AttnRes and for its window: reads store, sources pull.

Shapes and letters as in `depth.variant_forward`; G_l is the gradient of h_l.

    ds_il = a_il (G_l . v_i - sum_j a_jl G_l . v_j), by sigmoid a_il (1 - a_il) G_l . v_i
    dk_i = sum_l ds_il w_l      dw_l = sum_i ds_il r_i v_i
    dv_i = sum_l a_il G_l + r_i dk_i - v_i r_i^3 / d (v_i . dk_i), the last dot over all channels of a token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnres.depth import tape
from attnres.depth.head_products import head_dots, query_mix, query_sums
from attnres.depth.products import mix
from attnres.depth.variant_forward import Source


@dataclass
class Backward(tape.Backward):
    """Tables of its own; the rest, and what is forgotten when, is as in `depth.tape`."""

    gradients_RKC: Tensor | None = None  # G_l
    scores_RNK: Tensor | None = None  # ds_il of finished sources
    sum_KC: Tensor | None = None  # gradient of the running sum so far

    def keep(
        self,
        row: int,
        normaliser: str,
        gradient_KC: Tensor,
        values_NKC: Tensor,
        weights_nK: Tensor,
        running_KC: Tensor | None,
    ) -> Tensor:
        """Store G_l and ds_l; gives the latter, [n, K], that of the running sum last."""
        if self.gradients_RKC is None or self.scores_RNK is None:
            reads, groups = self.plan.layers, self.plan.groups
            self.gradients_RKC = gradient_KC.new_zeros(reads, *gradient_KC.shape)
            self.scores_RNK = gradient_KC.new_zeros(reads, groups, len(gradient_KC))
        self.stored.add(row)
        self.gradients_RKC[row] = gradient_KC
        seen = self.plan.seen(row)
        products = [head_dots(gradient_KC, values_NKC[part]) for part in seen]
        if running_KC is not None:
            products.append((gradient_KC * running_KC).sum(-1)[None])
            share_KC = gradient_KC * weights_nK[-1, :, None]
            self.sum_KC = share_KC if self.sum_KC is None else self.sum_KC + share_KC
        scores_nK = torch.cat(products)
        if normaliser == "softmax":
            scores_nK.sub_((weights_nK * scores_nK).sum(0)).mul_(weights_nK)
        else:
            scores_nK.mul_(weights_nK).mul_(1 - weights_nK)
        used = 0
        for part in seen:
            count = part.stop - part.start
            self.scores_RNK[row, part] = scores_nK[used : used + count]
            used += count
        if running_KC is not None:
            self.running[row] = scores_nK[-1]
        return scores_nK

    def own_query(
        self,
        row: int,
        scores_nK: Tensor,
        values_NKC: Tensor,
        r_NK: Tensor | None,
        running_KC: Tensor | None,
        running_r_K: Tensor | None,
    ) -> Tensor:
        """dw_l [K, C] of a read whose tokens have queries of their own."""
        gradient_KC, used = torch.zeros_like(values_NKC[0]), 0
        for part in self.plan.seen(row):
            count = part.stop - part.start
            factors_nK = scores_nK[used : used + count]
            factors_nK = factors_nK if r_NK is None else factors_nK * r_NK[part]
            gradient_KC += mix(factors_nK[None], values_NKC[part])[0]
            used += count
        if running_KC is not None:
            factor_K = scores_nK[-1] if running_r_K is None else scores_nK[-1] * running_r_K
            gradient_KC.addcmul_(running_KC, factor_K[:, None])
        return gradient_KC

    def gather(self, group: int, source: Source, weights_RK: Tensor, keys: Keys | None) -> Tensor | None:
        """dv of a finished source [K, C], from what its readers have stored.

        `weights_RK` begins at its first reader; `keys` is None where weights do not look at sources.
        """
        first, last = self.plan.readers(group).start, max(self.stored, default=-1)
        rows = slice(first, min(self.plan.readers(group).stop, last + 1))
        if self.gradients_RKC is None or self.scores_RNK is None or rows.stop <= rows.start:
            return None
        readers = rows.stop - rows.start
        gradient_KC = mix(weights_RK[None, :readers], self.gradients_RKC[rows])[0].contiguous()
        if keys is not None:
            gradient_KC += self._through_keys(rows, source, self.scores_RNK[rows, group], keys)
        return gradient_KC

    def gather_running(self, row: int, source: Source, keys: Keys | None) -> Tensor | None:
        """Gradient of a running sum: from its one reader, and as a part of the next running sum."""
        if keys is None or row not in self.running:
            return self.sum_KC
        assert self.sum_KC is not None
        scores_1K = self.running[row][None]
        return self.sum_KC + self._through_keys(slice(row, row + 1), source, scores_1K, keys)

    def _through_keys(self, rows: slice, source: Source, scores_RK: Tensor, keys: Keys) -> Tensor:
        """What reaches a source through its logits. Adds to dw where all tokens share the queries."""
        value_KC, r_K = source.value_KC, source.r_K
        factors_RK = scores_RK if r_K is None else scores_RK * r_K
        if keys.queries_RHC is not None:
            queries_RHC = keys.queries_RHC[rows]
            gradient_KC = query_mix(factors_RK, queries_RHC)
            if self.queries_RD is None:
                self.queries_RD = value_KC.new_zeros(self.plan.layers, keys.width)
            self.queries_RD[rows] += query_sums(factors_RK, value_KC, keys.heads)
        else:
            assert keys.queries_RKC is not None
            gradient_KC = mix(factors_RK[None], keys.queries_RKC[rows])[0]
        if r_K is None:
            return gradient_KC
        along_T = (value_KC * gradient_KC).sum(-1).view(-1, keys.heads).sum(-1)
        scale_K = r_K.square() * along_T.repeat_interleave(keys.heads) / keys.width
        return torch.addcmul(gradient_KC, value_KC, scale_K[:, None], value=-1)


@dataclass
class Keys:
    """The queries that meet the sources' keys: one of the two, for all rows."""

    heads: int
    width: int
    queries_RHC: Tensor | None
    queries_RKC: Tensor | None
