"""Names and texts of others in reports: each place of its own, in all three kinds of report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rows_support import edit, trials

from analysis.report import main
from analysis.simulate import Truth, simulate_table, write_study


def nasty(place: str) -> str:
    return f"{place}|`c`<i>{place}</i>\n# {place}"


def of_multipliers() -> pd.DataFrame:
    table = simulate_table(Truth({nasty("rule"): 1.25}, sizes=4, seeds=2), np.random.default_rng(0))
    return table.replace({"size": {"size1": nasty("size")}})


def of_rows() -> pd.DataFrame:
    return trials({"prenorm": (2.0, 2.1), nasty("rule"): (1.9, 2.0)}, size=nasty("size"))


def of_rates() -> pd.DataFrame:
    return pd.concat(
        trials({"prenorm": (loss, loss), nasty("rule"): (loss, loss + 0.1)}, size=nasty("size")).assign(
            **{"optim.learning_rate": rate}
        )
        for rate, loss in ((0.01, 2.0), (0.02, 1.9), (0.04, 2.0))
    )


@pytest.mark.parametrize(
    ("kind", "table"), [("multiplier", of_multipliers()), ("rows", of_rows()), ("rates", of_rates())]
)
def test_no_text_of_others_acts_as_markdown(tmp_path: Path, kind: str, table: pd.DataFrame) -> None:
    folder = tmp_path / "s"
    write_study(folder, table, axes="optim.learning_rate" if kind == "rates" else "")
    texts = {key: nasty(key) for key in ("purpose", "too_small")}
    texts = texts if kind != "rates" else {"purpose": nasty("purpose")}
    claims = [{"name": nasty("claim"), "multiplier": 1.25}] if kind == "multiplier" else []
    edit(folder / "study.json", report=kind, overrides=[nasty("override")], claims=claims, **texts)
    for path in folder.glob("*/record.json"):
        machine = json.loads(path.read_text())["environment"] | {"cpu": nasty("machine")}
        edit(path, environment=machine | {"commit": nasty("commit")})
    stray = folder / "stray|`c`<i>"  # a folder of somebody else, whose name is in a note
    shutil.copytree(path.parent, stray)
    edit(stray / "record.json", trial_id=stray.name)
    assert main(["study=s", f"runs_dir={tmp_path}", "draws=100", "--no-figures"]) == 0
    report = (folder / "report" / "report.md").read_text()
    places = {"rule", "size", "override", "commit", *texts, *(["claim", "machine"] if claims else [])}
    for place in places:
        assert rf"{place}\|\`c\`\<i\>{place}\</i\> \# {place}" in report, place  # in one line
    assert r"stray\|\`c\`\<i\>" in report
    assert "<i>" not in report.replace(r"\<i", "")
    assert "|`c`" not in report.replace(r"\|", "")
    assert not any(line.startswith(tuple(f"# {place}" for place in places)) for line in report.splitlines())
