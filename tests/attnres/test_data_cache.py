"""The cache: a half-written one is never used, two processes build once, damage is noticed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from data_support import data_config, permissions_bind, start_child, write_texts

from attnres.data import cache as cache_module
from attnres.data.corpus import open_corpus, verify
from attnres.errors import DataError

# Kill this process at the n-th call of a function of os, before it does anything.
KILL_AT_CALL = """
original, left = os.{name}, [{call}]
def killer(*args, **kwargs):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
os.{name} = killer
"""
KILL_WHILE_READING = """
from attnres.data.text_files import TextFiles
documents = TextFiles.documents
def killer(self, report):
    for index, document in enumerate(documents(self, report)):
        if index == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        yield document
TextFiles.documents = killer
"""
# fsync: train.bin, validation.bin, report, manifest, the build folder; after the rename the cache folder.
STAGES = {
    "reading": KILL_WHILE_READING,
    **{f"fsync {call}": KILL_AT_CALL.format(name="fsync", call=call) for call in range(1, 7)},
    "rename": KILL_AT_CALL.format(name="rename", call=1),
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    write_texts(tmp_path / "texts")
    return tmp_path / "texts"


@pytest.fixture(scope="module")
def fingerprint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an undisturbed build of the same texts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_texts(folder / "texts")
    return open_corpus(data_config(folder / "texts", folder / "cache")).fingerprint


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != "lock")


@pytest.mark.parametrize("stage", STAGES)
def test_a_build_killed_at_any_stage_is_never_used(
    texts: Path, tmp_path: Path, stage: str, fingerprint: str
) -> None:
    cache = tmp_path / "cache"
    child = start_child(texts, cache, STAGES[stage])
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    published = [name for name in entries(cache) if not name.startswith(".")]
    assert len(published) == (stage == "fsync 6")  # only the last stage comes after the rename
    lines: list[str] = []
    corpus = open_corpus(data_config(texts, cache), progress=lines.append)
    assert bool(lines) == (not published)  # built anew, or opened
    assert corpus.fingerprint == fingerprint
    verify(corpus)
    assert entries(cache) == [corpus.folder.name]


@pytest.mark.parametrize("call", [1, 2])
def test_a_kill_while_a_damaged_cache_is_replaced(
    texts: Path, tmp_path: Path, call: int, fingerprint: str
) -> None:
    cache = tmp_path / "cache"
    config = data_config(texts, cache)
    (open_corpus(config).folder / "train.bin").write_bytes(b"short")
    child = start_child(texts, cache, KILL_AT_CALL.format(name="rename", call=call))
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    corpus = open_corpus(config, progress=lambda line: None)
    assert corpus.fingerprint == fingerprint
    verify(corpus)
    assert entries(cache) == [corpus.folder.name]


def test_two_processes_at_once_build_once(texts: Path, tmp_path: Path, fingerprint: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        children = [start_child(texts, cache) for _ in range(2)]
        for child in children:  # both want to build before either may
            assert child.stdout is not None
            assert child.stdout.readline() == f"waiting for another process that builds in {cache}\n"
        assert entries(cache) == []
    outputs = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert [out.splitlines()[-1] for out, _ in outputs] == [fingerprint] * 2
    assert sorted(out.count("packing data.path") for out, _ in outputs) == [0, 1]
    assert len(entries(cache)) == 1


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda folder: os.truncate(folder / "train.bin", 100),
            r"train\.bin: has 100 bytes, its manifest says",
        ),
        (lambda folder: (folder / "validation.bin").unlink(), r"validation\.bin: is missing"),
        (lambda folder: os.truncate(folder / "manifest.json", 20), r"manifest\.json: torn"),
        (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json: is missing"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), r"manifest\.json: torn"),
        (
            lambda folder: (folder / "manifest.json").write_text('{"format": 0}'),
            r"manifest\.json: unknown format",
        ),
    ],
)
def test_damage_is_noticed_and_mended_with_a_warning(
    texts: Path, tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    config = data_config(texts, tmp_path / "cache")
    corpus = open_corpus(config)
    old_map = corpus.train()
    expected = old_map.copy()
    damage(corpus.folder)
    with pytest.warns(RuntimeWarning, match=says + ".*packing again"):
        mended = open_corpus(config)
    assert mended == corpus
    assert (mended.train() == expected).all()
    damage(corpus.folder)
    lines: list[str] = []
    open_corpus(config, progress=lines.append)
    assert [line.endswith("; packing again") for line in lines].count(True) == 1
    assert lines[0].startswith("warning: ")


def test_the_manifest_tells_what_is_packed(texts: Path, tmp_path: Path) -> None:
    corpus = open_corpus(data_config(texts, tmp_path / "cache"))
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    assert manifest["fingerprint"] == corpus.fingerprint
    for split, tokens in (("train", corpus.train_tokens), ("validation", corpus.validation_tokens)):
        entry = manifest["splits"][split]
        assert entry["tokens"] == tokens == entry["text_bytes"] + entry["documents"]
        assert entry["size"] == 2 * tokens == (corpus.folder / f"{split}.bin").stat().st_size


def test_a_full_disk_is_an_error_that_names_the_folder_and_leaves_nothing(
    texts: Path, tmp_path: Path
) -> None:
    # A limit on the size of files stands in for the full disk: writing fails in the same place.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    child = start_child(texts, tmp_path / "cache", limit)
    _, errors = child.communicate(timeout=60)
    expected = f"DataError: data.cache_dir={tmp_path}/cache: the cache folder cannot be used: File too large"
    assert errors.splitlines()[-1].endswith(expected)
    assert entries(tmp_path / "cache") == []


def test_a_cache_folder_that_cannot_be_made_is_an_error(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataError, match=rf"^data\.cache_dir={cache}: the cache folder cannot be used: "):
            open_corpus(data_config(texts, cache))


def test_a_closed_progress_pipe_is_not_blamed_on_the_folder(texts: Path, tmp_path: Path) -> None:
    def closed(line: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        open_corpus(data_config(texts, tmp_path / "cache"), progress=closed)
    assert entries(tmp_path / "cache") == []


@pytest.mark.skipif(not permissions_bind(), reason="this user writes everywhere")
def test_a_read_only_cache_serves_what_it_has_and_refuses_the_rest(texts: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    corpus = open_corpus(data_config(texts, cache))
    cache.chmod(0o500)
    try:
        assert open_corpus(data_config(texts, cache)) == corpus
        with pytest.raises(DataError, match=r"the cache folder cannot be used: Permission denied"):
            open_corpus(data_config(texts, cache, validation_fraction=0.4))
    finally:
        cache.chmod(0o700)


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_module.cache_root(None) == tmp_path / "xdg" / "attnres"
    assert cache_module.cache_root("~/mine") == tmp_path / "mine"
    for invalid in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", invalid)
        assert cache_module.cache_root(None) == tmp_path / ".cache" / "attnres"
