"""The benchmark compares what it says it compares and refuses what it does not know. No time is asserted."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "step_time.py"


sys.path.insert(0, str(SCRIPT.parent))
measurement = importlib.import_module("measurement")


@pytest.mark.parametrize(("count", "rank"), [(1, 0), (5, 0), (8, 0), (9, 1), (15, 3), (25, 7)])
def test_ranks_of_the_interval_of_a_median_are_those_of_the_sign_test(count, rank):
    assert measurement._rank(count) == rank


def test_ratios_are_taken_within_a_round_and_slow_contenders_take_part_less_often():
    """A clock that only the steps move: each round is twice as slow as the one before, ratios stay."""
    now, calls = [0.0], []

    def step(name, cost):
        def run():
            calls.append(name)
            now[0] += cost * 2 ** (calls.count("first") // 10)

        return run

    steps = [step("first", 1.0), step("twice", 2.0), step("ten", 10.0)]
    first, twice, ten = measurement.interleave(steps, 9, lambda: now[0], cuda=False)
    assert first.ratio == 1.0 and first.ratio_interval == (1.0, 1.0)
    assert first.rounds == twice.rounds == 9 and ten.rounds == measurement.SLOW_ROUNDS
    assert twice.ratio == pytest.approx(2.0)
    assert ten.ratio == pytest.approx(10.0)


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
        (("--implementations", "fast"), "--implementations=fast"),
        (("--json", "no/such/folder/rows.json"), "--json=no/such/folder/rows.json: cannot be written"),
        (("--markdown", "."), "--markdown=.: cannot be written"),
    ],
)
def test_mistakes_are_named(arguments, named):
    done = run(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
