"""JSON files that a crash or a hand may have mangled: read whole and of the right types, or refused with one
line. Torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attnres.errors import RecordError

Check = Callable[[Any], bool]
_MOST_DIGITS = 300  # longer integers have no float, and formatting one would raise


def parse(text: str) -> Any:
    """JSON text -> value. ValueError for what is not JSON, or nested or long beyond all sense."""
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None if there is no file. Raises RecordError for anything else: a torn file,
    another value, a folder, a file that may not be read.
    """
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise RecordError(f"{path}: torn or not JSON ({error})") from None
    if not isinstance(value, dict):
        raise RecordError(f"{path}: not a JSON object")
    return value


def check_fields(fields: Mapping[str, Any], checks: Mapping[str, Check], where: str) -> None:
    """RecordError, naming the first field that its check refuses. An absent field is null."""
    for name, check in checks.items():
        if name not in fields and not check(None):
            raise RecordError(f"{where}: {name}: is missing")
        if not check(fields.get(name)):
            raise RecordError(f"{where}: {name}={repr(fields[name])[:80]}: wrong type or out of range")


def is_number(value: Any) -> bool:
    """A finite number; JSON's true is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any) -> bool:
    """A whole number, not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def or_null(check: Check) -> Check:
    """The same, or null, or absent."""
    return lambda value: value is None or check(value)
