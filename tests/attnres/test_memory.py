"""Freed memory stays in the process: large tensors of one step are not mapped afresh in the next."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from attnres.memory import keep_freed_memory

def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(30):  # the heap grows for some steps before every block finds its place
    torch.ones(10_000_000)
before = page_faults()
for _ in range(3):
    torch.ones(10_000_000)  # 40 MB
print(page_faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc")
def test_no_page_is_mapped_again():
    faults = {}
    for how in ("keep", "return"):
        run = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
        faults[how] = int(run.stdout)
    assert faults["keep"] < faults["return"] / 5
    assert faults["return"] > 1000  # else this test, or the module, has lost its reason
