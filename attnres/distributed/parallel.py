"""What several processes do to a model: replicas (DistributedDataParallel) or shards (fully_shard, FSDP2).

Checkpoints hold whole tensors under the names of a single process, so that they can be read by any number of
processes of any kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor, nn

from attnres.config import TrialConfig
from attnres.distributed.group import Group
from attnres.model import Transformer

Path = tuple[Any, ...]  # of keys, into a nested mapping
Loss = Callable[..., Tensor]


class Parallel:
    """One process. `loss` is the training's: the gradients that follow from it are those of all processes."""

    def __init__(self, model: Transformer, group: Group, loss: Loss) -> None:
        self.model, self.group, self.loss = model, group, loss

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward pass of a microbatch; the gradients are exchanged after the last."""
        return nullcontext()

    def whole(self, tensor: Tensor) -> Tensor:
        """A parameter, a gradient or a norm that may be in shards -> all of it, on every process."""
        return tensor

    def whole_rule(self) -> AbstractContextManager[Any]:
        """While open, the parameters outside the transformer blocks are whole on every process."""
        return nullcontext()

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """State dicts of this process -> those of a single one. Called on all; whole on the main one."""
        return state

    def spread(self, state: dict[str, Any] | None, like: Callable[[Path], Tensor | None]) -> dict[str, Any]:
        """The inverse: the main process has the state, every process gets its part of it.

        `like` names the parameter that a tensor of the state belongs to.
        """
        assert state is not None
        return state


class Replicas(Parallel):
    """A copy of the model on each process; the gradients are averaged while they are made."""

    def __init__(self, model: Transformer, group: Group, loss: Loss) -> None:
        devices = [group.local_rank] if next(model.parameters()).is_cuda else None
        kind = nn.parallel.DistributedDataParallel
        # Buffers are constants: no need to send them. The option has another name since torch 2.13 or so.
        names = inspect.signature(kind.__init__).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        option: dict[str, Any] = {name: False}
        self._replica = kind(_LossModule(model, loss), device_ids=devices, **option)
        super().__init__(model, group, self._replica)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._replica.no_sync()

    def spread(self, state: dict[str, Any] | None, like: Callable[[Path], Tensor | None]) -> dict[str, Any]:
        return _broadcast(self.group, state, lambda path, tensor: tensor)


class Shards(Parallel):
    """Parameters, gradients and optimizer states are cut along their first axis, a part per process.

    A sublayer is whole while it runs; everything else (embedding, residual rule, final norm, unembedding)
    from the start of the forward pass to the end of the backward pass.
    """

    def __init__(self, model: Transformer, group: Group, loss: Loss) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        self._mesh = init_device_mesh(next(model.parameters()).device.type, (group.size,))
        for block in model.blocks:
            for sublayer in block.children():
                fully_shard(sublayer, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)
        self._sharded = cast(FSDPModule, model)
        super().__init__(model, group, loss)

    @contextmanager
    def accumulating(self, last: bool) -> Any:
        self._sharded.set_requires_gradient_sync(last)
        yield

    def whole(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @contextmanager
    def whole_rule(self) -> Any:
        self._sharded.unshard()
        try:
            yield
        finally:
            self._sharded.reshard()

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        def take(path: Path, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = self.whole(value)
            return value.cpu() if self.group.main else None

        self._sharded.reshard()  # an evaluation leaves the last parameters whole
        return _walk(state, take)

    def spread(self, state: dict[str, Any] | None, like: Callable[[Path], Tensor | None]) -> dict[str, Any]:
        from torch.distributed.tensor import DTensor, distribute_tensor

        def place(path: Path, tensor: Tensor) -> Tensor:
            parameter = like(path)
            if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:  # a count of steps
                return tensor
            tensor = tensor.to(parameter.device)
            # No exchange: every process has all of it, and keeps its part.
            return distribute_tensor(tensor, self._mesh, parameter.placements, src_data_rank=None)

        self._sharded.reshard()
        return _broadcast(self.group, state, place)


class _LossModule(nn.Module):
    """DistributedDataParallel runs the forward pass of a module."""

    def __init__(self, model: Transformer, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return self._loss(inputs_BT, targets_BT)


def make_parallel(config: TrialConfig, group: Group, model: Transformer, loss: Loss) -> Parallel:
    """What the trial asks for. `model` is on its device, and has no optimizer yet.

    Raises ConfigError for what cannot be done in shards.
    """
    if group.size == 1:
        return Parallel(model, group, loss)
    if config.runtime.parallel == "ddp":
        return Replicas(model, group, loss)
    return Shards(model, group, loss)


def _walk(tree: Any, visit: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The tree of dicts and lists with `visit(path, leaf)` in place of each leaf, in one fixed order."""
    if isinstance(tree, Mapping):
        return {key: _walk(value, visit, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_walk(value, visit, (*path, index)) for index, value in enumerate(tree)]
    return visit(path, tree)


@dataclass(frozen=True)
class _Slot:
    """A tensor's place in a tree that goes ahead of its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _broadcast(
    group: Group, state: dict[str, Any] | None, place: Callable[[Path, Tensor], Tensor]
) -> dict[str, Any]:
    """The main process' state on all, with `place(path, tensor)` for each tensor, one after the other."""
    tensors: list[Tensor] = []

    def strip(path: Path, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return _Slot(tuple(value.shape), value.dtype)

    sent = iter(tensors)

    def fill(path: Path, value: Any) -> Any:
        if not isinstance(value, _Slot):
            return value
        tensor = next(sent).contiguous() if group.main else torch.empty(value.shape, dtype=value.dtype)
        torch.distributed.broadcast(tensor, src=0)
        return place(path, tensor)

    return _walk(group.shared(lambda: _walk(state, strip)), fill)
