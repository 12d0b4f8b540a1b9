"""What one forward pass of depth attention holds, and what its backward pass gathers.

Shapes: T tokens, D channels, N sources, R = L reads that have a choice, G reads of one group. A row is a
read's place in the query table (see `Plan`). With w the gain times the query, r the inverse RMS of a source,
G_l the gradient of h_l, p the weights over finished sources alone and b the weight of the running sum:

    s_il = r_i w_l . v_i      b_l = sigmoid(s_running - logsumexp_i s_il)
    h_l = (1 - b_l) sum_i p_il v_i + b_l running
    ds_il = p_il (1 - b_l) (G_l . v_i - G_l . h_l)      ds_running = b_l (G_l . running - G_l . h_l)
    dv_i = sum_l p_il (1 - b_l) G_l + r_i sum_l ds_il w_l - v_i r_i^2 / d sum_l ds_il s_il
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
    """A finished source as backward needs it: its value, inverse RMS, and what its readers made of it."""

    value_TD: Tensor
    r_T: Tensor
    logits_RT: Tensor
    weights_RT: Tensor  # p


class Forward:
    """Dies with the pass; the graph saves what backward needs."""

    def __init__(self, plan: Plan, eps: float, queries_RD: Tensor, embedding_TD: Tensor) -> None:
        tokens = embedding_TD.shape[0]
        self.plan, self.eps = plan, eps
        self.queries_RD = queries_RD.detach()  # w
        self.values_NTD = embedding_TD.new_empty(plan.groups, *embedding_TD.shape)
        self.logits_RNT = embedding_TD.new_empty(plan.layers, plan.groups, tokens)
        self.weights_RNT = torch.empty_like(self.logits_RNT)  # p
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
        # `.data` has a version counter of its own: later sources go to other places of these tables, and
        # autograd would take that for changes of what is saved here.
        source = Source(value_TD.data, r_T, logits_RT.data, self.weights_RNT.data[rows.start :, group])
        self.answer(group, rows)
        return source

    def answer(self, group: int, rows: slice) -> None:
        """The reads of a group over all finished sources."""
        logits_GNT, weights_GNT = (table[rows, : group + 1] for table in (self.logits_RNT, self.weights_RNT))
        if rows.stop - rows.start > 1 or group == 0:
            self.lse_GT = softmax_with_lse(logits_GNT, weights_GNT)
        else:
            torch.softmax(logits_GNT, dim=1, out=weights_GNT)
        values_NTD = self.values_NTD[: group + 1]
        self.mixed_GTD = (
            mix(weights_GNT, values_NTD) if group else values_NTD.expand(len(weights_GNT), -1, -1)
        )

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


def softmax_with_lse(logits_GNT: Tensor, out_GNT: Tensor) -> Tensor:
    """Softmax over sources, into `out_GNT`; returns the logarithm of its denominator."""
    largest_G1T = logits_GNT.amax(1, keepdim=True)
    torch.sub(logits_GNT, largest_G1T, out=out_GNT).exp_()
    total_G1T = out_GNT.sum(1, keepdim=True)
    out_GNT.div_(total_G1T)
    return largest_G1T.add_(total_G1T.log_()).squeeze(1)


@dataclass
class Backward:
    """Shared by the nodes of one graph. The tensors here have no graph of their own."""

    plan: Plan
    pass_id: int = -1
    gradients_RTD: Tensor | None = None  # (1 - b_l) G_l of the rows stored so far
    mean_RT: Tensor | None = None  # (1 - b_l) G_l . h_l
    stored: set[int] = field(default_factory=set)  # rows whose read was used
    running: dict[int, Tensor] = field(default_factory=dict)  # row -> ds_running, [T]
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

    def store(self, row: int, gradient_TD: Tensor, h_TD: Tensor) -> None:
        """Gradient of a read that saw finished sources only."""
        gradients_RTD, mean_RT = self._tables(gradient_TD)
        self.stored.add(row)
        gradients_RTD[row].copy_(gradient_TD)
        torch.sum(gradient_TD * h_TD, -1, out=mean_RT[row])

    def store_with_running(
        self, row: int, gradient_TD: Tensor, h_TD: Tensor, running_TD: Tensor, weight_T: Tensor
    ) -> None:
        """Gradient of a read that also saw the running sum, with weight b."""
        gradients_RTD, mean_RT = self._tables(gradient_TD)
        self.stored.add(row)
        keep_T = 1 - weight_T
        torch.mul(gradient_TD, keep_T[:, None], out=gradients_RTD[row])
        mean_T = (gradient_TD * h_TD).sum(-1)
        self.running[row] = (gradient_TD * running_TD).sum(-1).sub_(mean_T).mul_(weight_T)
        torch.mul(mean_T, keep_T, out=mean_RT[row])
        if self.sum_TD is None:
            self.sum_TD = gradient_TD * weight_T[:, None]
        else:
            self.sum_TD = torch.addcmul(self.sum_TD, gradient_TD, weight_T[:, None])

    def _tables(self, gradient_TD: Tensor) -> tuple[Tensor, Tensor]:
        if self.gradients_RTD is None or self.mean_RT is None:
            self.gradients_RTD = gradient_TD.new_empty(self.plan.layers, *gradient_TD.shape)
            self.mean_RT = self.gradients_RTD.new_empty(self.plan.layers, len(gradient_TD))
        return self.gradients_RTD, self.mean_RT

    def pull(self, group: int, source: Source, queries_RD: Tensor) -> Tensor | None:
        """dv of source `group`, from what all its readers have stored. Adds to dw."""
        if self.gradients_RTD is None or self.mean_RT is None:
            return None
        own = self.plan.rows(group)
        rows = slice(own.start, max(self.stored) + 1)
        for row in range(own.start, min(own.stop, rows.stop)):
            if row not in self.stored:  # nobody used what this read gave
                self.gradients_RTD[row].zero_()
                self.mean_RT[row].zero_()
        readers = rows.stop - rows.start
        value_TD, logits_RT, weights_RT = (
            source.value_TD,
            source.logits_RT[:readers],
            source.weights_RT[:readers],
        )
        gradients_RTD = self.gradients_RTD[rows]
        gradient_TD = mix(weights_RT[None], gradients_RTD)[0]
        factors_RT = (
            dots(value_TD[None], gradients_RTD)[0].sub_(self.mean_RT[rows]).mul_(weights_RT).mul_(source.r_T)
        )
        scale_T = (factors_RT * logits_RT).sum(0).mul_(source.r_T)
        gradient_TD.addmm_(factors_RT.t(), queries_RD[rows])
        gradient_TD.addcmul_(value_TD, scale_T[:, None], value=-1 / value_TD.shape[-1])
        self.add_query_gradient(rows, factors_RT, value_TD)
        return gradient_TD

    def pull_running(
        self, row: int, running_TD: Tensor, r_T: Tensor, logit_T: Tensor, queries_RD: Tensor
    ) -> Tensor | None:
        """Gradient of a running sum: from its one reader, and as a part of the next running sum."""
        if row not in self.running:
            return self.sum_TD
        assert self.sum_TD is not None
        factor_T = self.running[row] * r_T
        gradient_TD = torch.addcmul(self.sum_TD, factor_T[:, None], queries_RD[row])
        scale_T = (factor_T * logit_T).mul_(r_T)
        gradient_TD.addcmul_(running_TD, scale_T[:, None], value=-1 / running_TD.shape[-1])
        self.add_query_gradient(slice(row, row + 1), factor_T[None], running_TD)
        return gradient_TD

    def add_query_gradient(self, rows: slice, factors_RT: Tensor, values_TD: Tensor) -> None:
        if self.queries_RD is None:
            self.queries_RD = values_TD.new_zeros(self.plan.layers, values_TD.shape[-1])
        self.queries_RD[rows].addmm_(factors_RT, values_TD)
