"""Hyper-connections: n streams instead of one, and learned reading, writing and mixing.

Shapes: B sequences, T tokens, N streams, D channels, L sublayers, M = 1 + N rows (the read, then the new
streams), K coefficients of a sublayer, V = N D. All rules start from N copies of the embedding and end with
the sum of the streams. Coefficients and streams are float32 at least, whatever autocast says.

One product per sublayer makes its input and the mixed streams: N streams and as many coefficients per token
are what autograd keeps, the normalised streams are never made.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod

import torch
from torch import Tensor, nn

from attnres.residual import multi_stream_specs as specs
from attnres.residual.rule import ResidualRule, ResidualState


class _Streams(ResidualRule):
    def __init__(self, streams: int, layers: int, norm_eps: float) -> None:
        super().__init__()
        self.streams, self.layers, self.eps = streams, layers, norm_eps

    def start(self, embedding_BTD: Tensor) -> ResidualState:
        return _StreamsState(self, embedding_BTD)

    @abstractmethod
    def coefficients(self, row: list[Tensor], x_BTND: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of one sublayer's read and mixing [.., M, N] and of its write [.., N]."""

    def inverse_rms(self, x: Tensor) -> Tensor:
        """r = (mean(x^2) + eps)^(-1/2) over the last axis, kept as one."""
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
        return torch.rsqrt(mean_square + self.eps)


class _StreamsState(ResidualState):
    def __init__(self, rule: _Streams, embedding_BTD: Tensor) -> None:
        self.rule = rule
        self.dtype = embedding_BTD.dtype
        wide_BTD = embedding_BTD.to(torch.promote_types(self.dtype, torch.float32))
        # Copies in memory: batched products of a CPU go position by position through expanded tensors.
        self.x_BTND = torch.stack([wide_BTD] * rule.streams, dim=-2)
        # Unbound at once: the gradients of single rows are as large as all rows.
        rows = zip(*(parameter.unbind() for parameter in rule.parameters()), strict=True)
        self.rows = [list(row) for row in rows]

    def read(self, layer: int) -> Tensor:
        with torch.autocast(self.x_BTND.device.type, enabled=False):
            weights_MN, self.write_N = self.rule.coefficients(self.rows[layer], self.x_BTND)
            mixed_BTMD = weights_MN @ self.x_BTND
        self.x_BTND = mixed_BTMD[..., 1:, :]
        return mixed_BTMD[..., 0, :].to(self.dtype)

    def write(self, layer: int, output_BTD: Tensor) -> None:
        output_BT1D = output_BTD.to(self.x_BTND.dtype).unsqueeze(-2)
        self.x_BTND = torch.addcmul(self.x_BTND, self.write_N.unsqueeze(-1), output_BT1D)

    def finish(self) -> Tensor:
        return self.x_BTND.sum(-2).to(self.dtype)


class HyperConnections(_Streams):
    """h = A_m^T H and H <- A_r^T H + B^T f(h), H the streams as rows (2409.19606).

    Static: A_m, A_r and B are learned numbers. Dynamic: each is moved by the streams themselves,
    A = A_0 + s_a tanh(norm(H) W_a) and B = B_0 + s_b tanh(norm(H) W_b) with an RMSNorm and its gain,
    W shared by the streams. At start A_m takes stream l mod n, A_r is the identity, B is ones, W is zero and
    s is 0.01 (all from the paper): every stream is pre-norm's, the output n times its sum, which the final
    norm does not see. n (n + 2) parameters per sublayer; dynamic also d (n + 3) + 2. n live
    tensors, and n more per sublayer for the backward pass.
    """

    def __init__(self, spec: specs.HyperConnections, layers: int, width: int, norm_eps: float) -> None:
        super().__init__(spec.streams, layers, norm_eps)
        columns = spec.streams + 2  # K: the read, n of the mixing, the write
        self.static_LNK = nn.Parameter(torch.empty(layers, spec.streams, columns))
        if spec.dynamic:
            self.gains_LD = nn.Parameter(torch.empty(layers, width))
            self.dynamic_LDK = nn.Parameter(torch.empty(layers, width, columns))
            self.scales_L2 = nn.Parameter(torch.empty(layers, 2))  # s_a, s_b
        self.dynamic = spec.dynamic
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        self.static_LNK.zero_()
        self.static_LNK[:, :, 1:-1] = torch.eye(self.streams)
        self.static_LNK[:, :, -1] = 1.0
        for layer in range(self.layers):
            self.static_LNK[layer, layer % self.streams, 0] = 1.0
        if self.dynamic:
            self.gains_LD.fill_(1.0)
            self.dynamic_LDK.zero_()
            self.scales_L2.fill_(0.01)

    def coefficients(self, row: list[Tensor], x_BTND: Tensor) -> tuple[Tensor, Tensor]:
        coefficients_NK = row[0]
        if self.dynamic:
            gain_D, dynamic_DK, scale_2 = row[1:]
            products_BTNK = x_BTND @ (gain_D.unsqueeze(-1) * dynamic_DK)
            moved_BTNK = torch.tanh(products_BTNK * self.inverse_rms(x_BTND))
            scale_K = torch.cat((scale_2[:1].expand(self.streams + 1), scale_2[1:]))
            coefficients_NK = coefficients_NK + scale_K * moved_BTNK
        return coefficients_NK[..., :-1].transpose(-1, -2), coefficients_NK[..., -1]


class _Constrained(_Streams):
    """h = H_pre x and x <- H_res x + H_post^T f(h), x the streams (2512.24880, equations 14 to 19).

    With x' = RMSNorm(vec(x)): H_pre = sigmoid(a_pre x' P_pre + b_pre), H_post = 2 sigmoid(a_post x' P_post +
    b_post), H_res = constrained(a_res x' P_res + b_res); a gain of the norm would be part of P. At start P is
    zero (assumed) and a is 0.01 (from the paper). For b the values of mHC-lite's public code are taken: +1
    for stream l mod n and -1 for the others in b_pre and b_post, 0 for the identity and -8 for all else in
    b_res. So a sublayer writes 1.46 to one stream and 0.54 to the others: not pre-norm. (Equal biases would
    be, and would keep the streams equal for ever. The first H_res mixes equal streams: it has no effect.) Per
    sublayer n d K + K + 3 parameters, K = 2 n + the number of logits of H_res. n live tensors, and n more per
    sublayer for the backward pass.
    """

    def __init__(self, spec: specs._Constrained, layers: int, width: int, norm_eps: float) -> None:
        super().__init__(spec.streams, layers, norm_eps)
        self.split = (spec.streams, spec.streams, spec.mixing_logits())  # of K: pre, post, res
        self.projections_LVK = nn.Parameter(torch.empty(layers, spec.streams * width, sum(self.split)))
        self.biases_LK = nn.Parameter(torch.empty(layers, sum(self.split)))
        self.scales_L3 = nn.Parameter(torch.empty(layers, 3))

    @torch.no_grad()
    def initialise(self) -> None:
        self.projections_LVK.zero_()
        self.scales_L3.fill_(0.01)
        pre_LN, post_LN, res_LK = self.biases_LK.split(self.split, dim=-1)
        for layer in range(self.layers):
            for bias_N in (pre_LN[layer], post_LN[layer]):
                bias_N.fill_(-1.0)
                bias_N[layer % self.streams] = 1.0
            res_LK[layer] = self.identity_logits()

    def coefficients(self, row: list[Tensor], x_BTND: Tensor) -> tuple[Tensor, Tensor]:
        projection_VK, bias_K, scale_3 = row
        x_BTV = x_BTND.flatten(-2)
        scale_K = torch.cat([scale_3[i].expand(size) for i, size in enumerate(self.split)])
        logits_BTK = (x_BTV @ projection_VK) * self.inverse_rms(x_BTV) * scale_K + bias_K
        pre_BTN, post_BTN, res_BTK = logits_BTK.split(self.split, dim=-1)
        mixing_BTNN = self.constrained(res_BTK)
        weights_BTMN = torch.cat((torch.sigmoid(pre_BTN).unsqueeze(-2), mixing_BTNN), dim=-2)
        return weights_BTMN, 2 * torch.sigmoid(post_BTN)

    @abstractmethod
    def constrained(self, logits_BTK: Tensor) -> Tensor:
        """Doubly stochastic H_res [.., N, N]."""

    @abstractmethod
    def identity_logits(self) -> Tensor:
        """b_res at start [K]: H_res is nearly the identity."""


def sinkhorn(logits_BTNN: Tensor, steps: int) -> Tensor:
    """exp(logits), its columns and then its rows divided by their sums, `steps` times (2512.24880).

    Rows end exact, columns as near as the steps bring them. Only a factor per row and column is iterated: the
    same numbers, with N instead of N^2 per step for the backward pass. Positions are the last axis meanwhile:
    measured twice as fast on a CPU as sums over a last axis of four. In float32 a row 100 below all others
    has no sum left to divide by.
    """
    logits_NNP = logits_BTNN.flatten(0, -3).permute(1, 2, 0).contiguous()
    # A factor per column is what the first division takes away: no exponential overflows.
    matrix_NNP = torch.exp(logits_NNP - logits_NNP.amax(0, keepdim=True).detach())
    row_N1P = torch.ones_like(matrix_NNP[:, :1])
    for _ in range(steps):
        column_1NP = 1 / (row_N1P * matrix_NNP).sum(0, keepdim=True)
        row_N1P = 1 / (matrix_NNP * column_1NP).sum(1, keepdim=True)
    return (row_N1P * matrix_NNP * column_1NP).permute(2, 0, 1).reshape(logits_BTNN.shape)


class MHC(_Constrained):
    """Manifold-constrained hyper-connections: H_res by Sinkhorn's algorithm, n^2 logits (2512.24880)."""

    def __init__(self, spec: specs.MHC, layers: int, width: int, norm_eps: float) -> None:
        super().__init__(spec, layers, width, norm_eps)
        self.steps = spec.sinkhorn_steps
        self.initialise()

    def constrained(self, logits_BTK: Tensor) -> Tensor:
        return sinkhorn(logits_BTK.unflatten(-1, (self.streams, self.streams)), self.steps)

    def identity_logits(self) -> Tensor:
        return (8 * torch.eye(self.streams) - 8).flatten()


class MHCLite(_Constrained):
    """mHC-lite: H_res = sum_k softmax(logits)_k P_k over the n! permutation matrices (2601.05732).

    Doubly stochastic to rounding, without iterations, and every doubly stochastic matrix can be reached.
    """

    permutations_KNN: Tensor

    def __init__(self, spec: specs.MHCLite, layers: int, width: int, norm_eps: float) -> None:
        super().__init__(spec, layers, width, norm_eps)
        orders = torch.tensor(list(itertools.permutations(range(spec.streams))))  # the identity is first
        permutations_KNN = torch.eye(spec.streams)[orders]
        self.register_buffer("permutations_KNN", permutations_KNN, persistent=False)
        self.initialise()

    def constrained(self, logits_BTK: Tensor) -> Tensor:
        mixing_BTV = torch.softmax(logits_BTK, dim=-1) @ self.permutations_KNN.flatten(1)
        return mixing_BTV.unflatten(-1, (self.streams, self.streams))

    def identity_logits(self) -> Tensor:
        logits_K = torch.full((len(self.permutations_KNN),), -8.0)
        logits_K[0] = 0.0
        return logits_K
