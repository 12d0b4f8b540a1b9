"""The rules in the whole model: where they start, what they compute, what they must not see or keep."""

from __future__ import annotations

import functools

import pytest
import torch
from model_support import (
    ATTNRES,
    PRENORM,
    RULES,
    block,
    block_size_of,
    check_equals_reference,
    check_output_query_learns,
    check_reads_equal_reference,
    check_zero_queries_are_prenorm,
    full,
    living_canaries,
    loss_and_gradients,
    make_batch,
    make_model,
    relative_error,
    set_eps,
)
from torch import Tensor

from attnres.residual import registry, specs

every_attnres = pytest.mark.parametrize("name", ATTNRES)
every_rule = pytest.mark.parametrize("name", RULES)


@every_attnres
def test_zero_queries_have_the_loss_and_the_gradients_of_prenorm(name: str) -> None:
    check_zero_queries_are_prenorm(make_model(ATTNRES[name]))


@every_attnres
def test_every_query_learns_from_the_first_step(name: str) -> None:
    check_output_query_learns(make_model(ATTNRES[name]))


@every_rule
@pytest.mark.parametrize("tied", [False, True])
def test_equals_the_independent_implementation(name: str, tied: bool) -> None:
    model = make_model(RULES[name], tie_embeddings=tied, head_width=4 if tied else None)
    check_equals_reference(model, block_size_of(RULES[name]))


@every_rule
def test_every_read_equals_the_independent_implementation(name: str) -> None:
    check_reads_equal_reference(make_model(RULES[name]), block_size_of(RULES[name]))


@pytest.mark.parametrize("implementation", ["reference", "fused"])
def test_blocks_of_one_sublayer_are_full(implementation: str) -> None:
    one = loss_and_gradients(make_model(block(1, implementation), random_rule=True))
    assert relative_error(one, loss_and_gradients(make_model(full(implementation), random_rule=True))) == 0


@every_attnres
def test_rules_differ_once_queries_are_not_zero(name: str) -> None:
    """What every equality above would hide if random queries had no effect."""
    expected = loss_and_gradients(make_model(PRENORM))
    assert relative_error(loss_and_gradients(make_model(ATTNRES[name], random_rule=True)), expected) > 0.1


@functools.cache
def shared_gradient_norm(spec: specs.RuleSpec, eps: float) -> float:
    """At step 0 of a model of 48 sublayers with GPT-2's small initial values (0.02, outputs / sqrt(L))."""
    model = make_model(spec, depth=24, width=48, mlp_width=96)
    set_eps(model, eps)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and not name.startswith("residual."):
                residual_branch = name.endswith((".output.weight", ".down.weight"))
                parameter.mul_(0.02 / parameter.std() / (48**0.5 if residual_branch else 1.0))
    gradients = loss_and_gradients(model)
    shared = (g for name, g in gradients.items() if name != "loss" and not name.startswith("residual."))
    return float(sum(g.square().sum() for g in shared) ** 0.5)


@pytest.mark.parametrize("spec", [full(), block(6)], ids=["full", "block_s6"])
def test_a_large_norm_epsilon_handicaps_deep_models(spec: specs.RuleSpec) -> None:
    """A read is an average, up to 49 times smaller than the sum: 1e-5 swamps its square, 1e-8 does not."""
    right = shared_gradient_norm(PRENORM, 1e-14)
    assert shared_gradient_norm(spec, 1e-8) == pytest.approx(right, rel=0.05)
    assert shared_gradient_norm(spec, 1e-5) < 0.6 * right


@every_rule
def test_no_position_sees_later_inputs(name: str) -> None:
    model = make_model(RULES[name], random_rule=True)
    kept: list[Tensor] = []

    def keep(module: torch.nn.Module, arguments: object, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    model.embedding.register_forward_hook(keep)
    for position in (0, 3, 7):
        model(make_batch(model)[0])[:, position].square().sum().backward()
        per_input_T = kept.pop().grad.abs().amax((0, 2))
        assert (per_input_T[: position + 1] > 0).all()
        assert (per_input_T[position + 1 :] == 0).all()


@every_rule
def test_nothing_outlives_the_backward_pass(name: str) -> None:
    assert living_canaries(make_model(RULES[name], random_rule=True)) == 0


def test_a_rule_that_keeps_its_state_is_seen() -> None:
    model = make_model(block(3, "reference"))
    start = model.residual.start

    def keeping_start(embedding_BTD: Tensor) -> object:
        model.residual.state = start(embedding_BTD)  # type: ignore[assignment]
        return model.residual.state

    model.residual.start = keeping_start  # type: ignore[assignment,method-assign]
    assert living_canaries(model) > 0


@every_rule
def test_initialise_leaves_zero_queries_and_shared_weights_that_no_rule_moves(name: str) -> None:
    model = make_model(RULES[name], random_rule=True)
    model.initialise(0)
    shared = dict(make_model(PRENORM).named_parameters())
    for parameter_name, parameter in model.named_parameters():
        if parameter_name == "residual.queries_RD":
            assert (parameter == 0).all()
        elif parameter_name == "residual.gains_RD":
            assert (parameter == 1).all()
        else:
            assert torch.equal(parameter, shared.pop(parameter_name))
    assert not shared


@every_attnres
def test_every_parameter_gets_a_gradient(name: str) -> None:
    """DistributedDataParallel stops at a parameter that the graph does not reach."""
    model = make_model(ATTNRES[name])
    assert loss_and_gradients(model).keys() - {"loss"} == dict(model.named_parameters()).keys()


def test_two_models_in_one_process_do_not_meet() -> None:
    chosen = [full(), block(3), full("reference"), block(3, "reference"), PRENORM]
    models = [make_model(spec, random_rule=True, seed=seed) for seed, spec in enumerate(chosen)]
    alone = [loss_and_gradients(model) for model in models]
    for model in models:
        model.zero_grad()
    losses = [model.loss(*make_batch(model)) for model in models]  # all passes open at once
    for loss in losses:
        loss.backward()
    for model, expected in zip(models, alone, strict=True):
        for parameter_name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, expected[parameter_name])


def test_specs_have_a_module_each() -> None:
    assert set(registry.RULES) == set(specs.SPECS.values())
