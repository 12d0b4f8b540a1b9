"""The smallest real trial that still learns: a few thousand parameters on some of words."""

from __future__ import annotations

import random
from pathlib import Path

from attnres.compose import compose_trial
from attnres.data.corpus import PackedCorpus, open_corpus
from attnres.trial import Trial, resolve

WORDS = "the model reads some words and then def return class self import for in range it writes them".split()
MODEL = (
    "model.width=16 model.depth=2 model.heads=2 model.mlp_width=32 model.context=32 model.batch_size=4"
).split()


def write_texts(folder: Path, files: int = 40, words: int = 900) -> Path:
    """Texts of words in random order: bytes that a model learns quickly, and never to the end."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    for index in range(files):
        text = " ".join(generator.choice(WORDS) for _ in range(words))
        (folder / f"{index:03d}.txt").write_text(text)
    return folder


def tiny_overrides(root: Path, *more: str, steps: int = 30) -> list[str]:
    """A trial of `steps` steps whose texts, cache and runs are below `root`; `more` wins over these."""
    texts = root / "texts"
    if not texts.exists():
        write_texts(texts)
    words = [
        *MODEL,
        "data=text_files",
        f"data.path={texts}",
        f"data.cache_dir={root / 'cache'}",
        "data.validation_tokens=1024",
        "data.interim_validation_tokens=256",
        "budget=tokens",
        f"budget.tokens={steps * 4 * 32}",
        "budget.evaluations=3",
        "tracking=none",
        "runtime.progress=none",
        f"runs_dir={root / 'runs'}",
        *more,
    ]
    return list({word.partition("=")[0]: word for word in words}.values())  # no key may be given twice


def tiny_trial(root: Path, *more: str, steps: int = 30) -> tuple[Trial, PackedCorpus]:
    config = compose_trial(tiny_overrides(root, *more, steps=steps))
    corpus = open_corpus(config.data, config.model.context)
    return resolve(config, corpus), corpus
