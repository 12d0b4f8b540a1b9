"""What one forward pass of depth attention holds, and what its backward pass gathers.

Shapes: T tokens, D channels, N sources, R = L reads that have a choice. A row is a read's place in the query
table (see `Plan`). The running sum of a block is a source of one read; its weight is b, its gradient goes on
to the next running sum as well. With w the gain times the query, r the inverse RMS of a source and G_l the
gradient of h_l:

    s_il = r_i w_l . v_i      a_l = softmax_i(s_il)      h_l = sum_i a_il v_i
    c_l = sum_i a_il G_l . v_i      ds_il = a_il (G_l . v_i - c_l)
    dv_i = sum_l a_il G_l + r_i sum_l ds_il w_l - v_i r_i^2 / d sum_l ds_il s_il
    dw_l = sum_i ds_il r_i v_i

Tables of scalars per token have tokens last, so that arithmetic on them runs over neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnres.depth.plan import Plan
from attnres.depth.products import dots, inverse_rms, mix


class Forward:
    """Dies with the pass; the graph saves what backward needs."""

    def __init__(self, plan: Plan, eps: float, queries_RD: Tensor, embedding_TD: Tensor) -> None:
        tokens = embedding_TD.shape[0]
        self.plan, self.eps = plan, eps
        self.queries_RD = queries_RD.detach()  # w
        self.values_NTD = embedding_TD.new_empty(plan.groups, *embedding_TD.shape)
        self.r_NT = embedding_TD.new_empty(plan.groups, tokens)
        self.logits_RNT = embedding_TD.new_empty(plan.layers, plan.groups, tokens)
        self.running_TD: Tensor | None = None

    def add_source(self, group: int) -> tuple[Tensor, Tensor]:
        """Row `group` of the buffer is complete: its logits for all its readers.

        Returns the value and its inverse RMS.
        """
        rows, value_TD = self.plan.rows(group), self.values_NTD[group]
        r_T = inverse_rms(value_TD, self.eps, out=self.r_NT[group])
        logits_RT = self.logits_RNT[rows.start :, group]
        torch.mm(self.queries_RD[rows.start :], value_TD.t(), out=logits_RT).mul_(r_T)
        # `.data` has a version counter of its own: later sources go to other places of the buffer, and
        # autograd would take that for a change of what is saved here.
        return value_TD.data, r_T.data

    def read(self, row: int) -> tuple[Tensor, Read]:
        """h of a read, and what its backward pass needs."""
        finished = self.plan.group_of(row + 1) + 1
        # `.data` for the reason above.
        values_NTD, r_NT = self.values_NTD.data[:finished], self.r_NT.data[:finished]
        running_TD = self.running_TD
        logits_NT = self.logits_RNT.data[row, : finished + (running_TD is not None)]
        weights_NT = torch.softmax(logits_NT, 0)
        a_NT = weights_NT[:finished]
        if finished > 1:
            h_TD = mix(a_NT[None], values_NTD)[0]
        else:
            h_TD = values_NTD[0] * a_NT[0, :, None]
        read = Read(values_NTD, r_NT, logits_NT[:finished], a_NT)
        if running_TD is not None:
            read.running_TD, read.running_weight_T = running_TD, weights_NT[finished]
            h_TD.addcmul_(running_TD, read.running_weight_T[:, None])
        return h_TD, read

    def add_to_running(self, row: int, output_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The running sum that read `row` sees, its inverse RMS and its logit."""
        if self.running_TD is None:
            running_TD = output_TD.detach().to(self.values_NTD.dtype)
        else:
            running_TD = self.running_TD + output_TD
        self.running_TD = running_TD
        r_T = inverse_rms(running_TD, self.eps)
        # The place in this row of the source that will be finished next: nobody else writes or reads it.
        logit_T = self.logits_RNT.data[row, self.plan.group_of(row + 1) + 1]
        torch.mv(running_TD, self.queries_RD[row], out=logit_T).mul_(r_T)
        return running_TD, r_T, logit_T

    def finish_block(self, group: int, output_TD: Tensor) -> None:
        """The last output of a block completes source `group`."""
        if self.running_TD is None:
            self.values_NTD[group].copy_(output_TD)
        else:
            torch.add(self.running_TD, output_TD, out=self.values_NTD[group])
        self.running_TD = None


@dataclass
class Read:
    """One read as its backward pass needs it: N finished sources, and the running sum if it saw one."""

    values_NTD: Tensor
    r_NT: Tensor
    logits_NT: Tensor
    weights_NT: Tensor  # a
    running_TD: Tensor | None = None
    running_weight_T: Tensor | None = None  # b

    def tensors(self) -> tuple[Tensor, ...]:
        fields = (getattr(self, name) for name in self.__dataclass_fields__)
        return tuple(tensor for tensor in fields if tensor is not None)


@dataclass
class Backward:
    """Shared by the nodes of one graph. The tensors here have no graph of their own."""

    plan: Plan
    pass_id: int = -1
    gradients_RTD: Tensor | None = None  # G_l of the rows stored so far
    weights_RNT: Tensor | None = None  # a_il
    factors_RNT: Tensor | None = None  # r_i ds_il
    scale_NT: Tensor | None = None  # r_i sum_l ds_il s_il
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

    def store(self, row: int, gradient_TD: Tensor, read: Read) -> None:
        """The gradient of a read, for its sources to pull."""
        gradients_RTD, weights_RNT, factors_RNT, scale_NT = self._tables(gradient_TD)
        self.stored.add(row)
        gradients_RTD[row].copy_(gradient_TD)
        sources, weights_NT = len(read.values_NTD), read.weights_NT
        weights_RNT[row, :sources].copy_(weights_NT)
        products_NT = dots(gradient_TD, read.values_NTD)
        mean_T = (weights_NT * products_NT).sum(0)
        if read.running_TD is not None:
            self._store_running(row, gradient_TD, read, mean_T)
        factors_NT = factors_RNT[row, :sources]
        torch.mul(products_NT.sub_(mean_T).mul_(weights_NT), read.r_NT, out=factors_NT)
        scale_NT[:sources].addcmul_(factors_NT, read.logits_NT)

    def _store_running(self, row: int, gradient_TD: Tensor, read: Read, mean_T: Tensor) -> None:
        """The part of the running sum, of weight b. Adds to c."""
        weight_T = read.running_weight_T
        assert weight_T is not None and read.running_TD is not None
        product_T = (gradient_TD * read.running_TD).sum(-1)
        mean_T.addcmul_(product_T, weight_T)
        self.running[row] = product_T.sub_(mean_T).mul_(weight_T)
        if self.sum_TD is None:
            self.sum_TD = gradient_TD * weight_T[:, None]
        else:
            self.sum_TD = torch.addcmul(self.sum_TD, gradient_TD, weight_T[:, None])

    def _tables(self, gradient_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.gradients_RTD is None:
            tokens, groups, layers = len(gradient_TD), self.plan.groups, self.plan.layers
            self.gradients_RTD = gradient_TD.new_empty(layers, *gradient_TD.shape)
            self.weights_RNT = gradient_TD.new_empty(layers, groups, tokens)
            self.factors_RNT = torch.empty_like(self.weights_RNT)
            self.scale_NT = gradient_TD.new_zeros(groups, tokens)
        assert self.weights_RNT is not None and self.factors_RNT is not None and self.scale_NT is not None
        return self.gradients_RTD, self.weights_RNT, self.factors_RNT, self.scale_NT

    def pull(self, group: int, value_TD: Tensor, r_T: Tensor, queries_RD: Tensor) -> Tensor | None:
        """dv of source `group`, from what all its readers have stored. Adds to dw."""
        if not self.stored:
            return None
        gradients_RTD, weights_RNT, factors_RNT, scale_NT = self._tables(value_TD)
        rows = slice(self.plan.rows(group).start, max(self.stored) + 1)
        for row in {*range(rows.start, rows.stop)} - self.stored:  # nobody used what this read gave
            for table in (gradients_RTD, weights_RNT, factors_RNT):
                table[row].zero_()
            self.stored.add(row)
        factors_RT = factors_RNT[rows, group]
        gradient_TD = mix(weights_RNT[None, rows, group], gradients_RTD[rows])[0]
        gradient_TD.addmm_(factors_RT.t(), queries_RD[rows])
        scale_T = scale_NT[group] * r_T
        gradient_TD.addcmul_(value_TD, scale_T[:, None], value=-1 / value_TD.shape[-1])
        self._queries(value_TD)[rows].addmm_(factors_RT, value_TD)
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
        self._queries(running_TD)[row].addmv_(running_TD.t(), factor_T)
        return gradient_TD

    def _queries(self, values_TD: Tensor) -> Tensor:
        if self.queries_RD is None:
            self.queries_RD = values_TD.new_zeros(self.plan.layers, values_TD.shape[-1])
        return self.queries_RD
