"""A model, its optimizer and its schedule: everything that one optimizer step changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnres.depth.kernel import peak_before
from attnres.distributed.group import Group
from attnres.distributed.parallel import Path, make_parallel
from attnres.errors import ConfigError
from attnres.memory import keep_freed_memory
from attnres.model import Transformer
from attnres.optim import learning_rate, make_optimizer
from attnres.peak_memory import process_peak_bytes
from attnres.run_state import Diverged
from attnres.trial import Trial

Tokens = npt.NDArray[np.int64]  # [sequences, context]


@dataclass(frozen=True)
class StepResult:
    loss_nats: float  # mean over the batch, before the update
    grad_norm: float  # global L2 norm before clipping
    learning_rate: float


class Learner:
    """Built from a trial alone. `state` and `load_state` carry it through a checkpoint, bit for bit."""

    def __init__(self, trial: Trial, group: Group | None = None) -> None:
        config = trial.config
        self.group = group = group or Group()
        torch.set_num_threads(config.runtime.threads)
        keep_freed_memory()
        self.trial = trial
        self.device = _device(trial, group)
        self.model = Transformer(config.model, config.residual, trial.vocabulary)
        self.model.initialise(config.seed)
        self.model.to(self.device)
        self.model.checkpoint_activations = config.runtime.checkpoint_activations
        self._loss: Callable[..., Tensor] = self.model.loss
        if config.runtime.compile:
            self._loss = torch.compile(self.model.loss)
        self.parallel = make_parallel(config, group, self.model, self._loss)
        self.optimizer = make_optimizer(self.model, config.optim)
        # Sequences per forward pass of this process, of training and of evaluation.
        self.microbatch_size = config.runtime.microbatch_size or config.model.batch_size // group.size

    def step(self, step: int, inputs: Tokens, targets: Tokens) -> StepResult:
        """Optimizer step number `step` (from 1) on one batch [batch_size, context].

        Raises Diverged, before the parameters change, if the loss or the gradient is not finite.
        """
        optim = self.trial.config.optim
        loss_nats = self.group.mean(self.accumulate_gradients(inputs, targets).item())
        if not math.isfinite(loss_nats):
            raise Diverged(f"training loss is {loss_nats} at step {step}")
        # With no limit the norm is still measured: it is logged, and it tells a divergence from a bad batch.
        limit = math.inf if optim.grad_clip is None else optim.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        grad_norm = self.parallel.whole(norm).item()
        if not math.isfinite(grad_norm):
            raise Diverged(f"gradient norm is {grad_norm} at step {step}")
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step, optim.peak_rate(group["name"]))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss_nats, grad_norm, self._rate(step, optim.learning_rate))

    def _rate(self, step: int, peak: float) -> float:
        trial = self.trial
        return learning_rate(step, trial.steps, trial.warmup_steps, peak, trial.config.schedule)

    def accumulate_gradients(self, inputs: Tokens, targets: Tokens) -> Tensor:
        """Gradients of the mean loss of a batch, microbatch by microbatch. Returns that loss (nats, scalar),
        or where there are several processes that of this one's share of the batch.

        Shares and microbatches are of one size (the configuration sees to it), so the mean of their means is
        the mean.
        """
        share = len(inputs) // self.group.size
        mine = range(self.group.rank * share, (self.group.rank + 1) * share, self.microbatch_size)
        total = torch.zeros((), device=self.device)
        for start in mine:
            part = slice(start, start + self.microbatch_size)
            with self.parallel.accumulating(last=start == mine[-1]):
                with self.precision():
                    loss = self.parallel.loss(self.move(inputs[part]), self.move(targets[part]))
                    loss = loss * (self.microbatch_size / share)
                loss.backward()
            total += loss.detach()
        return total

    def warm_up(self, inputs: Tokens, targets: Tokens) -> None:
        """Compile forward and backward outside the clock; leaves parameters and gradients as they were."""
        self.accumulate_gradients(inputs, targets)
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def window_losses(
        self, inputs: Tokens, targets: Tokens, after_each: Callable[[], None] = lambda: None
    ) -> npt.NDArray[np.float64]:
        """Mean loss in nats per token of each window; shape [windows]. `after_each` runs after each batch.

        The processes share the windows. Where these do not divide, the last one is read more than once, so
        that all make the same number of passes, and counted once.
        """
        share = math.ceil(len(inputs) / self.group.size)
        mine = (self.group.rank * share + np.arange(share)).clip(max=len(inputs) - 1)
        losses = []
        for start in range(0, share, self.microbatch_size):
            part = mine[start : start + self.microbatch_size]
            with self.precision():
                loss_BT = self._loss(self.move(inputs[part]), self.move(targets[part]), reduction="none")
            losses.append(loss_BT.double().mean(dim=1).cpu().numpy())
            after_each()
        return self.group.concatenate(np.concatenate(losses))[: len(inputs)]

    def peak_memory_bytes(self) -> int:
        """Most memory so far: the resident sets of all processes on CPUs, what torch allocated on the fullest
        GPU. Called on all processes together.
        """
        if self.device.type == "cuda":
            own = torch.cuda.max_memory_allocated(self.device)
            return self.group.largest(max(own, peak_before(self.device)))
        return round(self.group.mean(process_peak_bytes()) * self.group.size)

    def state(self) -> dict[str, Any]:
        """Called on all processes together; the main one's is whole, and that of a single process."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return self.parallel.gather(state)

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Called on all processes together; only the main one needs to have the state."""
        state = self.parallel.spread(state, self._parameter_of)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _parameter_of(self, path: Path) -> Tensor | None:
        """The parameter that a tensor of `state` belongs to."""
        if path[0] == "model":
            return self.model.get_parameter(path[1])
        optimizer: Any = self.optimizer
        if path[1] == "optimizers":
            optimizer = optimizer.optimizers[path[2]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return parameters[path[-2]]

    def precision(self) -> AbstractContextManager[Any]:
        bfloat16 = self.trial.config.runtime.dtype == "bfloat16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bfloat16)

    def move(self, tokens: Tokens) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(tokens)).to(self.device)


def _device(trial: Trial, group: Group) -> torch.device:
    """The device of this process. Raises ConfigError if it is not there."""
    if trial.device != "cuda":
        return torch.device(trial.device)
    if not torch.cuda.is_available():
        raise ConfigError("runtime.device", trial.config.runtime.device, "torch finds no CUDA device here")
    return torch.device("cuda") if group.size == 1 else torch.device("cuda", group.local_rank)
