"""The fused rules inside the whole model: equal to the reference implementation under every way to run it."""

import copy

import pytest
import torch
from torch import nn

from attnres.config import ModelConfig
from attnres.depth.tape import Backward, Forward
from attnres.model import Transformer
from attnres.residual import specs

VOCABULARY = 32
RULES = {
    "full": specs.AttnResFull(implementation="fused"),
    "block_s2": specs.AttnResBlock(implementation="fused", num_blocks=None, block_size=2),
    "block_s3": specs.AttnResBlock(implementation="fused", num_blocks=None, block_size=3),
    "block_n1": specs.AttnResBlock(implementation="fused", num_blocks=1, block_size=None),
}
every_rule = pytest.mark.parametrize("rule", RULES)


def make_model(rule: str, implementation: str = "fused", dtype: torch.dtype = torch.float64) -> Transformer:
    config = ModelConfig(
        name="tiny",
        width=12,
        depth=4,
        heads=2,
        head_width=None,
        mlp_width=20,
        context=8,
        batch_size=2,
        learning_rate=1e-3,
        tie_embeddings=False,
        rope_base=1e4,
        norm_eps=1e-8,
    )
    spec = copy.copy(RULES[rule])
    object.__setattr__(spec, "implementation", implementation)
    model = Transformer(config, spec, VOCABULARY)
    model.initialise(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.residual.parameters():  # queries start at zero, where much cancels
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def make_batch(sequences: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (sequences, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_gradients(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model.loss(*batch)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"loss": loss.detach()} | gradients


def assert_close(values: dict, expected: dict, tolerance: float) -> None:
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        error = (values[name].double() - value.double()).norm() / value.double().norm()
        assert error <= tolerance, (name, error)


@every_rule
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str)
def test_fused_equals_reference(rule, dtype, tolerance):
    batch = make_batch()
    expected = loss_and_gradients(make_model(rule, "reference"), batch)
    assert_close(loss_and_gradients(make_model(rule, dtype=dtype), batch), expected, tolerance)


@every_rule
def test_fused_equals_reference_under_bfloat16_autocast(rule):
    """Sublayers round to bfloat16 alike in both; a slip in the operator would show as percents."""
    batch, values = make_batch(), {}
    for implementation in ("reference", "fused"):
        model = make_model(rule, implementation, torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.loss(*batch)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        values[implementation] = {"loss": loss.detach()} | gradients
    assert_close(values["fused"], values["reference"], 2e-2)


@every_rule
def test_recomputed_sublayers_give_the_same_gradients(rule):
    model, batch = make_model(rule), make_batch()
    expected = loss_and_gradients(model, batch)
    model.checkpoint_activations = True
    assert_close(loss_and_gradients(model, batch), expected, 1e-12)


@every_rule
def test_microbatches_add_up(rule):
    model, (inputs, targets) = make_model(rule), make_batch(4)
    expected = loss_and_gradients(model, (inputs, targets))
    model.zero_grad()
    for part in range(4):
        (model.loss(inputs[part : part + 1], targets[part : part + 1]) / 4).backward()
    del expected["loss"]
    assert_close({name: parameter.grad for name, parameter in model.named_parameters()}, expected, 1e-10)


def test_two_models_interleaved_in_one_process():
    models = {rule: make_model(rule) for rule in ("full", "block_s3")}
    batch = make_batch()
    expected = {rule: loss_and_gradients(model, batch) for rule, model in models.items()}
    losses = {rule: model.loss(*batch) for rule, model in models.items()}
    for rule, model in models.items():
        model.zero_grad()
        losses[rule].backward()
        values = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert_close({"loss": losses[rule].detach()} | values, expected[rule], 1e-12)


@every_rule
def test_a_step_leaves_nothing_that_only_the_collector_frees(rule):
    import gc

    model, batch = make_model(rule), make_batch()
    model.loss(*batch).backward()
    gc.collect()
    gc.disable()
    try:
        loss = model.loss(*batch)
        assert [thing for thing in gc.get_objects() if type(thing) is Backward]  # it would be seen
        del loss
        model.loss(*batch).backward()
        assert not [thing for thing in gc.get_objects() if type(thing) in (Forward, Backward)]
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["full", "block_s3"])
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_model_gives_the_same_numbers(rule):
    """The verbs stay out of the compiled graph; the sublayers between them are compiled."""
    model, batch = make_model(rule), make_batch()
    expected = loss_and_gradients(model, batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    loss = nn.functional.cross_entropy(compiled(batch[0]).flatten(0, 1), batch[1].flatten())
    loss.backward()
    values = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_close({"loss": loss.detach()} | values, expected, 1e-10)


def _replica(rank: int, rule: str, folder: str) -> None:
    """One process of the distributed test: a step on its half of the batch; rank 0 writes the gradients."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        model = make_model(rule)
        replica = nn.parallel.DistributedDataParallel(model)
        inputs, targets = (part[2 * rank : 2 * rank + 2] for part in make_batch(4))
        for _ in range(2):  # an unused parameter would make the second forward pass raise
            model.zero_grad()
            nn.functional.cross_entropy(replica(inputs).flatten(0, 1), targets.flatten()).backward()
        if rank == 0:
            torch.save(
                {name: parameter.grad for name, parameter in model.named_parameters()}, f"{folder}/out"
            )
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["full", "block_s3"])
def test_two_distributed_processes_give_the_gradients_of_the_whole_batch(rule, tmp_path):
    torch.multiprocessing.spawn(_replica, args=(rule, str(tmp_path)), nprocs=2)
    expected = loss_and_gradients(make_model(rule), make_batch(4))
    del expected["loss"]
    assert_close(torch.load(tmp_path / "out"), expected, 1e-10)
