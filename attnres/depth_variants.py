"""The fused operator for the options of AttnRes and for its window: nodes of the graph and the four verbs.

As `depth_attention`, for queries from the input, static weights, sigmoid, keys without norm, depth heads and
windows. In O(L d) memory per token, too, but a query from the input keeps about three more tensors [T, D] per
read (its own, and what its product needs), and each depth head has a table of weights of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnres.depth.plan import Plan
from attnres.depth.query import input_query
from attnres.depth.variant_backward import Backward, Keys
from attnres.depth.variant_forward import Forward, Source
from attnres.residual.attnres_specs import AttnRes
from attnres.residual.rule import ResidualState

_Optional = Tensor | None


def _without_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


def _save_source(ctx: Any, forward: Forward, source: Source, weights_RK: _Optional) -> None:
    ctx.heads, ctx.has_keys = forward.spec.heads, forward.spec.weights == "content"
    queries_RKC = None if forward.queries_RKC is None else forward.queries_RKC.data
    ctx.save_for_backward(source.value_KC, source.r_K, weights_RK, forward.queries_RHC, queries_RKC)


def _save_finished(ctx: Any, forward: Forward, group: int, output_TD: Tensor) -> Source:
    source = forward.finish(group, output_TD)
    weights_RK = forward.weights_RNK.data[forward.plan.readers(group), group]
    _save_source(ctx, forward, source, weights_RK)
    return source


def _source_gradient(ctx: Any, group: int | None, row: int) -> _Optional:
    """dv [T, D] of a finished source, or of the running sum that `row` reads."""
    value_KC, r_K, weights_RK, queries_RHC, queries_RKC = ctx.saved_tensors
    source, width = Source(value_KC, r_K), value_KC.shape[1] * ctx.heads
    keys = Keys(ctx.heads, width, queries_RHC, queries_RKC) if ctx.has_keys else None
    with _without_autocast(value_KC):
        if group is None:
            gradient_KC = ctx.backward.gather_running(row, source, keys)
        else:
            gradient_KC = ctx.backward.gather(group, source, weights_RK, keys)
    return None if gradient_KC is None else gradient_KC.reshape(-1, width)


class _Start(torch.autograd.Function):
    """Takes the embedding [T, D] and w [R, D], or None; gives the token."""

    @staticmethod
    def forward(
        ctx: Any, forward: Forward, backward: Backward, embedding_TD: Tensor, queries_RD: _Optional
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.backward = backward
        with _without_autocast(embedding_TD):
            _save_finished(ctx, forward, 0, embedding_TD)
        return embedding_TD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Any, ...]:
        backward: Backward = ctx.backward
        backward.enter()
        gradient_TD = _source_gradient(ctx, 0, 0)
        queries_gradient_RD = backward.queries_RD
        backward.release()
        return None, None, gradient_TD, queries_gradient_RD


class _Write(torch.autograd.Function):
    """Takes the output of a sublayer [T, D] and the token; gives the next token, and the latest source [T, D]
    where the next query looks at it."""

    @staticmethod
    def forward(
        ctx: Any, forward: Forward, backward: Backward, layer: int, output_TD: Tensor, token: Tensor
    ) -> tuple[Tensor, _Optional]:
        ctx.set_materialize_grads(False)
        ctx.backward, ctx.layer, ctx.dtype, ctx.group = backward, layer, output_TD.dtype, None
        with _without_autocast(output_TD):
            if forward.plan.finishes(layer):
                ctx.group = forward.plan.group_of(layer) + 1
                source = _save_finished(ctx, forward, ctx.group, output_TD)
            else:
                source = forward.add_to_running(output_TD)
                _save_source(ctx, forward, source, None)
        latest_TD = source.value_KC.data.view(output_TD.shape) if forward.spec.query == "input" else None
        return token.new_empty(0), latest_TD

    @staticmethod
    def backward(ctx: Any, _: None, latest_gradient_TD: _Optional) -> tuple[Any, ...]:
        backward: Backward = ctx.backward
        backward.enter()
        gradient_TD = _source_gradient(ctx, ctx.group, ctx.layer)
        if latest_gradient_TD is not None:
            gradient_TD = latest_gradient_TD if gradient_TD is None else gradient_TD + latest_gradient_TD
        # The running sum before this one is a part of what has been written here.
        backward.sum_KC = None if gradient_TD is None else gradient_TD.view(ctx.saved_tensors[0].shape)
        if not ctx.needs_input_grad[4]:  # no earlier node takes part
            backward.release()
        return None, None, None, None if gradient_TD is None else gradient_TD.to(ctx.dtype), None


class _Read(torch.autograd.Function):
    """Takes what is the read's own (its queries [T, D] or scalars [n, H], or None) and the token; gives h
    [T, D] and the next token."""

    @staticmethod
    def forward(
        ctx: Any, forward: Forward, backward: Backward, row: int, own: _Optional, token: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.backward, ctx.row, ctx.spec = backward, row, forward.spec
        ctx.own_dtype = None if own is None else own.dtype
        with _without_autocast(token):
            answer = forward.answer(row, own)
        running = answer.running or Source(token.new_empty(0), None)
        ctx.has_running = answer.running is not None
        values_NKC, r_NK = forward.values_NKC.data, forward.r_NK.data
        ctx.save_for_backward(values_NKC, r_NK, answer.weights_nK, running.value_KC, running.r_K)
        return answer.h_KC.view(-1, forward.spec.heads * forward.shape_KC[1]), token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient_TD: _Optional, _: None) -> tuple[Any, ...]:
        backward: Backward = ctx.backward
        backward.enter()
        own_gradient = None
        if gradient_TD is not None:
            with _without_autocast(gradient_TD):
                own_gradient = _store(ctx, gradient_TD)
        if not ctx.needs_input_grad[4]:  # no earlier node takes part
            backward.release()
        return None, None, None, own_gradient, None


def _store(ctx: Any, gradient_TD: Tensor) -> _Optional:
    """Leaves a read's gradient to its sources; gives that of its own queries or scalars."""
    values_NKC, r_NK, weights_nK, value_KC, r_K = ctx.saved_tensors
    spec, running_KC = ctx.spec, value_KC if ctx.has_running else None
    gradient_KC = gradient_TD.reshape(values_NKC.shape[1:])
    scores_nK = ctx.backward.keep(ctx.row, spec.normaliser, gradient_KC, values_NKC, weights_nK, running_KC)
    if spec.weights == "static":
        return scores_nK.unflatten(1, (-1, spec.heads)).sum(1).to(ctx.own_dtype)
    if spec.query == "learned":
        return None
    return ctx.backward.own_query(
        ctx.row, scores_nK, values_NKC, r_NK if spec.key_norm else None, running_KC, r_K
    ).view(gradient_TD.shape)


class VariantState(ResidualState):
    """The four verbs over one forward pass of full, block or window AttnRes with any options.

    `parameters` are those of `residual.attnres.AttnRes` by name. Norms, logits, weights and sums are in
    float32 (float64 for a float64 embedding) whatever autocast says; reads are cast once, to the embedding's
    type. The verbs are opaque to torch.compile.
    """

    @torch.compiler.disable
    def __init__(
        self, plan: Plan, spec: AttnRes, parameters: Mapping[str, Tensor], eps: float, embedding_BTD: Tensor
    ) -> None:
        self.plan, self.spec, self.eps, self.embedding_BTD = plan, spec, eps, embedding_BTD
        dtype = torch.promote_types(embedding_BTD.dtype, torch.float32)
        embedding_TD = embedding_BTD.to(dtype).flatten(0, -2)
        # One slice per row, all at once: the gradient of a single slice is as large as the whole.
        self.rows = {name: p.to(dtype).unbind() for name, p in parameters.items() if name != "scalars_PH"}
        queries_RD = None
        if spec.weights == "static":
            counts = [count for count in spec.sources(plan.layers) if count > 1]
            self.scalars = parameters["scalars_PH"].split(counts)
        elif spec.query == "learned":
            queries_RD = parameters["queries_RD"].to(dtype)
            if spec.key_norm:
                queries_RD = parameters["gains_RD"].to(dtype) * queries_RD
        self.forward = Forward(plan, spec, eps, queries_RD, embedding_TD)
        self.backward = Backward(plan)
        self.latest_TD: _Optional = None
        self.token: Tensor = _Start.apply(self.forward, self.backward, embedding_TD, queries_RD)

    @torch.compiler.disable
    def read(self, layer: int) -> Tensor:
        return self.embedding_BTD if layer == 0 else self._read(layer - 1)

    @torch.compiler.disable
    def write(self, layer: int, output_BTD: Tensor) -> None:
        output_TD = output_BTD.flatten(0, -2)
        self.token, self.latest_TD = _Write.apply(self.forward, self.backward, layer, output_TD, self.token)

    @torch.compiler.disable
    def finish(self) -> Tensor:
        return self._read(self.plan.layers - 1)

    def _own(self, row: int) -> _Optional:
        """What the weights of a read come from, but for learned queries."""
        if self.spec.weights == "static":
            return self.scalars[row]
        if self.spec.query == "learned":
            return None
        assert self.latest_TD is not None
        query_D, weight_DD = self.rows["queries_RD"][row], self.rows["query_weights_RDD"][row]
        query_TD = input_query(self.latest_TD, query_D, weight_DD, self.eps)
        return query_TD * self.rows["gains_RD"][row] if self.spec.key_norm else query_TD

    def _read(self, row: int) -> Tensor:
        h_TD, self.token = _Read.apply(self.forward, self.backward, row, self._own(row), self.token)
        return h_TD.view_as(self.embedding_BTD).to(self.embedding_BTD.dtype)
