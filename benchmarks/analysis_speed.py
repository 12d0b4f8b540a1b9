"""How long the fits and the start-up of the analysis commands take: `python benchmarks/analysis_speed.py`.

Prints a table; every figure is the median of several runs. OMP_NUM_THREADS=1 gives one thread.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from analysis.fit import fit_csv
from analysis.isoflop import fit_isoflop
from analysis.parametric import fit_parametric
from analysis.power import plan_power
from analysis.published_fits import compute_published

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
    """Median wall-clock and processor time."""
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus)


def start_up(module: str, repeats: int = 5) -> tuple[float, float]:
    """Median wall-clock and processor time of `python -m module --help` in a process of its own."""
    walls, cpus = [], []
    for _ in range(repeats):
        before, wall = os.times(), time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", module, "--help"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        after = os.times()
        walls.append(time.perf_counter() - wall)
        cpus.append(
            after.children_user - before.children_user + after.children_system - before.children_system
        )
    return statistics.median(walls), statistics.median(cpus)


def isoflop_table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    budgets, factors = np.geomspace(1e18, 1e21, 9), np.geomspace(0.2, 5, 10)
    C, factor = (grid.ravel() for grid in np.meshgrid(budgets, factors))
    return 0.1 * C**0.5 * factor, C, 10 * C**-0.04 + 0.03 * np.log(factor) ** 2


def main() -> None:
    N, D, L = models()
    rows = []
    for objective in ("huber:1e-3", "least-squares", "log-least-squares", "lad"):
        name = f"parametric, {objective}, {POINTS} points x {STARTS} starts"
        rows.append((name, *seconds(partial(fit_parametric, N, D, L, objective, starts=STARTS), 3)))
    rows.append(
        (f"the same, huber:1e-3, and {DRAWS} bootstrap draws",)
        + seconds(lambda: fit_parametric(N, D, L, "huber:1e-3", starts=STARTS, bootstrap=DRAWS), 3)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.csv"
        np.savetxt(path, np.stack([N, D, L], axis=1), delimiter=",", header="N,D,L", comments="")
        columns = "N=N,D=D,loss=L"
        rows.append(
            ("analysis.fit defaults (500 starts, 200 draws)",)
            + seconds(lambda: fit_csv(path, "parametric", columns), 3)
        )
    rows.append(("isoFLOP, 90 points", *seconds(lambda: fit_isoflop(*isoflop_table()), 5)))
    rows.append(("power plan, 20 designs", *seconds(lambda: plan_power(0.002, 0.057), 5)))
    rows.append(("all fits of the published tables", *seconds(compute_published, 3)))
    for module in ("analysis.fit", "analysis.power", "analysis.published", "analysis.report"):
        rows.append((f"python -m {module} --help", *start_up(module)))
    print(
        f"Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} processors, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':56s} {'wall s':>8s} {'cpu s':>8s}")
    for name, wall, cpu in rows:
        print(f"{name:56s} {wall:8.2f} {cpu:8.2f}")


if __name__ == "__main__":
    main()
