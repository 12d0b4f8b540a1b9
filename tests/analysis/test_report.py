"""The report from end to end, on simulated records, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.load import load_study
from analysis.markdown import escape, name
from analysis.report import main
from analysis.results import compute_results
from analysis.simulate import Truth, simulate_table, write_study
from attnres.cli import run_command

ROOT = Path(__file__).resolve().parents[2]
RULES = {"attnres_full": 1.3, "attnres_block_n8": 1.25}
COMPARISON_KEYS = {"multiplier", "ci_low", "ci_high", "saving", "loss_gap", "p_value", "verdicts"}


def python(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


def study(runs: Path, truth: Truth, **options: Any) -> Path:
    write_study(runs / "s", simulate_table(truth, np.random.default_rng(0)), **options)
    return runs / "s"


def report(runs: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run in this process without figures; returns results.json and report.md."""
    assert main(["study=s", f"runs_dir={runs}", "draws=200", "--no-figures", *arguments]) == 0
    folder = runs / "s" / "report"
    return json.loads((folder / "results.json").read_text()), (folder / "report.md").read_text()


def test_simulate_then_report_as_commands(tmp_path: Path) -> None:
    runs = f"runs_dir={tmp_path}"
    made = python("analysis.simulate", "study=demo", runs, "multipliers=1.25,1.3")
    assert made.returncode == 0, made.stderr
    done = python("analysis.report", "study=demo", runs)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    folder = tmp_path / "demo" / "report"
    lines = done.stdout.splitlines()
    assert lines[-1] == f"report: {folder / 'report.md'}"
    assert re.match(
        r"attnres_block against prenorm: 1\.\d\dx compute \[1\.\d\d, 1\.\d\d\], saves \d+%", lines[0]
    )
    results = json.loads((folder / "results.json").read_text())
    for rule, truth in (("attnres_block", 1.25), ("attnres_full", 1.3)):
        comparison = results["comparisons"][rule]
        assert comparison.keys() >= COMPARISON_KEYS
        assert comparison["ci_low"] < truth < comparison["ci_high"]
    for figure in ("loss_against_compute", "size_gaps", "training_curves"):
        assert (folder / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / f"{figure}.svg").read_text()
        assert f"({figure}.png)" in (folder / "report.md").read_text()


def test_report_answers_first_and_shows_everything(tmp_path: Path) -> None:
    study(tmp_path, Truth(RULES, overhead=0.02), purpose="Which rule saves <b>compute</b>?")
    results, text = report(tmp_path, "claims=1.15")
    first = text.index("## Verdict")
    assert first < text.index("## Compute multipliers") < text.index("## Caveats")
    for line in (results["comparisons"][rule]["verdict_line"] for rule in RULES):
        assert escape(line) in text
    assert r"\<b\>compute" in text
    for words in ("1.15x compute", "m in wall-clock", "not identified", "Leaving out one size"):
        assert words in text
    verdicts = results["comparisons"]["attnres_full"]["verdicts"]
    assert set(verdicts) == {
        "better than baseline",
        "1.10x compute",
        "1.15x compute",
        "1.25x compute",
        "20 % saving",
        "25 % saving",
    }
    assert verdicts["better than baseline"]["verdict"] == "supported"
    folder = tmp_path / "s" / "report"
    tables = {path.stem: pd.read_csv(path) for path in folder.glob("*.csv")}
    assert set(tables) == {"trials", "comparisons", "claims", "sizes", "sensitivity", "laws"}
    assert len(tables["trials"]) == 45 and len(tables["sizes"]) == 10
    exact = results["comparisons"]["attnres_full"]["multiplier"]
    assert tables["comparisons"].set_index("rule")["multiplier"]["attnres_full"] == pytest.approx(
        exact, rel=1e-12
    )


def test_results_hold_the_truth_in_full_precision(tmp_path: Path) -> None:
    study(tmp_path, Truth({"attnres_block": 1.25}, seeds=1, noise=0, misfit=0, overhead=0.02))
    results, _ = report(tmp_path)
    comparison = results["comparisons"]["attnres_block"]
    assert comparison["multiplier"] == pytest.approx(1.25, rel=1e-6)
    assert comparison["saving"] == pytest.approx(0.2, rel=1e-6)
    assert results["laws"]["prenorm"]["exponent"] == pytest.approx(0.057, rel=1e-6)
    assert results["schema"] == 1 and results["unit"] == "FLOP"
    assert results["how"]["command"].startswith("python -m analysis.report study=s")


def test_conventions_correct_for_the_rules_own_work(tmp_path: Path) -> None:
    """m counts the rule's FLOPs; without them the same losses look 2 % better."""
    study(tmp_path, Truth({"attnres_block": 1.25}, seeds=1, noise=0, misfit=0, overhead=0.02))
    results, _ = report(tmp_path)
    conventions = results["comparisons"]["attnres_block"]["conventions"]
    assert conventions["total"]["multiplier"] == pytest.approx(1.25, rel=1e-6)
    assert conventions["without_residual"]["multiplier"] == pytest.approx(1.25 * 1.02, rel=1e-6)


@pytest.mark.parametrize(
    ("truth", "options", "reason"),
    [
        (Truth(sizes=5), {"too_small": "One seed tells nothing."}, "One seed tells nothing."),
        (Truth(sizes=3, seeds=1, decades=0.5), {}, "3 sizes, fewer than the 4"),
    ],
)
def test_a_small_study_says_so_and_supports_nothing(
    tmp_path: Path, truth: Truth, options: dict[str, Any], reason: str
) -> None:
    study(tmp_path, truth, **options)
    results, text = report(tmp_path)
    assert "**Too small to judge a claim.**" in text and reason in text
    (comparison,) = results["comparisons"].values()
    assert {v["verdict"] for v in comparison["verdicts"].values()} == {"cannot tell"}
    assert "too small to judge" in comparison["verdict_line"]


def test_what_was_let_pass_is_printed(tmp_path: Path) -> None:
    folder = study(tmp_path, Truth(sizes=5))
    gone = next(iter(folder.glob("*/record.json")))
    gone.unlink()
    results, text = report(tmp_path, "--allow", "missing")
    assert results["let_pass"][0].startswith("missing: 1 of 30 trials")
    assert "1 of 30 trials have no record" in text
    assert "without a partner of the same size and seed" in text


def test_wall_clock_is_withheld_when_machines_differ(tmp_path: Path) -> None:
    folder = study(tmp_path, Truth(seeds=1))
    results, text = report(tmp_path)
    assert results["comparisons"]["attnres_block"]["wall_clock"] is not None
    assert "side by side with others on that machine" in text
    path = folder / load_study(tmp_path, "s").table["id"].iloc[0] / "record.json"
    for group, key, value, named in (
        ("environment", "cpu", "another", "processor (another, simulated; size1)"),
        ("environment", "threads", 2, "environment.threads (1, 2; size1)"),
        ("environment", "torch", "2.14.0", "environment.torch (2.14.0, absent; size1)"),
        ("runtime", "microbatch_size", 4, "runtime.microbatch_size (4, absent; size1)"),
        ("runtime", "compile", True, "runtime.compile (absent, true; size1)"),
        ("runtime", "checkpoint_activations", True, "runtime.checkpoint_activations (absent, true; size1)"),
        ("runtime", "parallel", "ddp", "runtime.parallel (ddp, none; size1)"),
        ("runtime", "processes", 2, "runtime.processes (1, 2; size1)"),
    ):
        before = path.read_text()
        record = json.loads(before)
        (record if group == "environment" else record["config"]).setdefault(group, {})[key] = value
        path.write_text(json.dumps(record))
        (comparison,) = compute_results(load_study(tmp_path, "s"), draws=100).rules.values()
        assert comparison.wall_clock is None and comparison.wall_clock_median_step is None
        assert comparison.wall_clock_note == f"withheld: trials of one size differ in {named}"
        path.write_text(before)


def test_wall_clock_is_withheld_when_rules_are_computed_in_two_ways(tmp_path: Path) -> None:
    folder = study(tmp_path, Truth(RULES, sizes=4, seeds=1))
    for path in folder.glob("*/record.json"):
        record = json.loads(path.read_text())
        way = {"attnres_full": "fused", "attnres_block_n8": "reference"}.get(record["rule"])
        record["config"]["residual"] = {"rule": record["rule"], **({"implementation": way} if way else {})}
        path.write_text(json.dumps(record))
    results, text = report(tmp_path)
    for comparison in results["comparisons"].values():
        assert comparison["wall_clock"] is None
    assert "the AttnRes rules differ in residual.implementation (fused, reference)" in text


def test_a_poorly_known_exponent_is_said(tmp_path: Path) -> None:
    study(tmp_path, Truth({"attnres_block": 1.02}, sizes=5, decades=0.4, misfit=0.02, noise=0.0002))
    results, text = report(tmp_path)
    (comparison,) = results["comparisons"].values()
    assert results["too_small"] is None
    assert "alpha is known only to" in comparison["not_judged"] and comparison["not_judged"] in text
    assert {v["verdict"] for v in comparison["verdicts"].values()} == {"cannot tell"}
    assert comparison["verdicts"]["25 % saving"]["interval_verdict"] == "rejected"


def test_overrides_of_the_launch_are_listed(tmp_path: Path) -> None:
    folder = study(tmp_path, Truth(sizes=4, seeds=1))
    plan = json.loads((folder / "study.json").read_text())
    plan["overrides"] = ["optim.beta2=0.9", "budget=tokens"]
    (folder / "study.json").write_text(json.dumps(plan))
    results, text = report(tmp_path)
    assert results["overrides"] == plan["overrides"]
    assert "- Launched with optim.beta2=0.9, budget=tokens." in text.split("## How this was made")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study=s", "sizes=3"], "sizes=3: unknown key"),
        (["study="], "study=: name the study"),
        ([], "study=: name the study"),
        (["study=../x"], "study=../x: name the study"),
        (["study=s", "report"], "report=: write key=value"),
        (["study=s", "--force"], "--force: unknown option"),
        (["study=s", "confidence=95"], "confidence=95: must be a number from 0.5"),
        (["study=s", "draws=many"], "draws=many: must be a number"),
        (["study=s", "claims=lots"], "claims=lots: write a multiplier"),
        (["study=s", "where=rate"], "where=rate: write where="),
        (["study=s", "--allow=all"], "--allow=all: one of missing"),
        (["study=none"], "study=none: there is no folder"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    study(tmp_path, Truth(sizes=3, seeds=1))
    assert run_command(main, [*arguments, f"runs_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_refusal_as_a_command(tmp_path: Path) -> None:
    study(tmp_path, Truth(sizes=3))
    done = python("analysis.report", "study=s", f"runs_dir={tmp_path}", "baseline=mhc")
    assert done.returncode == 2
    expected = "is not a rule of this study; it has prenorm, attnres_block"
    assert done.stderr == f"error: baseline=mhc: {expected}\n"
    assert done.stdout == ""


def test_help_is_fast_and_complete() -> None:
    started = time.monotonic()
    done = python("analysis.report", "--help")
    assert done.returncode == 0
    assert time.monotonic() - started < 20  # about 1 s; loose, because machines are shared
    for words in ("runs_dir", "--allow", "mixed_validation", "Examples", "without_residual"):
        assert words in done.stdout
    assert python("analysis.simulate", "--help").returncode == 0


def test_matplotlib_and_torch_are_not_imported_for_numbers(tmp_path: Path) -> None:
    study(tmp_path, Truth(seeds=1))
    code = (
        "import sys; from analysis.report import main;"
        f"main(['study=s', 'runs_dir={tmp_path}', 'draws=100', '--no-figures']);"
        "print([m for m in ('torch', 'matplotlib', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


def test_names_cannot_act_as_markdown() -> None:
    assert name("attnres_block_n8") == "`attnres_block_n8`"
    assert name("a|b") == r"a\|b"
    assert name("a`b") == r"a\`b"
    assert escape("<script>\n# x") == r"\<script\> \# x"
    assert escape("attnres_full saves -4 %") == "attnres_full saves -4 %"
    assert escape("_now_ and *then*") == r"\_now\_ and \*then\*"
    assert escape("- item") == r"\- item" and escape("1. item") == r"1\. item"
    assert escape("1.10x compute") == "1.10x compute"


def test_the_report_says_what_was_trained(tmp_path: Path) -> None:
    study(tmp_path, Truth({"attnres_block": 1.25}))
    assert python("analysis.report", "study=s", f"runs_dir={tmp_path}", "--no-figures").returncode == 0
    report = tmp_path / "s" / "report"
    sizes = json.loads((report / "results.json").read_text())["design"]["sizes"]
    text = (report / "report.md").read_text()
    assert len(sizes) == 5
    for size in sizes:
        assert f"| `{size['size']}` | {size['non_embedding_parameters']:,.0f} | {size['tokens']:,} |" in text


def test_simulate_refuses_nonsense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from analysis.simulate import main as simulate

    for argument, message in (
        ("sizes=many", "must be a number"),
        ("size=3", "unknown key"),
        ("noise=-1", "must be from 0 to 1"),
    ):
        assert run_command(simulate, ["study=d", f"runs_dir={tmp_path}", argument]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "d").mkdir()
    assert run_command(simulate, ["study=d", f"runs_dir={tmp_path}"]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.slow
def test_a_large_report_is_written(tmp_path: Path) -> None:
    """6 rules x 6 sizes x 5 seeds, 2,000 draws, every row and figure."""
    rules = {f"attnres_block_n{n}": 1 + 0.05 * n for n in range(1, 6)}
    study(tmp_path, Truth(rules, sizes=6, seeds=5, overhead=0.02))
    done = python("analysis.report", "study=s", f"runs_dir={tmp_path}", "draws=2000")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "s" / "report").glob("*.png"))) == 3
