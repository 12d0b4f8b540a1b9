"""Measures what a trial takes on this machine, in time and memory, once per shape.

Each measurement is `python -m attnres.calibrate` in a process of its own, as many side by side as trials
will run, so that what they take from each other is in the numbers. What would not fit into memory is not
measured, and a machine that was busy with something else is named.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict

from attnres.errors import UserError
from attnres.record import write_text_atomic
from attnres.words import counted
from sweeps.calibration import Calibration, cache_key, cache_path, known
from sweeps.capacity import capacity
from sweeps.children import Children
from sweeps.endings import from_outside
from sweeps.interrupts import signals_as_exit
from sweeps.machine_memory import available_memory
from sweeps.memory_need import Need, need
from sweeps.study import PlannedTrial, Study
from sweeps.table import gigabytes

SAY_SECONDS = 10.0  # between two words while nothing is done
BUSY_SHARE = 0.1  # of a measurement's time, in which it waited for a core that something else had


def calibrate(
    study: Study, say: Callable[[str], None], config_dir: str | None = None, again: bool = False
) -> dict[str, Calibration]:
    """Calibrations by cell; what is not known, or with `again` everything, is measured and kept.

    Cells whose trials run in several processes, or would run out of memory, are left out, and named.
    """
    found = known(study)
    missing = {p.cell: p for p in study.trials if again or p.cell not in found}
    side_by_side = capacity(study).side_by_side
    for cells, why in (_in_several_processes(missing), *_too_large(missing, side_by_side)):
        if cells:
            others = f" and {counted(len(cells) - 1, 'other shape')}" if len(cells) > 1 else ""
            say(f"not timed: {cells[0]}{others}: {why}")
            missing = {cell: planned for cell, planned in missing.items() if cell not in cells}
    if not missing:
        return found
    shapes = {cache_key(planned, side_by_side): planned for planned in missing.values()}
    say(
        f"timing {counted(len(shapes), 'shape')} on this machine "
        f"({side_by_side} at once; --no-calibrate skips it)"
    )

    def measure(planned: PlannedTrial) -> Calibration:
        calibration, waited = _measure(planned, config_dir, children)
        if waited is not None and waited > BUSY_SHARE:
            say(
                f"warning: {planned.cell}: timed while others had the cores for {waited:.0%} of the time; "
                "--recalibrate when the machine is quiet"
            )
        path = cache_path(planned, side_by_side)
        try:
            write_text_atomic(path, json.dumps(asdict(calibration)) + "\n")
        except OSError as error:  # the plan is worth more than its cache
            say(f"warning: {path}: {error.strerror}: the time of {planned.cell} is not kept")
        return calibration

    children = Children()
    # Left in this order when interrupted: what is being timed is killed, then its threads can end.
    with ThreadPoolExecutor(side_by_side) as pool, children, signals_as_exit():
        futures = {pool.submit(measure, planned): (key, planned) for key, planned in shapes.items()}
        try:
            _follow({future: planned for future, (_, planned) in futures.items()}, say)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    measured = {key: future.result() for future, (key, _) in futures.items()}
    return found | {cell: measured[cache_key(planned, side_by_side)] for cell, planned in missing.items()}


def _in_several_processes(missing: Mapping[str, PlannedTrial]) -> tuple[list[str], str]:
    cells = [cell for cell, planned in missing.items() if planned.trial.config.runtime.processes > 1]
    return cells, "a trial runs in several processes"


def _too_large(missing: Mapping[str, PlannedTrial], side_by_side: int) -> Iterator[tuple[list[str], str]]:
    """Cells of each device that would be killed while they are timed, and perhaps others with them; the
    largest first.

    Their needs are lower bounds: what is left may still turn out too large.
    """
    for device in dict.fromkeys(planned.trial.device for planned in missing.values()):
        available = available_memory(device)
        needs = [need(planned, {}) for planned in missing.values() if planned.trial.device == device]
        needs.sort(key=lambda one: one.bytes)
        cells, why = list[str](), ""
        while available and needs and _together(needs, side_by_side) > available.bytes:
            largest, at_once = needs[-1], min(side_by_side, len(needs))
            alone = largest.bytes > available.bytes
            together = "" if alone else f", {at_once} at once {gigabytes(_together(needs, at_once))}"
            there = f"{gigabytes(available.bytes)} are available ({available.where})"
            why = why or f"a trial takes {largest}{together}, and {there}"
            cells.append(needs.pop().cell)
        yield cells, why


def _together(needs: Sequence[Need], side_by_side: int) -> int:
    """Bytes of the largest needs that may be timed at the same time."""
    return sum(one.bytes for one in needs[-side_by_side:])


def _follow(futures: Mapping[Future[Calibration], PlannedTrial], say: Callable[[str], None]) -> None:
    """Say what each shape takes as it is known, and now and then what is being waited for.

    Raises what the first that failed has raised.
    """
    started, waiting = time.monotonic(), set(futures)
    while waiting:
        done, waiting = wait(waiting, SAY_SECONDS, FIRST_COMPLETED)
        count = f"{len(futures) - len(waiting)} of {len(futures)}"
        for future in done:
            calibration = future.result()
            memory = (calibration.peak_memory_bytes or 0) / 1e6
            step = calibration.seconds_per_step * 1000
            say(f"  {count}: {futures[future].cell}: {step:,.0f} ms a step, {memory:,.0f} MB")
        if not done:
            at = ", ".join(futures[future].cell for future in futures if future.running())
            say(f"  {count} after {time.monotonic() - started:.0f} s; timing {at}")


def _measure(
    planned: PlannedTrial, config_dir: str | None, children: Children
) -> tuple[Calibration, float | None]:
    """The calibration, and the share of its time in which it waited for a core (None: not known)."""
    command = [sys.executable, "-m", "attnres.calibrate", *planned.overrides, "--json"]
    if config_dir:
        command += ["--config-dir", config_dir]
    done = children.run(command)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).split("\n")[-1].removeprefix("error: ")
        why = from_outside(done.returncode) or said
        raise UserError(f"timing {planned.cell} failed: {why} (--no-calibrate skips it)")
    numbers = json.loads(done.stdout.strip().split("\n")[-1])
    measured = Calibration(**{name: numbers[name] for name in Calibration.__dataclass_fields__})
    return measured, numbers["waiting_share"]
