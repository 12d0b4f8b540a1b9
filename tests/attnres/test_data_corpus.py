"""Splitting, packing and the fingerprints: what is packed depends on the documents only."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_support import data_config, write_texts

from attnres.cli import run_command
from attnres.data.corpus import PackedCorpus, main, open_corpus, verify
from attnres.data.text_files import TextFiles
from attnres.data.tokenizer import END_OF_DOCUMENT, VOCABULARY
from attnres.errors import DataError


def documents(tokens: np.ndarray) -> list[bytes]:
    assert tokens[-1] == END_OF_DOCUMENT
    ends = np.flatnonzero(tokens == END_OF_DOCUMENT)
    return [part[part != END_OF_DOCUMENT].astype(np.uint8).tobytes() for part in np.split(tokens, ends[:-1])]


def splits(corpus: PackedCorpus) -> tuple[list[bytes], list[bytes]]:
    return documents(corpus.train()), documents(corpus.validation())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    write_texts(tmp_path / "texts")
    return tmp_path / "texts"


def test_every_document_is_in_exactly_one_split(texts: Path, cache: Path) -> None:
    contents = [file.read_bytes() for file in texts.iterdir()]
    (texts / "copy.md").write_bytes(contents[0])
    (texts / "copies.jsonl").write_text("".join(json.dumps({"text": c.decode()}) + "\n" for c in contents))
    corpus = open_corpus(data_config(texts, cache))
    train, validation = splits(corpus)
    assert sorted(train + validation) == sorted(contents)
    assert train and validation and not set(train) & set(validation)
    assert corpus.report["duplicate"] == len(contents) + 1
    assert (corpus.train_tokens, corpus.validation_tokens) == (len(corpus.train()), len(corpus.validation()))
    assert corpus.vocabulary == VOCABULARY


def test_adding_documents_moves_no_other_document_between_the_splits(texts: Path, cache: Path) -> None:
    before = splits(open_corpus(data_config(texts, cache)))
    write_texts(texts / "more", seed=1)
    after = splits(open_corpus(data_config(texts, cache)))
    assert set(before[0]) < set(after[0]) and set(before[1]) < set(after[1])


def test_what_is_packed_does_not_depend_on_names_folders_or_file_kinds(texts: Path, tmp_path: Path) -> None:
    first = open_corpus(data_config(texts, tmp_path / "cache"))
    other = tmp_path / "elsewhere" / "deep"
    other.mkdir(parents=True)
    files = sorted(texts.iterdir(), reverse=True)
    for index, file in enumerate(files[:10]):
        shutil.copy(file, other / f"{index}.md")
    lines = [json.dumps({"content": file.read_text()}) for file in files[10:]]
    (other / "rest.jsonl").write_text("\n".join(lines))
    second = open_corpus(data_config(other, tmp_path / "other cache", text_field="content"))
    assert first.folder != second.folder
    assert first.fingerprint == second.fingerprint
    np.testing.assert_array_equal(first.train(), second.train())
    np.testing.assert_array_equal(first.validation(), second.validation())


def test_the_fingerprint_follows_content_and_split(texts: Path, cache: Path) -> None:
    found = {open_corpus(data_config(texts, cache, validation_fraction=f)).fingerprint for f in (0.3, 0.6)}
    (texts / "text_00.txt").write_text("changed")
    found.add(open_corpus(data_config(texts, cache)).fingerprint)
    assert len(found) == 3


def test_a_fraction_that_splits_alike_gives_the_same_fingerprint(texts: Path, cache: Path) -> None:
    first, second = (open_corpus(data_config(texts, cache, validation_fraction=f)) for f in (0.3, 0.300001))
    assert first.folder != second.folder and first.fingerprint == second.fingerprint


def test_validation_fingerprint_is_of_the_tokens_that_are_read(texts: Path, cache: Path) -> None:
    def fingerprint(context: int | None, **changes: int) -> str:
        return open_corpus(data_config(texts, cache, **changes), context).validation_fingerprint

    assert re.fullmatch("16x32:[0-9a-f]{16}", fingerprint(32))
    assert re.fullmatch("whole split:[0-9a-f]{16}", fingerprint(None))
    assert (
        len({fingerprint(32), fingerprint(16), fingerprint(32, validation_tokens=256), fingerprint(None)})
        == 4
    )
    before = fingerprint(32)
    train, validation = (sorted(contents) for contents in splits(open_corpus(data_config(texts, cache))))
    files = {file.read_bytes(): file for file in texts.iterdir()}
    files[train[0]].unlink()  # the validation split is as it was
    assert fingerprint(32) == before
    files[validation[0]].unlink()
    assert fingerprint(32) != before


def test_a_small_validation_split_is_used_whole_and_says_so(texts: Path, cache: Path) -> None:
    lines: list[str] = []
    corpus = open_corpus(data_config(texts, cache, validation_tokens=10**6), 32, lines.append)
    windows = (corpus.validation_tokens - 1) // 32
    assert corpus.validation_fingerprint.startswith(f"{windows}x32:")
    assert lines[-1] == (
        f"data.validation_tokens=1000000: the validation split has only {corpus.validation_tokens:,}; "
        f"all {windows:,} windows of 32 are used"
    )


def test_a_context_longer_than_the_validation_split_is_an_error(texts: Path, cache: Path) -> None:
    with pytest.raises(
        DataError, match=r"^model\.context=100000: the validation split has only [\d,]+ tokens"
    ):
        open_corpus(data_config(texts, cache), 100_000)


@pytest.mark.parametrize("fraction", [1e-6, 1 - 1e-6])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_an_empty_split_is_an_error_whose_advice_works(
    tmp_path: Path, cache: Path, fraction: float, count: int
) -> None:
    write_texts(tmp_path / "texts", count)
    which = "validation" if fraction < 0.5 else "training"
    expected = (
        rf"^data\.validation_fraction={fraction:g}: puts none of the {count} documents of .* {which} split"
    )
    with pytest.raises(DataError, match=expected) as caught:
        open_corpus(data_config(tmp_path / "texts", cache, validation_fraction=fraction))
    (advice,) = re.findall(r"use data\.validation_fraction=(\S+)$", str(caught.value))
    train, validation = splits(
        open_corpus(data_config(tmp_path / "texts", cache, validation_fraction=float(advice)))
    )
    assert min(len(train), len(validation)) == 1 and len(train) + len(validation) == count


def test_a_single_document_cannot_be_split(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "book.txt").write_text("all in one")
    with pytest.raises(
        DataError, match=r"book\.txt: the only document, book\.txt, cannot be in both splits; cut"
    ):
        open_corpus(data_config(tmp_path / "book.txt", cache))


def test_an_up_to_date_cache_opens_without_reading_the_source(
    texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_corpus(data_config(texts, cache))
    monkeypatch.delattr(TextFiles, "documents")
    assert open_corpus(data_config(texts, cache)) == first


@pytest.mark.parametrize("change", ["edit", "add", "remove", "rename"])
def test_a_changed_source_is_noticed(texts: Path, cache: Path, change: str) -> None:
    before = open_corpus(data_config(texts, cache))
    victim = texts / "text_05.txt"
    if change == "edit":
        victim.write_bytes(victim.read_bytes()[::-1].replace(b"\xb6\xc3", "ö".encode()))  # same size
    elif change == "add":
        (texts / "new.md").write_text("new")
    elif change == "remove":
        victim.unlink()
    else:
        victim.rename(texts / "renamed.txt")
    after = open_corpus(data_config(texts, cache))
    assert after.folder != before.folder
    assert (after.fingerprint == before.fingerprint) == (change == "rename")


def test_a_source_that_changes_while_it_is_packed_is_an_error(texts: Path, cache: Path) -> None:
    def write_more(line: str) -> None:
        if "validation.bin" in line:
            (texts / "late.txt").write_text("late")

    with pytest.raises(DataError, match="changed while it was packed; run again"):
        open_corpus(data_config(texts, cache), progress=write_more)
    assert open_corpus(data_config(texts, cache)).report["documents"] == 21


def test_the_command_shows_a_corpus(texts: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (texts / "empty.txt").write_text("")
    overrides = [
        "data=text_files",
        f"data.path={texts}",
        f"data.cache_dir={cache}",
        "data.validation_fraction=0.3",
    ]
    assert run_command(main, [*overrides, "--verify"]) == 0
    shown = capsys.readouterr().out
    corpus = open_corpus(data_config(texts, cache))
    for part in (
        corpus.fingerprint,
        str(corpus.folder),
        f"{corpus.train_tokens:,} tokens",
        "1 (empty): empty.txt",
    ):
        assert part in shown
    damaged = corpus.folder / "train.bin"
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    assert run_command(main, [*overrides, "--verify"]) == 2
    assert f"error: {damaged}: is damaged" in capsys.readouterr().err
    with pytest.raises(DataError, match="is damaged"):
        verify(corpus)


def test_the_command_reports_mistakes_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(main, ["data=text_files", "data.path=/absent"]) == 2
    assert capsys.readouterr().err == "error: data.path=/absent: no such file or folder\n"
    assert run_command(main, ["--help"]) == 0
    assert "data.path=my_texts" in capsys.readouterr().out


def test_torch_is_not_imported() -> None:
    code = "import sys, attnres.data.corpus, attnres.data.sampler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
