"""What a step of a trial takes here, in time and memory: `python -m attnres.calibrate` runs some.

The steps are those of the trial itself (data, forward, backward, clipping, optimizer) at its thread count;
nothing is written, and the model is thrown away.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnres.cli import help_text, reject_options, run_command, take_flag, take_option, wants_help
from attnres.compose import compose_trial
from attnres.data import sampler
from attnres.data.corpus import PackedCorpus, open_corpus
from attnres.errors import ConfigError
from attnres.evaluate import open_validation
from attnres.peak_memory import training_bytes_at_least
from attnres.trial import Trial, resolve

WARM_UP_STEPS = 2  # the first step allocates memory and builds kernels
TIMED_STEPS = 5  # at least; small models get more, so that a median of them is steady
TIMED_SECONDS = 1.0
TIMED_EVALUATIONS = 3


def calibrate(trial: Trial, corpus: PackedCorpus) -> dict[str, float | None]:
    """seconds_per_step (median), evaluation_seconds_per_window (median), startup_seconds, peak_memory_bytes
    and waiting_share of this trial here.

    Start-up is measured in this process: importing torch, if nothing has, and building the model and
    optimizer. The peak is the resident set of this whole process on a CPU, what torch has allocated on a
    GPU. The waiting share is the part of the steps' time in which this thread could have run and other
    processes had the cores; None where the system does not say.
    """
    if (processes := trial.config.runtime.processes) > 1:
        why = "a trial of several processes is not timed; runtime=cpu or runtime=cuda times one process"
        raise ConfigError("runtime.processes", processes, why)
    start = time.perf_counter()
    from attnres.learner import Learner  # timed: it imports torch

    learner = Learner(trial)
    train_tokens, validation = corpus.train(), open_validation(trial, corpus)
    startup_seconds = time.perf_counter() - start

    waited_before, begun = _waited_seconds(), time.perf_counter()
    seconds: list[float] = []
    while len(seconds) < WARM_UP_STEPS + TIMED_STEPS or sum(seconds[WARM_UP_STEPS:]) < TIMED_SECONDS:
        start, model = time.perf_counter(), trial.config.model
        # The rate of step 1 is the lowest of the warm-up: even a model that would diverge can be timed.
        inputs, targets = sampler.batch(
            train_tokens, trial.config.seed, len(seconds), model.batch_size, model.context
        )
        learner.step(1, inputs, targets)
        seconds.append(time.perf_counter() - start)

    windows = min(len(validation.inputs), learner.microbatch_size)
    evaluation_seconds = []
    for _ in range(TIMED_EVALUATIONS):
        start = time.perf_counter()
        learner.window_losses(validation.inputs[:windows], validation.targets[:windows])
        evaluation_seconds.append(time.perf_counter() - start)
    waited, whole = _waited_seconds(), time.perf_counter() - begun
    return {
        "seconds_per_step": statistics.median(seconds[WARM_UP_STEPS:]),
        "evaluation_seconds_per_window": statistics.median(evaluation_seconds) / windows,
        "startup_seconds": startup_seconds,
        "peak_memory_bytes": learner.peak_memory_bytes(),
        "waiting_share": None
        if waited is None or waited_before is None
        else (waited - waited_before) / whole,
    }


def _waited_seconds() -> float | None:
    """That this process's first thread was ready to run and did not (Linux, proc(5): schedstat)."""
    try:
        return int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


_USAGE = """
usage: python -m attnres.calibrate [key=value ...] [--config-dir DIR] [--json]

Time some real training steps and an evaluation batch of a trial on this machine, and measure their memory.
  --json   one JSON object: seconds_per_step, evaluation_seconds_per_window, startup_seconds,
           peak_memory_bytes (of the whole process on a CPU, allocated by torch on a GPU), waiting_share
           (of the time, in which other processes had the cores; null: not known)
"""
_GROUPS = ("model", "residual", "runtime", "data")
_EXAMPLES = (
    "python -m attnres.calibrate model=cpu_220k residual=attnres_block",
    "python -m attnres.calibrate model=cpu_3m runtime.threads=2 --json",
)


def main(argv: list[str]) -> int:
    """`python -m attnres.calibrate`; see --help."""
    if wants_help(argv):
        print(help_text(_USAGE, _GROUPS, _EXAMPLES))
        return 0
    as_json = take_flag(argv, "--json")
    extra_dir = take_option(argv, "--config-dir")
    reject_options(argv)
    config = compose_trial(argv, extra_dir)
    corpus = open_corpus(
        config.data, config.model.context, lambda line: print(line, file=sys.stderr, flush=True)
    )
    trial = resolve(config, corpus)
    result = calibrate(trial, corpus)
    if as_json:
        print(json.dumps(result))
        return 0
    print(describe(trial, result))
    return 0


def describe(trial: Trial, result: Mapping[str, Any]) -> str:
    """The figures of `calibrate` for people."""
    step, window = result["seconds_per_step"], result["evaluation_seconds_per_window"]
    waiting = "?" if result["waiting_share"] is None else f"{result['waiting_share']:.0%}"
    minutes, megabyte = trial.steps * step / 60, 1e6
    return "\n".join(
        (
            f"{trial.name} with {trial.config.runtime.threads} thread(s):",
            f"  step        {step * 1e3:,.1f} ms, {trial.batch_tokens / step:,.0f} tokens/s",
            f"  evaluation  {window * 1e3:,.2f} ms per window of {trial.config.model.context} tokens",
            f"  start-up    {result['startup_seconds']:.1f} s",
            f"  memory      {result['peak_memory_bytes'] / megabyte:,.0f} MB at most "
            f"(computed from the shape: at least {training_bytes_at_least(trial) / megabyte:,.0f} MB)",
            f"  waited      {waiting} of the time for a core that another process had",
            f"  whole run   {trial.steps:,} steps, {minutes:,.1f} minutes of training",
        )
    )


if __name__ == "__main__":
    raise SystemExit(run_command(main))
