"""`residual.implementation=kernel`: what it refuses, how it is called, and the package's kernels themselves.

The last run in Triton's interpreter (`kernel_interpreter.py` says what that shows), where the package is
installed, and on a CUDA device, where there is one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_support import spec
from model_support import loss_and_gradients, make_batch, make_model, relative_error
from tiny_trial import tiny_overrides
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from attnres import train
from attnres.cli import run_command
from attnres.depth import kernel
from attnres.distributed.group import Group
from attnres.errors import ConfigError, UserError
from attnres.learner import Learner
from attnres.residual import specs
from attnres.residual.attnres import depth_attention

PACKAGES = ("fla", "triton")
TESTS = Path(__file__).resolve().parents[1]


def plain_operator(sources: list[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """Takes what the package takes: float32 sources only, all of one type."""
    assert all(source.dtype == torch.float32 for source in sources)
    return depth_attention(sources, query_D, gain_D, eps)


def halves(sources: list[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    return 0.5 * depth_attention(sources, query_D, gain_D, eps)


def not_a_number(sources: list[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    return depth_attention(sources, query_D, gain_D, eps) + torch.nan


def values(rule: str, how: str, autocast: bool = False) -> dict[str, Tensor]:
    """Loss and all gradients of a float32 model of 10 sublayers."""
    model = make_model(spec(rule, how), random_rule=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return loss_and_gradients(model)


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.scale * gradient, None


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The plain operator in place of the package's, and tensors that say they are on a CUDA device."""
    kernel.checked_operator.cache_clear()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(kernel, "load_operator", lambda: plain_operator)
    monkeypatch.setattr(kernel.importlib.metadata, "version", lambda name: "0.0")
    yield monkeypatch
    kernel.checked_operator.cache_clear()


@pytest.mark.parametrize("rule", ["full", "block_s2", "block_s3", "block_s10", "window_w3"])
def test_the_rules_hand_over_the_sources_that_the_reference_stacks(
    package: pytest.MonkeyPatch, rule: str
) -> None:
    assert relative_error(values(rule, "kernel"), values(rule, "reference")) < 1e-5


@pytest.mark.parametrize("rule", ["full", "block_s3", "window_w3"])
def test_under_autocast_it_is_no_further_from_float32_than_the_reference(
    package: pytest.MonkeyPatch, rule: str
) -> None:
    exact = values(rule, "reference")
    error = relative_error(values(rule, "kernel", autocast=True), exact)
    assert 0 < error < 1.5 * relative_error(values(rule, "reference", autocast=True), exact)


def refused(package: pytest.MonkeyPatch, operator: kernel.Operator, rule: str = "full") -> str:
    """What is said of an operator that takes the package's place; "" if it is believed."""
    kernel.checked_operator.cache_clear()
    package.setattr(kernel, "load_operator", lambda: operator)
    try:
        loss_and_gradients(make_model(spec(rule, "kernel"), dtype=torch.float32))
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def test_an_operator_that_differs_is_refused_with_where_and_by_how_much(package: pytest.MonkeyPatch) -> None:
    said = refused(package, halves)
    assert said.startswith(
        "residual.implementation=kernel: fla-core 0.0 on cpu differs from the reference by 5.0e-01 in "
    )
    assert said.endswith("(width 12, 2 sources; allowed 0.0001); use fused")
    assert "by nan in the output" in refused(package, not_a_number)


def test_a_difference_in_the_fourth_digit_is_too_much_and_rounding_is_not(
    package: pytest.MonkeyPatch,
) -> None:
    assert "by 2.0e-04 in" in refused(package, lambda *a: plain_operator(*a) * (1 + 2e-4))
    assert not refused(package, lambda *a: plain_operator(*a) * (1 + 2e-5))


@pytest.mark.parametrize(
    ("which", "named"),
    [(0, "the query's gradient"), (1, "the gain's gradient"), (2, "source 0"), (3, "source 1")],
)
@pytest.mark.parametrize("scale", [2.0, torch.nan])
def test_right_outputs_with_one_wrong_gradient_are_refused(
    package: pytest.MonkeyPatch, which: int, named: str, scale: float
) -> None:
    def wrong(sources: list[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        inputs = [query_D, gain_D, *sources]
        inputs[which] = ScaledGradient.apply(inputs[which], scale)
        return plain_operator(inputs[2:], inputs[0], inputs[1], eps)

    assert f" in {named}" in refused(package, wrong).replace("the gradient of ", "")


def test_another_eps_is_refused(package: pytest.MonkeyPatch) -> None:
    small = [torch.full((1, 1, 12), 1e-4)] * 2
    assert not torch.allclose(plain_operator(small, torch.ones(12), torch.arange(12.0), 1e-8), small[0] * 0)

    def operator(sources: list[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        assert eps == 1e-14  # the model's
        return plain_operator(sources, query_D, gain_D, eps)

    assert not refused(package, operator)


def test_every_form_that_the_package_compiles_is_compared(package: pytest.MonkeyPatch) -> None:
    assert kernel.counts_of_sources(2) == [2]
    assert kernel.counts_of_sources(7) == [2, 7]
    assert kernel.counts_of_sources(49) == [2, 8, 16, 32, 49]
    compared: list[tuple[int, int]] = []

    def counting(sources: list[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        compared.append((len(sources), sources[0].numel() // sources[0].shape[-1]))
        return plain_operator(sources, query_D, gain_D, eps)

    package.setattr(kernel, "load_operator", lambda: counting)
    kernel.checked_operator(torch.device("cpu"), 12, 11, 100, 1e-8, depth_attention)
    assert compared == [(2, 100), (8, 100), (11, 100)]
    package.setattr(kernel, "CHECKED_ELEMENTS", 12 * 2 * 50)
    compared.clear()
    kernel.checked_operator(torch.device("cpu"), 12, 2, 101, 1e-8, depth_attention)
    assert compared == [(2, 48)]  # fewer, and of the form that round numbers have


def test_it_is_compared_at_the_largest_number_of_sources_too(package: pytest.MonkeyPatch) -> None:
    def forgets(sources: list[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        return depth_attention(sources[:8], query_D, gain_D, eps) + 0 * sum(sources)

    assert not refused(package, forgets, "block_s3")  # 5 sources at most
    assert "11 sources" in refused(package, forgets, "full")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_whose_first_use_is_an_evaluation_is_compared_too(
    package: pytest.MonkeyPatch, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    model = make_model(spec("full", "kernel"), dtype=torch.float32)
    with mode():
        model.loss(*make_batch(model))
    assert kernel.checked_operator.cache_info().misses == 1
    loss_and_gradients(model)
    package.setattr(kernel, "load_operator", lambda: halves)
    kernel.checked_operator.cache_clear()
    with mode(), pytest.raises(UserError, match="differs from the reference"):
        model.loss(*make_batch(model))


def test_the_comparison_changes_nothing_of_the_training(package: pytest.MonkeyPatch) -> None:
    model = make_model(spec("full", "kernel"), random_rule=True, dtype=torch.float32)
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        first = loss_and_gradients(model)
        assert torch.equal(torch.get_rng_state(), before)
        second = loss_and_gradients(model)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.filterwarnings("default")  # of torch's compiler, of itself
def test_torch_compile_looks_neither_into_the_comparison_nor_into_the_reads(
    package: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    calls = []

    def opaque(sources: list[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        assert not torch.compiler.is_compiling()
        calls.append(len(sources))
        return plain_operator(sources, query_D, gain_D, eps)

    package.setattr(kernel, "load_operator", lambda: opaque)
    model = make_model(spec("full", "kernel"), random_rule=True, dtype=torch.float32)
    compiled = torch.compile(model.loss, backend="eager")(*make_batch(model))
    assert calls == [2, 8, 11, *range(2, 12)]
    assert compiled.item() == pytest.approx(model.loss(*make_batch(model)).item(), rel=1e-6)


class Node(torch.autograd.Function):
    """Keeps a source as the package does: in an attribute, out of autograd's sight."""

    @staticmethod
    def forward(ctx: Any, source: Tensor) -> Tensor:
        ctx.res = (source,)
        return source.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert len(ctx.res) == 1
        return gradient


def test_sources_are_released_after_backward_though_the_loss_lives() -> None:
    source = 2 * torch.ones(3, 4, requires_grad=True)
    alive = StorageWeakRef(source.untyped_storage())
    output = Node.apply(source).view(2, 6)
    kernel._allow_one_backward(output)
    loss = output.sum()
    del source, output
    assert not alive.expired()
    loss.backward()
    assert alive.expired() and loss.grad_fn is not None


def test_a_second_backward_pass_and_second_derivatives_are_refused() -> None:
    """The package takes its backward pass for a constant, and needs what is released after the first."""

    def run(**options: bool) -> None:
        source = 2 * torch.ones(3, 4, requires_grad=True)
        output = Node.apply(source)
        kernel._allow_one_backward(output)
        for _ in range(2):
            torch.autograd.grad(output.sum(), source, **options)

    with pytest.raises(RuntimeError, match="no second derivatives"):
        run(create_graph=True)
    with pytest.raises(RuntimeError, match="go backward once"):
        run(retain_graph=True)


def test_rows_of_a_width_that_four_does_not_divide_are_aligned_as_in_the_comparison(
    package: pytest.MonkeyPatch,
) -> None:
    def aligned(sources: list[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        assert query_D.data_ptr() % 16 == gain_D.data_ptr() % 16 == 0
        return plain_operator(sources, query_D, gain_D, eps)

    package.setattr(kernel, "load_operator", lambda: aligned)
    results = [
        loss_and_gradients(
            make_model(spec("full", how), random_rule=True, dtype=torch.float32, width=18, heads=1)
        )
        for how in ("kernel", "reference")
    ]
    assert relative_error(*results) < 1e-5


def test_a_comparison_while_a_model_trains_does_not_hide_its_peak_of_memory(
    package: pytest.MonkeyPatch,
) -> None:
    """An evaluation of another number of tokens is compared too, and torch's count starts again after it."""
    counted = {"peak": 7}
    package.setattr(torch.cuda, "max_memory_allocated", lambda device: counted["peak"])
    package.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: counted.update(peak=1))
    package.setattr(torch.cuda, "empty_cache", lambda: None)
    package.setattr(kernel, "largest_difference", lambda *a: counted.update(peak=9) or ("", 0.0))
    package.setattr(kernel, "_peaks", {})
    for tokens in (64, 32):
        kernel.checked_operator(torch.device("cuda", 0), 12, 2, tokens, 1e-8, depth_attention)
    assert counted["peak"] == 1
    assert Learner.peak_memory_bytes(SimpleNamespace(device=torch.device("cuda"), group=Group())) == 7


def test_each_device_width_and_number_of_sources_is_compared_once(package: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        loss_and_gradients(make_model(spec("full", "kernel"), dtype=torch.float32))
    assert kernel.checked_operator.cache_info().misses == 1


def test_float64_is_refused_since_the_kernel_would_round_it(package: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"residual\.implementation=kernel: has no torch\.float64"):
        loss_and_gradients(make_model(spec("full", "kernel"), dtype=torch.float64))


def test_a_model_on_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"residual\.implementation=kernel: is for CUDA devices"):
        loss_and_gradients(make_model(spec("full", "kernel"), dtype=torch.float32))


@pytest.mark.skipif(bool(importlib.util.find_spec("fla")), reason="fla-core is installed")
def test_a_missing_package_is_one_line_that_names_what_to_install() -> None:
    with pytest.raises(
        UserError, match=r"fla-core or triton cannot be imported .*attnres-study\[kernel\]"
    ) as caught:
        kernel.load_operator()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "option", [{"heads": 2}, {"query": "input"}, {"normaliser": "sigmoid"}, {"key_norm": False}]
)
def test_options_beyond_the_main_form_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"residual\.implementation=kernel: computes the paper's main form"):
        specs.AttnResFull("kernel", **option).check(10, 12)


def test_the_command_line_refuses_it_without_a_device_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    overrides = tiny_overrides(tmp_path, "residual=attnres_full", "residual.implementation=kernel")
    assert run_command(train.main, overrides) == 2
    assert capsys.readouterr().err.endswith(
        "\nerror: residual.implementation=kernel: needs a CUDA device: runtime.device=cuda\n"
    )


@pytest.mark.slow
def test_the_kernels_in_the_interpreter_agree_with_the_reference() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install -e '.[kernel]' triton)")
    cases = [
        "parity",
        "wrong_scale",
        "no_gain",
        "released",
        "full",
        "block_s3",
        "window_w3",
        "block_s3/bfloat16",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    command = [sys.executable, str(TESTS / "kernel_interpreter.py"), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["parity"] < 1e-4
    assert "differs from the reference" in results["wrong_scale"]
    assert "in the gain's gradient" in results["no_gain"]
    assert results["released"]
    for rule in ("full", "block_s3", "window_w3"):
        assert results[rule] < 1e-4
    # In units of the reference's own distance from float32.
    assert results["block_s3/bfloat16"] < 1.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rule", ["full", "block_s3", "window_w3"])
def test_the_kernels_on_a_device_agree_with_the_reference(rule: str) -> None:
    results = []
    for how in ("reference", "kernel"):
        shape = {"width": 192, "mlp_width": 256, "context": 128, "depth": 12}
        model = make_model(spec(rule, how), random_rule=True, dtype=torch.float32, **shape).cuda()
        results.append(loss_and_gradients(model))
    assert relative_error(results[1], results[0]) < 1e-4
