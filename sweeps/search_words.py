"""The command line that a search was started with, kept beside its journal.

What a search has found belongs to the settings it was made with. Whoever looks at it need not give them
again, and whoever gives others is told which they were.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from attnres.errors import RecordError
from attnres.json_file import check_fields, read_object
from attnres.record import write_text_atomic

WORDS_FILE = "words.json"
_WHERE = ("study", "search", "runs_dir", "study.name", "search.name")  # these find the search
_GROUPS = ("launch", "executor")  # nothing here changes what a search does


def remember(folder: Path, words: Sequence[str]) -> None:
    """`folder` is the search's, `words` the overrides of its command line."""
    write_text_atomic(folder / WORDS_FILE, json.dumps({"overrides": list(words)}) + "\n")


def recall(folder: Path) -> list[str]:
    """The remembered overrides; none where nothing was. RecordError for a file that is no such list."""
    path = folder / WORDS_FILE
    try:
        found = read_object(path)
        if found is None:
            return []
        check_fields(found, {"overrides": _are_words}, str(path))
    except RecordError as error:
        raise RecordError(
            f"{error}; remove it, and give the search's settings again where it says that they differ"
        ) from None
    return list(found["overrides"])


def completed(words: Sequence[str], remembered: Sequence[str]) -> list[str]:
    """The given words, and of the remembered settings those whose key is not given.

    Where the search is, the given words alone say: its folder may have been copied or moved.
    """
    given = {word.partition("=")[0] for word in words}
    return [*words, *(word for word in _settings(remembered) if word.partition("=")[0] not in given)]


def settings(remembered: Sequence[str]) -> str:
    """The remembered words that make the search what it is, as a shell takes them."""
    return shlex.join(_settings(remembered))


def _settings(remembered: Sequence[str]) -> list[str]:
    keys = {word: word.partition("=")[0] for word in remembered}
    return [word for word, key in keys.items() if key not in _WHERE and key.partition(".")[0] not in _GROUPS]


def _are_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) and "=" in word for word in value)
