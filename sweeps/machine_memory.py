"""Memory that trials can have here: of the machine, of the control group that it is limited by, of a GPU."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**60  # cgroup v1 writes a number near 2^63 where there is no limit


@dataclass(frozen=True)
class Available:
    """Bytes that can still be taken, and of what."""

    bytes: int
    where: str


def available_memory(device: str, root: Path = Path("/")) -> Available | None:
    """What trials on this device ("cpu" or "cuda") can have now; None where nothing here says."""
    if device == "cuda":
        gpus = visible_gpus()
        return Available(gpus[0].free_bytes, f"GPU {gpus[0].name}") if gpus else None
    machine = _machine(root)
    limits = [bound for bound in (machine, *_control_groups(root)) if bound is not None]
    return min(limits, key=lambda bound: bound.bytes, default=None)


def _machine(root: Path) -> Available | None:
    found = re.search(r"MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"))
    return Available(int(found[1]) * 1024, "this machine") if found else None


def _control_groups(root: Path) -> list[Available]:
    """What is left of the limit of every group that this process is in, versions 2 and 1.

    Cached files count as used, but the kernel drops those that are inactive before it kills.
    """
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / group.lstrip("/")
        # A container sees its own group at the top, whatever the path says: there the walk finds it.
        for place in (folder, *folder.parents):
            limit, used = (_number(place / name) for name in names)
            if limit is not None and used is not None and limit < _UNLIMITED:
                left = limit - used + _droppable(_text(place / "memory.stat"))
                found.append(Available(max(0, left), f"its memory limit of {limit / 1e9:.1f} GB"))
            if place == top:
                break
    return found


def _droppable(statistics: str) -> int:
    """Bytes of inactive cached files: version 1 has those of the groups below under a name of their own."""
    values = dict(line.split() for line in statistics.splitlines())
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


@dataclass(frozen=True)
class Gpu:
    name: str
    free_bytes: int


@functools.cache
def visible_gpus() -> tuple[Gpu, ...]:
    """GPUs that a trial started here would see, the one that it would use first. Empty without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    found = {}
    for line in done.stdout.splitlines():
        index, uuid, name, free = (part.strip() for part in line.split(","))
        if free.isdigit():
            found[index] = found[uuid] = Gpu(name, int(free) * 2**20)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(gpu for key, gpu in found.items() if key.isdigit())
    return tuple(found[key.strip()] for key in chosen.split(",") if key.strip() in found)
