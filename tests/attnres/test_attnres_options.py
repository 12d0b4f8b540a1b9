"""AttnRes with options and with a window: against the equations, where it starts, what it costs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnres_options_support import CASES, MAIN, OPTIONS, as_reference, spec_of
from model_support import loss_and_gradients, make_model, relative_error, run_rule
from rules_support import (
    check_is_prenorm,
    check_model,
    check_reads,
    random_rule,
    reference_reads,
)

from attnres.compose import compose_trial
from attnres.errors import ConfigError
from attnres.model import Transformer
from attnres.residual import specs
from attnres.residual.registry import make_rule
from attnres.residual.rule_spec import RuleSpec

every_main = pytest.mark.parametrize(
    "name", [f"{s}_{option}" for s in ("full", "s3", "w3") for option in MAIN]
)
every_case = pytest.mark.parametrize("name", CASES)
both = pytest.mark.parametrize("implementation", ["fused", "reference"])

# (sublayers, width, batch): one sublayer; a short last block and a width that is no multiple of 8; batch 1.
SHAPES = [(1, 4, 2), (7, 6, 2), (6, 10, 1)]


@both
@every_case
def test_every_read_equals_the_independent_implementation(name: str, implementation: str) -> None:
    spec = dataclasses.replace(CASES[name], implementation=implementation)
    for layers, width, batch in SHAPES:
        if spec.resolved_block_size(layers) <= layers:
            check_reads(spec, random_rule(spec, layers, width), layers, width, batch)


@every_main
def test_the_model_equals_the_independent_implementation(name: str) -> None:
    """Here sublayers depend on what they read, so that gradients of a whole pass meet."""
    for spec in (CASES[name], as_reference(CASES[name])):
        check_model(make_model(spec, depth=2, width=8), spec)


def test_wide_heads_equal_the_independent_implementation() -> None:
    """Beyond the width up to which products over depth go by another way."""
    for option in ("input", "sigmoid"):
        spec = spec_of("s2", option)
        check_reads(spec, random_rule(spec, 4, 136), 4, 136)


@every_main
def test_fused_equals_reference_in_float32(name: str) -> None:
    spec, changes = CASES[name], {"norm_eps": 1e-8, "depth": 3}
    values = loss_and_gradients(calm(make_model(spec, random_rule=True, dtype=torch.float32, **changes)))
    expected = loss_and_gradients(calm(make_model(as_reference(spec), random_rule=True, **changes)))
    assert relative_error(values, expected) < 1e-4


def calm(model: Transformer) -> Transformer:
    """Random parameters of a size at which the weights are not saturated: float32 keeps its digits."""
    with torch.no_grad():
        for name, parameter in model.residual.named_parameters():
            parameter.mul_({"query_weights_RDD": 0.05, "queries_RD": 0.3}.get(name, 1.0))
    return model


@pytest.mark.parametrize("sources", ["s2", "w1"])
@pytest.mark.parametrize("option", [*MAIN, "input_sigmoid_h2"])
def test_gradcheck(sources: str, option: str) -> None:
    spec, layers, width = spec_of(sources, option), 3, 2
    rule = random_rule(spec, layers, width)
    v = torch.randn(layers + 1, 1, 2, width, dtype=torch.float64, requires_grad=True)
    names = dict(rule.named_parameters())

    def reads(v, *parameters):
        for name, parameter in zip(names, parameters, strict=True):
            delattr(rule, name)
            setattr(rule, name, parameter)
            rule.named_parameters = lambda: zip(names, parameters, strict=True)
        return tuple(run_rule(rule, list(v))[1:])

    inputs = [p.detach().clone().requires_grad_() for p in names.values()]
    assert torch.autograd.gradcheck(reads, (v, *inputs))


@both
@pytest.mark.parametrize("sources", ["full", "s2", "s3", "w10"])
@pytest.mark.parametrize("option", MAIN)
def test_starts_as_prenorm(sources: str, option: str, implementation: str) -> None:
    """Loss and every shared gradient. A window of as many sublayers as the model has is full."""
    check_is_prenorm(make_model(spec_of(sources, option, implementation)))


@pytest.mark.parametrize("window", [1, 3, 9])
def test_a_window_of_fewer_sublayers_does_not_start_as_prenorm(window: int) -> None:
    """By how much is in docs/rules.md."""
    model = make_model(spec_of(f"w{window}", "plain"))
    with pytest.raises(AssertionError):
        check_is_prenorm(model)


@both
def test_sigmoid_at_the_start_reads_half_of_the_sum(implementation: str) -> None:
    v = list(torch.randn(6, 1, 3, 4, dtype=torch.float64))
    for option in ("sigmoid", "static_sigmoid_h2"):
        rule = make_rule(spec_of("full", option, implementation), 5, 4, 1e-9).double()
        for layer, read in enumerate(run_rule(rule, v)):
            half = sum(v[: layer + 1]) * (0.5 if layer else 1.0)
            assert torch.allclose(read, half, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("option", MAIN)
def test_a_wide_window_and_blocks_of_one_are_full(option: str) -> None:
    expected = loss_and_gradients(make_model(as_reference(spec_of("full", option)), random_rule=True))
    for sources in ("w10", "s1", "w11"):
        values = loss_and_gradients(make_model(spec_of(sources, option), random_rule=True))
        assert relative_error(values, expected) < 1e-9


@pytest.mark.parametrize("option", OPTIONS)
def test_the_option_changes_the_numbers(option: str) -> None:
    """What every equality above would hide if an option had no effect."""
    expected = loss_and_gradients(make_model(spec_of("s3", "plain"), random_rule=True))
    values = loss_and_gradients(make_model(spec_of("s3", option), random_rule=True))
    shared = {name: g for name, g in expected.items() if not name.startswith("residual.")}
    assert (relative_error(values, shared) > 1e-2) == (option != "plain")


@every_case
@pytest.mark.parametrize("layers", [4, 10])
def test_flops_are_those_of_the_equation(name: str, layers: int) -> None:
    """The independent implementation counts its own products and sums of d channels."""
    spec, v = CASES[name], list(torch.randn(layers + 1, 1, 6, dtype=torch.float64))
    if spec.resolved_block_size(layers) <= layers:
        _, meter = reference_reads(spec, random_rule(spec, layers, 6), v)
        assert spec.flops_per_token(layers, 6) == meter.flops


@every_case
def test_parameters_are_counted(name: str) -> None:
    for layers, width in ((4, 6), (10, 14)):
        if CASES[name].resolved_block_size(layers) <= layers:
            rule = make_rule(CASES[name], layers, width, 1e-8)
            assert CASES[name].parameters(layers, width) == sum(p.numel() for p in rule.parameters())


def test_a_window_reads_the_embedding_and_the_last_outputs() -> None:
    assert spec_of("w2", "plain").sources(4) == (1, 2, 3, 3, 3)
    assert spec_of("w9", "plain").sources(4) == (1, 2, 3, 4, 5)


def test_labels_tell_options_apart() -> None:
    by_label: dict[str, specs.RuleSpec] = {}
    for spec in [*CASES.values(), spec_of("full", "plain"), spec_of("s3", "plain")]:
        assert by_label.setdefault(spec.label(), spec) == spec
    assert spec_of("full", "sigmoid").label() == "attnres_full_sigmoid"
    assert spec_of("s4", "input_sigmoid_h2").label() == "attnres_block_s4_input_sigmoid_h2"
    assert spec_of("w8", "no_key_norm").label() == "attnres_window_w8_no_key_norm"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["query=input", "weights=static"], "residual.query=input: residual.weights=static has no queries"),
        (
            ["weights=static", "key_norm=false"],
            "residual.key_norm=False: residual.weights=static has no keys",
        ),
        (["heads=0"], "residual.heads=0: must be at least 1"),
        (["heads=7"], "residual.heads=7: does not divide model.width="),
        (["query=both"], "residual.query=both: one of learned, input"),
        (["normaliser=relu"], "residual.normaliser=relu: one of softmax, sigmoid"),
        (["window=0"], "residual.window=0: must be at least 1"),
        (["window=null"], "residual.window=None: must be a whole number"),
    ],
)
@pytest.mark.parametrize("rule", ["attnres_block", "attnres_window"])
def test_options_that_make_no_sense_are_refused(rule: str, overrides: list[str], message: str) -> None:
    if "window" in message and rule != "attnres_window":
        message = "residual.window"  # no such option there
    with pytest.raises(ValueError) as caught:
        words = ["window=8"] if rule == "attnres_window" and "window" not in message else []
        compose_trial([f"residual={rule}", *(f"residual.{word}" for word in [*words, *overrides])])
    assert isinstance(caught.value, ConfigError) or "window" in message
    assert message in str(caught.value) and "\n" not in str(caught.value)


@dataclasses.dataclass(frozen=True)
class FullWithoutOptions(RuleSpec):
    """attnres_full as it was before it had options."""

    rule = "attnres_full"
    implementation: str

    def flops_per_token(self, layers: int, width: int) -> int:
        return 0


def test_options_at_their_default_are_no_part_of_a_trial_id(tmp_path) -> None:
    from tiny_trial import tiny_trial

    from attnres.trial import resolve

    trial, corpus = tiny_trial(tmp_path, "residual=attnres_full")
    before = dataclasses.replace(trial.config, residual=FullWithoutOptions("fused"))
    assert resolve(before, corpus).id == trial.id
    ids = {trial.id}
    for option in MAIN:
        after = dataclasses.replace(trial.config, residual=spec_of("full", option))
        ids.add(resolve(after, corpus).id)
    for window in (2, 3):
        after = dataclasses.replace(trial.config, residual=spec_of(f"w{window}", "plain"))
        ids.add(resolve(after, corpus).id)
    assert len(ids) == 1 + len(MAIN) + 2
