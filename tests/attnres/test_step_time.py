"""The benchmark compares what it says it compares and refuses what it does not know. No time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "step_time.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_table_and_json_of_a_tiny_shape(tmp_path):
    shape = ("--width", "16", "--depth", "2", "--dtype", "float32", "--batch", "2", "--context", "16")
    output = tmp_path / "rows.json"
    done = run(*shape, "--vocabulary", "64", "--repeats", "2", "--threads", "1", "--json", str(output))
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    pairs = {(row["rule"], row["implementation"]) for row in rows}
    assert {("prenorm", "plain"), ("stand_in", "plain"), ("matmul", "bare")} < pairs
    assert {
        (rule, how) for rule in ("attnres_full", "attnres_block") for how in ("fused", "reference")
    } < pairs
    for row in rows:
        assert (row["width"], row["depth"], row["dtype"], row["threads"]) == (16, 2, "float32", 1)
        assert row["step_ms"] > 0
        assert row["ratio_to_prenorm"] > 0
        assert (row["peak_memory_ratio"] is None) == (row["rule"] == "matmul")
        assert f"| {row['rule']} | {row['implementation']} |" in done.stdout
    assert rows[0]["ratio_to_prenorm"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--rules", "full"), "--rules=full"),
        (("--width", "8"), "--depth"),
        (("--repeats", "0"), "--repeats=0"),
    ],
)
def test_mistakes_are_named(arguments, named):
    done = run(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
