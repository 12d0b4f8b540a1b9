"""Where the time of a training step goes: `python benchmarks/profile_step.py --rules prenorm,attnres_full`.

Sums what the profiler attributes to each operator alone, by kind, in milliseconds a step. The profiler itself
costs a few percent, most of it under "the rest" (Python, autograd, small calls).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from attnres.memory import keep_freed_memory

sys.path.insert(0, str(Path(__file__).resolve().parent))
from contenders import Shape, absent, build, names, unfit  # noqa: E402

KINDS = {  # kind -> beginnings of operators' names
    "matrix products": ("aten::mm", "aten::addmm"),
    "attention": ("aten::_scaled_dot_product",),
    "depth attention's batched products": ("aten::bmm", "aten::baddbmm", "aten::_embedding_bag"),
    "loss": ("aten::_log_softmax", "aten::nll_loss"),
    "norms": ("aten::linalg_vector_norm", "aten::native_layer_norm", "aten::addmv", "aten::rsqrt"),
    "optimizer": ("aten::_fused_adam",),
    "other arithmetic": (
        "aten::mul",
        "aten::add",
        "aten::sub",
        "aten::div",
        "aten::sum",
        "aten::silu",
        "aten::gelu",
        "aten::_softmax",
        "aten::lerp",
    ),
    "copies and fills": ("aten::copy_", "aten::fill_", "aten::cat", "aten::index_select", "aten::zero_"),
}
REST = "the rest"


def kind_of(operator: str) -> str:
    return next((kind for kind, names_ in KINDS.items() if operator.startswith(names_)), REST)


def profile_rule(rule: str, implementation: str, shape: Shape, steps: int) -> Counter[str]:
    """Milliseconds a step by kind."""
    step = build(rule, implementation, shape)
    step()
    step()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(steps):
            step()
    total: Counter[str] = Counter()
    for event in profiler.key_averages():
        total[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / steps
    return total


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rules", default="prenorm,attnres_full,attnres_block", help="comma-separated")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args(argv)
    for field in ("width", "depth", "threads", "steps"):
        if getattr(arguments, field) < 1:
            parser.error(f"--{field}={getattr(arguments, field)}: must be positive")
    if arguments.width % 2:
        parser.error(f"--width={arguments.width}: must be even, for the rotary pairs of a head's channels")
    if arguments.threads > (cores := os.cpu_count() or 1):
        parser.error(f"--threads={arguments.threads}: more than the {cores} cores")
    implementations = dict(reversed(names()))  # the first of each rule: fused where there is one
    unknown = set(arguments.rules.split(",")) - set(implementations)
    if unknown:
        parser.error(f"--rules={min(unknown)}: unknown; one of {', '.join(sorted(implementations))}")
    rules = arguments.rules.split(",")
    shape = Shape(arguments.width, arguments.depth, arguments.dtype, 8, 256, 4096, "cpu")
    for rule in rules:
        if why := absent(rule, arguments.width) or unfit(rule, implementations[rule], shape):
            parser.error(f"--rules={arguments.rules}: {why}")
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    columns = [profile_rule(rule, implementations[rule], shape, arguments.steps) for rule in rules]
    print(f"| ms of a step | {' | '.join(rules)} |")
    print(f"| --- |{' ---: |' * len(rules)}")
    for kind in (*KINDS, REST):
        print(f"| {kind} | {' | '.join(f'{column[kind]:.1f}' for column in columns)} |")
    print(f"| sum | {' | '.join(f'{column.total():.1f}' for column in columns)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
