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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_support import spec
from model_support import loss_and_gradients, make_model, relative_error
from tiny_trial import tiny_overrides
from torch import Tensor

from attnres import train
from attnres.cli import run_command
from attnres.depth import kernel
from attnres.errors import ConfigError, UserError
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


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The plain operator in place of the package's, and tensors that say they are on a CUDA device."""
    kernel.checked_operator.cache_clear()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
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


@pytest.mark.parametrize(("wrong", "error"), [(halves, "5.0e-01"), (not_a_number, "nan")])
def test_an_operator_that_differs_is_refused_with_where_and_by_how_much(
    package: pytest.MonkeyPatch, wrong: kernel.Operator, error: str
) -> None:
    package.setattr(kernel, "load_operator", lambda: wrong)
    with pytest.raises(
        UserError, match=r"fla-core 0\.0 on cpu differs from the reference by " + error
    ) as caught:
        loss_and_gradients(make_model(spec("full", "kernel"), dtype=torch.float32))
    assert "\n" not in str(caught.value) and "width 12, 2 sources" in str(caught.value)


def test_it_is_compared_at_the_largest_number_of_sources_too(package: pytest.MonkeyPatch) -> None:
    def forgets(sources: list[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        return depth_attention(sources[:8], query_D, gain_D, eps) + 0 * sum(sources)

    package.setattr(kernel, "load_operator", lambda: forgets)
    loss_and_gradients(make_model(spec("block_s3", "kernel"), dtype=torch.float32))  # 5 sources at most
    with pytest.raises(UserError, match="11 sources"):
        loss_and_gradients(make_model(spec("full", "kernel"), dtype=torch.float32))


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
        pytest.skip(f"not installed: {', '.join(missing)} (pip install '.[kernel]' triton)")
    cases = ["parity", "wrong_scale", "full", "block_s3", "window_w3", "block_s3/bfloat16"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    command = [sys.executable, str(TESTS / "kernel_interpreter.py"), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["parity"] < kernel.TOLERANCE
    assert "differs from the reference" in results["wrong_scale"]
    for rule in ("full", "block_s3", "window_w3"):
        assert results[rule] < 1e-4
    # In units of the reference's own distance from float32.
    assert results["block_s3/bfloat16"] < 1.5


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["full", "block_s3", "window_w3"])
def test_the_kernels_on_a_device_agree_with_the_reference(rule: str) -> None:
    results = []
    for how in ("reference", "kernel"):
        model = make_model(spec(rule, how), random_rule=True, dtype=torch.float32).cuda()
        results.append(loss_and_gradients(model))
    assert relative_error(results[1], results[0]) < 1e-4
