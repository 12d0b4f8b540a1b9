"""Any CSV of finished runs, one row per run, as the input of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.gate import Gate, check_losses, rules_of, why_no_multiplier
from analysis.points import read_csv
from analysis.study_data import StudyData, empty_cells
from attnres.errors import ConfigError, DataError

CONVENTION = "as_given"
QUANTITIES = ("size", "rule", "seed", "loss", "compute", "N", "D", "seconds", "standard_error")
NEEDED = ("size", "rule", "loss")
LABELS = ("size", "rule", "seed")


def load_table(path: Path, columns: str, baseline: str, folder: Path, allow: Sequence[str] = ()) -> StudyData:
    """Read a CSV as a study whose report goes to `folder`.

    `columns` maps quantities to columns, `loss=val_loss,compute=pf_days*8.64e19`; a quantity whose column
    has its own name need not be named. compute is in FLOP; without it C = 6 N D. Raises DataError or
    ConfigError, one line.
    """
    gate = Gate(f"source={path}", allow)
    if set(allow) - {"missing"}:
        raise ConfigError("--allow", ",".join(allow), "a table has no records; only missing can be let pass")
    try:
        header, rows = read_csv(path)
    except DataError as error:
        raise DataError(f"source={error}") from None
    if not rows:
        raise DataError(f"source={path}: has a header and no rows")
    raw = pd.DataFrame([row.cells for row in rows], columns=header)
    values = {key: _column(raw, key, text, path) for key, text in _mapping(columns, raw).items()}
    for key in NEEDED:
        if key not in values:
            raise ConfigError(
                "columns", columns, f"needs {key}=COLUMN; the file has {', '.join(raw.columns)}"
            )
    if "compute" not in values:
        if not {"N", "D"} <= values.keys():
            raise ConfigError(
                "columns", columns, "needs compute=COLUMN in FLOP, or N=COLUMN and D=COLUMN for 6 N D"
            )
        values["compute"] = 6 * values["N"] * values["D"]
        meaning = "6 N D, from the file's N and D"
    else:
        meaning = "C as the file gives it"
    table = _tidy(values)
    rules = rules_of(table, baseline)
    empty = empty_cells(table, rules)
    gate.check("missing", empty, f"{len(empty)} cells of the grid have no row")
    study = path.stem
    check_losses(table, f"study={study}")
    repeated = table[table.duplicated(["size", "rule", "seed"])]
    if len(repeated):
        raise DataError(f"source={path}: two rows for {repeated['trial'].iloc[0]}; map seed=COLUMN")
    return StudyData(
        name=study,
        folder=folder,
        description="",
        purpose="",
        baseline=rules[0],
        rules=rules,
        claims=(),
        too_small=False,
        convention=CONVENTION,
        conventions={CONVENTION: meaning},
        table=table,
        tuned=table,
        where={},
        allowed=gate.allow,
        let_pass=tuple(gate.let_pass),
        notes=(
            f"losses are from {path.name}: that they are final, and on one validation set, was not checked",
        ),
        no_multiplier=why_no_multiplier(table, f"study={study}"),
    )


def _mapping(text: str, raw: pd.DataFrame) -> dict[str, str]:
    mapping = {key: key for key in QUANTITIES if key in raw.columns}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, column = (piece.strip() for piece in part.partition("="))
        if not equals or key not in QUANTITIES:
            raise ConfigError(
                "columns", part, f"write quantity=column; quantities are {', '.join(QUANTITIES)}"
            )
        mapping[key] = column
    return mapping


def _column(raw: pd.DataFrame, key: str, text: str, path: Path) -> pd.Series[Any]:
    """A column, or a column times a number (`pf_days*8.64e19`)."""
    column, factor = text, 1.0
    if text not in raw.columns and "*" in text:
        column, _, number = (part.strip() for part in text.rpartition("*"))
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError("columns", f"{key}={text}", f"{number!r} is not a positive number")
    if column not in raw.columns:
        raise ConfigError("columns", f"{key}={text}", f"{path.name} has {', '.join(map(str, raw.columns))}")
    if key in LABELS:
        labels = raw[column].str.strip()
        if (labels == "").any():
            row = int((labels == "").to_numpy().argmax()) + 1
            raise DataError(f"source={path}: {column} in row {row}: is empty; it is the {key}")
        return labels
    numbers = pd.to_numeric(raw[column], errors="coerce")
    for row in range(len(raw)):
        if numbers.isna().iloc[row]:
            value = str(raw[column].iloc[row])
            raise DataError(f"source={path}: {column}={value!r} in row {row + 1}: is not a number")
    return numbers * factor


def _tidy(values: Mapping[str, pd.Series[Any]]) -> pd.DataFrame:
    table = pd.DataFrame({key: values[key] for key in ("size", "rule", "loss", "compute")})
    table["seed"] = values.get("seed", "0")
    table["trial"] = table["size"] + " " + table["rule"] + " seed " + table["seed"]
    table["id"] = [f"row {i + 1}" for i in range(len(table))]
    table[f"compute_{CONVENTION}"] = table["compute"]
    table["loss_standard_error"] = values.get("standard_error", math.nan)
    table["train_seconds"] = values.get("seconds", math.nan)
    table["median_step_train_seconds"] = math.nan
    table["tokens"] = values.get("D", table["compute"] * math.nan)
    table["non_embedding_parameters"] = values.get("N", math.nan)
    return table.assign(attempts=1, machine="not recorded", commit=None, learning_rate=math.nan)
