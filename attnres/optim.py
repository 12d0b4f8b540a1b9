"""Parameter groups, the optimizer, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from attnres.autocast import lacks_bfloat16
from attnres.config import MUON_GROUP, MuonConfig, OptimConfig, ScheduleConfig


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


def muon_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(Muon's one group, AdamW's groups): Muon has the projections of the transformer blocks, nothing else.

    The unembedding is a matrix, but its rows are tokens: it stays with AdamW, decayed. So does all that the
    residual rule owns, whatever its shape.
    """
    named = list(named_parameters)
    ours = {name for name, parameter in named if name.startswith("blocks.") and parameter.ndim == 2}
    matrices = [parameter for name, parameter in named if name in ours]
    others = parameter_groups([(name, p) for name, p in named if name not in ours], weight_decay)
    return [{"name": MUON_GROUP, "params": matrices, "weight_decay": weight_decay}], others


class Muon(torch.optim.Muon):
    """torch's Muon, which multiplies in bfloat16; in float32 on a CPU that has no bfloat16 arithmetic.

    There an update would take a thousand times as long as AdamW's. The figures are in LOG.md.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        if not (on_cpu and lacks_bfloat16()):
            return super().step(closure)
        with _RoundedInFloat32():
            return super().step(closure)


class _RoundedInFloat32(TorchFunctionMode):
    """While open, Tensor.bfloat16 rounds and gives float32, so that what follows is float32 arithmetic."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.float() if func is torch.Tensor.bfloat16 else result


class Optimizers:
    """Several optimizers, each with parameters of its own, behind the verbs of one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizers themselves: a rate that is set here takes effect."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer | Optimizers:
    """AdamW (1711.05101) over `parameter_groups`; under MuonConfig, Muon and AdamW over `muon_groups`.

    Muon's update of a matrix is its Nesterov momentum made nearly orthogonal.
    """
    named = model.named_parameters()
    if not isinstance(config, MuonConfig):
        return _adamw(parameter_groups(named, config.weight_decay), config)
    matrices, others = muon_groups(named, config.weight_decay)
    muon = Muon(
        matrices,
        lr=config.muon_learning_rate,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        adjust_lr_fn=config.adjust_lr_fn,
    )
    return Optimizers(muon, _adamw(others, config))


def _adamw(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    """As one fused kernel per parameter list: the fastest on CPU too; the figures are in LOG.md."""
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
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
