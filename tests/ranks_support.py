"""Ranks of trials of several processes without torchrun: forks of one process that has imported torch.

torchrun and each of its processes import torch, which takes longer than a short trial. Here it is imported
once, and the ranks train all the trials that they are given, one after the other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from dataclasses import dataclass
from typing import Any

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


def train_in_ranks(legs: list[Leg], processes: int = 2) -> None:
    """Train the legs in ranks of their own; AssertionError if a rank fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    ports = [_free_port() for _ in legs]
    ranks = [context.Process(target=_rank, args=(rank, processes, legs, ports)) for rank in range(processes)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(SECONDS)
        assert [rank.exitcode for rank in ranks] == [0] * processes
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


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


def _rank(rank: int, processes: int, legs: list[Leg], ports: list[int]) -> None:
    for leg, port in zip(legs, ports, strict=True):
        place: dict[str, int | str] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()}
        train_leg(leg)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
