"""What the training sees of the other processes of its trial: sums, and decisions taken together.

All processes make the same calls in the same order; each waits for the others. Importing this needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from attnres.distributed import launched, messages
from attnres.errors import ConfigError
from attnres.origin import Origin
from attnres.run_state import RunState
from attnres.stop import Preempted
from attnres.trial import Trial

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # of one call: the first process may write a large checkpoint meanwhile
SECONDS_BETWEEN_LOOKS = 0.1  # at the file by which the trial's own process asks to stop
# How the libraries below torch say that the other side of a connection is gone.
_OF_CONNECTIONS = (
    "gloo",
    "nccl",
    "connection closed",
    "connection reset",
    "broken pipe",
    "connection refused",
)


class LostProcess(Exception):
    """Another process of the trial is gone, or has stopped before this one could know why."""


class Group:
    """A trial of one process; `Processes` is one of several. Exactly one process is `main`: it alone writes
    files.
    """

    rank, size, local_rank = 0, 1, 0

    @property
    def main(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def shared(self, call: Callable[[], T]) -> T:
        """What `call` gives on the main process, to all. What it raises there is LostProcess elsewhere."""
        return call()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return flag

    def stop_wish(self, mine: int) -> int:
        """What this or another process was asked: a signal's number, CANCEL_WISH of `attnres.stop`, 0 for
        nothing.
        """
        return mine

    def largest(self, number: int) -> int:
        return number

    def tell_failure(self, reason: str, origin: Origin | Literal["lost"], state: RunState) -> None:
        """Tell the trial's own process what ended this one; "lost": the end of another process."""

    def mean(self, value: float) -> float:
        return value

    def concatenate(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Arrays of equal length, in the order of the processes."""
        return values


class Processes(Group):
    """The processes that torchrun has started, joined by torch.distributed: gloo on CPUs, nccl on GPUs."""

    def __init__(self, device: str) -> None:
        import torch
        import torch.distributed

        self._torch = torch
        self.rank, self.size = launched.rank(), launched.world_size()
        self.local_rank = launched.local_rank()
        self._folder = launched.messages_folder()
        self._looked = 0.0
        if device == "cuda":
            if (devices := torch.cuda.device_count()) <= self.local_rank:
                why = (
                    f"each needs a GPU of its own on its machine, and torch finds {devices} CUDA devices here"
                )
                raise ConfigError("runtime.processes", self.size, why)
            torch.cuda.set_device(self.local_rank)
        # What is decided together is on CPUs: it must not wait for a GPU.
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, timeout=TIMEOUT)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nobody leaves before the main process has written its last file: torchrun ends them all with the
        first that fails.
        """
        if error is None or isinstance(error, Preempted):
            self.any(False)
            self._torch.distributed.destroy_process_group()

    def shared(self, call: Callable[[], T]) -> T:
        said: list[Any] = [None, None]
        failure: Exception | None = None
        if self.main:
            try:
                said = [call(), None]
            except Exception as error:
                failure, said = error, [None, f"{type(error).__name__}: {error}"]
        self._torch.distributed.broadcast_object_list(said)
        if failure is not None:
            raise failure
        value, why = said
        if why is not None:
            raise LostProcess(f"the first process has stopped ({why})")
        return value

    def any(self, flag: bool) -> bool:
        return self.largest(int(flag)) > 0

    def stop_wish(self, mine: int) -> int:
        return self.largest(mine or self._asked())

    def tell_failure(self, reason: str, origin: Origin | Literal["lost"], state: RunState) -> None:
        if self._folder is None:
            return
        failure = {"rank": self.rank, "reason": reason, "origin": origin}
        failure |= {"state": state.to_dict(), "environment": state.environment}
        messages.write(self._folder, messages.failure_file(self.rank), failure)

    def mean(self, value: float) -> float:
        total = self._torch.tensor(value, dtype=self._torch.float64)
        self._torch.distributed.all_reduce(total)
        return total.item() / self.size

    def concatenate(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        mine = self._torch.from_numpy(values)
        all_of_them = [self._torch.empty_like(mine) for _ in range(self.size)]
        self._torch.distributed.all_gather(all_of_them, mine)
        return self._torch.cat(all_of_them).numpy()

    def largest(self, number: int) -> int:
        value = self._torch.tensor(number)
        self._torch.distributed.all_reduce(value, self._torch.distributed.ReduceOp.MAX)
        return int(value)

    def _asked(self) -> int:
        """What the trial's own process was asked, if it has started torchrun."""
        if self._folder is None or not self.main or time.monotonic() - self._looked < SECONDS_BETWEEN_LOOKS:
            return 0
        self._looked = time.monotonic()
        try:
            return int((self._folder / launched.STOP_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return 0


def open_group(trial: Trial) -> Group:
    """The group of this process. Raises ConfigError if torchrun has started another number of processes."""
    launched.check_world_size(trial.config.runtime)
    return Processes(trial.device) if trial.config.runtime.processes > 1 else Group()


def is_lost_connection(error: BaseException) -> bool:
    """Whether the error is, most likely, that another process is gone."""
    if isinstance(error, LostProcess):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OF_CONNECTIONS)
