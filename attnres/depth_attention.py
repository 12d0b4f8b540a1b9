"""The fused operator behind the AttnRes rules (arXiv:2603.15031), in plain PyTorch.

Computes what `residual.attnres.depth_attention` computes, in O(L d) memory per token instead of O(L^2 d):

- One buffer of sources per forward pass. The logits of a source for all later reads are one matrix product,
  made when the source is written: queries are parameters, so they are known.
- All reads of a depth block are answered against the finished sources in one pass when the block begins (a
  batched product); the block's running sum is merged into each by the online-softmax rule (1805.02867).
- Backward pulls instead of pushing: the backward of a read only stores its gradient; that of a source sums
  what its later readers stored, in one batched product. An empty token tensor threaded through all nodes
  gives autograd the order.

With w_l = g_l * q_l, r_i = (mean(v_i^2) + eps)^(-1/2), s_il = r_i w_l . v_i, a = softmax_i(s),
h_l = sum_i a_il v_i and G_l the gradient of h_l:
ds_il = a_il (G_l . v_i - G_l . h_l);  dw_l = sum_i ds_il r_i v_i;
dv_i = sum_l a_il G_l + r_i sum_l ds_il w_l - v_i r_i^2 / d sum_l ds_il s_il.

Shapes: T tokens of all sequences, D channels, N sources (the embedding and the finished blocks), R = L reads
that have a choice (row l - 1 is sublayer l, the last row the output), G reads of one group: those of a depth
block, or the output's alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnres.residual.rule import ResidualState


@dataclass(frozen=True)
class Plan:
    """Which reads see which sources, for L `layers` in blocks of `block_size` S (1: full AttnRes).

    Group n, the reads of sublayers nS .. nS+S-1, sees sources 0..n (embedding and finished blocks) and its
    own running sum; the last group is the output's read alone. Source n is complete before group n reads.
    """

    layers: int
    block_size: int

    @property
    def groups(self) -> int:
        return -(-self.layers // self.block_size) + 1

    def rows(self, group: int) -> slice:
        """Rows of the query table that a group reads with. Sublayer 0 has one source and no row."""
        first = min(group * self.block_size, self.layers)
        last = min(first + self.block_size, self.layers) if first < self.layers else self.layers + 1
        return slice(max(first, 1) - 1, last - 1)

    def group_of(self, layer: int) -> int:
        return -(-layer // self.block_size) if layer == self.layers else layer // self.block_size

    def finishes(self, layer: int) -> bool:
        """Whether the output of this sublayer completes a block."""
        return (layer + 1) % self.block_size == 0 or layer + 1 == self.layers


def mix(weights_NGT: Tensor, values_NTD: Tensor) -> Tensor:
    """sum_n weights[n, g, t] values[n, t, :] -> [T, G, D]."""
    return torch.bmm(weights_NGT.permute(2, 1, 0).contiguous(), values_NTD.transpose(0, 1))


def dots(vectors_GTD: Tensor, values_NTD: Tensor) -> Tensor:
    """vectors[g, t, :] . values[n, t, :] -> [N, G, T]."""
    products_TGN = torch.bmm(vectors_GTD.transpose(0, 1), values_NTD.permute(1, 2, 0))
    return products_TGN.permute(2, 1, 0).contiguous()


def inverse_rms(values_TD: Tensor, eps: float) -> Tensor:
    """(mean(v^2) + eps)^(-1/2) -> [T]."""
    norm_T = torch.linalg.vector_norm(values_TD, dim=-1)
    return norm_T.square_().div_(values_TD.shape[-1]).add_(eps).rsqrt_()


class _Forward:
    """What one forward pass holds. It dies with the pass; the graph saves what backward needs."""

    def __init__(self, plan: Plan, eps: float, queries_RD: Tensor, embedding_TD: Tensor) -> None:
        self.plan, self.eps = plan, eps
        self.queries_RD = queries_RD.detach()  # w; its gradient is _Start's business
        self.values_NTD = embedding_TD.new_empty(plan.groups, *embedding_TD.shape)
        self.logits: list[Tensor] = []  # per source: of all rows that may read it, [rows, T]
        self.lse_GT = embedding_TD.new_empty(
            0
        )  # log of the sum of exp(logits) over finished sources, per read
        self.mixed_TGD = embedding_TD.new_empty(0)  # their weighted mean, per read of the current group
        self.running_TD: Tensor | None = None
        self.running_logit_T: Tensor | None = None

    def unversioned_values(self, sources: int) -> Tensor:
        """The first sources, to be saved for backward. Later writes go to other rows of the buffer, but would
        count as changes of these; `.data` has a version counter of its own."""
        return self.values_NTD.data[:sources]

    def settle(self, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """Source `group` is complete: its logits, and the group's reads over all finished sources.

        Returns inverse RMS [T], logits for its readers [rows, T], weights over finished sources [N, G, T].
        """
        plan, source_TD = self.plan, self.values_NTD[group]
        rows = plan.rows(group)
        r_T = inverse_rms(source_TD, self.eps)
        self.logits.append((self.queries_RD[rows.start :] @ source_TD.t()).mul_(r_T))
        starts = [plan.rows(source).start for source in range(group + 1)]
        logits_NGT = torch.stack(
            [
                logits[rows.start - start : rows.stop - start]
                for logits, start in zip(self.logits, starts, strict=True)
            ]
        )
        weights_NGT = torch.softmax(logits_NGT, dim=0)
        if group:
            self.mixed_TGD = mix(weights_NGT, self.values_NTD[: group + 1])
        else:
            self.mixed_TGD = source_TD[:, None].expand(-1, max(rows.stop - rows.start, 1), -1)
        if rows.stop - rows.start > 1 or not group:
            self.lse_GT = torch.logsumexp(logits_NGT, dim=0)
        return r_T, self.logits[-1], weights_NGT


@dataclass
class _Backward:
    """What the backward pass of one graph has gathered so far; tensors here have no graph of their own."""

    plan: Plan
    pass_id: int = -1
    gradients_RTD: Tensor | None = None  # of what was read, by row
    stored: set[int] = field(default_factory=set)  # rows that have one
    keep: dict[int, Tensor] = field(
        default_factory=dict
    )  # row -> weight of all finished sources together, [T]
    mean_gradient: dict[int, Tensor] = field(default_factory=dict)  # row -> G_l . h_l, [T]
    running_gradient: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # row -> (weight, ds) [T]
    weights: dict[int, Tensor] = field(default_factory=dict)  # group -> a [N, G, T]
    logit_gradients: dict[int, Tensor] = field(default_factory=dict)  # group -> ds [N, G, T]
    sum_TD: Tensor | None = None  # gradient of the running sum so far
    queries_RD: Tensor | None = None

    def enter(self) -> None:
        """Forget what an earlier pass over the same graph (retain_graph, or one that raised) has left."""
        if torch.is_grad_enabled():  # create_graph: the tape's gradients would count as constants
            raise RuntimeError(
                "fused depth attention has no second derivatives; use implementation=reference"
            )
        pass_id = torch._C._current_graph_task_id()  # as torch.utils.checkpoint tells passes apart
        if pass_id != self.pass_id:
            self.release()
            self.pass_id = pass_id

    def release(self) -> None:
        self.__init__(self.plan)  # type: ignore[misc]

    def store(self, row: int, gradient_TD: Tensor) -> Tensor:
        if self.gradients_RTD is None:
            self.gradients_RTD = gradient_TD.new_empty(self.plan.layers, *gradient_TD.shape)
        self.stored.add(row)
        return self.gradients_RTD[row].copy_(gradient_TD)

    def add_query_gradient(self, rows: slice, factors_RT: Tensor, values_TD: Tensor) -> None:
        if self.queries_RD is None:
            self.queries_RD = values_TD.new_zeros(self.plan.layers, values_TD.shape[-1])
        self.queries_RD[rows].addmm_(factors_RT, values_TD)

    def settle(self, group: int, weights_NGT: Tensor, values_NTD: Tensor) -> None:
        """Weights and logit gradients of a group over finished sources, from what its reads have stored."""
        rows = self.plan.rows(group)
        reads = range(rows.start, rows.stop)
        if self.gradients_RTD is None:
            return
        if (
            not reads
        ):  # sublayer 0 is a group of its own when blocks have one sublayer; it reads without weights
            self.weights[group] = self.logit_gradients[group] = weights_NGT
            return
        for row in reads:
            if row not in self.stored:  # nobody used what this read gave
                self.gradients_RTD[row].zero_()
        if any(row in self.keep for row in reads):
            ones_T = torch.ones_like(weights_NGT[0, 0])
            weights_NGT = weights_NGT * torch.stack([self.keep.get(row, ones_T) for row in reads])
        products_NGT = dots(self.gradients_RTD[rows], values_NTD)
        mean_GT = (weights_NGT * products_NGT).sum(0)
        for index, row in enumerate(reads):
            if row in self.mean_gradient:
                mean_GT[index] = self.mean_gradient[row]
        self.weights[group] = weights_NGT
        self.logit_gradients[group] = products_NGT.sub_(mean_GT).mul_(weights_NGT)

    def pull(
        self, source: int, value_TD: Tensor, r_T: Tensor, logits_RT: Tensor, queries_RD: Tensor
    ) -> Tensor | None:
        """Gradient of a finished source, from what all its readers stored. Adds to the queries' gradient."""
        if self.gradients_RTD is None:
            return None
        groups = range(source, max(self.weights) + 1)  # later ones, if any, had no part in this pass
        rows = slice(self.plan.rows(source).start, self.plan.rows(groups[-1]).stop)
        weights_RT = torch.cat([self.weights[group][source] for group in groups])
        ds_RT = torch.cat([self.logit_gradients[group][source] for group in groups])
        logits_RT = logits_RT[: ds_RT.shape[0]]
        gradient_TD = mix(weights_RT[:, None], self.gradients_RTD[rows]).squeeze(1)
        scale_T = (ds_RT * logits_RT).sum(0).mul_(r_T).mul_(r_T).div_(-value_TD.shape[-1])
        factors_RT = ds_RT.mul_(r_T)
        gradient_TD.addmm_(factors_RT.t(), queries_RD[rows])
        gradient_TD.addcmul_(value_TD, scale_T[:, None])
        self.add_query_gradient(rows, factors_RT, value_TD)
        return gradient_TD


def _no_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


class _Start(torch.autograd.Function):
    """Takes the embedding [T, D] and w [R, D]; gives the token."""

    @staticmethod
    def forward(
        ctx: Any, forward: _Forward, backward: _Backward, embedding_TD: Tensor, queries_RD: Tensor
    ) -> Tensor:
        with _no_autocast(embedding_TD):
            forward.values_NTD[0].copy_(embedding_TD)
            r_T, logits_RT, weights_NGT = forward.settle(0)
        ctx.set_materialize_grads(False)
        ctx.backward = backward
        ctx.save_for_backward(forward.queries_RD, forward.unversioned_values(1), r_T, logits_RT, weights_NGT)
        return embedding_TD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Any, ...]:
        backward: _Backward = ctx.backward
        backward.enter()
        queries_RD, values_NTD, r_T, logits_RT, weights_NGT = ctx.saved_tensors
        with _no_autocast(values_NTD):
            backward.settle(0, weights_NGT, values_NTD)
            gradient_TD = backward.pull(0, values_NTD[0], r_T, logits_RT, queries_RD)
        queries_gradient = backward.queries_RD
        backward.release()
        return None, None, gradient_TD, queries_gradient


class _Write(torch.autograd.Function):
    """Takes the output of a sublayer [T, D], and the token; gives the next token."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: _Forward,
        backward: _Backward,
        layer: int,
        output_TD: Tensor,
        token: Tensor,
    ) -> Tensor:
        plan, running_TD, queries_RD = forward.plan, forward.running_TD, forward.queries_RD
        ctx.set_materialize_grads(False)
        ctx.backward, ctx.layer, ctx.dtype = backward, layer, output_TD.dtype
        with _no_autocast(output_TD):
            if plan.finishes(layer):
                group = plan.group_of(layer) + 1
                if running_TD is None:
                    forward.values_NTD[group].copy_(output_TD)
                else:
                    torch.add(running_TD, output_TD, out=forward.values_NTD[group])
                forward.running_TD = forward.running_logit_T = None
                r_T, logits_RT, weights_NGT = forward.settle(group)
                values = forward.unversioned_values(group + 1)
                ctx.save_for_backward(queries_RD, values, r_T, logits_RT, weights_NGT)
            else:
                running_TD = (
                    output_TD.to(forward.values_NTD.dtype) if running_TD is None else running_TD + output_TD
                )
                r_T = inverse_rms(running_TD, forward.eps)
                logit_T = (running_TD @ queries_RD[layer]).mul_(r_T)
                forward.running_TD, forward.running_logit_T = running_TD.detach(), logit_T
                ctx.save_for_backward(queries_RD, forward.running_TD, r_T, logit_T)
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Any, ...]:
        backward: _Backward = ctx.backward
        backward.enter()
        with _no_autocast(ctx.saved_tensors[1]):
            if backward.plan.finishes(ctx.layer):
                gradient_TD = _Write.block_gradient(ctx, backward)
            else:
                gradient_TD = _Write.running_gradient(ctx, backward)
        backward.sum_TD = gradient_TD
        if not ctx.needs_input_grad[4]:  # no earlier node takes part
            backward.release()
        if gradient_TD is not None:
            gradient_TD = gradient_TD.to(ctx.dtype)
        return None, None, None, gradient_TD, None

    @staticmethod
    def block_gradient(ctx: Any, backward: _Backward) -> Tensor | None:
        queries_RD, values_NTD, r_T, logits_RT, weights_NGT = ctx.saved_tensors
        group = values_NTD.shape[0] - 1
        backward.settle(group, weights_NGT, values_NTD)
        return backward.pull(group, values_NTD[group], r_T, logits_RT, queries_RD)

    @staticmethod
    def running_gradient(ctx: Any, backward: _Backward) -> Tensor | None:
        """The running sum has one reader, the next sublayer, and is part of the next running sum."""
        row = ctx.layer
        later_TD = backward.sum_TD
        if row not in backward.running_gradient:
            return later_TD
        queries_RD, running_TD, r_T, logit_T = ctx.saved_tensors
        assert backward.gradients_RTD is not None
        weight_T, ds_T = backward.running_gradient[row]
        read_TD = backward.gradients_RTD[row]
        if later_TD is None:
            gradient_TD = read_TD * weight_T[:, None]
        else:
            gradient_TD = torch.addcmul(later_TD, read_TD, weight_T[:, None])
        factor_T = ds_T * r_T
        gradient_TD.addr_(factor_T, queries_RD[row])
        scale_T = (factor_T * r_T).mul_(logit_T).div_(-running_TD.shape[-1])
        gradient_TD.addcmul_(running_TD, scale_T[:, None])
        backward.add_query_gradient(slice(row, row + 1), factor_T[None], running_TD)
        return gradient_TD


class _Read(torch.autograd.Function):
    """Takes the token; gives what the read of query row `row` sees, [T, D]."""

    @staticmethod
    def forward(ctx: Any, forward: _Forward, backward: _Backward, row: int, token: Tensor) -> Tensor:
        plan = forward.plan
        index = row - plan.rows(plan.group_of(row + 1)).start
        mixed_TD = forward.mixed_TGD[:, index]
        ctx.set_materialize_grads(False)
        ctx.backward, ctx.row = backward, row
        if forward.running_TD is None:
            ctx.save_for_backward()
            return mixed_TD.contiguous()
        assert forward.running_logit_T is not None
        weight_T = torch.sigmoid(forward.running_logit_T - forward.lse_GT[index])
        h_TD = torch.lerp(mixed_TD, forward.running_TD, weight_T[:, None])
        ctx.save_for_backward(h_TD, forward.running_TD, weight_T)
        return h_TD

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor | None) -> tuple[Any, ...]:
        backward: _Backward = ctx.backward
        backward.enter()
        saved = ctx.saved_tensors
        if gradient_TD is None:
            return None, None, None, None
        row = ctx.row
        gradient_TD = backward.store(row, gradient_TD)
        if saved:
            h_TD, running_TD, weight_T = saved
            mean_T = torch.linalg.vecdot(gradient_TD, h_TD)
            ds_T = torch.linalg.vecdot(gradient_TD, running_TD).sub_(mean_T).mul_(weight_T)
            backward.keep[row] = 1 - weight_T
            backward.mean_gradient[row] = mean_T
            backward.running_gradient[row] = (weight_T, ds_T)
        return None, None, None, None


class DepthAttentionState(ResidualState):
    """The four verbs over one forward pass of full (block_size 1) or block AttnRes.

    `queries_RD` and `gains_RD` have a row for each of the L reads after the first. Norms, logits, softmax and
    sums are in float32 (float64 for a float64 embedding) whatever autocast says; reads are cast once, to the
    embedding's type.
    """

    @torch.compiler.disable
    def __init__(
        self, queries_RD: Tensor, gains_RD: Tensor, block_size: int, eps: float, embedding_BTD: Tensor
    ) -> None:
        layers = queries_RD.shape[0]
        self.plan = Plan(layers, block_size)
        dtype = torch.promote_types(embedding_BTD.dtype, torch.float32)
        self.embedding_BTD = embedding_BTD
        embedding_TD = embedding_BTD.to(dtype).flatten(0, -2)
        self.queries_RD = gains_RD.to(dtype) * queries_RD.to(dtype)
        self.forward = _Forward(self.plan, eps, self.queries_RD, embedding_TD)
        self.backward = _Backward(self.plan)
        self.token: Tensor = _Start.apply(self.forward, self.backward, embedding_TD, self.queries_RD)

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
        h_TD: Tensor = _Read.apply(self.forward, self.backward, row, self.token)
        return h_TD.view_as(self.embedding_BTD).to(self.embedding_BTD.dtype)
