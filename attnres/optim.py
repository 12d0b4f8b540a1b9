"""Parameter groups, the optimizer, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from attnres.config import OptimConfig, ScheduleConfig


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Three groups: matrices (decay); gains and the embedding table (none); the residual rule's own (none).

    A rule's parameters stay in a group of their own, so that nothing meant for matrices (decay, another
    optimizer) ever reaches the queries, which start at exactly zero. The embedding table is looked up, not
    multiplied: most of its rows see no gradient in most steps, and decay alone would move rare tokens. Tied,
    it is still the embedding.
    """
    matrices, vectors, residual = [], [], []
    for name, parameter in named_parameters:
        if name.startswith("residual."):
            residual.append(parameter)
        elif parameter.ndim < 2 or name.startswith("embedding."):
            vectors.append(parameter)
        else:
            matrices.append(parameter)
    groups = [
        {"name": "matrices", "params": matrices, "weight_decay": weight_decay},
        {"name": "gains_and_embedding", "params": vectors, "weight_decay": 0.0},
        {"name": "residual", "params": residual, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (1711.05101) over `parameter_groups`, as one fused kernel per parameter list.

    Fused is the fastest on CPU too; the figures are in LOG.md.
    """
    return torch.optim.AdamW(
        parameter_groups(model.named_parameters(), config.weight_decay),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(step: int, steps: int, warmup_steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Learning rate of optimizer step `step` in 1..steps.

    Linear warm-up reaches the peak at `warmup_steps`. "cosine" then follows half a cosine, "wsd" stays at the
    peak and falls linearly over the last `decay_fraction` of all steps. The last step has final_fraction *
    peak exactly.
    """
    assert 1 <= step <= steps, (step, steps)
    final = schedule.final_fraction
    if step == steps:
        return peak * final
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule.name == "cosine":
        progress = (step - warmup_steps) / (steps - warmup_steps)
        return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
    assert schedule.decay_fraction is not None
    decay_steps = max(1, round(schedule.decay_fraction * steps))
    return peak * (final + (1 - final) * min(1.0, (steps - step) / decay_steps))
