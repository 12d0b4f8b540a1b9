"""The rules that are not depth attention: each against its equation, where it starts, what it may see."""

from __future__ import annotations

import pytest
import torch
from model_support import TINY, living_canaries, loss_and_gradients, make_batch, make_model, relative_error
from rules_support import (
    CASES,
    check_blind_to_autocast,
    check_every_parameter_learns,
    check_is_prenorm,
    check_model,
    check_reads,
    check_streams_part,
    default_spec,
    random_rule,
    reference_reads,
)

from attnres.compose import group_options
from attnres.optim import parameter_groups
from attnres.residual import specs
from attnres.residual.multi_stream import sinkhorn
from attnres.residual.registry import make_rule

every_case = pytest.mark.parametrize("name", CASES)
every_rule = pytest.mark.parametrize("rule", specs.SPECS)
STREAMS = [name for name in CASES if "hyper" in name or "mhc" in name]
SHAPES = {"even": (10, 12, 2), "short": (2, 5, 1), "odd": (6, 7, 3)}


def test_every_rule_has_a_yaml_and_no_yaml_lacks_a_rule() -> None:
    assert {default_spec(name).rule for name in group_options()["residual"]} == set(specs.SPECS)


# A block of more sublayers than the model has is refused.
@pytest.mark.parametrize(
    ("name", "shape"), [(n, s) for n in CASES for s in SHAPES if n[-2:] + s != "s3short"]
)
def test_every_read_equals_the_independent_implementation(name: str, shape: str) -> None:
    layers, width, batch = SHAPES[shape]
    spec = CASES[name]
    check_reads(spec, random_rule(spec, layers, width), layers, width, batch)


@every_case
@pytest.mark.parametrize("tied", [False, True])
def test_the_model_equals_the_independent_implementation(name: str, tied: bool) -> None:
    changes = {"width": 8, "heads": 1, "depth": 3, "mlp_width": 12} if tied else {}
    check_model(make_model(CASES[name], tie_embeddings=tied, **changes), CASES[name])


@every_case
@pytest.mark.parametrize("layers", [4, 10])
def test_flops_are_those_of_the_equation(name: str, layers: int) -> None:
    """The independent implementation counts its own products and sums of d channels."""
    spec = CASES[name]
    v = list(torch.randn(layers + 1, 1, 6, dtype=torch.float64))
    _, meter = reference_reads(spec, random_rule(spec, layers, 6), v)
    assert spec.flops_per_token(layers, 6) == meter.flops


@every_case
@pytest.mark.parametrize(("layers", "width"), [(4, 6), (10, 13)])
def test_parameters_are_counted(name: str, layers: int, width: int) -> None:
    rule = make_rule(CASES[name], layers, width, 1e-8)
    assert CASES[name].parameters(layers, width) == sum(p.numel() for p in rule.parameters())


PRENORM_AT_START = [
    specs.DenseFormer(),
    specs.HyperConnections(streams=4, dynamic=True),
    specs.HyperConnections(streams=3, dynamic=False),
    specs.HyperConnections(streams=1, dynamic=True),
    specs.X0Lambdas(initial_x0=0.0),
    specs.LayerScale(initial=1.0),  # its limiting case
]


@pytest.mark.parametrize("spec", PRENORM_AT_START, ids=lambda spec: spec.label())
def test_starts_as_prenorm(spec: specs.RuleSpec) -> None:
    check_is_prenorm(make_model(spec))


NOT_AT_START = ["rezero", "layerscale", "highway", "x0_lambdas", "mhc_n4", "mhc_lite_n4", "rms_block_s3"]


@pytest.mark.parametrize("name", NOT_AT_START)
def test_does_not_start_as_prenorm(name: str) -> None:
    """By how much is in docs/rules.md, measured by `python -m attnres.rules`."""
    with pytest.raises(AssertionError):
        check_is_prenorm(make_model(CASES[name]))


def test_rezero_starts_as_the_identity() -> None:
    """Every read is the embedding, and only the scales and what reads the output learn."""
    model = make_model(CASES["rezero"])
    gradients = loss_and_gradients(model)
    assert float(gradients["residual.scales_L"].abs().min()) > 0
    assert all(float(g.norm()) == 0 for name, g in gradients.items() if name.startswith("blocks."))


def test_rezero_at_one_is_prenorm() -> None:
    model = make_model(CASES["rezero"])
    torch.nn.init.ones_(model.residual.scales_L)
    check_is_prenorm(model)


@pytest.mark.parametrize("name", ["mhc_n4", "mhc_lite_n4"])
def test_mhc_that_writes_evenly_is_prenorm_whatever_it_mixes(name: str) -> None:
    """Rows of the mixing matrix that sum to 1 keep equal streams; a write of 2 sigmoid(0) is 1 to each."""
    model = make_model(CASES[name])
    with torch.no_grad():
        pre_LN, post_LN, res_LK = model.residual.biases_LK.split(model.residual.split, dim=-1)
        post_LN.zero_()
        res_LK.normal_(generator=torch.Generator().manual_seed(0))
    check_is_prenorm(model)


@pytest.mark.parametrize("name", ["mhc_n4", "mhc_lite_n4"])
def test_mhc_starts_near_the_identity_with_one_favoured_stream(name: str) -> None:
    rule = make_rule(CASES[name], 6, 5, 1e-8)
    rule.initialise()
    for layer in range(6):
        row = [p[layer] for p in rule.parameters()]
        weights_MN, write_N = (x[0, 0] for x in rule.coefficients(row, torch.randn(1, 1, 4, 5)))
        favoured = [stream == layer % 4 for stream in range(4)]
        assert write_N.tolist() == pytest.approx([1.4621 if one else 0.5379 for one in favoured], abs=1e-4)
        assert weights_MN[0].tolist() == pytest.approx(
            [0.7311 if one else 0.2689 for one in favoured], abs=1e-4
        )
        assert torch.allclose(weights_MN[1:], torch.eye(4), atol=8e-3)


@pytest.mark.parametrize("name", ["mhc_n4", "mhc_lite_n4"])
def test_streams_part_at_the_first_step(name: str) -> None:
    check_streams_part(make_model(CASES[name]))


def test_sinkhorn_is_doubly_stochastic_within_a_thousandth() -> None:
    logits = torch.randn(500, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrices = sinkhorn(logits, 20)
    assert float((matrices.sum(-1) - 1).abs().max()) < 1e-12  # rows are divided last
    assert float((matrices.sum(-2) - 1).abs().max()) < 1e-3
    assert float((sinkhorn(logits, 1).sum(-2) - 1).abs().max()) > 1e-2  # the steps are needed
    assert float(matrices.min()) > 0


def test_sinkhorn_at_the_start_and_far_from_it() -> None:
    start = 8 * torch.eye(4) - 8
    assert torch.allclose(sinkhorn(start[None], 20).sum(-2), torch.ones(4), atol=1e-5)
    large = 20 * torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0)).sign()
    assert torch.isfinite(sinkhorn(large, 20)).all()


@pytest.mark.parametrize("streams", [2, 3, 4, 5])
def test_permutations_make_a_doubly_stochastic_matrix_exactly(streams: int) -> None:
    rule = random_rule(specs.MHCLite(streams), 2, 6)
    x_BTND = 10 * torch.randn(3, 7, streams, 6, dtype=torch.float64)
    weights_BTMN, _ = rule.coefficients([p[0] for p in rule.parameters()], x_BTND)
    mixing = weights_BTMN.detach()[..., 1:, :]
    assert float((mixing.sum(-1) - 1).abs().max()) < 1e-12
    assert float((mixing.sum(-2) - 1).abs().max()) < 1e-12
    assert float(mixing.min()) >= 0


@pytest.mark.parametrize("name", [name for name in CASES if "rms" not in name and name != "rezero"])
def test_initialise_undoes_any_change(name: str) -> None:
    """What a model starts from is what `initialise` sets, and nothing else may touch it."""
    fresh = make_model(CASES[name])
    changed = make_model(CASES[name], random_rule=True)
    changed.initialise(0)
    for (key, a), (_, b) in zip(fresh.named_parameters(), changed.named_parameters(), strict=True):
        assert torch.equal(a, b), key


@every_case
def test_autocast_changes_nothing_inside_a_rule(name: str) -> None:
    check_blind_to_autocast(random_rule(CASES[name], TINY.layers, TINY.width), TINY.layers, TINY.width)


# For every rule of the registry, as its YAML has it.


@every_rule
def test_every_parameter_learns(rule: str) -> None:
    check_every_parameter_learns(make_model(default_spec(rule)))


@every_rule
def test_no_position_sees_later_inputs(rule: str) -> None:
    model = make_model(default_spec(rule), random_rule=True)
    kept: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, arguments: object, output: torch.Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    model.embedding.register_forward_hook(keep)
    for position in (0, 3, 7):
        model(make_batch(model)[0])[:, position].square().sum().backward()
        per_input_T = kept.pop().grad.abs().amax((0, 2))
        assert (per_input_T[: position + 1] > 0).all()
        assert (per_input_T[position + 1 :] == 0).all()


@every_rule
def test_nothing_outlives_the_backward_pass(rule: str) -> None:
    assert living_canaries(make_model(default_spec(rule), random_rule=True)) == 0


@every_rule
def test_recomputed_sublayers_change_nothing(rule: str) -> None:
    model = make_model(default_spec(rule), random_rule=True)
    expected = loss_and_gradients(model)
    model.checkpoint_activations = True
    assert relative_error(loss_and_gradients(model), expected) < 1e-12


@every_rule
def test_gradients_of_microbatches_add_up(rule: str) -> None:
    model = make_model(default_spec(rule), random_rule=True)
    expected = loss_and_gradients(model)
    inputs_BT, targets_BT = make_batch(model)
    model.zero_grad()
    for inputs_1T, targets_1T in zip(inputs_BT.split(1), targets_BT.split(1), strict=True):
        (model.loss(inputs_1T, targets_1T) / len(inputs_BT)).backward()
    added = {name: p.grad for name, p in model.named_parameters()}
    assert relative_error(added, {k: g for k, g in expected.items() if k != "loss"}) < 1e-10


@every_rule
def test_trains_under_autocast(rule: str) -> None:
    """Near the float32 loss, and every gradient is finite and in float32."""
    model = make_model(default_spec(rule), dtype=torch.float32, norm_eps=1e-8)
    losses = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model.loss(*make_batch(model))
        loss.backward()
        losses.append(float(loss.detach()))
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@every_rule
def test_a_rules_parameters_are_never_decayed(rule: str) -> None:
    model = make_model(default_spec(rule))
    own = {id(p) for p in model.residual.parameters()}
    groups = {group["name"]: group for group in parameter_groups(model.named_parameters(), 0.1)}
    for name, group in groups.items():
        assert {id(p) for p in group["params"]} & own == (own if name == "residual" else set())
    assert not own or groups["residual"]["weight_decay"] == 0


def test_labels_tell_options_apart() -> None:
    by_label: dict[str, specs.RuleSpec] = {}
    for spec in [*CASES.values(), *PRENORM_AT_START, *map(default_spec, specs.SPECS)]:
        assert by_label.setdefault(spec.label(), spec) == spec


REFUSED = [
    (specs.HyperConnections(streams=0, dynamic=True), "residual.streams=0: must be at least 1"),
    (specs.MHC(streams=1, sinkhorn_steps=20), "residual.streams=1: must be at least 2"),
    (specs.MHC(streams=4, sinkhorn_steps=0), "residual.sinkhorn_steps=0: must be at least 1"),
    (specs.MHCLite(streams=7), "residual.streams=7: must be at most 6"),
    (specs.LayerScale(initial=0.0), "residual.initial=0.0: must be positive"),
    (specs.RMSBlock(num_blocks=11, block_size=None), "residual.num_blocks=11: is more than"),
    (specs.RMSBlock(num_blocks=2, block_size=2), "residual.num_blocks=2: and residual.block_size=2"),
]


@pytest.mark.parametrize(("spec", "message"), REFUSED, ids=lambda value: getattr(value, "rule", ""))
def test_options_that_make_no_sense_are_refused(spec: specs.RuleSpec, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_rule(spec, 10, 12, 1e-8)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
