"""What one forward pass of depth attention holds, and what its backward pass gathers.

Shapes: T tokens, D channels, N sources, R = L reads that have a choice, G reads of one group. A row is a
read's place in the query table (see `Plan`). With w the gain times the query, r the inverse RMS of a source,
G_l the gradient of h_l, p the weights over finished sources alone and b the weight of the running sum:

    s_il = r_i w_l . v_i      b_l = sigmoid(s_running - logsumexp_i s_il)
    h_l = (1 - b_l) sum_i p_il v_i + b_l running
    ds_running = b_l G_l . (running - h_l)
    ds_il = p_il ((1 - b_l) (G_l . v_i - sum_j p_jl G_l . v_j) - ds_running)
    dv_i = sum_l a_il G_l + r_i sum_l ds_il w_l - v_i r_i^2 / d sum_l ds_il s_il     a_il = (1 - b_l) p_il
    dw_l = sum_i ds_il r_i v_i
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnres.depth.plan import Plan
from attnres.depth.products import dots, inverse_rms, mix


@dataclass
class Source:
    """A finished source as backward needs it. `values` are those of all finished sources up to this one."""

    values_NTD: Tensor
    r_T: Tensor
    logits_RT: Tensor  # of the rows that may read it
    weights_GNT: Tensor  # p of the group that starts with it


class Forward:
    """Dies with the pass; the graph saves what backward needs."""

    def __init__(self, plan: Plan, eps: float, queries_RD: Tensor, embedding_TD: Tensor) -> None:
        tokens = embedding_TD.shape[0]
        self.plan, self.eps = plan, eps
        self.queries_RD = queries_RD.detach()  # w
        self.values_NTD = embedding_TD.new_empty(plan.groups, *embedding_TD.shape)
        self.logits_RNT = embedding_TD.new_empty(plan.layers, plan.groups, tokens)
        self.mixed_GTD = embedding_TD.new_empty(0)  # what the current group reads, but for its running sum
        self.lse_GT = embedding_TD.new_empty(0)  # log of the sum of exp(logits) over finished sources
        self.running_TD: Tensor | None = None
        self.running_logit_T: Tensor | None = None

    def add_source(self, group: int) -> Source:
        """Row `group` of the buffer is complete: its logits for all its readers, and the group's reads."""
        rows, value_TD = self.plan.rows(group), self.values_NTD[group]
        r_T = inverse_rms(value_TD, self.eps)
        logits_RT = self.logits_RNT[rows.start :, group]
        torch.mm(self.queries_RD[rows.start :], value_TD.t(), out=logits_RT).mul_(r_T)
        group_logits_GNT = self.logits_RNT[rows, : group + 1]
        if rows.stop - rows.start > 1 or group == 0:
            weights_GNT, self.lse_GT = softmax_and_lse(group_logits_GNT)
        else:
            weights_GNT = torch.softmax(group_logits_GNT, dim=1)
        # `.data` has a version counter of its own: later sources are written to other rows of the buffers,
        # and autograd would take that for changes of these.
        values_NTD = self.values_NTD.data[: group + 1]
        self.mixed_GTD = (
            mix(weights_GNT, values_NTD) if group else values_NTD.expand(len(weights_GNT), -1, -1)
        )
        return Source(values_NTD, r_T, logits_RT.data, weights_GNT)

    def add_to_running(self, row: int, output_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The running sum that read `row` sees, its inverse RMS and its logit."""
        if self.running_TD is None:
            running_TD = output_TD.detach().to(self.values_NTD.dtype)
        else:
            running_TD = self.running_TD + output_TD
        r_T = inverse_rms(running_TD, self.eps)
        self.running_TD, self.running_logit_T = (
            running_TD,
            torch.mv(running_TD, self.queries_RD[row]).mul_(r_T),
        )
        return running_TD, r_T, self.running_logit_T

    def finish_block(self, group: int, output_TD: Tensor) -> None:
        """The last output of a block completes source `group`."""
        if self.running_TD is None:
            self.values_NTD[group].copy_(output_TD)
        else:
            torch.add(self.running_TD, output_TD, out=self.values_NTD[group])
        self.running_TD = self.running_logit_T = None


def softmax_and_lse(logits_GNT: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over sources and the logarithm of its denominator, with one exponential per logit."""
    largest_G1T = logits_GNT.amax(1, keepdim=True)
    weights_GNT = (logits_GNT - largest_G1T).exp_()
    total_G1T = weights_GNT.sum(1, keepdim=True)
    return weights_GNT.div_(total_G1T), largest_G1T.add_(total_G1T.log_()).squeeze(1)


@dataclass
class Backward:
    """Shared by the nodes of one graph. The tensors here have no graph of their own."""

    plan: Plan
    pass_id: int = -1
    gradients_RTD: Tensor | None = None  # G_l of the rows stored so far
    weights_RNT: Tensor | None = None  # a_il of the groups settled so far
    logit_gradients_RNT: Tensor | None = None  # ds_il of the groups settled so far
    stored: set[int] = field(default_factory=set)  # rows whose read was used
    settled: int = 0  # rows below this one are those of groups that took part
    running: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # row -> b and ds_running, [T]
    sum_TD: Tensor | None = None  # gradient of the running sum so far
    queries_RD: Tensor | None = None  # dw

    def enter(self) -> None:
        """Called first by every node: forget what another pass over the same graph has left.

        There is one if the graph was retained, or if the pass before broke off.
        """
        if torch.is_grad_enabled():  # create_graph: what is gathered here would count as constants
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

    def settle(self, group: int, source: Source) -> None:
        """Weights and logit gradients of a group over finished sources, from what its reads have stored."""
        rows = self.plan.rows(group)
        if self.gradients_RTD is None or rows.start == rows.stop:
            return
        if self.weights_RNT is None or self.logit_gradients_RNT is None:
            shape = (self.plan.layers, self.plan.groups, self.gradients_RTD.shape[1])
            self.weights_RNT = self.gradients_RTD.new_empty(shape)
            self.logit_gradients_RNT = self.gradients_RTD.new_empty(shape)
            self.settled = rows.stop
        for row in range(rows.start, rows.stop):
            if row not in self.stored:  # nobody used what this read gave
                self.gradients_RTD[row].zero_()
        products_GNT = dots(self.gradients_RTD[rows], source.values_NTD)
        products_GNT -= (products_GNT * source.weights_GNT).sum(1, keepdim=True)
        weights_GNT, ds_GNT = (t[rows, : group + 1] for t in (self.weights_RNT, self.logit_gradients_RNT))
        weights_GNT.copy_(source.weights_GNT)
        for index, row in enumerate(range(rows.start, rows.stop)):
            if row in self.running:
                weight_T, ds_running_T = self.running[row]
                weights_GNT[index].mul_(1 - weight_T)
                products_GNT[index].mul_(1 - weight_T).sub_(ds_running_T)
        torch.mul(products_GNT, source.weights_GNT, out=ds_GNT)

    def pull(self, group: int, source: Source, queries_RD: Tensor) -> Tensor | None:
        """dv of source `group`, from what all its readers have stored. Adds to dw."""
        if self.gradients_RTD is None or self.weights_RNT is None or self.logit_gradients_RNT is None:
            return None
        rows = slice(self.plan.rows(group).start, self.settled)
        value_TD = source.values_NTD[group]
        gradient_TD = mix(self.weights_RNT[None, rows, group], self.gradients_RTD[rows])[0]
        factors_RT = self.logit_gradients_RNT[rows, group] * source.r_T
        scale_T = (factors_RT * source.logits_RT[: len(factors_RT)]).sum(0).mul_(source.r_T)
        gradient_TD.addmm_(factors_RT.t(), queries_RD[rows])
        gradient_TD.addcmul_(value_TD, scale_T[:, None], value=-1 / value_TD.shape[-1])
        self.add_query_gradient(rows, factors_RT, value_TD)
        return gradient_TD

    def pull_running(
        self, row: int, running_TD: Tensor, r_T: Tensor, logit_T: Tensor, queries_RD: Tensor
    ) -> Tensor | None:
        """Gradient of a running sum: from its one reader, and as a part of the next running sum."""
        if row not in self.running or self.gradients_RTD is None:
            return self.sum_TD
        weight_T, ds_T = self.running[row]
        if self.sum_TD is None:
            gradient_TD = self.gradients_RTD[row] * weight_T[:, None]
        else:
            gradient_TD = torch.addcmul(self.sum_TD, self.gradients_RTD[row], weight_T[:, None])
        factor_T = ds_T * r_T
        gradient_TD.addcmul_(factor_T[:, None], queries_RD[row])
        scale_T = (factor_T * logit_T).mul_(r_T)
        gradient_TD.addcmul_(running_TD, scale_T[:, None], value=-1 / running_TD.shape[-1])
        self.add_query_gradient(slice(row, row + 1), factor_T[None], running_TD)
        return gradient_TD

    def add_query_gradient(self, rows: slice, factors_RT: Tensor, values_TD: Tensor) -> None:
        if self.queries_RD is None:
            self.queries_RD = values_TD.new_zeros(self.plan.layers, values_TD.shape[-1])
        self.queries_RD[rows].addmm_(factors_RT, values_TD)
