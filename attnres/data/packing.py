"""Documents -> two token files and a manifest in a folder that nobody else looks at yet.

Documents are put in the order of their content hash, and a hash below `validation_fraction` puts one into the
validation split: what is packed depends on the set of documents only, not on names, folders or the machine.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from attnres.data.documents import Report, Source
from attnres.data.tokenizer import TOKEN_DTYPE, TOKENIZER, VOCABULARY, encode_document
from attnres.errors import DataError

FORMAT = 1  # of the folder; another number is another cache key
MANIFEST_FILE = "manifest.json"
REPORT_FILE = "report.json"
SPLITS = ("train", "validation")

_BUFFER_BYTES = 1 << 22
_SECONDS_BETWEEN_MESSAGES = 2.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A document in the spool file."""

    digest: bytes
    offset: int
    length: int
    name: str


def token_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.bin"


def pack(source: Source, validation_fraction: float, folder: Path, progress: Progress) -> None:
    """Read the source once and write train.bin, validation.bin, report.json and, last of all, manifest.json.

    Raises DataError when there is nothing usable or a split would be empty; OSError when the folder cannot be
    written. Every file is on the disk, not only in its cache, when this returns.
    """
    report = Report()
    spool_path = folder / "documents.spool"
    with open(spool_path, "w+b", buffering=_BUFFER_BYTES) as spool:
        entries = _spool(source, spool, report, progress)
        for line in report.lines():
            progress(line)
        if not entries:
            raise DataError(_nothing_usable(source, report))
        train, validation = _split(entries, validation_fraction, source)
        spool.flush()
        with mmap.mmap(spool.fileno(), 0, access=mmap.ACCESS_READ) as texts:
            splits = {
                name: _write_tokens(token_file(folder, name), documents, texts, progress)
                for name, documents in zip(SPLITS, (train, validation), strict=True)
            }
    spool_path.unlink()
    report.counts.update({f"{name}_documents": split["documents"] for name, split in splits.items()})
    _write_durably(folder / REPORT_FILE, report.to_json())
    manifest = {
        "format": FORMAT,
        "fingerprint": _fingerprint(train, validation),
        "tokenizer": TOKENIZER,
        "vocabulary": VOCABULARY,
        "source": source.label,
        "validation_fraction": validation_fraction,
        "splits": splits,
        "report": dict(report.counts),
    }
    _write_durably(folder / MANIFEST_FILE, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    sync_folder(folder)


def _spool(source: Source, spool: BinaryIO, report: Report, progress: Progress) -> list[_Entry]:
    """Copy every usable document to the spool file; return them in the order of their hashes."""
    entries: dict[bytes, _Entry] = {}
    offset = 0
    next_message = time.monotonic() + _SECONDS_BETWEEN_MESSAGES
    for name, text in source.documents(report):
        report.counts["read"] += 1
        if time.monotonic() > next_message:
            next_message += _SECONDS_BETWEEN_MESSAGES
            progress(f"read {report.counts['read']:,} documents, kept {offset / 1e6:,.0f} MB")
        digest = hashlib.sha256(text).digest()
        if not text or text.isspace():
            report.leave_out("empty", name)
        elif (where := invalid_utf8(text)) is not None:
            report.leave_out("not_utf8", name, f"byte {where}")
        elif digest in entries:
            report.leave_out("duplicate", name, f"same as {entries[digest].name}")
        else:
            spool.write(text)
            entries[digest] = _Entry(digest, offset, len(text), name)
            offset += len(text)
    report.counts["documents"] = len(entries)
    return [entries[digest] for digest in sorted(entries)]


def invalid_utf8(text: bytes) -> int | None:
    """Position of the first byte that is not valid UTF-8, or None. Memory does not grow with the text."""
    if text.isascii():
        return None
    view, position = memoryview(text), 0
    while position < len(view):
        stop = position + (1 << 20)
        try:
            _, used = codecs.utf_8_decode(view[position:stop], "strict", stop >= len(view))
        except UnicodeDecodeError as error:
            return position + error.start
        position += used
    return None


def _position(digest: bytes) -> float:
    """The hash as a number in [0, 1]."""
    return int.from_bytes(digest[:8], "big") / 2**64


def _split(entries: Sequence[_Entry], fraction: float, source: Source) -> tuple[list[_Entry], list[_Entry]]:
    """(training, validation) documents. Raises DataError if one is empty, with a fraction that would do."""
    validation = [entry for entry in entries if _position(entry.digest) < fraction]
    train = [entry for entry in entries if _position(entry.digest) >= fraction]
    if train and validation:
        return train, validation
    if len(entries) == 1:
        raise DataError(
            f"{source.label}: the only document, {entries[0].name}, cannot be in both splits; "
            "cut it into several files, or into the lines of a .jsonl file"
        )
    which = "validation" if train else "training"
    raise DataError(
        f"data.validation_fraction={fraction:g}: puts none of the {len(entries)} documents of {source.label} "
        f"into the {which} split; add documents, or use "
        f"data.validation_fraction={_working_fraction(entries, raise_it=bool(train))}"
    )


def _working_fraction(entries: Sequence[_Entry], raise_it: bool) -> str:
    """The fraction nearest to the present one, in as few digits as possible, that fills both splits."""
    # Entries are in the order of their positions: any value in (low, high] separates two neighbours.
    low, high = (0, 1) if raise_it else (-2, -1)
    low_position, high_position = _position(entries[low].digest), _position(entries[high].digest)
    for digits in range(1, 17):
        scale = 10**digits
        value = (math.floor(low_position * scale) + 1) / scale
        if low_position < value <= high_position and value < 1:
            return f"{value:g}" if digits < 6 else repr(value)
    raise AssertionError("two documents have the same hash position")


def _write_tokens(
    path: Path, entries: Sequence[_Entry], texts: mmap.mmap, progress: Progress
) -> dict[str, Any]:
    """Write the tokens of documents one after the other; return counts, size and hash of the file."""
    progress(f"packing {len(entries):,} documents into {path.name}")
    hasher = hashlib.sha256()
    view = memoryview(texts)
    tokens = 0
    with open(path, "wb", buffering=_BUFFER_BYTES) as file:
        for entry in entries:
            for piece in encode_document(view[entry.offset : entry.offset + entry.length]):
                data = piece.tobytes()
                hasher.update(data)
                file.write(data)
                tokens += len(piece)
        file.flush()
        os.fsync(file.fileno())
    view.release()
    return {
        "documents": len(entries),
        "text_bytes": sum(entry.length for entry in entries),
        "tokens": tokens,
        "size": tokens * TOKEN_DTYPE.itemsize,
        "sha256": hasher.hexdigest(),
    }


def _fingerprint(train: Sequence[_Entry], validation: Sequence[_Entry]) -> str:
    """Hash of tokenizer and of which documents are in which split, in order."""
    hasher = hashlib.sha256(f"{TOKENIZER} {VOCABULARY} {len(train)} {len(validation)}\n".encode())
    for entry in (*train, *validation):
        hasher.update(entry.digest)
    return hasher.hexdigest()[:16]


def _nothing_usable(source: Source, report: Report) -> str:
    return f"{source.label}: no usable document; " + "; ".join(report.lines())


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
