"""How long the analysis takes: `OMP_NUM_THREADS=1 python benchmarks/analysis_speed.py`.

Prints the Markdown table of docs/analysis.md; every figure is the least of several runs, for other work on a
machine only ever adds to a time. `cpu s` is processor time, which that work hardly touches.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from analysis.fit import fit_csv
from analysis.isoflop import fit_isoflop
from analysis.parametric import fit_parametric
from analysis.power import plan_power
from analysis.published_fits import compute_published
from analysis.simulate import Truth, simulate_table, write_study

ROOT = Path(__file__).resolve().parents[1]
POINTS, STARTS, DRAWS = 240, 500, 1000


def models(points: int = POINTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A synthetic table with heavy-tailed noise of 0.5 % in the loss."""
    random = np.random.default_rng(0)
    N = np.exp(random.uniform(np.log(4e7), np.log(1.6e10), points))
    D = np.exp(random.uniform(np.log(2e8), np.log(3e11), points))
    L = 1.82 + 482 * N**-0.348 + 2085 * D**-0.366
    return N, D, L * np.exp(0.005 * random.standard_t(3, points))


def seconds(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Least wall-clock and processor time."""
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)


def start_up(module: str, repeats: int = 5) -> tuple[float, float]:
    """Least wall-clock and processor time of `python -m module --help` in a process of its own."""
    return process_seconds(["-m", module, "--help"], repeats)


def process_seconds(arguments: list[str], repeats: int) -> tuple[float, float]:
    """Least wall-clock and processor time of a Python process, its imports included."""
    walls, cpus = [], []
    for _ in range(repeats):
        before, wall = os.times(), time.perf_counter()
        subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        walls.append(time.perf_counter() - wall)
        cpus.append(
            after.children_user - before.children_user + after.children_system - before.children_system
        )
    return min(walls), min(cpus)


def isoflop_table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    budgets, factors = np.geomspace(1e18, 1e21, 9), np.geomspace(0.2, 5, 10)
    C, factor = (grid.ravel() for grid in np.meshgrid(budgets, factors))
    return 0.1 * C**0.5 * factor, C, 10 * C**-0.04 + 0.03 * np.log(factor) ** 2


def report_seconds(repeats: int) -> tuple[float, float]:
    """The whole command on 6 rules x 6 sizes x 5 seeds: fits, 2,000 draws, sensitivity, tables, figures."""
    multipliers = {f"attnres_block_n{n}": 1 + 0.04 * n for n in range(1, 6)}
    truth = Truth(multipliers, sizes=6, seeds=5, overhead=0.02)
    with tempfile.TemporaryDirectory() as folder:
        write_study(Path(folder) / "large", simulate_table(truth, np.random.default_rng(0)))
        return process_seconds(["-m", "analysis.report", "study=large", f"runs_dir={folder}"], repeats)


def measurements() -> Iterator[tuple[str, float, float]]:
    """What, wall-clock and processor seconds, one after the other."""
    N, D, L = models()
    for objective in ("huber:1e-3", "least-squares", "log-least-squares", "lad"):
        name = f"parametric, {objective}, {POINTS} points x {STARTS} starts"
        yield name, *seconds(partial(fit_parametric, N, D, L, objective, starts=STARTS), 3)
    draws = partial(fit_parametric, N, D, L, "huber:1e-3", starts=STARTS, bootstrap=DRAWS)
    yield f"the same, huber:1e-3, and {DRAWS:,} bootstrap draws", *seconds(draws, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.csv"
        np.savetxt(path, np.stack([N, D, L], axis=1), delimiter=",", header="N,D,L", comments="")
        defaults = partial(fit_csv, path, "parametric", "N=N,D=D,loss=L")
        yield "analysis.fit defaults (500 starts, 200 draws)", *seconds(defaults, 3)
    yield "isoFLOP, 90 points", *seconds(lambda: fit_isoflop(*isoflop_table()), 5)
    yield "power plan, 20 designs", *seconds(lambda: plan_power(0.002, 0.057), 5)
    yield "all fits of the published tables", *seconds(compute_published, 3)
    yield "report: 6 rules x 6 sizes x 5 seeds, 2,000 draws, figures", *report_seconds(3)
    for module in ("analysis.report", "analysis.fit", "analysis.power", "analysis.published", "sweeps.plan"):
        yield f"python -m {module} --help", *start_up(module)


def main() -> None:
    print(
        f"Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} processors, "
        f"load {os.getloadavg()[0]:.1f}\n"
    )
    print("| what | wall s | cpu s |")
    print("| --- | --- | --- |")
    for name, wall, cpu in measurements():
        print(f"| {name} | {wall:.2f} | {cpu:.2f} |", flush=True)


if __name__ == "__main__":
    main()
