"""The fused operator behind the AttnRes rules (arXiv:2603.15031), in plain PyTorch.

Computes what `residual.attnres.depth_attention` computes, in O(L d) memory per token instead of O(L^2 d):

- One buffer of sources per forward pass. The logits of a source for all later reads are one matrix product,
  made when the source is written: queries are parameters, so they are known.
- A read is one softmax and one batched product over the finished sources, plus the block's running sum.
- Backward pulls instead of pushing: the backward of a read stores its gradient and those of its logits; that
  of a source sums what its later readers stored, in one batched product. An empty token tensor threaded
  through all nodes gives autograd the order: that of the forward pass, turned round.

The formulas are in `depth.tape`. Shapes: B sequences of T tokens (elsewhere T is all tokens of the batch), D
channels, R = L reads that have a choice (row l - 1 is sublayer l, the last row the output).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnres.depth.plan import Plan
from attnres.depth.tape import Backward, Forward, Read
from attnres.residual.rule import ResidualState


def _without_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


def _pull(ctx: Any, group: int) -> Tensor | None:
    backward: Backward = ctx.backward
    value_TD, r_T, queries_RD = ctx.saved_tensors
    return backward.pull(group, value_TD, r_T, queries_RD)


class _Start(torch.autograd.Function):
    """Takes the embedding [T, D] and w [R, D]; gives the token."""

    @staticmethod
    def forward(
        ctx: Any, forward: Forward, backward: Backward, embedding_TD: Tensor, queries_RD: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.backward = backward
        with _without_autocast(embedding_TD):
            forward.finish_block(0, embedding_TD)
            ctx.save_for_backward(*forward.add_source(0), forward.queries_RD)
        return embedding_TD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Any, ...]:
        backward: Backward = ctx.backward
        backward.enter()
        with _without_autocast(ctx.saved_tensors[0]):
            gradient_TD = _pull(ctx, 0)
        queries_gradient_RD = backward.queries_RD
        backward.release()
        return None, None, gradient_TD, queries_gradient_RD


class _Write(torch.autograd.Function):
    """Takes the output of a sublayer [T, D] and the token; gives the next token."""

    @staticmethod
    def forward(
        ctx: Any, forward: Forward, backward: Backward, layer: int, output_TD: Tensor, token: Tensor
    ) -> Tensor:
        plan = forward.plan
        ctx.set_materialize_grads(False)
        ctx.backward, ctx.layer, ctx.dtype = backward, layer, output_TD.dtype
        with _without_autocast(output_TD):
            if plan.finishes(layer):
                group = plan.group_of(layer) + 1
                forward.finish_block(group, output_TD)
                ctx.save_for_backward(*forward.add_source(group), forward.queries_RD)
            else:  # row `layer` is the next sublayer's
                ctx.save_for_backward(*forward.add_to_running(layer, output_TD), forward.queries_RD)
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Any, ...]:
        backward: Backward = ctx.backward
        backward.enter()
        with _without_autocast(ctx.saved_tensors[0]):
            if backward.plan.finishes(ctx.layer):
                gradient_TD = _pull(ctx, backward.plan.group_of(ctx.layer) + 1)
            else:
                gradient_TD = backward.pull_running(ctx.layer, *ctx.saved_tensors)
        backward.sum_TD = gradient_TD
        if not ctx.needs_input_grad[4]:  # no earlier node takes part
            backward.release()
        return None, None, None, None if gradient_TD is None else gradient_TD.to(ctx.dtype), None


class _Read(torch.autograd.Function):
    """Takes the token; gives what the read of query row `row` sees, [T, D], and the next token."""

    @staticmethod
    def forward(
        ctx: Any, forward: Forward, backward: Backward, row: int, token: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.backward, ctx.row = backward, row
        with _without_autocast(token):
            h_TD, read = forward.read(row)
        ctx.save_for_backward(*read.tensors())
        return h_TD, token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor | None, _: None) -> tuple[Any, ...]:
        backward: Backward = ctx.backward
        backward.enter()
        if gradient_TD is not None:
            with _without_autocast(gradient_TD):
                backward.store(ctx.row, gradient_TD, Read(*ctx.saved_tensors))
        return None, None, None, None


class DepthAttentionState(ResidualState):
    """The four verbs over one forward pass of full (block_size 1) or block AttnRes.

    `queries_RD` and `gains_RD` have a row for each of the L reads after the first. Norms, logits, softmax and
    sums are in float32 (float64 for a float64 embedding) whatever autocast says; reads are cast once, to the
    embedding's type. The verbs are opaque to torch.compile: it compiles the sublayers between them.
    """

    @torch.compiler.disable
    def __init__(
        self, queries_RD: Tensor, gains_RD: Tensor, block_size: int, eps: float, embedding_BTD: Tensor
    ) -> None:
        self.plan = Plan(queries_RD.shape[0], block_size)
        dtype = torch.promote_types(embedding_BTD.dtype, torch.float32)
        embedding_TD = embedding_BTD.to(dtype).flatten(0, -2)
        queries_RD = gains_RD.to(dtype) * queries_RD.to(dtype)
        self.embedding_BTD = embedding_BTD
        self.forward = Forward(self.plan, eps, queries_RD, embedding_TD)
        self.backward = Backward(self.plan)
        self.token: Tensor = _Start.apply(self.forward, self.backward, embedding_TD, queries_RD)

    @torch.compiler.disable
    def read(self, layer: int) -> Tensor:
        return self.embedding_BTD if layer == 0 else self._read(layer - 1)

    @torch.compiler.disable
    def write(self, layer: int, output_BTD: Tensor) -> None:
        output_TD = output_BTD.flatten(0, -2)
        self.token = _Write.apply(self.forward, self.backward, layer, output_TD, self.token)

    @torch.compiler.disable
    def finish(self) -> Tensor:
        return self._read(self.plan.layers - 1)

    def _read(self, row: int) -> Tensor:
        h_TD, self.token = _Read.apply(self.forward, self.backward, row, self.token)
        return h_TD.view_as(self.embedding_BTD).to(self.embedding_BTD.dtype)
