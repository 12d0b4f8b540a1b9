"""Packed corpora: interface (the data helper fills this in)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attnres.config import DataConfig


@dataclass(frozen=True)
class PackedCorpus:
    """A tokenized, split and packed corpus in the cache folder."""

    folder: Path
    fingerprint: str  # of content, split and tokenizer; every record carries it
    validation_fingerprint: str  # of the validation tokens that are read
    vocabulary: int
    train_tokens: int
    validation_tokens: int  # in the validation split
    report: Mapping[str, int]  # documents, duplicates, empty, unreadable, ... counts


def open_corpus(config: DataConfig) -> PackedCorpus:
    """The packed corpus of this configuration; packs it first if the cache has none."""
    raise NotImplementedError
