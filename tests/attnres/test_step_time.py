"""The benchmark compares what it says it compares and refuses what it does not know. No time is asserted."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnres import rules

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "step_time.py"


sys.path.insert(0, str(SCRIPT.parent))
measurement = importlib.import_module("measurement")
step_time = importlib.import_module("step_time")
profile_step = importlib.import_module("profile_step")


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


def test_quick_steps_are_repeated_and_rounds_start_with_another_contender():
    """Costs of 0.05 and 0.02 s: 4 and 10 steps of a measurement of 0.2 s, which give the time of one."""
    now, calls = [0.0], []

    def step(name, cost):
        def run():
            calls.append(name)
            now[0] += cost

        return run

    steps = [step("a", 0.05), step("b", 0.02)]
    timings = measurement.interleave(steps, 2, lambda: now[0], cuda=False)
    assert [timing.step_ms for timing in timings] == pytest.approx([50, 20])
    measured = calls[4:]  # after the warm-up and the first timing of each
    assert measured == ["a"] * 4 + ["b"] * 20 + ["a"] * 4


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_table_and_json_of_a_tiny_shape(tmp_path):
    shape = ("--width", "16", "--depth", "2", "--dtype", "float32", "--batch", "2", "--context", "16")
    output = tmp_path / "rows.json"
    rules = "attnres_full,attnres_block,attnres_full_sigmoid,stand_in,matmul"  # each takes processes
    options = ("--vocabulary", "64", "--repeats", "2", "--threads", "1", "--rules", rules)
    done = run(*shape, *options, "--json", str(output))
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    pairs = {(row["rule"], row["implementation"]) for row in rows}
    plain = {("prenorm", "plain"), ("stand_in", "plain"), ("matmul", "bare")}
    assert plain | {("attnres_full_sigmoid", "fused")} < pairs
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


def refusal(main, arguments, capsys) -> str:
    """The last line of what a benchmark that exits with 2 says, and that it has measured nothing."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    *usage, line = printed.err.strip().splitlines()
    assert "error:" not in "".join(usage)
    return line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--rules", "full"), "--rules=full: unknown"),
        (("--rules", ","), "--rules=,: names nothing"),
        (("--width", "8"), "--width and --depth"),
        (("--width", "7", "--depth", "1"), "--width=7: must be even"),
        (("--repeats", "0"), "--repeats=0: must be positive"),
        (("--threads", "100000"), "--threads=100000: more than"),
        (("--implementations", "fast"), "--implementations=fast: unknown"),
        (("--rules", "attnres_full", "--implementations", "plain"), "--implementations=plain: no chosen"),
        (("--json", "no/such/folder/rows.json"), "--json=no/such/folder/rows.json: cannot be written"),
        (("--json", ""), "--json=: cannot be written"),
        (("--markdown", "."), "--markdown=.: cannot be written"),
        (("--memory-of", "prenorm", "fused"), "--memory-of=prenorm fused: unknown"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(arguments, named, capsys):
    assert named in refusal(step_time.main, arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--rules", "full"), "--rules=full: unknown"),
        (("--rules", "prenorm,"), "--rules=: unknown"),
        (("--width", "7"), "--width=7: must be even"),
        (("--depth", "0"), "--depth=0: must be positive"),
        (("--steps", "0"), "--steps=0: must be positive"),
        (("--threads", "100000"), "--threads=100000: more than"),
        (("--rules", "attnres_full_h4", "--width", "6"), "residual.heads=4: does not divide model.width=6"),
    ],
)
def test_mistakes_of_a_profile_are_named(arguments, named, capsys):
    assert named in refusal(profile_step.main, arguments, capsys)


def test_every_row_of_the_table_of_rules_is_timed_and_what_does_not_fit_is_said(capsys):
    timed = {rule for rule, _ in step_time.names()}
    assert {rules.timed_as(spec) for spec in rules.all_specs()} <= timed
    arguments = step_time.parse(["--width", "6", "--depth", "1", "--rules", "attnres_full_h4,rezero"])
    pairs = step_time.contenders(arguments, step_time.shapes(arguments)[0])
    assert pairs == [("prenorm", "plain"), ("rezero", "plain")]
    assert "not timed: attnres_full_h4: residual.heads=4" in capsys.readouterr().err


def test_kernels_are_timed_on_cuda_only_and_said_to_be_left_out_where_they_are_asked_for(capsys):
    def pairs(*words):
        arguments = step_time.parse(["--width", "16", "--depth", "1", "--rules", "attnres_full", *words])
        return step_time.contenders(arguments, step_time.shapes(arguments)[0])

    ours = [("attnres_full", "fused"), ("attnres_full", "reference")]
    assert pairs() == [("prenorm", "plain"), *ours]
    assert not capsys.readouterr().err
    assert pairs("--implementations", "fused,kernel") == [("prenorm", "plain"), ours[0]]
    said = "not timed: attnres_full: residual.implementation=kernel needs --device cuda\n"
    assert said in capsys.readouterr().err


def test_asking_whether_a_file_can_be_written_changes_nothing(tmp_path):
    old, new, binary = tmp_path / "old.md", tmp_path / "new.md", tmp_path / "binary.md"
    old.write_text("kept")
    binary.write_bytes(b"\xff")
    assert step_time.cannot_write(str(old)) is step_time.cannot_write(str(new)) is None
    assert old.read_text() == "kept" and not new.exists()
    assert step_time.cannot_write(str(binary)) == "the file there is not text"
    assert binary.read_bytes() == b"\xff"


@pytest.mark.slow
def test_exit_code_of_the_script():
    done = run("--repeats", "0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
