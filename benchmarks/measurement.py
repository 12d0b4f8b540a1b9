"""Time steps of several contenders interleaved, and the peak memory of one of them in this process."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Clock = Callable[[], float]
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
MINIMUM_SECONDS = 0.2  # of one measurement; quick steps are repeated within it
SLOW = 2.5  # times the first contender: what needs so long is measured less often
SLOW_ROUNDS = 3


@dataclass(frozen=True)
class Timing:
    step_ms: float  # median
    spread_ms: float  # half the distance between the quartiles
    ratio: float  # median over rounds of this contender's time over the first one's in the same round
    ratio_interval: tuple[float, float]  # of that median, of at least 95 %, from the ranks of the ratios
    rounds: int


def interleave(steps: Sequence[Callable[[], object]], rounds: int, clock: Clock, cuda: bool) -> list[Timing]:
    """Time every contender once a round, starting each round with another one, so that drift meets all alike.

    A ratio compares two times of one round: what slows the machine for a while cancels. Contenders much
    slower than the first one take part in the first few rounds only.
    """
    counts, limits, first = [], [], 0.0
    for step in steps:
        step()  # allocate, build kernels, create optimizer state
        seconds = _time(step, 1, clock, cuda)
        first = first or seconds
        counts.append(max(1, round(MINIMUM_SECONDS / max(seconds, 1e-9))))
        limits.append(min(rounds, SLOW_ROUNDS) if seconds > SLOW * first else rounds)
    times: list[list[float]] = [[] for _ in steps]
    for round_ in range(rounds):
        for offset in range(len(steps)):
            index = (round_ + offset) % len(steps)
            if round_ < limits[index]:
                times[index].append(_time(steps[index], counts[index], clock, cuda) / counts[index])
    return [_summary(own, times[0]) for own in times]


def _time(step: Callable[[], object], count: int, clock: Clock, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = clock()
    for _ in range(count):
        step()
    if cuda:
        torch.cuda.synchronize()
    return clock() - start


def _summary(seconds: Sequence[float], first: Sequence[float]) -> Timing:
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    ratios = sorted(own / other for own, other in zip(seconds, first, strict=False))
    spread = (quartiles[2] - quartiles[0]) / 2
    rank = _rank(len(ratios))
    interval = (ratios[rank], ratios[-1 - rank])
    return Timing(
        1e3 * statistics.median(seconds), 1e3 * spread, statistics.median(ratios), interval, len(seconds)
    )


def _rank(count: int) -> int:
    """The largest k so that the median lies between the values of rank k and count - 1 - k in 95 % of cases.

    0, the whole range, also where even that covers less (fewer than six values).
    """
    outside, rank = 0.0, 0
    while rank < count // 2:
        outside += 2 * math.comb(count, rank) * 0.5**count
        if outside > 0.05:
            break
        rank += 1
    return max(0, rank - 1)


def peak_memory_bytes(build: Callable[[], Callable[[], object]], cuda: bool) -> int:
    """Peak memory of two steps, model and optimizer included. Call it in a fresh process.

    The second step has the optimizer's state. On a CPU: the peak of resident memory above what the process
    had before the model was built (interpreter, torch). Linux only.
    """
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = _resident("VmRSS")
    step = build()
    for _ in range(2):
        step()
    return torch.cuda.max_memory_allocated() if cuda else _resident("VmHWM") - before


def _resident(field: str) -> int:
    if not sys.platform.startswith("linux"):
        return 0
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))
