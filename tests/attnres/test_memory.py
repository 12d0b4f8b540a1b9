"""Freed memory stays in the process: large blocks of one step are not mapped afresh in the next."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from attnres.memory import keep_freed_memory

def page_faults_of(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        b"x" * 40_000_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

page_faults_of(3)
print(page_faults_of(3))
assert keep_freed_memory()
page_faults_of(10)  # the heap grows for some rounds before every block finds its place
print(page_faults_of(3))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc")
def test_no_page_is_mapped_again():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = map(int, run.stdout.split())
    assert before > 1000  # else this test, and the module, have lost their reason
    assert after < before / 10
