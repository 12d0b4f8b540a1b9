"""JSON files are read whole and of the right types, or refused with one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnres.errors import RecordError
from attnres.json_file import check_fields, is_count, is_flag, is_number, is_texts, or_null, read_object


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", "[" * 100_000, '{"a": ' + "9" * 400 + "}", "\xff"]
)
def test_what_is_not_an_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(RecordError, match=r"a\.json: ") as refused:
        read_object(path)
    assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)


def test_no_file_a_folder_and_a_path_through_a_file(tmp_path: Path) -> None:
    assert read_object(tmp_path / "a.json") is None
    for path in (tmp_path, Path(__file__) / "a.json"):
        with pytest.raises(RecordError, match="cannot be read"):
            read_object(path)


def test_fields() -> None:
    checks = {"step": is_count, "loss": or_null(is_number)}
    check_fields({"step": 0, "loss": None, "more": []}, checks, "f")
    check_fields({"step": 3}, checks, "f")
    with pytest.raises(RecordError, match=r"^f: step: is missing$"):
        check_fields({"loss": 1.5}, checks, "f")
    for wrong in (None, True, -1, 1.0, "1", []):
        with pytest.raises(RecordError, match=r"^f: step="):
            check_fields({"step": wrong}, checks, "f")
    for wrong in (True, float("nan"), float("inf"), "1"):
        with pytest.raises(RecordError, match=r"^f: loss="):
            check_fields({"step": 1, "loss": wrong}, checks, "f")
    assert is_texts(["a"]) and not is_texts([["a"]]) and not is_texts("a")
    assert is_flag(True) and not is_flag(1)
