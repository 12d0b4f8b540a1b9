"""A user's own files: what is read, what is left out, and that nothing is left out in silence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from data_support import data_config, permissions_bind, write_texts

from attnres.data.corpus import PackedCorpus, open_corpus
from attnres.data.documents import Report
from attnres.data.text_files import TextFiles
from attnres.data.tokenizer import decode
from attnres.errors import DataError

GOOD = {"read me.md": b"# Title\n", "code/a.py": b"x = 1\n", "B.TXT": "grün\r\n".encode(), "c/d/e.txt": b"e"}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def read(path: Path, field: str = "text") -> tuple[dict[str, bytes], Report]:
    report = Report()
    documents = list(TextFiles(str(path), field).documents(report))
    assert len({name for name, _ in documents}) == len(documents)
    return dict(documents), report


def left_out(corpus: PackedCorpus) -> dict[str, list[str]]:
    return json.loads((corpus.folder / "report.json").read_text())["left_out"]


def test_reads_every_kind_of_file_in_a_fixed_order_and_keeps_the_bytes(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    documents, report = read(tmp_path)
    assert documents == GOOD
    assert list(documents) == ["B.TXT", "read me.md", "c/d/e.txt", "code/a.py"]
    assert report.counts == {"files": 4}


def test_a_json_line_is_a_document(tmp_path: Path) -> None:
    lines = [{"text": "first\nline", "id": 1}, {"text": "secönd"}]
    write(tmp_path, {"a.jsonl": "\n".join(map(json.dumps, lines)).encode()})
    documents, _ = read(tmp_path)
    assert documents == {"a.jsonl:1": b"first\nline", "a.jsonl:2": "secönd".encode()}


def test_a_single_file_may_be_given(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": b'{"body": "one"}\n{"body": "two"}\n'})
    documents, _ = read(tmp_path / "a.jsonl", "body")
    assert list(documents.values()) == [b"one", b"two"]


def test_the_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "texts", GOOD)
    assert len(list(TextFiles("~/texts", "text").documents(Report()))) == len(GOOD)


def test_bad_json_lines_are_reported_by_name_and_line(tmp_path: Path) -> None:
    lines = [b'{"text": "good"}', b'{"text": "torn', b"", b"[1]", b'{"id": 1, "body": "x"}', b'{"text": 3}']
    lines += [b'{"text": "\xff"}', b"[" * 100_000, b'{"text": "also good"}']
    write(tmp_path, {"a.jsonl": b"\n".join(lines)})
    documents, report = read(tmp_path)
    assert list(documents) == ["a.jsonl:1", "a.jsonl:9"]
    assert report.counts == {"files": 1, "bad_json": 3, "empty": 1, "no_text_field": 2, "not_utf8": 1}
    assert [name.partition(": ")[0] for name in report.names["bad_json"]] == [
        "a.jsonl:2",
        "a.jsonl:4",
        "a.jsonl:8",
    ]
    assert report.names["no_text_field"] == [
        "a.jsonl:5: data.text_field=text is missing; there are id, body",
        "a.jsonl:6: data.text_field=text is not a text",
    ]
    assert report.names["empty"] == ["a.jsonl:3"]
    assert report.names["not_utf8"] == ["a.jsonl:7: byte 10 of the line"]


def test_everything_left_out_is_counted_named_in_the_report_file_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    texts = write_texts(folder)
    long = "é" * (1 << 20)  # the first bad byte lies in a later piece of the check
    write(folder, {"latin.txt": "caf\xe9".encode("latin-1"), "late.md": long.encode() + b"\xc3("})
    write(folder, {"empty.py": b"", "blank.md": b" \n\t", "copy.txt": texts["text_03.txt"]})
    write(folder, {"half.jsonl": b'{"text": "\\ud800"}'})
    write(folder, {"table.csv": b"1", ".git/config.txt": b"1", "__pycache__/a.py": b"1"})
    os.mkfifo(folder / "pipe.txt")
    (folder / "nowhere.txt").symlink_to(tmp_path / "absent")
    lines: list[str] = []
    corpus = open_corpus(data_config(folder, tmp_path / "cache"), progress=lines.append)
    report = left_out(corpus)
    assert sorted(report["not_utf8"]) == [
        "half.jsonl:1: byte 0",
        "late.md: byte 2097152",
        "latin.txt: byte 3",
    ]
    assert sorted(report["empty"]) == ["blank.md", "empty.py"]
    assert report["duplicate"] == ["text_03.txt: same as copy.txt"]
    assert report["unreadable"] == ["nowhere.txt: No such file or directory", "pipe.txt: not a regular file"]
    assert report["unknown_extension"] == ["table.csv"] and report["hidden"] == [".git"]
    counts = {kind: count for kind, count in corpus.report.items() if kind in report}
    assert counts == {kind: len(names) for kind, names in report.items()}
    assert corpus.report["documents"] == 20
    assert corpus.report["train_documents"] + corpus.report["validation_documents"] == 20
    assert "left out 2 (empty): blank.md, empty.py" in lines
    assert corpus.left_out() == [line for line in lines if line.startswith("left out")]


def test_many_names_are_cut_in_messages_but_counted(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"a", **{f"{i}.csv": b"1" for i in range(10)}})
    _, report = read(tmp_path)
    assert report.lines() == ["left out 10 (other file extension): 0.csv, 1.csv, 2.csv and 7 more"]


def test_odd_names_become_one_printable_line(tmp_path: Path) -> None:
    (tmp_path / "new\nline.txt").write_bytes(b"a")
    with open(os.fsencode(tmp_path) + b"/latin\xe9.txt", "wb") as file:
        file.write(b"b")
    documents, _ = read(tmp_path)
    assert documents == {"latin\\xe9.txt": b"b", "new\\nline.txt": b"a"}


def test_links_are_followed_but_a_circle_is_entered_once(tmp_path: Path) -> None:
    write(tmp_path / "data", {"a.txt": b"a", "sub/b.txt": b"b"})
    write(tmp_path / "elsewhere", {"c.txt": b"c"})
    (tmp_path / "data/sub/back").symlink_to(tmp_path / "data")
    (tmp_path / "data/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/loop.txt").symlink_to(tmp_path / "data/loop.txt")
    documents, report = read(tmp_path / "data")
    assert documents == {"a.txt": b"a", "more/c.txt": b"c", "sub/b.txt": b"b"}
    assert len(report.names["unreadable"]) == 1 and report.names["unreadable"][0].startswith("loop.txt: ")


@pytest.mark.skipif(not permissions_bind(), reason="this user reads everything")
def test_files_without_permission_are_reported_and_noticed_when_mended(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    secret = tmp_path / "texts/text_00.txt"
    secret.chmod(0)
    config = data_config(tmp_path / "texts", tmp_path / "cache")
    assert left_out(open_corpus(config))["unreadable"] == ["text_00.txt: Permission denied"]
    secret.chmod(0o600)
    assert open_corpus(config).report["documents"] == 20


def test_a_missing_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"^data\.path={tmp_path}/absent: no such file or folder$"):
        TextFiles(f"{tmp_path}/absent", "text")


def test_an_unknown_home_is_an_error() -> None:
    with pytest.raises(DataError, match=r"^data\.path=~nobody-of-this-name/x: cannot be read: .*home"):
        TextFiles("~nobody-of-this-name/x", "text")


def test_a_circle_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "a")
    with pytest.raises(DataError, match=r"^data\.path=.*/a: cannot be read: "):
        TextFiles(f"{tmp_path}/a", "text")


def test_a_file_of_another_kind_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"a.csv": b"1"})
    with pytest.raises(
        DataError, match=r"^data\.path=.*a\.csv: cannot read this kind of file; one of \.txt, "
    ):
        TextFiles(f"{tmp_path}/a.csv", "text")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "holds no .txt, .md, .py, .jsonl files; it is empty"),
        (
            {"a.csv": b"1"},
            "holds no .txt, .md, .py, .jsonl files; left out 1 (other file extension): a.csv",
        ),
        (
            {"a.txt": b"\n", "b.md": b"\xff"},
            "no usable document; left out 1 (empty): a.txt; left out 1 (not UTF-8): b.md",
        ),
        ({"a.jsonl": b'{"body": "x"}'}, "a.jsonl:1: data.text_field=text is missing; there are body"),
    ],
)
def test_nothing_usable_is_one_line_that_says_why(tmp_path: Path, files: dict[str, bytes], why: str) -> None:
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts", files)
    with pytest.raises(DataError) as caught:
        open_corpus(data_config(tmp_path / "texts", tmp_path / "cache"))
    assert str(caught.value).startswith(f"data.path={tmp_path}/texts: ") and why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_packed_text_is_the_text(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", count=6)
    corpus = open_corpus(data_config(tmp_path / "texts", tmp_path / "cache", validation_fraction=0.5))
    packed = [text for split in (corpus.train(), corpus.validation()) for text in decode(split).split("\n\n")]
    assert sorted(packed) == sorted(text.decode() for text in texts.values())
