"""AttnRes with options as a part of an autograd graph and of training: order, reuse, release, precision."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from attnres_options_support import CASES, as_reference, spec_of
from model_support import TINY, living_canaries, loss_and_gradients, make_batch, make_model, relative_error
from rules_support import check_blind_to_autocast, check_every_parameter_learns, random_rule
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from attnres.optim import parameter_groups
from attnres.residual import specs
from attnres.residual.rule import ResidualRule

# One of each kind of logits and normaliser over each kind of sources.
NAMES = ["full_input", "s3_input_sigmoid_h2", "w3_input", "s3_static", "w3_sigmoid", "s3_no_key_norm"]
NAMES += ["full_h2", "w3_plain", "s3_sigmoid", "full_static_sigmoid_h2"]
every_name = pytest.mark.parametrize("name", NAMES)

LAYERS, WIDTH = 7, 6
Reads = list[Tensor]


class Network:
    """Sublayers tanh(h W) between the verbs of a rule; those in `detached` pass their read no gradient."""

    def __init__(self, spec: specs.RuleSpec, detached: tuple[int, ...] = ()) -> None:
        self.rule, self.detached = random_rule(spec, LAYERS, WIDTH), detached
        generator = torch.Generator().manual_seed(0)
        self.embedding, self.readout, *self.weights = (
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in ((2, 3, WIDTH), (2, 3, WIDTH), *((WIDTH, WIDTH) for _ in range(LAYERS)))
        )
        for tensor in (self.embedding, *self.weights):
            tensor.requires_grad_()

    def reads(self) -> Reads:
        state, reads = self.rule.start(self.embedding), []
        for layer, weight in enumerate(self.weights):
            reads.append(state.read(layer))
            h = reads[-1].detach() if layer in self.detached else reads[-1]
            state.write(layer, torch.tanh(h @ weight))
        return [*reads, state.finish()]

    def loss(self) -> Tensor:
        return (self.reads()[-1] * self.readout).sum()

    def tensors(self) -> dict[str, Tensor]:
        named = {f"weights.{i}": weight for i, weight in enumerate(self.weights)}
        return {"embedding": self.embedding, **named, **dict(self.rule.named_parameters())}

    def gradients(self) -> dict[str, Tensor]:
        return {
            n: torch.zeros_like(t) if t.grad is None else t.grad.clone() for n, t in self.tensors().items()
        }

    def clear(self) -> None:
        for tensor in self.tensors().values():
            tensor.grad = None


def assert_same(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, right in expected.items():
        assert float((values[name] - right).norm()) <= 1e-10 * max(1e-3, float(right.norm())), name


def both_gradients(
    name: str, loss_of: Callable[[Network], Tensor], detached: tuple[int, ...] = (), frozen: str = ""
) -> list[dict[str, Tensor]]:
    gradients = []
    for spec in (CASES[name], as_reference(CASES[name])):
        network = Network(spec, detached)
        for key, tensor in network.tensors().items():
            tensor.requires_grad_(not (frozen and key.startswith(tuple(frozen.split()))))
        loss_of(network).backward()
        gradients.append(network.gradients())
    return gradients


@every_name
@pytest.mark.parametrize("used", [(1,), (3, 6), (0, 5), (7, 2)], ids=str)
def test_only_some_reads_reach_the_loss(name: str, used: tuple[int, ...]) -> None:
    def loss_of(network: Network) -> Tensor:
        reads = network.reads()
        return sum((reads[index] * network.readout).square().sum() for index in used)  # type: ignore[return-value]

    assert_same(*both_gradients(name, loss_of))


@every_name
def test_reads_that_only_another_loss_uses(name: str) -> None:
    """Nothing but the operator itself orders the two backwards."""

    def loss_of(network: Network) -> Tensor:
        reads = network.reads()
        return sum((reads[index] * network.readout).square().sum() for index in (2, 3, 7))  # type: ignore[return-value]

    assert_same(*both_gradients(name, loss_of, detached=(2, 3)))


PARAMETERS = "queries gains query_weights scalars"


@every_name
@pytest.mark.parametrize(
    "frozen",
    ["embedding", PARAMETERS, f"embedding {PARAMETERS} weights.0 weights.1", "weights", "embedding weights"],
)
def test_some_inputs_need_no_gradient(name: str, frozen: str) -> None:
    assert_same(*both_gradients(name, Network.loss, frozen=frozen))


@every_name
def test_two_forward_passes_before_a_backward_and_backward_twice(name: str) -> None:
    network = Network(CASES[name])
    network.loss().backward()
    once = network.gradients()
    losses = [network.loss() for _ in range(2)]
    for loss in losses:
        network.clear()
        loss.backward(retain_graph=True)
        assert_same(network.gradients(), once)
        loss.backward()
        assert_same(network.gradients(), {key: 2 * gradient for key, gradient in once.items()})


@every_name
def test_an_exception_half_way_leaves_the_next_pass_right(name: str) -> None:
    network = Network(CASES[name])
    network.loss().backward()
    expected = network.gradients()
    network.reads()  # abandoned between forward and backward

    def explode(gradient: Tensor) -> Tensor:
        raise ZeroDivisionError

    reads = network.reads()
    loss = (reads[-1] * network.readout).sum()
    handle = reads[3].register_hook(explode)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    handle.remove()
    network.clear()
    loss.backward()  # of the very graph whose first backward broke off
    assert_same(network.gradients(), expected)


@every_name
def test_without_gradients_the_reads_are_the_same(name: str) -> None:
    network = Network(CASES[name])
    expected = network.reads()[-1].detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(network.reads()[-1], expected)


@every_name
def test_second_derivatives_are_refused(name: str) -> None:
    network = Network(CASES[name])
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(network.loss(), network.embedding, create_graph=True)


@every_name
@pytest.mark.parametrize(  # with the third, the first node of a query or scalar of a read's own is the read
    "frozen", ["", "embedding queries gains query_weights", "embedding weights.0"]
)
def test_memory_is_released_by_backward_though_the_loss_lives(name: str, frozen: str) -> None:
    network = Network(CASES[name])
    for key, tensor in network.tensors().items():
        tensor.requires_grad_(not (frozen and key.startswith(tuple(frozen.split()))))
    gc.collect()
    gc.disable()  # reference counts alone must do it
    try:
        state = network.rule.start(network.embedding)
        for layer, weight in enumerate(network.weights):
            state.write(layer, torch.tanh(state.read(layer) @ weight))
        loss = (state.finish() * network.readout).sum()
        sources = StorageWeakRef(state.forward.values_NKC.untyped_storage())  # type: ignore[attr-defined]
        backward, seen = state.backward, []  # type: ignore[attr-defined]

        def look(gradient: Tensor) -> None:
            seen.append(StorageWeakRef(backward.gradients_RKC.untyped_storage()))

        handle = network.weights[1].register_hook(look)
        del state
        assert not sources.expired()
        loss.backward()
        handle.remove()
        assert sources.expired()
        assert seen and all(storage.expired() for storage in seen)
        assert loss.grad_fn is not None
    finally:
        gc.enable()


@every_name
def test_nothing_outlives_the_backward_pass(name: str) -> None:
    assert living_canaries(make_model(CASES[name], random_rule=True)) == 0


@every_name
def test_recomputed_sublayers_change_nothing(name: str) -> None:
    model = make_model(CASES[name], random_rule=True)
    expected = loss_and_gradients(model)
    model.checkpoint_activations = True
    assert relative_error(loss_and_gradients(model), expected) < 1e-12


@every_name
def test_no_position_sees_later_inputs(name: str) -> None:
    model = make_model(CASES[name], random_rule=True)
    kept: list[Tensor] = []

    def keep(module: nn.Module, arguments: object, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    model.embedding.register_forward_hook(keep)
    for position in (0, 3, 7):
        model(make_batch(model)[0])[:, position].square().sum().backward()
        per_input_T = kept.pop().grad.abs().amax((0, 2))
        assert (per_input_T[: position + 1] > 0).all()
        assert (per_input_T[position + 1 :] == 0).all()


@every_name
def test_autocast_changes_nothing_inside_a_rule(name: str) -> None:
    for spec in (CASES[name], as_reference(CASES[name])):
        rule = random_rule(spec, TINY.layers, TINY.width)
        with torch.no_grad():  # logits of a few units, so that rounding stays rounding
            for parameter in rule.parameters():
                parameter.mul_(0.2)
        check_blind_to_autocast(rule, TINY.layers, TINY.width)


@pytest.mark.parametrize("name", [name for name in NAMES if "input" not in name])
def test_backward_inside_autocast_rounds_nothing(name: str) -> None:
    """Sublayers without a product that autocast knows, so that only the operator could round to bfloat16.

    A query from the input has one, W RMSNorm(v), whose backward is torch's own.
    """
    gradients: list[dict[str, Tensor]] = []
    for autocast in (False, True):
        network = Network(CASES[name])
        network.rule.float()
        state = network.rule.start(network.embedding.float())
        for layer, weight_DD in enumerate(network.weights):
            h_BTD = state.read(layer)
            state.write(layer, torch.tanh((h_BTD[..., None, :] * weight_DD.float().t()).sum(-1)))
        loss = (state.finish() * network.readout.float()).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss.backward()
        gradients.append(network.gradients())
    for key, right in gradients[0].items():
        assert torch.equal(gradients[1][key], right), key


@every_name
def test_under_bfloat16_autocast_fused_is_as_near_to_float32_as_the_reference(name: str) -> None:
    """They cannot be equal: outputs that differ by a float32 rounding may round to other bfloat16 numbers.
    But they are nearer to each other (0 to 0.022) than bfloat16 is to float32 (0.037 to 0.049).
    """
    values = []
    for spec, autocast in (
        (CASES[name], False),
        (CASES[name], True),
        (as_reference(CASES[name]), True),
    ):
        model = make_model(spec, dtype=torch.float32, norm_eps=1e-8, depth=3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model.loss(*make_batch(model))
        loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        assert all(torch.isfinite(g).all() and g.dtype == torch.float32 for g in gradients.values())
        values.append({"loss": loss.detach()} | gradients)
    exact, fused, reference = values
    assert exact.keys() == fused.keys() == reference.keys() == {"loss", *dict(model.named_parameters())}
    assert relative_error(fused, exact) < 1.5 * relative_error(reference, exact)
    assert relative_error(fused, reference) < relative_error(reference, exact)


@every_name
def test_every_parameter_learns(name: str) -> None:
    check_every_parameter_learns(make_model(CASES[name]))


@every_name
def test_no_parameter_of_a_rule_is_decayed(name: str) -> None:
    model = make_model(CASES[name])
    own = {id(p) for p in model.residual.parameters()}
    for group in parameter_groups(model.named_parameters(), 0.1):
        members = {id(p) for p in group["params"]}
        assert members & own == (own if group["name"] == "residual" else set())
        assert group["weight_decay"] == 0 or group["name"] == "matrices"


@every_name
def test_initialise_undoes_any_change(name: str) -> None:
    changed = make_model(CASES[name], random_rule=True)
    changed.initialise(0)
    for key, parameter in changed.residual.named_parameters():
        assert (parameter == (1 if key == "gains_RD" else 0)).all()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("gloo") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@every_name
def test_distributed_training_finds_no_unused_parameter(name: str, one_process: None) -> None:
    model = make_model(CASES[name])
    replica = nn.parallel.DistributedDataParallel(model)
    inputs_BT, targets_BT = make_batch(model)
    for _ in range(2):  # an unused parameter makes the second forward pass raise
        nn.functional.cross_entropy(replica(inputs_BT).flatten(0, 1), targets_BT.flatten()).backward()


def test_the_kinds_above_are_those_that_are_meant() -> None:
    """The fused form of the plain full and block rules is another: none of these may fall back to it."""
    from attnres.depth_variants import VariantState

    for name in NAMES:
        rule: ResidualRule = random_rule(CASES[name], LAYERS, WIDTH)
        assert type(rule.start(torch.zeros(1, 1, WIDTH, dtype=torch.float64))) is VariantState
    plain = random_rule(spec_of("w9", "plain"), LAYERS, WIDTH)
    assert type(plain.start(torch.zeros(1, 1, WIDTH, dtype=torch.float64))) is not VariantState
