"""Wrong forms of the rules of test_rules.py: each must fail a check that the right ones pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from model_support import PRENORM, TINY, living_canaries, make_model
from rules_support import (
    CASES,
    check_blind_to_autocast,
    check_every_parameter_learns,
    check_is_prenorm,
    check_model,
    check_reads,
    check_streams_part,
    random_rule,
)
from torch import Tensor, nn

from attnres.model import Transformer
from attnres.optim import parameter_groups
from attnres.residual import denseformer, multi_stream, rms_block, single_stream
from attnres.residual.rule import ResidualRule, ResidualState

LAYERS, WIDTH = TINY.layers, TINY.width


def altered(name: str, state: type[ResidualState] | None = None, **methods: Callable) -> ResidualRule:
    """The rule of a case with random parameters, some of its methods or its state replaced."""
    rule = random_rule(CASES[name], LAYERS, WIDTH)
    if state is not None:
        methods["start"] = lambda self, embedding_BTD: state(self, embedding_BTD)  # type: ignore[call-arg]
    rule.__class__ = type("Wrong", (type(rule),), methods)
    return rule


def transposed_mixing(self: multi_stream.HyperConnections, row: list[Tensor], x: Tensor) -> object:
    weights, write = multi_stream.HyperConnections.coefficients(self, row, x)
    return torch.cat((weights[..., :1, :], weights[..., 1:, :].transpose(-1, -2)), dim=-2), write


def no_tanh_scale(self: multi_stream.HyperConnections, row: list[Tensor], x: Tensor) -> object:
    return multi_stream.HyperConnections.coefficients(self, [*row[:3], torch.ones_like(row[3])], x)


def rows_first(self: multi_stream.MHC, logits: Tensor) -> Tensor:
    matrix = logits.unflatten(-1, (self.streams, self.streams)).transpose(-1, -2)
    return multi_stream.sinkhorn(matrix, self.steps).transpose(-1, -2)


def one_step_fewer(self: multi_stream.MHC, logits: Tensor) -> Tensor:
    return multi_stream.sinkhorn(logits.unflatten(-1, (self.streams, self.streams)), self.steps - 1)


def inverse_permutations(self: multi_stream.MHCLite, logits: Tensor) -> Tensor:
    return multi_stream.MHCLite.constrained(self, logits).transpose(-1, -2)


def write_of_one_sigmoid(self: multi_stream.MHC, row: list[Tensor], x: Tensor) -> object:
    weights, write = type(self).__mro__[1].coefficients(self, row, x)  # type: ignore[attr-defined]
    return weights, write / 2


class MeanOfStreams(multi_stream._StreamsState):
    def finish(self) -> Tensor:
        return self.x_BTND.mean(-2)


class WriteBeforeMixing(multi_stream._StreamsState):
    """The output goes into the streams first and is mixed with them."""

    def read(self, layer: int) -> Tensor:
        self.weights_MN, self.write_N = self.rule.coefficients(self.rows[layer], self.x_BTND)
        return (self.weights_MN @ self.x_BTND)[..., 0, :]

    def write(self, layer: int, output_BTD: Tensor) -> None:
        written = self.x_BTND + self.write_N.unsqueeze(-1) * output_BTD.unsqueeze(-2)
        self.x_BTND = self.weights_MN[..., 1:, :] @ written


class UnderAutocast(multi_stream._StreamsState):
    """Coefficients and mixing in whatever type autocast chooses."""

    def read(self, layer: int) -> Tensor:
        weights_MN, self.write_N = self.rule.coefficients(self.rows[layer], self.x_BTND)
        mixed_BTMD = (weights_MN @ self.x_BTND).to(self.x_BTND.dtype)
        self.x_BTND = mixed_BTMD[..., 1:, :]
        return mixed_BTMD[..., 0, :]


class AverageOfAverages(denseformer._DenseState):
    """Keeps Y_k, what the average gave, instead of X_k."""

    def write(self, layer: int, output_BTD: Tensor) -> None:
        super().write(layer, output_BTD)
        if layer % 2:
            self.states[-1] = self.x_BTD


class EverySublayer(single_stream._X0State):
    """Scales before the MLP too."""

    def read(self, layer: int) -> Tensor:
        return super().read(layer - layer % 2)


class GateOfTheOutput(single_stream._HighwayState):
    """The gate looks at what the sublayer put out."""

    def write(self, layer: int, output_BTD: Tensor) -> None:
        weight_DD, bias_D = self.gates[layer]
        gate = torch.sigmoid(nn.functional.linear(output_BTD, weight_DD, bias_D))
        self.x_BTD = torch.lerp(self.x_BTD, output_BTD, gate)


class PlainBlocks(rms_block._RMSBlockState):
    """The finished block is the running sum, as in attnres_block."""

    def write(self, layer: int, output_BTD: Tensor) -> None:
        running = output_BTD if self.running_BTD is None else self.running_BTD + output_BTD
        super().write(layer, output_BTD)
        if self.running_BTD is None:
            self.sources[-1] = running


class NormedRunningSum(rms_block._RMSBlockState):
    def write(self, layer: int, output_BTD: Tensor) -> None:
        super().write(layer, output_BTD)
        self.running_BTD = self.normed_BTD


class DetachedBlocks(rms_block._RMSBlockState):
    def write(self, layer: int, output_BTD: Tensor) -> None:
        super().write(layer, output_BTD)
        self.sources[-1] = self.sources[-1].detach() if len(self.sources) > 1 else self.sources[0]


WRONG: dict[str, tuple[str, Callable[[], ResidualRule]]] = {
    "mixing transposed": (
        "hyper_connections_static_n3",
        lambda: altered("hyper_connections_static_n3", coefficients=transposed_mixing),
    ),
    "no scale of the dynamic part": (
        "hyper_connections_n4",
        lambda: altered("hyper_connections_n4", coefficients=no_tanh_scale),
    ),
    "mean of the streams": ("hyper_connections_n4", lambda: altered("hyper_connections_n4", MeanOfStreams)),
    "write before mixing": (
        "hyper_connections_n4",
        lambda: altered("hyper_connections_n4", WriteBeforeMixing),
    ),
    "rows before columns": ("mhc_n2_k3", lambda: altered("mhc_n2_k3", constrained=rows_first)),
    "a Sinkhorn step fewer": ("mhc_n4", lambda: altered("mhc_n4", constrained=one_step_fewer)),
    "a write of one sigmoid": ("mhc_n4", lambda: altered("mhc_n4", coefficients=write_of_one_sigmoid)),
    "permutations inverted": (
        "mhc_lite_n4",
        lambda: altered("mhc_lite_n4", constrained=inverse_permutations),
    ),
    "averages of averages": ("denseformer", lambda: altered("denseformer", AverageOfAverages)),
    "scales at every sublayer": ("x0_lambdas", lambda: altered("x0_lambdas", EverySublayer)),
    "gate of the output": ("highway", lambda: altered("highway", GateOfTheOutput)),
    "plain blocks": ("rms_block_s3", lambda: altered("rms_block_s3", PlainBlocks)),
    "normed running sum": ("rms_block_s3", lambda: altered("rms_block_s3", NormedRunningSum)),
    "detached blocks": ("rms_block_s3", lambda: altered("rms_block_s3", DetachedBlocks)),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_the_reads_expose(mistake: str) -> None:
    name, make = WRONG[mistake]
    check_reads(CASES[name], random_rule(CASES[name], LAYERS, WIDTH), LAYERS, WIDTH)
    with pytest.raises(AssertionError):
        check_reads(CASES[name], make(), LAYERS, WIDTH)


@pytest.mark.parametrize("mistake", [m for m in WRONG if m != "mean of the streams"])
def test_the_whole_model_exposes(mistake: str) -> None:
    """A mean of the streams only scales the output: the final norm hides it, the reads above do not."""
    name, make = WRONG[mistake]
    model = make_model(CASES[name])
    model.residual = make()
    model.residual.eps = TINY.norm_eps  # type: ignore[assignment]
    with pytest.raises(AssertionError):
        check_model(model, CASES[name])


@pytest.mark.parametrize("name", ["hyper_connections_n4", "mhc_n4", "mhc_lite_n4"])
def test_autocast_exposes_coefficients_in_bfloat16(name: str) -> None:
    check_blind_to_autocast(random_rule(CASES[name], LAYERS, WIDTH), LAYERS, WIDTH)
    with pytest.raises(AssertionError):
        check_blind_to_autocast(altered(name, UnderAutocast), LAYERS, WIDTH)


def test_the_start_exposes_a_generic_initialisation() -> None:
    model = make_model(CASES["hyper_connections_n4"])
    check_is_prenorm(model)
    torch.nn.init.normal_(model.residual.dynamic_LDK, std=0.02)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        check_is_prenorm(model)


def test_equal_biases_leave_the_streams_equal() -> None:
    model = make_model(CASES["mhc_n4"])
    check_streams_part(model)
    with torch.no_grad():
        model.residual.biases_LK[:, :8] = 0.0  # type: ignore[index]
    with pytest.raises(AssertionError):
        check_streams_part(model)


def model_with_an_unused_parameter() -> Transformer:
    model = make_model(CASES["rezero"])
    model.residual.scales_of_the_first_read = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    return model


def test_a_parameter_that_no_read_uses_is_seen() -> None:
    with pytest.raises(AssertionError):
        check_every_parameter_learns(model_with_an_unused_parameter())


def test_a_rule_that_keeps_its_state_is_seen() -> None:
    rule = altered("hyper_connections_n4")
    start = rule.start

    def keeping_start(embedding_BTD: Tensor) -> ResidualState:
        rule.state = start(embedding_BTD)  # type: ignore[assignment]
        return rule.state  # type: ignore[return-value]

    model = make_model(CASES["hyper_connections_n4"])
    model.residual = rule
    assert living_canaries(model) == 0
    rule.start = keeping_start  # type: ignore[method-assign]
    assert living_canaries(model) > 0


def test_a_rule_outside_the_residual_prefix_would_be_decayed() -> None:
    """What the test of the groups looks at: the same matrix under another name is a matrix like any other."""
    weights = nn.Parameter(torch.zeros(4, 3, 3))
    (group,) = parameter_groups([("residual.weights_LDD", weights)], 0.1)
    assert group["name"] == "residual" and group["weight_decay"] == 0
    (group,) = parameter_groups([("highway.weights_LDD", weights)], 0.1)
    assert group["weight_decay"] == 0.1


def test_prenorm_passes_what_the_wrong_rules_fail() -> None:
    check_is_prenorm(make_model(PRENORM))
