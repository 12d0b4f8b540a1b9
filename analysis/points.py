"""A CSV with named columns -> arrays N, D, C, loss; every row that is left out is counted.

Two tiny languages, parsed here and never evaluated as code:
- a column: `params`, `params_m*1e6`, `Training FLOP/6/Model Size`: columns and numbers joined by * and /;
  quote a column ("tokens/s") whose name has one of those characters.
- a condition: `C<1e21`, `N>=1e8 and rule==prenorm`: name, operator, value, joined by `and`. The name is one
  of the mapped ones (N, D, C, loss) or a column; text is compared with == and != only.
"""

from __future__ import annotations

import csv
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.arrays import Array
from attnres.errors import ConfigError, DataError

QUANTITIES = ("N", "D", "C", "loss")
FLOPS_PER_PARAMETER_TOKEN = 6.0
OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}


# A column or a number, with the sign before it (none at the start) up to the next sign or the end.
FACTOR = re.compile(
    r"""\s*(?P<sign>^|(?<!^)[*/])\s*(?:(?P<mark>["'`])(?P<quoted>.+?)(?P=mark)|(?P<plain>[^*/]+?))\s*(?=[*/]|$)"""
)


@dataclass(frozen=True)
class Points:
    """Values by quantity, rows in file order; how many rows were left out and why; how C or D came about."""

    values: Mapping[str, Array]
    expressions: Mapping[str, str]
    rows: int
    left_out: Mapping[str, int]

    @property
    def used(self) -> int:
        return self.rows - sum(self.left_out.values())


@dataclass(frozen=True)
class Row:
    """A row of a file with its line number, for messages."""

    cells: Mapping[str, str]
    line: int

    def number(self, column: str) -> float:
        text = self.cells[column].strip()
        try:
            if "_" in text or not text.isascii():  # which Python takes for digits, and no table means
                raise ValueError
            return float(text)
        except ValueError:
            raise DataError(f"{column}={text!r} (line {self.line}): is not a number") from None


@dataclass(frozen=True)
class Expression:
    """Product of columns and numbers; `factors` are (column or number, +1 or -1)."""

    text: str
    factors: tuple[tuple[str | float, int], ...]

    def columns(self) -> list[str]:
        return [factor for factor, _ in self.factors if isinstance(factor, str)]

    def value(self, row: Row) -> float:
        result = 1.0
        for factor, power in self.factors:
            number = row.number(factor) if isinstance(factor, str) else factor
            if power < 0 and number == 0:
                raise DataError(f"{factor}=0 (line {row.line}): cannot divide by it")
            try:
                result *= number**power
            except OverflowError:
                result = math.inf
        return result


@dataclass(frozen=True)
class Condition:
    """One comparison of a --where text."""

    text: str
    name: str
    operator: str
    value: str

    def holds(self, row: Row, mapped: Mapping[str, Expression]) -> bool:
        compare = OPERATORS[self.operator]
        try:
            limit: float | str = float(self.value)
        except ValueError:
            limit = self.value
        if isinstance(limit, str):
            return compare(row.cells[self.name].strip(), limit)
        number = mapped[self.name].value(row) if self.name in mapped else row.number(self.name)
        return compare(number, limit)


def read_points(
    path: Path,
    columns: str,
    needed: Sequence[str],
    where: str | None = None,
    drop_highest: int = 0,
    drop_empty: bool = False,
) -> Points:
    """Read the needed quantities of a CSV file.

    `columns` maps them: `N=params,D=tokens,loss=val_loss`. Of N, D, C one may be missing; it then comes
    from C = 6 N D. `drop_highest` leaves out that many rows of the highest loss, after `where`. `drop_empty`
    leaves out rows with an empty needed cell instead of refusing them.
    Raises ConfigError or DataError naming the field and the value.
    """
    header, rows = read_csv(path)
    mapped = parse_columns(columns, header)
    known = _with_derived(mapped, header)
    conditions = parse_where(where, header, known) if where else []
    quantities = [q for q in QUANTITIES if q in mapped and q in _sources(needed, mapped)]
    used = {column for quantity in quantities for column in mapped[quantity].columns()}
    left_out = {"where": 0, "empty": 0, "drop_highest": 0}
    kept = []
    for row in rows:
        if drop_empty and any(not row.cells[column].strip() for column in used):
            left_out["empty"] += 1
        elif not all(condition.holds(row, known) for condition in conditions):
            left_out["where"] += 1
        else:
            kept.append(row)
    values = {
        quantity: np.array([_positive(quantity, mapped, row) for row in kept]) for quantity in quantities
    }
    expressions = {quantity: mapped[quantity].text for quantity in quantities}
    _derive(values, expressions, needed)
    if drop_highest < 0:
        raise ConfigError("--drop-highest", drop_highest, "must not be negative")
    if drop_highest:
        # Ties are broken by the other quantities, so the choice does not depend on the order of rows.
        order = np.lexsort(
            [values[quantity] for quantity in sorted(values) if quantity != "loss"] + [values["loss"]]
        )
        keep = np.sort(order[: max(len(kept) - drop_highest, 0)])
        left_out["drop_highest"] = len(kept) - len(keep)
        values = {quantity: array[keep] for quantity, array in values.items()}
    return Points(values, expressions, len(rows), left_out)


def read_csv(path: Path) -> tuple[list[str], list[Row]]:
    """Header and non-empty rows of a CSV file. Raises DataError, one line, for what is no such table."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a folder, not a CSV file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV text file ({error})") from None
    if not any(header):
        raise DataError(f"{path}: is empty; a header and rows are expected")
    twice = next((name for name in header if name and header.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: column {twice!r} occurs twice in the header")
    for number, cells in lines:
        if len(cells) != len(header):
            raise DataError(f"{path}: line {number} has {len(cells)} cells, the header {len(header)}")
    return header, [Row(dict(zip(header, cells, strict=True)), number) for number, cells in lines]


def parse_columns(text: str, header: Sequence[str]) -> dict[str, Expression]:
    """`N=params,D=tokens*1e9,loss=val_loss` -> expressions."""
    mapped = {}
    for part in re.split(r",(?=\s*\w+\s*=)", text):
        name, equals, expression = (piece.strip() for piece in part.partition("="))
        name = "loss" if name == "L" else name
        if not equals or not expression:
            raise ConfigError(
                "--columns", part.strip(), "write NAME=column, for example N=params,loss=val_loss"
            )
        if name not in QUANTITIES:
            raise ConfigError("--columns", part.strip(), f"the name is one of {', '.join(QUANTITIES)}")
        if name in mapped:
            raise ConfigError("--columns", part.strip(), f"{name} is given twice")
        mapped[name] = parse_expression(expression, header, f"--columns {name}")
    return mapped


def parse_expression(text: str, header: Sequence[str], field: str) -> Expression:
    """`column`, `column*1e6`, `a/6/b`; a text that is a column as a whole is that column."""
    if text in header:
        return Expression(text, ((text, 1),))
    factors: list[tuple[str | float, int]] = []
    position = 0
    while position < len(text) or not factors:
        match = FACTOR.match(text, position)
        if match is None:
            why = f"{text[position:]!r}: write columns and numbers joined by * and /"
            raise ConfigError(field, text, why)
        position = match.end()
        piece = match["quoted"] or match["plain"].strip()
        power = -1 if match["sign"] == "/" else 1
        if piece in header:
            factors.append((piece, power))
            continue
        try:
            factors.append((float(piece), power))
        except ValueError:
            raise ConfigError(field, text, f"no column {piece!r}; columns are {', '.join(header)}") from None
    if not any(isinstance(factor, str) for factor, _ in factors):
        raise ConfigError(field, text, f"names no column; columns are {', '.join(header)}")
    return Expression(text, tuple(factors))


def parse_where(text: str, header: Sequence[str], mapped: Mapping[str, Expression]) -> list[Condition]:
    """`C<1e21 and rule==prenorm` -> conditions."""
    conditions = []
    for part in re.split(r"\s+and\s+", text.strip()):
        match = re.fullmatch(r"""\s*(["'`]?)(.+?)\1\s*(<=|>=|==|!=|<|>|=)\s*(["']?)([^<>=!]+?)\4\s*""", part)
        if match is None:
            raise ConfigError(
                "--where", part, "write name operator value, joined by `and`: C<1e21 and N>=1e8"
            )
        name, sign, value = match.group(2), match.group(3), match.group(5)
        if name not in mapped and name not in header:
            raise ConfigError("--where", part, f"no column {name!r}; columns are {', '.join(header)}")
        if not _is_number(value) and (sign not in ("==", "=", "!=") or name in mapped):
            raise ConfigError("--where", part, f"{value!r} is not a number")
        conditions.append(Condition(part, name, sign, value))
    return conditions


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _sources(needed: Sequence[str], mapped: Mapping[str, Expression]) -> set[str]:
    """The mapped quantities to read: the needed ones, and what a missing one is computed from."""
    sources = set(needed)
    for quantity in needed:
        if quantity in mapped:
            continue
        others = [other for other in ("N", "D", "C") if other != quantity]
        if quantity == "loss" or not all(other in mapped for other in others):
            how = "" if quantity == "loss" else f", or {others[0]} and {others[1]}"
            raise ConfigError("--columns", ",".join(mapped), f"needs {quantity}{how} for this law")
        sources.update(others)
    return sources


def _with_derived(mapped: Mapping[str, Expression], header: Sequence[str]) -> dict[str, Expression]:
    """With the one of N, D, C that is not mapped, where the other two are: conditions may name it too.

    A column of that name is the column.
    """
    missing = [quantity for quantity in ("N", "D", "C") if quantity not in mapped]
    if len(missing) != 1 or missing[0] in header:
        return dict(mapped)
    six = (FLOPS_PER_PARAMETER_TOKEN, 1)
    if missing == ["C"]:
        product = Expression("6*N*D", (six, *mapped["N"].factors, *mapped["D"].factors))
        return {**mapped, "C": product}
    other = "D" if missing == ["N"] else "N"
    below = (six, *mapped[other].factors)
    inverse = tuple((factor, -power) for factor, power in below)
    return {**mapped, missing[0]: Expression(f"C/(6*{other})", (*mapped["C"].factors, *inverse))}


def _derive(values: dict[str, Array], expressions: dict[str, str], needed: Sequence[str]) -> None:
    """Fill in a needed quantity from C = 6 N D, and say so."""
    for quantity in needed:
        if quantity in values:
            continue
        if quantity == "C":
            values["C"] = FLOPS_PER_PARAMETER_TOKEN * values["N"] * values["D"]
            expressions["C"] = "6*N*D"
        else:
            other = "D" if quantity == "N" else "N"
            values[quantity] = values["C"] / (FLOPS_PER_PARAMETER_TOKEN * values[other])
            expressions[quantity] = f"C/(6*{other})"


def _positive(quantity: str, mapped: Mapping[str, Expression], row: Row) -> float:
    value = mapped[quantity].value(row)
    if not (math.isfinite(value) and value > 0):
        raise DataError(
            f"{quantity}={value:g} (line {row.line}, {mapped[quantity].text}): must be finite and positive"
        )
    return value
