"""Step time and memory of every rule beside prenorm: `make bench`, or this file with --help.

All contenders of a shape are timed in one process, interleaved; memory is measured in a fresh process each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attnres.environment import processor_name, source_commit
from attnres.memory import keep_freed_memory

sys.path.insert(0, str(Path(__file__).resolve().parent))
from contenders import OPTIONS, PEERS, PLAIN_RULES, RULES, Shape, absent, build, names, unfit  # noqa: E402
from measurement import CLOCKS, SLOW, SLOW_ROUNDS, interleave, peak_memory_bytes  # noqa: E402

SMALL_WIDTH = 256
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
SHAPES = [
    (256, 8, "float32"),
    (256, 8, "bfloat16"),
    (512, 12, "float32"),
    (512, 12, "bfloat16"),
    (96, 6, "float32"),
]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--width", type=int, help="channels; with --depth, one shape instead of the five of the docs"
    )
    parser.add_argument("--depth", type=int, help="transformer blocks")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 is autocast")
    parser.add_argument(
        "--rules",
        help="comma-separated part of "
        f"{', '.join([*RULES, *PLAIN_RULES, *OPTIONS, *PEERS, 'stand_in', 'matmul'])}; "
        f"by default all; from {PLAIN_RULES[0]} to peers only in float32 up to width {SMALL_WIDTH}",
    )
    parser.add_argument(
        "--implementations", help="comma-separated part of fused, reference, kernel, plain, peer, bare"
    )
    parser.add_argument("--repeats", type=int, default=7, help="rounds; the median is reported (default 7)")
    parser.add_argument("--batch", type=int, default=8, help="sequences (default 8)")
    parser.add_argument("--context", type=int, default=256, help="tokens of a sequence (default 256)")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--clock", choices=tuple(CLOCKS), default="wall", help="cpu: processor time, for a busy machine"
    )
    parser.add_argument(
        "--no-memory", action="store_true", help="skip the fresh processes that measure memory"
    )
    parser.add_argument("--json", metavar="F", help="write the rows and the machine here")
    parser.add_argument(
        "--markdown",
        metavar="F",
        help=f"write the table here; in a file with lines {BEGIN} and {END}, between them",
    )
    parser.add_argument("--memory-of", nargs=2, metavar=("RULE", "IMPLEMENTATION"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if (arguments.width is None) != (arguments.depth is None):
        parser.error("--width and --depth go together")
    for field in ("width", "depth", "repeats", "batch", "context", "vocabulary", "threads"):
        value = getattr(arguments, field)
        if value is not None and value < 1:
            parser.error(f"--{field}={value}: must be positive")
    if arguments.width and arguments.width % 2:
        parser.error(f"--width={arguments.width}: must be even, for the rotary pairs of a head's channels")
    if arguments.threads > (cores := os.cpu_count() or 1):
        parser.error(f"--threads={arguments.threads}: more than the {cores} cores")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: no CUDA device here")
    for field, known in (
        ("rules", {rule for rule, _ in names()}),
        ("implementations", {implementation for _, implementation in names()}),
    ):
        for name in chosen_names(getattr(arguments, field)):
            if name not in known:
                parser.error(f"--{field}={name}: unknown; one of {', '.join(sorted(known))}")
        if getattr(arguments, field) is not None and not chosen_names(getattr(arguments, field)):
            parser.error(f"--{field}={getattr(arguments, field)}: names nothing")
    if arguments.memory_of and tuple(arguments.memory_of) not in names():
        parser.error(f"--memory-of={' '.join(arguments.memory_of)}: unknown")
    rules, hows = chosen_names(arguments.rules), chosen_names(arguments.implementations)
    if rules and hows and not any(rule in rules and how in hows for rule, how in names()):
        parser.error(f"--implementations={arguments.implementations}: no chosen rule has these")
    for field in ("json", "markdown"):  # said now, not after minutes of measuring
        path = getattr(arguments, field)
        if path is not None and (why := cannot_write(path)):
            parser.error(f"--{field}={path}: cannot be written: {why}")
    return arguments


def chosen_names(option: str | None) -> set[str]:
    """What a comma-separated option names; empty where it was not given."""
    return {name.strip() for name in (option or "").split(",") if name.strip()}


def cannot_write(path: str) -> str | None:
    """Why a text file cannot be written here, or None. A file that is there stays as it is.

    Tried, not asked: permissions do not tell of a folder such as /proc, nor those of a file of its folder.
    """
    there = os.path.lexists(path)
    try:
        with open(path, "a", encoding="utf-8"):
            pass
        if Path(path).is_file():  # not a terminal or a pipe
            Path(path).read_text(encoding="utf-8")  # a Markdown table goes between two marks of the old text
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeDecodeError:
        return "the file there is not text"
    if not there:
        os.unlink(path)
    return None


def shapes(arguments: argparse.Namespace) -> list[Shape]:
    """The shapes to time: the one asked for, or those of docs/performance.md."""
    if arguments.width is None:
        chosen = [shape for shape in SHAPES if arguments.dtype in (None, shape[2])]
    else:
        dtypes = [arguments.dtype] if arguments.dtype else ["float32", "bfloat16"]
        chosen = [(arguments.width, arguments.depth, dtype) for dtype in dtypes]
    return [
        Shape(*s, arguments.batch, arguments.context, arguments.vocabulary, arguments.device) for s in chosen
    ]


def contenders(arguments: argparse.Namespace, shape: Shape) -> list[tuple[str, str]]:
    """The chosen (rule, implementation) pairs that are installed; prenorm is always the first.

    Unless named, peers and rules without a fused form are timed in float32 up to SMALL_WIDTH only.
    """
    rules = chosen_names(arguments.rules)
    implementations = chosen_names(arguments.implementations)
    cheap = shape.dtype == "float32" and shape.width <= SMALL_WIDTH
    chosen = []
    for rule, implementation in names():
        by_default = cheap or not (rule in PEERS or rule in PLAIN_RULES or rule in OPTIONS)
        wanted = rule in rules if rules else by_default
        if implementation == "kernel" and shape.device != "cuda" and "kernel" not in implementations:
            continue
        if rule == "prenorm" or (wanted and (not implementations or implementation in implementations)):
            chosen.append((rule, implementation))
    fitting = []
    for rule, implementation in chosen:
        if why := unfit(rule, implementation, shape):
            print(f"not timed: {why}", file=sys.stderr)
        elif absent(rule, shape.width) is None:
            fitting.append((rule, implementation))
    return fitting


def measure(shape: Shape, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per contender of a shape."""
    pairs = contenders(arguments, shape)
    cuda = shape.device == "cuda"
    memory = [
        None if arguments.no_memory or rule == "matmul" else _fresh(rule, i, shape) for rule, i in pairs
    ]
    steps = [build(rule, implementation, shape) for rule, implementation in pairs]
    timings = interleave(steps, arguments.repeats, CLOCKS[arguments.clock], cuda)
    return [
        {
            "rule": rule,
            "implementation": implementation,
            "width": shape.width,
            "depth": shape.depth,
            "dtype": shape.dtype,
            "threads": arguments.threads,
            "rounds": timing.rounds,
            "step_ms": timing.step_ms,
            "spread_ms": timing.spread_ms,
            "ratio_to_prenorm": timing.ratio,
            "ratio_interval": timing.ratio_interval,
            "tokens_per_second": 1e3 * shape.batch * shape.context / timing.step_ms,
            "peak_memory_bytes": peak,
            "peak_memory_ratio": peak / memory[0] if peak and memory[0] else None,
        }
        for (rule, implementation), timing, peak in zip(pairs, timings, memory, strict=True)
    ]


def _fresh(rule: str, implementation: str, shape: Shape) -> int:
    """Peak memory of a contender, from a process of its own."""
    command = [sys.executable, __file__, "--memory-of", rule, implementation]
    for field, value in asdict(shape).items():
        command += [f"--{field}", str(value)]
    command += ["--threads", str(torch.get_num_threads())]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    return int(result.stdout.split()[-1])


def machine(arguments: argparse.Namespace) -> dict[str, Any]:
    commit, modified = source_commit()
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else processor_name()
    return {
        "device": device,
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "batch": arguments.batch,
        "context": arguments.context,
        "vocabulary": arguments.vocabulary,
        "optimizer": "AdamW, fused",
        "clock": arguments.clock,
        "repeats": arguments.repeats,
        "load_average": os.getloadavg()[0],
        "commit": commit,
        "modified": modified,
    }


COLUMNS = (
    "width, depth",
    "type",
    "rule",
    "implementation",
    "step, ms",
    "spread",
    "tokens/s",
    "ratio to prenorm [95 %]",
    "memory ratio",
)


def markdown(about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The table of all rows, under a line that says where and how they were measured."""
    commit = f"{str(about['commit'])[:12]}{' with changes' if about['modified'] else ''}"
    lines = [
        f"{about['device']}, {about['threads']} of {about['cores']} cores, torch {about['torch']}; batch "
        f"{about['batch']} x {about['context']} tokens, {about['vocabulary']} words, {about['optimizer']}; "
        f"median of {about['repeats']} interleaved rounds ({about['clock']} clock; {SLOW_ROUNDS} for what "
        f"takes {SLOW:g} times as long as prenorm), load average {about['load_average']:.1f} at the start; "
        f"commit {commit}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        *map(_line, rows),
    ]
    reasons = sorted({str(absent(peer, row["width"])) for peer in PEERS for row in rows} - {"None"})
    if reasons:
        lines += ["", f"Not compared: {'; '.join(reasons)}."]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    memory, (low, high) = row["peak_memory_ratio"], row["ratio_interval"]
    interval = "" if low == high else f" [{low:.3f}, {high:.3f}]"
    return (
        f"| {row['width']}, {row['depth']} | {row['dtype']} | {row['rule']} | {row['implementation']} | "
        f"{row['step_ms']:.1f} | {row['spread_ms']:.1f} | {row['tokens_per_second']:,.0f} | "
        f"{row['ratio_to_prenorm']:.3f}{interval} | {'' if memory is None else f'{memory:.2f}'} |"
    )


def _write_markdown(path: Path, table: str) -> None:
    """The whole file, or what is between its two marks."""
    before, mark, rest = path.read_text(encoding="utf-8").partition(BEGIN) if path.exists() else ("", "", "")
    _, end, after = rest.partition(END)
    text = f"{before}{BEGIN}\n\n{table}\n\n{END}{after}" if mark and end else f"{table}\n"
    path.write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as training does
    if arguments.memory_of:
        (rule, implementation), shape = arguments.memory_of, shapes(arguments)[0]
        print(peak_memory_bytes(lambda: build(rule, implementation, shape), shape.device == "cuda"))
        return 0
    about, rows = machine(arguments), []
    for shape in shapes(arguments):
        print(f"width {shape.width}, depth {shape.depth}, {shape.dtype} ...", file=sys.stderr, flush=True)
        measured = measure(shape, arguments)
        print(*map(_line, measured), sep="\n", file=sys.stderr, flush=True)
        rows += measured
        if arguments.json:  # after each shape: some take many minutes
            text = json.dumps({"machine": about, "rows": rows}, indent=1)
            Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    table = markdown(about, rows)
    print(table)
    if arguments.markdown:
        _write_markdown(Path(arguments.markdown), table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
