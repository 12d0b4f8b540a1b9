"""The fused operator gives the numbers of the definition: values and every gradient."""

import pytest
import torch
from depth_attention_support import expected_reads, fused_reads, make_toy, relative_error

from attnres.depth.plan import Plan
from attnres.depth.products import BAG_WIDTH
from attnres.depth_attention import DepthAttentionState

# (layers, block size, batch, tokens, width): one sublayer, S = 1 (full), N = 1, short last block, S odd,
# batch 1, one token, widths that are no multiple of 8, and both kinds of products.
SHAPES = [
    (1, 1, 2, 3, 5),
    (1, 1, 1, 1, 2),
    (2, 1, 1, 7, 12),
    (2, 2, 2, 3, 5),
    (6, 1, 2, 5, 9),
    (6, 2, 2, 3, 8),
    (6, 3, 1, 4, 13),
    (6, 6, 2, 3, 5),
    (7, 3, 2, 3, 5),
    (7, 4, 1, 2, 20),
    (8, 5, 3, 1, 7),
    (9, 2, 1, 3, 40),
    (12, 1, 1, 3, 3),
    (5, 1, 2, 3, BAG_WIDTH + 2),
    (5, 2, 1, 4, BAG_WIDTH + 5),
]


def values_and_gradients(reads_of, shape, dtype):
    layers, block_size, batch, tokens, width = shape
    toy = make_toy(layers, block_size, batch, tokens, width, dtype)
    reads = reads_of(toy)
    toy.loss(reads).backward()
    return {f"read {index}": read.detach() for index, read in enumerate(reads)} | toy.gradients()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str)
def test_values_and_gradients_are_those_of_the_definition(shape, dtype, tolerance):
    expected = values_and_gradients(expected_reads, shape, torch.float64)
    fused = values_and_gradients(fused_reads, shape, dtype)
    assert fused.keys() == expected.keys()
    for name, value in fused.items():
        assert value.dtype == dtype
        assert relative_error(value, expected[name]) <= tolerance, name


@pytest.mark.parametrize(("layers", "block_size"), [(4, 1), (5, 2), (3, 3)])
def test_gradcheck(layers, block_size):
    toy = make_toy(layers, block_size, batch=1, tokens=2, width=3)

    def reads(embedding, queries, gains, *weights):
        toy.embedding, toy.queries, toy.gains, toy.weights = embedding, queries, gains, list(weights)
        return tuple(fused_reads(toy)[1:])

    inputs = [tensor.detach().clone().requires_grad_() for tensor in toy.tensors.values()]
    assert torch.autograd.gradcheck(reads, inputs)


def test_zero_queries_weigh_all_sources_equally():
    toy = make_toy(5, 1)
    toy.queries.data.zero_()
    outputs = []
    state = DepthAttentionState(toy.queries, toy.gains, 1, 1e-8, toy.embedding)
    for layer in range(5):
        mean = torch.stack([toy.embedding, *outputs]).mean(0)
        assert torch.allclose(state.read(layer), mean, rtol=0, atol=1e-14)
        outputs.append(torch.randn_like(mean))
        state.write(layer, outputs[-1])
    mean = torch.stack([toy.embedding, *outputs]).mean(0)
    assert torch.allclose(state.finish(), mean, rtol=0, atol=1e-14)


def test_large_logits_do_not_overflow():
    toy = make_toy(6, 3, dtype=torch.float32)
    toy.queries.data.mul_(1e4)
    reads = fused_reads(toy)
    toy.loss(reads).backward()
    assert all(torch.isfinite(gradient).all() for gradient in toy.gradients().values())
    reference = make_toy(6, 3)
    reference.queries.data.mul_(1e4)
    assert relative_error(reads[-1].detach(), expected_reads(reference)[-1].detach()) < 1e-3


@pytest.mark.parametrize(("layers", "block_size"), [(1, 1), (6, 1), (6, 4), (7, 3), (5, 5)])
def test_plan_gives_each_read_its_row_and_each_block_its_source(layers, block_size):
    plan = Plan(layers, block_size)
    rows = [row for group in range(plan.groups) for row in range(plan.layers)[plan.rows(group)]]
    assert rows == list(range(layers))
    assert sum(plan.finishes(layer) for layer in range(layers)) == plan.groups - 1
    for layer in range(1, layers + 1):
        assert layer - 1 in range(layers)[plan.rows(plan.group_of(layer))]


WIDTHS_OF_BOTH_PRODUCTS = (48, BAG_WIDTH + 8)


@pytest.mark.parametrize("width", WIDTHS_OF_BOTH_PRODUCTS)
def test_reads_are_float32_under_autocast_whatever_type_the_outputs_have(width):
    """Outputs arrive in bfloat16, as a Linear gives them; nothing else may be rounded to it."""
    exact, toy = make_toy(6, 2, width=width), make_toy(6, 2, width=width, dtype=torch.float32)

    def rounding(h, weight):
        return torch.tanh(h.double() @ weight.double()).to(torch.bfloat16)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        reads = fused_reads(toy, rounding)
    assert {read.dtype for read in reads} == {torch.float32}
    expected = expected_reads(exact, lambda h, weight: rounding(h, weight).double())
    for read, wanted in zip(reads, expected, strict=True):
        assert relative_error(read.detach(), wanted.detach()) < 2e-2  # bfloat16 outputs differ by a rounding
    with torch.autocast("cpu", dtype=torch.bfloat16):
        toy.loss(reads).backward()  # backward inside autocast must not round either
    exact.loss(expected).backward()
    for name, gradient in toy.gradients().items():
        assert relative_error(gradient, exact.gradients()[name]) < 5e-2, name


@pytest.mark.parametrize("width", WIDTHS_OF_BOTH_PRODUCTS)
def test_given_bfloat16_outputs_the_reads_are_exact_to_float32(width):
    toy = make_toy(5, 2, width=width, dtype=torch.float32)
    outputs = [torch.randn_like(toy.embedding).to(torch.bfloat16) for _ in range(5)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = iter(outputs)
        reads = fused_reads(toy, lambda h, weight: next(given))
    given = iter(outputs)
    exact = make_toy(5, 2, width=width)
    expected = expected_reads(exact, lambda h, weight: next(given).double())
    for read, wanted in zip(reads, expected, strict=True):
        assert relative_error(read.detach(), wanted.detach()) < 1e-5


def test_a_bfloat16_embedding_gives_bfloat16_reads_computed_in_float32():
    toy = make_toy(4, 2, width=32, dtype=torch.bfloat16)
    exact = make_toy(4, 2, width=32)
    for name, tensor in exact.tensors.items():
        tensor.data.copy_(toy.tensors[name].detach())
    outputs = [torch.randn_like(toy.embedding) for _ in range(4)]
    given, again = iter(outputs), iter(outputs)
    reads = fused_reads(toy, lambda h, weight: next(given))
    expected = expected_reads(exact, lambda h, weight: next(again).double())
    for read, wanted in zip(reads, expected, strict=True):
        assert read.dtype == torch.bfloat16
        assert relative_error(read.detach(), wanted.detach()) < 2**-8  # one rounding to bfloat16


@pytest.mark.parametrize("width", WIDTHS_OF_BOTH_PRODUCTS)
@pytest.mark.parametrize("block_size", [1, 2])
def test_backward_inside_autocast_rounds_nothing(width, block_size):
    """Sublayers without autocast around them, so that only the operator could round to bfloat16."""

    def apply(h, weight):
        return torch.tanh((h[..., None, :] * weight.t()).sum(-1))  # no product that autocast knows

    toy = make_toy(5, block_size, 1, 2, width, torch.float32)
    exact = make_toy(5, block_size, 1, 2, width)
    for name, tensor in exact.tensors.items():
        tensor.data.copy_(toy.tensors[name].detach())
    exact.loss(expected_reads(exact, apply)).backward()
    loss = toy.loss(fused_reads(toy, apply))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    for name, gradient in toy.gradients().items():
        assert relative_error(gradient, exact.gradients()[name]) < 1e-4, name
