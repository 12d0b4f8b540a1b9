"""Parameter groups, AdamW's update, and the schedules."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnres.compose import compose_trial
from attnres.config import ScheduleConfig
from attnres.model import Transformer
from attnres.optim import learning_rate, make_optimizer, parameter_groups

COSINE = ScheduleConfig("cosine", warmup_fraction=0.1, final_fraction=0.1, decay_fraction=None)
WSD = ScheduleConfig("wsd", warmup_fraction=0.1, final_fraction=0.1, decay_fraction=0.2)


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("rule", ["prenorm", "attnres_full", "attnres_block"])
def test_groups(rule: str, tied: str) -> None:
    config = compose_trial([f"residual={rule}", f"model.tie_embeddings={tied}"])
    model = Transformer(config.model, config.residual, 257)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {group["name"]: group for group in parameter_groups(model.named_parameters(), 0.1)}
    grouped = [names[parameter] for group in groups.values() for parameter in group["params"]]
    assert sorted(grouped) == sorted(names.values())  # each parameter once

    decayed = {names[p] for group in groups.values() if group["weight_decay"] for p in group["params"]}
    expected = {name for name in names.values() if ".weight" in name and not name.startswith("embedding.")}
    assert decayed == expected and decayed
    if rule == "prenorm":
        assert "residual" not in groups
    else:
        own = {names[parameter] for parameter in groups["residual"]["params"]}
        assert own == {name for name in names.values() if name.startswith("residual.")} and own
        assert groups["residual"]["weight_decay"] == 0


def test_an_update_is_adamw() -> None:
    """The first step moves by rate * (sign of the gradient + decay * weight): Adam's moments cancel."""
    config = compose_trial(["residual=attnres_full", "optim.learning_rate=0.01", "optim.weight_decay=0.5"])
    model = Transformer(config.model, config.residual, 257)
    model.initialise(0)
    optimizer = make_optimizer(model, config.optim)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.where(torch.rand_like(parameter) < 0.5, -1.0, 1.0)
    optimizer.step()
    for name, parameter in model.named_parameters():
        decay = 0.5 if ".weight" in name and not name.startswith("embedding.") else 0.0
        expected = before[name] - 0.01 * (parameter.grad.sign() + decay * before[name])  # type: ignore[union-attr]
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", [COSINE, WSD])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 999])
def test_ends_are_exact(schedule: ScheduleConfig, steps: int) -> None:
    warmup_steps = round(schedule.warmup_fraction * steps)
    assert learning_rate(steps, steps, warmup_steps, 3e-3, schedule) == 0.1 * 3e-3
    if warmup_steps:
        assert learning_rate(warmup_steps, steps, warmup_steps, 3e-3, schedule) == 3e-3
        assert learning_rate(1, steps, warmup_steps, 3e-3, schedule) == 3e-3 / warmup_steps


def test_cosine_at_half_is_the_middle() -> None:
    rate = learning_rate(60, 110, 10, 1.0, dataclasses.replace(COSINE, final_fraction=0.0))
    assert rate == pytest.approx(0.5)


def test_wsd_is_flat_and_then_linear() -> None:
    rates = [learning_rate(step, 100, 10, 1.0, WSD) for step in range(1, 101)]
    assert set(rates[9:80]) == {1.0}
    steps_down = {round(a - b, 12) for a, b in zip(rates[79:], rates[80:], strict=False)}
    assert steps_down == {round(0.9 / 20, 12)}


@given(st.integers(1, 3000), st.floats(0, 0.5), st.sampled_from([COSINE, WSD]), st.floats(0, 1))
def test_rate_rises_then_never_rises_again(
    steps: int, warmup: float, schedule: ScheduleConfig, final: float
) -> None:
    schedule = dataclasses.replace(schedule, warmup_fraction=warmup, final_fraction=final)
    warmup_steps = round(warmup * steps)
    probes = sorted({1, max(1, warmup_steps), min(steps, warmup_steps + 1), (steps + 1) // 2, steps})
    rates = {step: learning_rate(step, steps, warmup_steps, 2.0, schedule) for step in probes}
    assert all(0 <= rate <= 2.0 and math.isfinite(rate) for rate in rates.values())
    falling = [rates[step] for step in probes if step >= warmup_steps]
    assert falling == sorted(falling, reverse=True)
