"""The forward pass over depth for the options of AttnRes and for its window.

What `depth.tape` is for the main form, more general and a little slower. Shapes: T tokens, D channels, H
depth heads, C = D / H channels of a head, K = T H pairs of token and head, N sources, n of them seen by a
read, R reads. With w_l the gain times the query (the query alone where keys are not normed; then r = 1), for
each head:

    s_il = r_i w_l . v_i, or a scalar      a_l = softmax_i(s_il), or sigmoid      h_l = sum_i a_il v_i

Logits take one product per source for all its readers, made when it is written; a query that looks at the
input is known only when its read comes, and then takes one product over all sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnres.depth.head_products import head_dots, query_dots
from attnres.depth.plan import Plan
from attnres.depth.products import inverse_rms, mix
from attnres.residual.attnres_specs import AttnRes


@dataclass
class Source:
    """A finished source or a running sum."""

    value_KC: Tensor
    r_K: Tensor | None  # None: its keys are not normed


@dataclass
class Answer:
    """A read, and what its backward pass needs; the running sum, where there is one, is the last source."""

    h_KC: Tensor
    weights_nK: Tensor
    running: Source | None


class Forward:
    """Dies with the pass; the graph saves what backward needs."""

    def __init__(
        self, plan: Plan, spec: AttnRes, eps: float, queries_RD: Tensor | None, embedding_TD: Tensor
    ) -> None:
        tokens, width = embedding_TD.shape
        self.plan, self.spec, self.eps = plan, spec, eps
        self.shape_KC = (tokens * spec.heads, width // spec.heads)
        self.queries_RHC: Tensor | None = None  # w, where it is the same for all tokens
        if queries_RD is not None:
            self.queries_RHC = queries_RD.detach().unflatten(-1, (spec.heads, -1))
        self.queries_RKC: Tensor | None = None  # w, where each token has its own
        if spec.query == "input":
            self.queries_RKC = embedding_TD.new_empty(plan.layers, *self.shape_KC)
        self.values_NKC = embedding_TD.new_empty(plan.groups, *self.shape_KC)
        self.r_NK = embedding_TD.new_empty(plan.groups, self.shape_KC[0])
        # A read's logits, and from the read on its weights.
        self.weights_RNK = embedding_TD.new_empty(plan.layers, plan.groups, self.shape_KC[0])
        self.running: Source | None = None

    def finish(self, group: int, output_TD: Tensor) -> Source:
        """The last output of a block completes source `group`."""
        # `.data` has a version counter of its own: later sources go to other places of the same table, and
        # autograd would take that for changes of what it saved.
        value_KC, output_KC = self.values_NKC.data[group], output_TD.reshape(self.shape_KC)
        if self.running is None:
            value_KC.copy_(output_KC)
        else:
            torch.add(self.running.value_KC, output_KC, out=value_KC)
        source, self.running = Source(value_KC, self._inverse_rms(value_KC)), None
        if source.r_K is not None:
            self.r_NK[group].copy_(source.r_K)
        if self.queries_RHC is not None:
            rows = self.plan.readers(group)
            self.weights_RNK[rows, group] = _times(query_dots(self.queries_RHC[rows], value_KC), source.r_K)
        return source

    def add_to_running(self, output_TD: Tensor) -> Source:
        output_KC = output_TD.detach().reshape(self.shape_KC).to(self.values_NKC.dtype)
        value_KC = output_KC if self.running is None else self.running.value_KC + output_KC
        self.running = Source(value_KC, self._inverse_rms(value_KC))
        return self.running

    def _inverse_rms(self, value_KC: Tensor) -> Tensor | None:
        """Over all channels of a token, whatever the heads."""
        if self.spec.weights == "static" or not self.spec.key_norm:
            return None
        heads = self.spec.heads
        r_T = inverse_rms(value_KC.view(len(value_KC) // heads, -1), self.eps)
        return r_T if heads == 1 else r_T.repeat_interleave(heads)

    def answer(self, row: int, own: Tensor | None) -> Answer:
        """A read. `own`: its queries [T, D] or its scalars [n, H], where the weights come from such."""
        seen = self.plan.seen(row)
        if self.spec.weights == "static":
            assert own is not None
            tokens = self.shape_KC[0] // self.spec.heads
            logits_nK = own.detach().to(self.values_NKC.dtype)[:, None].expand(-1, tokens, -1).flatten(1)
        else:
            logits_nK = self._logits(row, seen, own)
        softmax = self.spec.normaliser == "softmax"
        weights_nK = torch.softmax(logits_nK, dim=0) if softmax else torch.sigmoid(logits_nK)
        parts = weights_nK[: sum(part.stop - part.start for part in seen)].split(
            [part.stop - part.start for part in seen]
        )
        mixed = []
        for part, part_nK in zip(seen, parts, strict=True):
            self.weights_RNK[row, part] = part_nK
            mixed.append(mix(part_nK[None], self.values_NKC[part])[0])
        h_KC = mixed[0].contiguous() if len(mixed) == 1 else mixed[0] + mixed[1]
        if self.running is not None:
            h_KC.addcmul_(self.running.value_KC, weights_nK[-1, :, None])
        return Answer(h_KC, weights_nK, self.running)

    def _logits(self, row: int, seen: Sequence[slice], own: Tensor | None) -> Tensor:
        running = self.running
        if own is None:
            assert self.queries_RHC is not None
            parts = [self.weights_RNK[row, part] for part in seen]
            if running is not None:
                logit_1K = query_dots(self.queries_RHC[row : row + 1], running.value_KC)
                parts.append(_times(logit_1K, running.r_K))
            return torch.cat(parts)
        assert self.queries_RKC is not None
        query_KC = self.queries_RKC[row].copy_(own.detach().reshape(self.shape_KC))
        for_keys = self.spec.key_norm
        parts = [
            _times(head_dots(query_KC, self.values_NKC[part]), self.r_NK[part] if for_keys else None)
            for part in seen
        ]
        if running is not None:
            parts.append(_times((query_KC * running.value_KC).sum(-1)[None], running.r_K))
        return torch.cat(parts)


def _times(logits_nK: Tensor, r_K: Tensor | None) -> Tensor:
    return logits_nK if r_K is None else logits_nK.mul_(r_K)
