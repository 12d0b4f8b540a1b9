"""How far the losses of several processes are from those of one: `python benchmarks/processes.py`.

A small model is trained for --steps steps by `python -m attnres.train`, for each rule alone, then as
replicas (ddp) and in shards (fsdp), at the same batch of 8 sequences, float32. Printed is the largest
absolute difference over all rows of metrics.jsonl, which holds every step and every evaluation: of the loss
in nats / of the gradient's norm. The second line of a rule is against one process that takes as many
microbatches one after the other as there are processes: what is left is the order of the sums between them.
`--json F` writes the numbers too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from attnres.metrics import METRICS_FILE, read_rows

ROOT = Path(__file__).resolve().parents[1]
RULES = (
    "prenorm", "attnres_full", "attnres_block residual.num_blocks=4", "attnres_window residual.window=2",
    "mhc", "hyper_connections", "denseformer",
)  # fmt: skip
LAYOUTS = (("ddp", 2), ("fsdp", 2), ("ddp", 4), ("fsdp", 4))
BATCH, CONTEXT = 8, 64
SETTINGS = (
    "model.width=32", "model.depth=4", "model.heads=2", "model.mlp_width=96",
    f"model.batch_size={BATCH}", f"model.context={CONTEXT}", "optim.learning_rate=0.005",
    "budget=tokens", "budget.evaluations=3", "runtime.log_every_steps=1", "tracking=none",
    "data.validation_tokens=2112", "data.interim_validation_tokens=704",  # 33 and 11 windows: odd shares
)  # fmt: skip
COLUMNS = ("loss_nats", "grad_norm")


def train(folder: Path, steps: int, *words: str) -> list[dict[str, Any]]:
    """The rows of metrics of one trial. SystemExit with what it said if it fails."""
    command = [sys.executable, "-m", "attnres.train", *SETTINGS, *words, f"runs_dir={folder}"]
    command.append(f"budget.tokens={steps * BATCH * CONTEXT}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    (file,) = folder.glob(f"*/*/{METRICS_FILE}")
    return read_rows(file)


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, float]:
    """The largest absolute difference of each column over rows of the same steps."""
    assert [(row["kind"], row["step"]) for row in one] == [(row["kind"], row["step"]) for row in other]
    pairs = list(zip(one, other, strict=True))
    return {name: max(abs(a[name] - b[name]) for a, b in pairs if name in a) for name in COLUMNS}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="of each trial (default 40)")
    parser.add_argument(
        "--rules", default=",".join(RULES), help="comma-separated, each with its options after blanks"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="also write the numbers to F")
    options = parser.parse_args()
    found = []
    print("| rule | " + " | ".join(f"{kind}, {count}" for kind, count in LAYOUTS) + " |")
    print("| --- |" + " --- |" * len(LAYOUTS), flush=True)
    with tempfile.TemporaryDirectory(prefix="processes_") as root:
        for rule in options.rules.split(","):
            words, folder = f"residual={rule}".split(), Path(root) / rule.partition(" ")[0]
            # One process: all at once, and in microbatches.
            alone = {
                parts: train(
                    folder / f"alone{parts}",
                    options.steps,
                    *words,
                    f"runtime.microbatch_size={BATCH // parts}",
                )
                for parts in sorted({1, *(count for _, count in LAYOUTS)})
            }
            cells: dict[str, list[str]] = {rule: [], f"{rule}, microbatches": []}
            for kind, count in LAYOUTS:
                how = (f"runtime={kind}", f"runtime.processes={count}")
                there = train(folder / f"{kind}{count}", options.steps, *words, *how)
                for line, parts in zip(cells.values(), (1, count), strict=True):
                    largest = differences(alone[parts], there)
                    place = {"rule": rule, "parallel": kind, "processes": count, "microbatches_alone": parts}
                    found.append({**place, "rows": len(there), **largest})
                    line.append(" / ".join(f"{largest[column]:.0e}" for column in COLUMNS))
            for name, line in cells.items():
                print(f"| {name} | " + " | ".join(line) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
