"""Products in bfloat16 by float32 arithmetic against torch's own, and when which is used."""

import pytest
import torch
import torch.nn.functional as F

from attnres import autocast
from attnres.autocast import Linear, _Bfloat16Product, causal_attention, linear

SHAPES = [((2, 3, 5), 7), ((4, 16), 8), ((1, 1, 1), 1)]


def results(function, x, weight, readout):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = function(x, weight)
    (y * readout).sum().backward()
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
def test_product_and_gradients_are_those_of_torch_under_autocast(shape, outputs, x_dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(x_dtype)
    weight = torch.randn(outputs, shape[-1], generator=generator)
    readout = torch.randn(*shape[:-1], outputs, generator=generator).bfloat16()
    for ours, theirs in zip(
        results(_Bfloat16Product.apply, x, weight, readout),
        results(F.linear, x, weight, readout),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype
        # One unit in the last place: the order of the sums differs.
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-7, atol=2**-7)
        # Every value is rounded to bfloat16, whatever its type.
        assert torch.equal(ours, ours.bfloat16().to(ours.dtype))


def test_rounding_of_the_factors_is_seen():
    """Without it the product of 1 + 2^-9, which bfloat16 rounds to 1, would not be 256."""
    x = torch.full((1, 256), 1 + 2**-9)
    product, _, _ = results(_Bfloat16Product.apply, x, torch.ones(1, 256), torch.ones(1, 1).bfloat16())
    assert product.item() == 256


def test_attention_is_that_of_torch_under_autocast(monkeypatch):
    monkeypatch.setattr(autocast, "lacks_bfloat16", lambda: True)
    generator = torch.Generator().manual_seed(0)
    q, k, v, readout = (torch.randn(2, 3, 9, 8, generator=generator).bfloat16() for _ in range(4))
    outputs = []
    for function in (causal_attention, lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = function(*inputs)
        (mixed * readout).sum().backward()
        outputs.append([mixed.detach(), *(x.grad for x in inputs)])
    for ours, theirs in zip(*outputs, strict=True):
        assert ours.dtype == theirs.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("lacking", [True, False])
def test_only_autocast_to_bfloat16_where_the_processor_lacks_it(monkeypatch, lacking):
    called = []
    monkeypatch.setattr(autocast, "lacks_bfloat16", lambda: lacking)
    monkeypatch.setattr(
        autocast._Bfloat16Product, "apply", lambda x, w: called.append(x.dtype) or F.linear(x, w)
    )
    x, weight = torch.randn(2, 4), torch.randn(3, 4)
    assert linear(x, weight).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        linear(x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x.double(), weight.double()).dtype == torch.float64
        assert not called
        assert linear(x, weight).dtype == torch.bfloat16
    assert len(called) == lacking


def test_without_autocast_it_is_a_linear_layer():
    layer = Linear(4, 3)
    x = torch.randn(2, 4)
    assert torch.equal(layer(x), F.linear(x, layer.weight))
    assert list(layer.state_dict()) == ["weight"]
