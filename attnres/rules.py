"""The table of all residual rules: `python -m attnres.rules` prints what each costs and where it starts.

Parameters and FLOPs are the counts of a model of width 256 and depth 12; the start is measured on a small one
in float64: loss and gradients of the shared weights beside those of prenorm, at the initial values.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnres.cli import help_text, reject_options, run_command, take_option, wants_help
from attnres.compose import compose_trial, group_options
from attnres.config import ModelConfig
from attnres.counts import Counts, count
from attnres.errors import UserError
from attnres.residual.specs import SPECS, PreNorm, RuleSpec

USAGE = """usage: python -m attnres.rules [residual=RULE residual.OPTION=VALUE ...] [--timings F]

Prints a Markdown table: for each rule, or for the one chosen, extra parameters and FLOPs of a model of width
256 and depth 12 (4096 words, 256 tokens), and whether it starts as prenorm. --timings F adds step times from
the JSON file of `benchmarks/step_time.py --json F`."""

COUNTED = ModelConfig(
    name="counted",
    width=256,
    depth=12,
    heads=4,
    head_width=None,
    mlp_width=688,
    context=256,
    batch_size=8,
    learning_rate=1e-3,
    tie_embeddings=False,
    rope_base=1e4,
    norm_eps=1e-8,
)
VOCABULARY = 4096
# Small, as deep as the counted one, and with an epsilon that hides no difference.
MEASURED = replace(COUNTED, name="measured", width=16, heads=2, mlp_width=40, context=16, norm_eps=1e-14)
MEASURED_VOCABULARY = 64
EQUAL = 1e-9  # relative difference of loss and gradients that float64 leaves between equal models

# Rows beside those of the YAML files as they are.
VARIANTS: Mapping[str, Sequence[Sequence[str]]] = {
    "attnres_full": [
        ["residual.query=input"],
        ["residual.weights=static"],
        ["residual.normaliser=sigmoid"],
        ["residual.key_norm=false"],
        ["residual.heads=4"],
    ],
    "hyper_connections": [["residual.dynamic=false"]],
    "x0_lambdas": [["residual.initial_x0=0.1"]],
}


def all_specs() -> list[RuleSpec]:
    """One spec per YAML file of the group, in the order of `SPECS`, and the variants."""
    depth = f"model.depth={COUNTED.depth}"
    specs = []
    for name in group_options()["residual"]:
        for more in ([], *VARIANTS.get(name, [])):
            specs.append(compose_trial([f"residual={name}", *more, depth]).residual)
    return sorted(specs, key=lambda spec: list(SPECS).index(spec.rule))


@functools.cache
def loss_and_gradients(spec: RuleSpec) -> tuple[float, dict[str, Any]]:
    """Loss in nats and gradients of the shared weights of the small model at its initial values."""
    import torch

    from attnres.model import Transformer

    model = Transformer(MEASURED, spec, MEASURED_VOCABULARY).double()
    model.initialise(0)
    generator = torch.Generator().manual_seed(0)
    shape = (MEASURED.batch_size, MEASURED.context + 1)
    tokens = torch.randint(MEASURED_VOCABULARY, shape, generator=generator)
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    shared = {n: p.grad for n, p in model.named_parameters() if not n.startswith("residual.")}
    return float(loss.detach()), shared


def start(spec: RuleSpec) -> str:
    """Whether the rule starts as prenorm; if not, by how much its loss and its gradients differ."""
    (loss, gradients), (right_loss, right) = loss_and_gradients(spec), loss_and_gradients(PreNorm())
    off = sum(float((gradients[name] - g).square().sum()) for name, g in right.items()) ** 0.5
    off /= sum(float(g.square().sum()) for g in right.values()) ** 0.5
    if max(off, abs(loss / right_loss - 1)) < EQUAL:
        return "yes"
    return f"no: loss {loss - right_loss:+.3f} nats, gradients off by {100 * off:.0f} %"


def read_timings(path: Path) -> list[dict[str, Any]]:
    """The rows of a benchmark's JSON file. Raises UserError where it is none."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for row in rows:
            _shape(row)
            float(row["ratio_to_prenorm"])
        return rows
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--timings={path}: not a file of benchmarks/step_time.py --json: {error}") from error


def _shape(row: Mapping[str, Any]) -> str:
    return f"{row['width']} x {row['depth']}, {row['dtype']}"


def _default(rule: str) -> RuleSpec:
    return compose_trial([f"residual={rule}", f"model.depth={COUNTED.depth}"]).residual


def timed_as(spec: RuleSpec) -> str:
    """The benchmark's name: that of a rule as its YAML has it, the label of a variant."""
    return spec.rule if spec == _default(spec.rule) else spec.label()


def _timing(spec: RuleSpec, shape: str, rows: Sequence[Mapping[str, Any]], ratio: str) -> str:
    """A ratio to prenorm, or nothing where it was not measured."""
    implementation, name = getattr(spec, "implementation", "plain"), timed_as(spec)
    for row in rows:
        same_rule = row["rule"] == name and row["implementation"] == implementation
        if same_rule and _shape(row) == shape:
            return "" if row.get(ratio) is None else f"{row[ratio]:.2f}"
    return ""


def counts_of(spec: RuleSpec) -> Counts:
    return count(COUNTED, spec, VOCABULARY)


def table(specs: Sequence[RuleSpec], timings: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; the columns of what was measured come last, a time and a memory per shape in the file."""
    shapes = list(dict.fromkeys(_shape(row) for row in timings))
    weighed = {_shape(row) for row in timings if row.get("peak_memory_ratio") is not None}
    measured = [("step time", "ratio_to_prenorm", shape) for shape in shapes]
    measured += [("memory", "peak_memory_ratio", shape) for shape in shapes if shape in weighed]
    head = ["rule", "extra parameters", "% of prenorm's", "extra FLOPs, %", "starts as prenorm"]
    head += [f"{what}, {shape}" for what, _, shape in measured]
    lines = [head, ["---", "---:", "---:", "---:", "---", *("---:" for _ in measured)]]
    baseline = counts_of(PreNorm())
    for spec in specs:
        counts = counts_of(spec)
        extra = counts.total_parameters - baseline.total_parameters
        flops = counts.flops_per_token / baseline.flops_per_token - 1
        share = extra / baseline.non_embedding_parameters
        cells = [spec.label(), f"{extra:,}", f"{100 * share:.3f}", f"{100 * flops:.2f}", start(spec)]
        lines.append([*cells, *(_timing(spec, shape, timings, ratio) for _, ratio, shape in measured)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str]) -> int:
    if wants_help(argv):
        examples = [
            "python -m attnres.rules",
            "python -m attnres.rules residual=mhc residual.streams=2",
            "python -m attnres.rules --timings timings.json",
        ]
        print(help_text(USAGE, ["residual"], examples))
        return 0
    path = take_option(argv, "--timings")
    reject_options(argv)
    timings = read_timings(Path(path)) if path else []
    specs = [compose_trial([*argv, f"model.depth={COUNTED.depth}"]).residual] if argv else all_specs()
    print(table(specs, timings))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
