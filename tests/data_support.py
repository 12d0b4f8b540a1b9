"""Small corpora for tests of attnres.data."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from attnres.config import DataConfig

# A process that packs a corpus and prints its progress; argv: path, cache folder, Python to run before.
CHILD = """
import os, signal, sys
from attnres.config import DataConfig
from attnres.data.corpus import open_corpus

path, cache, before = sys.argv[1:]
config = DataConfig(
    corpus="text_files", path=path, text_field="text", tokenizer="bytes", validation_fraction=0.3,
    validation_tokens=512, interim_validation_tokens=256, cache_dir=cache,
)
exec(before)
print(open_corpus(config, progress=lambda line: print(line, flush=True)).fingerprint)
"""


def data_config(path: Path | None, cache: Path, **changes: Any) -> DataConfig:
    values: dict[str, Any] = {
        "corpus": "text_files",
        "path": None if path is None else str(path),
        "text_field": "text",
        "tokenizer": "bytes",
        "validation_fraction": 0.3,
        "validation_tokens": 512,
        "interim_validation_tokens": 256,
        "cache_dir": str(cache),
    }
    return DataConfig(**(values | changes))


def write_texts(folder: Path, count: int = 20, words: int = 60, seed: int = 0) -> dict[str, bytes]:
    """Distinct text files below `folder`; returns their contents by name."""
    draw = random.Random(seed)
    texts = {}
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        text = f"{index} " + " ".join(draw.choice(["lorem", "ipsum", "dölor", "sit"]) for _ in range(words))
        texts[f"text_{index:02d}.txt"] = text.encode()
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    return texts


def start_child(path: Path, cache: Path, before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(path), str(cache), before]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def permissions_bind() -> bool:
    """Whether the permissions of a file bind this user; root passes over them."""
    with tempfile.NamedTemporaryFile() as file:
        os.chmod(file.name, 0)
        return not os.access(file.name, os.R_OK)
