"""The fused operator as a part of an autograd graph: order, reuse, partial use, failure, release."""

import copy
import gc

import pytest
import torch
from depth_attention_support import expected_reads, fused_reads, make_toy, relative_error, sublayer
from torch.multiprocessing.reductions import StorageWeakRef

from attnres.depth_attention import DepthAttentionState

LAYERS, BLOCK_SIZES = 6, (1, 3, 4)
every_block_size = pytest.mark.parametrize("block_size", BLOCK_SIZES)


def gradients(reads_of, loss_of, block_size, prepare=lambda toy: None):
    toy = make_toy(LAYERS, block_size)
    prepare(toy)
    loss_of(toy, reads_of(toy)).backward()
    return toy.gradients()


def assert_same(fused, expected):
    for name, value in expected.items():
        assert relative_error(fused[name], value) < 1e-10, name


@every_block_size
@pytest.mark.parametrize("used", [[1], [3], [2, 5], [0, 4], [6, 2], [0]], ids=str)
def test_only_some_reads_reach_the_loss(block_size, used):
    def loss_of(toy, reads):
        return sum((reads[index] * toy.readout).square().sum() for index in used)

    fused, expected = (gradients(of, loss_of, block_size) for of in (fused_reads, expected_reads))
    assert_same(fused, expected)


@every_block_size
def test_a_read_that_the_sublayer_ignores(block_size):
    def ignoring(h, weight):
        return torch.tanh(weight.sum() * torch.ones_like(h)) if h is ignoring.skip else sublayer(h, weight)

    ignoring.skip = None

    def reads_of(toy, which):
        calls = iter(range(LAYERS))

        def apply(h, weight):
            ignoring.skip = h if next(calls) == 3 else None
            return ignoring(h, weight)

        return which(toy, apply)

    fused, expected = (
        gradients(lambda toy, of=of: reads_of(toy, of), lambda toy, reads: toy.loss(reads), block_size)
        for of in (fused_reads, expected_reads)
    )
    assert_same(fused, expected)


@every_block_size
@pytest.mark.parametrize(
    "frozen", ["embedding", "queries and gains", "weights", "first weights", "all but last"]
)
def test_some_inputs_need_no_gradient(block_size, frozen):
    def prepare(toy):
        chosen = {
            "embedding": [toy.embedding],
            "queries and gains": [toy.queries, toy.gains],
            "weights": toy.weights,
            "first weights": [toy.embedding, toy.queries, toy.gains, *toy.weights[:3]],
            "all but last": [toy.embedding, toy.queries, toy.gains, *toy.weights[:-1]],
        }[frozen]
        for tensor in chosen:
            tensor.requires_grad_(False)

    fused, expected = (
        gradients(of, lambda toy, reads: toy.loss(reads), block_size, prepare)
        for of in (fused_reads, expected_reads)
    )
    assert_same(fused, expected)


@every_block_size
def test_a_detached_output_passes_no_gradient(block_size):
    def apply_of(calls):
        return lambda h, weight: sublayer(h, weight).detach() if next(calls) == 2 else sublayer(h, weight)

    fused, expected = (
        gradients(
            lambda toy, of=of: of(toy, apply_of(iter(range(LAYERS)))),
            type(toy := make_toy(1, 1)).loss,
            block_size,
        )
        for of in (fused_reads, expected_reads)
    )
    assert_same(fused, expected)


@every_block_size
def test_a_read_that_only_another_loss_uses(block_size):
    """The sublayer sees it without gradient, so nothing but the operator itself orders the two backwards."""

    def reads_of(toy, which):
        calls = iter(range(LAYERS))
        return which(toy, lambda h, weight: sublayer(h.detach() if next(calls) in (2, 3) else h, weight))

    def loss_of(toy, reads):
        return toy.loss(reads) + (reads[2] * toy.readout).sum() + (reads[3] * toy.readout).square().sum()

    fused, expected = (
        gradients(lambda toy, of=of: reads_of(toy, of), loss_of, block_size)
        for of in (fused_reads, expected_reads)
    )
    assert_same(fused, expected)


@every_block_size
def test_two_forward_passes_before_a_backward(block_size):
    first, second = make_toy(LAYERS, block_size, seed=1), make_toy(LAYERS, block_size, seed=2)
    alone = []
    for toy in (first, second):
        toy.loss(fused_reads(toy)).backward()
        alone.append(toy.gradients())
        for tensor in toy.tensors.values():
            tensor.grad = None
    loss_first, loss_second = first.loss(fused_reads(first)), second.loss(fused_reads(second))
    loss_first.backward()
    loss_second.backward()
    assert_same(first.gradients(), alone[0])
    assert_same(second.gradients(), alone[1])


@every_block_size
def test_one_model_used_twice_in_one_loss(block_size):
    toy = make_toy(LAYERS, block_size)
    toy.loss(fused_reads(toy)).backward()
    once = toy.gradients()
    (toy.loss(fused_reads(toy)) + toy.loss(fused_reads(toy))).backward()
    assert_same(toy.gradients(), {name: 3 * gradient for name, gradient in once.items()})


@every_block_size
def test_gradients_accumulate_over_microbatches(block_size):
    whole = make_toy(LAYERS, block_size, batch=4)
    whole.loss(fused_reads(whole)).backward()
    parts = make_toy(LAYERS, block_size, batch=4)
    for half in (slice(0, 2), slice(2, 4)):
        part = copy.copy(parts)
        part.embedding, part.readout = parts.embedding[half], parts.readout[half]
        part.loss(fused_reads(part)).backward()
    assert_same(parts.gradients(), whole.gradients())


@every_block_size
def test_without_gradients(block_size):
    toy = make_toy(LAYERS, block_size)
    expected = fused_reads(toy)[-1].detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            value = fused_reads(toy)[-1]
        assert not value.requires_grad
        assert torch.equal(value, expected)


@every_block_size
def test_backward_twice(block_size):
    toy = make_toy(LAYERS, block_size)
    loss = toy.loss(fused_reads(toy))
    loss.backward(retain_graph=True)
    once = toy.gradients()
    loss.backward()
    assert_same(toy.gradients(), {name: 2 * gradient for name, gradient in once.items()})
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivatives_are_refused():
    toy = make_toy(LAYERS, 2)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(toy.loss(fused_reads(toy)), toy.queries, create_graph=True)


@every_block_size
def test_an_exception_in_one_step_leaves_the_next_right(block_size):
    toy = make_toy(LAYERS, block_size)
    toy.loss(fused_reads(toy)).backward()
    expected = toy.gradients()
    for tensor in toy.tensors.values():
        tensor.grad = None
    fused_reads(toy)  # abandoned between forward and backward
    with pytest.raises(ZeroDivisionError):
        fused_reads(toy, lambda h, weight: 1 / 0)

    def explode(gradient):
        raise ZeroDivisionError

    reads = fused_reads(toy)
    loss = toy.loss(reads)
    handle = reads[3].register_hook(explode)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    handle.remove()
    for tensor in toy.tensors.values():
        tensor.grad = None
    loss.backward()  # of the very graph whose first backward broke off half-way
    assert_same(toy.gradients(), expected)


def storages_of_a_pass(toy):
    """Loss, and weak references to the source buffer and to the backward pass's own buffer."""
    state = DepthAttentionState(toy.queries, toy.gains, toy.block_size, 1e-8, toy.embedding)
    for layer, weight in enumerate(toy.weights):
        state.write(layer, sublayer(state.read(layer), weight))
    loss = toy.loss([state.finish()])
    sources = StorageWeakRef(state.forward.values_NTD.untyped_storage())
    backward, seen = state.backward, []

    def look(gradient):
        if backward.gradients_RTD is not None:
            seen.append(StorageWeakRef(backward.gradients_RTD.untyped_storage()))

    toy.weights[0].register_hook(look)
    return loss, sources, seen


@every_block_size
@pytest.mark.parametrize("frozen", [False, True])
def test_memory_is_released_by_backward_though_the_loss_lives(block_size, frozen):
    toy = make_toy(LAYERS, block_size)
    if frozen:  # the pass ends at the first write
        for tensor in (toy.embedding, toy.queries, toy.gains):
            tensor.requires_grad_(False)
    gc.collect()
    gc.disable()  # reference counts alone must do it: a cycle would hold memory until some later collection
    try:
        loss, sources, gradients_seen = storages_of_a_pass(toy)
        assert not sources.expired()
        loss.backward()
        assert sources.expired()
        assert gradients_seen or frozen
        assert all(storage.expired() for storage in gradients_seen)
        assert loss.grad_fn is not None
    finally:
        gc.enable()


@every_block_size
def test_memory_is_released_when_a_pass_is_abandoned(block_size):
    gc.collect()
    gc.disable()
    try:
        loss, sources, _ = storages_of_a_pass(make_toy(LAYERS, block_size))
        del loss
        assert sources.expired()
        with torch.no_grad():
            state = DepthAttentionState(*(make_toy(2, 1).queries,) * 2, 1, 1e-8, make_toy(2, 1).embedding)
            sources = StorageWeakRef(state.forward.values_NTD.untyped_storage())
            del state
            assert sources.expired()
    finally:
        gc.enable()
