"""The most memory that this process has held, and the least that training a trial can do with. Torch-free."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

from attnres.config import MuonConfig
from attnres.trial import Trial

# Resident around the smallest model: interpreter, torch, all that training imports. Measured: 333 MB.
PROCESS_BYTES = 300_000_000


def process_peak_bytes() -> int:
    """Largest resident set of this process so far, libraries that it shares with others included.

    From the kernel's own mark of this program's memory where there is one: getrusage also remembers what the
    process was before it started the program.
    """
    try:
        mark = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    except OSError:
        mark = None
    if mark:
        return int(mark[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def training_bytes_at_least(trial: Trial) -> int:
    """A lower bound of a trial's peak: resident bytes of all its processes on a CPU, allocated bytes on one
    GPU.

    Parameters and the optimizer's states live always; at the end of the forward pass what the backward pass
    needs lives too, at the end of the backward pass the gradients. Of a residual rule only the stream that
    every rule has is counted.
    """
    runtime = trial.config.runtime
    parts = runtime.processes if runtime.parallel == "fsdp" else 1
    state = _state_bytes(trial) // parts
    parameters = 4 * trial.counts.total_parameters // parts
    peak = max(state + _activation_bytes(trial), state + parameters)
    return (peak + PROCESS_BYTES) * runtime.processes if trial.device == "cpu" else peak


def _state_bytes(trial: Trial) -> int:
    """Parameters and two moments in float32; Muon has one moment for the matrices of the blocks."""
    counts, optim = trial.counts, trial.config.optim
    moments = 2 * counts.total_parameters
    if isinstance(optim, MuonConfig):
        moments -= counts.parameters["attention"] + counts.parameters["mlp"]
    return 4 * (counts.total_parameters + moments)


def _activation_bytes(trial: Trial) -> int:
    """What autograd keeps of one microbatch, from the products and norms of the model's equations."""
    model, runtime = trial.config.model, trial.config.runtime
    tokens = (runtime.microbatch_size or model.batch_size // runtime.processes) * model.context
    inner = model.heads * model.head_channels
    number = 2 if runtime.dtype == "bfloat16" else 4
    if runtime.compile:  # keeps what is dear to compute, and computes norms, rotations and products again
        attention, mlp = model.width + 4 * inner, model.width + 2 * model.mlp_width
    else:
        attention, mlp = 2 * model.width + 6 * inner, 2 * model.width + 4 * model.mlp_width
    blocks = model.depth * (attention + mlp)
    if runtime.checkpoint_activations:  # the inputs of all sublayers, and one sublayer at a time
        blocks = model.layers * model.width + max(attention, mlp)
    logits = 2 * 4 * trial.vocabulary  # their logarithms and their gradient, float32 whatever the rest is
    return tokens * (number * blocks + logits)
