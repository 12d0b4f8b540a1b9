"""Open the packed corpus of a configuration, packing it first if the cache has none.

`python -m attnres.data.corpus data=text_files data.path=FOLDER` shows a corpus: where it is, how large it is
and what was left out.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnres.cli import help_text, reject_options, run_command, take_flag, wants_help
from attnres.compose import compose_trial
from attnres.config import DataConfig
from attnres.data import sampler
from attnres.data.cache import build_folder, build_lock, cache_root, publish, using
from attnres.data.documents import Source, describe_left_out
from attnres.data.packing import FORMAT, MANIFEST_FILE, REPORT_FILE, SPLITS, Progress, pack, token_file
from attnres.data.python_source import PythonSource
from attnres.data.text_files import TextFiles
from attnres.data.tokenizer import TOKEN_DTYPE
from attnres.errors import DataError


@dataclass(frozen=True)
class PackedCorpus:
    """A tokenized, split and packed corpus in the cache folder."""

    folder: Path
    fingerprint: str  # of documents, split and tokenizer; equal wherever the same documents are packed
    # Of the validation tokens that an evaluation reads, "<windows>x<context>:<hash>"; "whole split:<hash>" if
    # the corpus was opened without a context.
    validation_fingerprint: str
    vocabulary: int
    train_tokens: int
    validation_tokens: int  # in the validation split
    report: Mapping[str, int]  # documents, duplicate, empty, unreadable, ... counts

    def train(self) -> npt.NDArray[np.uint16]:
        """The training split, memory-mapped, [train_tokens]."""
        return _map_tokens(self.folder, "train", self.train_tokens)

    def validation(self) -> npt.NDArray[np.uint16]:
        """The validation split, memory-mapped, [validation_tokens]."""
        return _map_tokens(self.folder, "validation", self.validation_tokens)

    def left_out(self) -> list[str]:
        """One line for each kind of document that was left out; the report file names them."""
        names = json.loads((self.folder / REPORT_FILE).read_text(encoding="utf-8"))["left_out"]
        return describe_left_out(dict(self.report), names)


class NotPacked(DataError):
    """The cache has no such corpus, and nobody wants it packed now."""


class _Damaged(Exception):
    """A folder of the cache that is not what its manifest says."""


def open_corpus(
    config: DataConfig, context: int | None = None, progress: Progress | None = None, build: bool = True
) -> PackedCorpus:
    """The packed corpus of this configuration; packs it first if the cache has none that is up to date.
    Without `build` it raises NotPacked instead.

    With `context`, `validation_fingerprint` is that of the windows that `sampler.validation_windows` reads.
    `progress` receives lines for people while a corpus is packed. Raises DataError for sources that are
    missing or unusable, a split without documents, a validation split shorter than the context, and a cache
    folder that cannot be used.
    """
    say: Progress = progress or (lambda line: None)
    source = _source(config)
    root = cache_root(config.cache_dir)
    identity = source.identity()
    folder = root / f"{config.corpus}-{_cache_key(identity, config)}"
    with using(root):
        manifest = _read(folder, lambda damage: None)  # told below, by the process that mends it
        if manifest is None and not build:
            raise NotPacked(f"{source.label}: is not packed yet")
        if manifest is None:
            with build_lock(root, say):
                manifest = _build(source, identity, config, folder, progress)
    return _opened(folder, manifest, config, context, say)


def _build(
    source: Source, identity: Any, config: DataConfig, folder: Path, progress: Progress | None
) -> dict[str, Any]:
    """Pack the source into the cache folder and return the manifest. Hold the lock."""

    def warn(damage: str) -> None:
        if progress is None:
            warnings.warn(damage, RuntimeWarning, stacklevel=4)
        else:
            progress(f"warning: {damage}")

    say: Progress = progress or (lambda line: None)
    manifest = _read(folder, warn)
    if manifest is not None:
        return manifest  # another process built it while this one waited for the lock
    say(f"packing {source.label} into {folder}")
    with build_folder(folder.parent) as build:
        pack(source, config.validation_fraction, build, say)
        if source.identity() != identity:
            raise DataError(f"{source.label}: changed while it was packed; run again")
        publish(build, folder)
    return _manifest(folder)


def verify(corpus: PackedCorpus) -> None:
    """Read the token files whole and compare them with the hashes in the manifest. Raises DataError."""
    for split, expected in _manifest(corpus.folder)["splits"].items():
        with open(token_file(corpus.folder, split), "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected["sha256"]:
            raise DataError(
                f"{token_file(corpus.folder, split)}: is damaged; remove {corpus.folder} to pack it again"
            )


def _source(config: DataConfig) -> Source:
    if config.corpus == "python_source":
        return PythonSource()
    assert config.path is not None  # DataConfig has checked it
    return TextFiles(config.path, config.text_field)


def _cache_key(identity: Any, config: DataConfig) -> str:
    key = [FORMAT, config.corpus, config.tokenizer, config.validation_fraction, identity]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _read(folder: Path, on_damage: Progress) -> dict[str, Any] | None:
    """The manifest of a usable packed corpus; None where there is none, or a damaged one, which is told."""
    if not folder.exists():
        return None
    try:
        return _manifest(folder)
    except _Damaged as error:
        on_damage(f"{error}; packing again")
        return None


def _manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest and the size of each token file. Raises _Damaged."""
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or set(manifest["splits"]) != set(SPLITS):
            raise _Damaged(f"{path}: unknown format")
        for split in SPLITS:
            file, size = token_file(folder, split), manifest["splits"][split]["size"]
            if file.stat().st_size != size:
                raise _Damaged(f"{file}: has {file.stat().st_size:,} bytes, its manifest says {size:,}")
    except FileNotFoundError as error:
        raise _Damaged(f"{error.filename}: is missing") from None
    except (ValueError, KeyError, TypeError):
        raise _Damaged(f"{path}: torn") from None
    return manifest


def _map_tokens(folder: Path, split: str, tokens: int) -> npt.NDArray[np.uint16]:
    file = token_file(folder, split)
    try:
        # A plain view of the map: indexing the subclass numpy.memmap is several times slower.
        return np.memmap(file, dtype=TOKEN_DTYPE, mode="r", shape=(tokens,)).view(np.ndarray)
    except ValueError as error:  # shorter than when it was packed
        raise DataError(f"{file}: is not whole ({error}); a new launch packs it again") from None


def _opened(
    folder: Path, manifest: Mapping[str, Any], config: DataConfig, context: int | None, say: Progress
) -> PackedCorpus:
    tokens = {split: manifest["splits"][split]["tokens"] for split in SPLITS}
    if context is None:
        validation_fingerprint = f"whole split:{manifest['splits']['validation']['sha256'][:16]}"
    else:
        validation = _map_tokens(folder, "validation", tokens["validation"])
        validation_fingerprint = _windows_fingerprint(validation, config.validation_tokens, context, say)
    return PackedCorpus(
        folder=folder,
        fingerprint=manifest["fingerprint"],
        validation_fingerprint=validation_fingerprint,
        vocabulary=manifest["vocabulary"],
        train_tokens=tokens["train"],
        validation_tokens=tokens["validation"],
        report=manifest["report"],
    )


def _windows_fingerprint(validation: npt.NDArray[np.uint16], asked: int, context: int, say: Progress) -> str:
    """Hash of the tokens that an evaluation reads, in order, and the shape in which it reads them."""
    windows = sampler.validation_order(len(validation), asked, context)
    if len(windows) < asked // context:
        say(
            f"data.validation_tokens={asked}: the validation split has only {len(validation):,}; "
            f"all {len(windows):,} windows of {context} are used"
        )
    rows = sampler.read_windows(validation, windows, context)
    digest = hashlib.sha256(rows.astype(TOKEN_DTYPE).tobytes()).hexdigest()[:16]
    return f"{len(windows)}x{context}:{digest}"


_USAGE = """
usage: python -m attnres.data.corpus [key=value ...] [--verify]

Show a corpus: where it is packed, how large it is, and what was left out. It is packed first if needed.
Whatever is in the cache folder may be deleted at any time; it is packed again when it is needed.
  --verify   read the token files whole and compare them with their hashes
"""
_EXAMPLES = (
    "python -m attnres.data.corpus",
    "python -m attnres.data.corpus data=text_files data.path=my_texts",
    "python -m attnres.data.corpus data=text_files data.path=my.jsonl data.text_field=content",
)


def describe(corpus: PackedCorpus) -> str:
    """The corpus in a few lines for people."""
    splits = _manifest(corpus.folder)["splits"]
    lines = [f"folder       {corpus.folder}", f"fingerprint  {corpus.fingerprint}"]
    for name in SPLITS:
        split = splits[name]
        lines.append(
            f"{name:12s} {split['documents']:,} documents, {split['tokens']:,} tokens "
            f"({split['size'] / 1e6:,.1f} MB on disk)"
        )
    lines.append(f"evaluated    {corpus.validation_fingerprint}  (windows x context : hash)")
    lines += corpus.left_out()
    lines.append(f"report       {corpus.folder / REPORT_FILE}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """`python -m attnres.data.corpus`; see --help."""
    if wants_help(argv):
        print(help_text(_USAGE, ["data", "model"], _EXAMPLES))
        return 0
    check_hashes = take_flag(argv, "--verify")
    reject_options(argv)
    config = compose_trial(argv)
    corpus = open_corpus(config.data, config.model.context, lambda line: print(line, file=sys.stderr))
    print(describe(corpus))
    if check_hashes:
        verify(corpus)
        print("verified     the token files are what was packed")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
