"""Rules that keep one stream and scale what is added to it. Shapes: B sequences, T tokens, D channels.

v_0 is the embedding, f_l the sublayer l = 1..L with its own pre-norm inside. Coefficients are computed in
float32 at least, and the sums are in the stream's type, the embedding's, as pre-norm's are.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.residual import single_stream_specs as specs
from attnres.residual.rule import ResidualRule, ResidualState


class _Stream(ResidualState):
    """x: what every sublayer reads and what the output is."""

    def __init__(self, embedding_BTD: Tensor) -> None:
        self.x_BTD = embedding_BTD

    def read(self, layer: int) -> Tensor:
        return self.x_BTD

    @abstractmethod
    def write(self, layer: int, output_BTD: Tensor) -> None: ...

    def finish(self) -> Tensor:
        return self.x_BTD


class ReZero(ResidualRule):
    """x <- x + a_l f_l(x), a_l = 0 at start (2003.04887, equation 1). L parameters; one live tensor.

    At start every sublayer reads the embedding and none is heard: not pre-norm, but the identity. The paper
    drops the norms; here the sublayers keep theirs, as for every rule.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scales_L = nn.Parameter(torch.zeros(layers))

    def initialise(self) -> None:
        nn.init.zeros_(self.scales_L)

    def start(self, embedding_BTD: Tensor) -> ResidualState:
        return _ScaledState(embedding_BTD, self.scales_L)


class LayerScale(ResidualRule):
    """x <- x + g_l * f_l(x), one number per channel (2103.17239). L d parameters; one live tensor.

    g_l is `initial` at start; the paper has 0.1 up to 18 transformer blocks, 1e-5 up to 24, 1e-6 above. 1 is
    pre-norm.
    """

    def __init__(self, spec: specs.LayerScale, layers: int, width: int) -> None:
        super().__init__()
        self.initial = spec.initial
        self.scales_LD = nn.Parameter(torch.full((layers, width), spec.initial))

    def initialise(self) -> None:
        nn.init.constant_(self.scales_LD, self.initial)

    def start(self, embedding_BTD: Tensor) -> ResidualState:
        return _ScaledState(embedding_BTD, self.scales_LD)


class _ScaledState(_Stream):
    def __init__(self, embedding_BTD: Tensor, scales: Tensor) -> None:
        super().__init__(embedding_BTD)
        self.scales = scales.unbind()  # at once: the gradients of single rows are as large as all rows

    def write(self, layer: int, output_BTD: Tensor) -> None:
        self.x_BTD = torch.addcmul(self.x_BTD, output_BTD.to(self.x_BTD.dtype), self.scales[layer])


class Highway(ResidualRule):
    """x <- (1 - t) * x + t * f_l(x), t = sigmoid(W_l x + b_l), per channel (1505.00387, equation 3).

    b_l = `gate_bias` at start, negative so that x is carried (the paper names -1 and -3); W_l = 0 (the
    paper draws it; zero needs no generator and opens all gates alike). L d (d + 1) parameters, as many as
    a quarter of the attention's projections; two live tensors. The limit b -> -inf is the identity.
    """

    def __init__(self, spec: specs.Highway, layers: int, width: int) -> None:
        super().__init__()
        self.gate_bias = spec.gate_bias
        self.weights_LDD = nn.Parameter(torch.zeros(layers, width, width))
        self.biases_LD = nn.Parameter(torch.full((layers, width), spec.gate_bias))

    def initialise(self) -> None:
        nn.init.zeros_(self.weights_LDD)
        nn.init.constant_(self.biases_LD, self.gate_bias)

    def start(self, embedding_BTD: Tensor) -> ResidualState:
        return _HighwayState(self, embedding_BTD)


class _HighwayState(_Stream):
    def __init__(self, rule: Highway, embedding_BTD: Tensor) -> None:
        super().__init__(embedding_BTD)
        self.gates = list(zip(rule.weights_LDD.unbind(), rule.biases_LD.unbind(), strict=True))

    def write(self, layer: int, output_BTD: Tensor) -> None:
        weight_DD, bias_D = self.gates[layer]
        with torch.autocast(output_BTD.device.type, enabled=False):
            gate_BTD = torch.sigmoid(F.linear(self.x_BTD.to(weight_DD.dtype), weight_DD, bias_D))
            mixed_BTD = torch.lerp(self.x_BTD.to(gate_BTD.dtype), output_BTD.to(gate_BTD.dtype), gate_BTD)
        self.x_BTD = mixed_BTD.to(self.x_BTD.dtype)


class X0Lambdas(ResidualRule):
    """x <- r_k x + b_k v_0 before transformer block k, then pre-norm's additions (nanochat's residual).

    r_k = 1 and b_k = `initial_x0` at start: with 0 it is pre-norm, later versions of nanochat have 0.1 (there
    v_0 is normalised, here it is not). 2 parameters per transformer block; two live tensors.
    """

    def __init__(self, spec: specs.X0Lambdas, layers: int) -> None:
        super().__init__()
        self.initial_x0 = spec.initial_x0
        self.stream_scales_K = nn.Parameter(torch.ones(layers // 2))
        self.embedding_scales_K = nn.Parameter(torch.full((layers // 2,), spec.initial_x0))

    def initialise(self) -> None:
        nn.init.ones_(self.stream_scales_K)
        nn.init.constant_(self.embedding_scales_K, self.initial_x0)

    def start(self, embedding_BTD: Tensor) -> ResidualState:
        return _X0State(self, embedding_BTD)


class _X0State(_Stream):
    def __init__(self, rule: X0Lambdas, embedding_BTD: Tensor) -> None:
        super().__init__(embedding_BTD)
        self.embedding_BTD = embedding_BTD
        self.scales = list(zip(rule.stream_scales_K.unbind(), rule.embedding_scales_K.unbind(), strict=True))

    def read(self, layer: int) -> Tensor:
        if layer % 2 == 0:  # an attention: a transformer block begins
            stream_scale, embedding_scale = self.scales[layer // 2]
            self.x_BTD = self.x_BTD * stream_scale + self.embedding_BTD * embedding_scale
        return self.x_BTD

    def write(self, layer: int, output_BTD: Tensor) -> None:
        self.x_BTD = self.x_BTD + output_BTD
