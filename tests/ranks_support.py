"""Ranks of trials of several processes without torchrun: forks of one process that has imported torch.

torchrun and each of its processes import torch, which takes longer than a short trial. Here it is imported
once, and the ranks train all the trials that they are given, one after the other.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from attnres.compose import compose_trial
from attnres.data.corpus import open_corpus
from attnres.stop import Preempted
from attnres.train import train
from attnres.trial import resolve

PRELOADED = ("attnres.learner", "attnres.checkpoint", "attnres.probes", "torch.distributed.fsdp")
SECONDS = 300


@dataclass(frozen=True)
class Leg:
    """A trial, or a part of it: after `stop_after` steps of this leg the first rank receives SIGTERM."""

    overrides: list[str]
    stop_after: int | None = None


def train_in_ranks(legs: list[Leg], folder: Path, processes: int = 2) -> None:
    """Train the legs in ranks of their own, which write what they say into `folder`.

    AssertionError with their last words if one fails; the others, who would wait for it, are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # The stores are here, as torchrun's are: a port that is free now may be another's when a rank opens it.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in legs]
    ports = [store.port for store in stores]
    logs = [folder / f"rank_{rank}.log" for rank in range(processes)]
    ranks = [
        context.Process(target=_rank, args=(rank, processes, legs, ports, log))
        for rank, log in enumerate(logs)
    ]
    for one in ranks:
        one.start()
    try:
        deadline, alive = time.monotonic() + SECONDS, [one.sentinel for one in ranks]
        while alive and not any(one.exitcode for one in ranks) and time.monotonic() < deadline:
            wait(alive, 1)
            alive = [one.sentinel for one in ranks if one.exitcode is None]
        said = "".join(f"\n{log.name}: {log.read_text()[-2000:]}" for log in logs if log.exists())
        assert [one.exitcode for one in ranks] == [0] * processes, said
    finally:
        for one in ranks:
            one.kill()
            one.join()


def train_leg(leg: Leg) -> None:
    """In this process, which is a rank if its environment says so."""
    from attnres.learner import Learner

    made, original = [0], Learner.step

    def step(*words: Any) -> Any:
        result = original(*words)
        made[0] += 1
        if made[0] == leg.stop_after and os.environ.get("RANK", "0") == "0":
            signal.raise_signal(signal.SIGTERM)
        return result

    config = compose_trial(leg.overrides)
    corpus = open_corpus(config.data, config.model.context)
    Learner.step = step  # type: ignore[method-assign]
    try:
        train(resolve(config, corpus), corpus)
        assert leg.stop_after is None, "it was to stop"
    except Preempted:
        assert made[0] == leg.stop_after
    finally:
        Learner.step = original  # type: ignore[method-assign]


def _rank(rank: int, processes: int, legs: list[Leg], ports: list[int], log: Path) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    faulthandler.dump_traceback_later(0.8 * SECONDS, file=handle)  # where it hangs, if it does
    for leg, port in zip(legs, ports, strict=True):
        place: dict[str, int | str] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ |= {name: str(value) for name, value in place.items()}
        train_leg(leg)
