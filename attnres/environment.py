"""What a trial ran on, for its record. No host or user names: records are published."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from attnres.trial import Trial

SOURCE_DIR = Path(__file__).resolve().parents[1]


def describe(trial: Trial) -> dict[str, Any]:
    """Python, torch, platform, processor, threads, device, number format and the commit of this code."""
    commit, modified = source_commit()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": processor_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # which vector kernels torch picks
        "cpu_cores": os.cpu_count(),
        "threads": trial.config.runtime.threads,
        "device": trial.device,
        "device_name": torch.cuda.get_device_name() if trial.device == "cuda" else processor_name(),
        "dtype": trial.config.runtime.dtype,
        "commit": commit,
        "source_modified": modified,
    }


def processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def source_commit() -> tuple[str | None, bool | None]:
    """Commit of the checkout this code runs from and whether its tracked files differ; None, None elsewhere.

    An installed copy may sit in the repository of somebody else's project, so the root has to be this
    package's.
    """
    if not (SOURCE_DIR / ".git").exists():
        return None, None
    try:
        commit = _git("rev-parse", "HEAD")
        modified = bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout that it refuses to read
        return None, None
    return commit, modified


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(SOURCE_DIR), *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=10, stdin=subprocess.DEVNULL
    )
    return result.stdout.strip()
