"""Output that cannot be written is an error, and closed standard files take no other file's place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnres.cli import take_flag, take_option
from attnres.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PRINT = """
import sys
from attnres.cli import run_command
def main(argv):
    file = open(argv[0], "w")
    assert file.fileno() > 2, file.fileno()
    if len(argv) > 1:
        print("something")
    return 0
sys.exit(run_command(main))
"""


def shell(tmp_path: Path, words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "print.py").write_text(PRINT)
    command = f"exec '{sys.executable}' print.py {words}"
    return subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("file say", 0, ""),
        ("file say >/dev/full", 1, "error: standard output: No space left on device\n"),
        ("file say >&-", 1, "error: standard output: is closed, and there is something to print\n"),
        ("file >&-", 0, ""),
        ("file say <&- 2>&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written(tmp_path: Path, words: str, code: int, line: str) -> None:
    done = shell(tmp_path, words)
    assert (done.returncode, done.stderr) == (code, line)
    assert (tmp_path / "file").read_text() == ""


def test_options_are_given_once_and_with_a_value() -> None:
    argv = ["a=1", "--to", "x", "--fast"]
    assert (take_option(argv, "--to"), take_flag(argv, "--fast"), argv) == ("x", True, ["a=1"])
    assert take_option(argv, "--to") is None and not take_flag(argv, "--fast")
    for words in (["--to=1", "--to", "2"], ["--to", "1", "--to=1"]):
        with pytest.raises(UserError, match="^--to: is given twice$"):
            take_option(words, "--to")
    for words in (["--to"], ["--to="], ["--to", ""]):
        with pytest.raises(UserError, match="^--to: needs a value$"):
            take_option(words, "--to")
    with pytest.raises(UserError, match="^--fast: is given 3 times$"):
        take_flag(["--fast"] * 3, "--fast")
