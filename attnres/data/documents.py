"""What a corpus is made of: documents, where they come from, and the report of what was left out."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

NAMES_KEPT = 1000  # per kind, in the report file; the counts are always complete
NAMES_SHOWN = 3  # per kind, on the progress callback

# What can be left out, and how to say so to people.
LEFT_OUT = {
    "duplicate": "same content as another",
    "empty": "empty",
    "not_utf8": "not UTF-8",
    "unreadable": "unreadable",
    "bad_json": "JSON line torn or no object",
    "no_text_field": "JSON line without the text field",
    "unknown_extension": "other file extension",
    "hidden": "hidden",
    "not_installed": "required package that is not installed",
    "no_file_list": "package without a list of files",
    "editable": "package installed in editable mode",
}


class Document(NamedTuple):
    """A name for people, and the bytes of the text."""

    name: str
    text: bytes


class Source(Protocol):
    """Where documents come from."""

    @property
    def label(self) -> str:
        """`field=value` of the setting that chose this source, for error messages."""
        ...

    def identity(self) -> Any:
        """JSON-ready; changes whenever the documents may have changed. Cheap: it is asked on every start."""
        ...

    def documents(self, report: Report) -> Iterator[Document]:
        """All documents, in an order that the file system does not decide. Reports what cannot be read."""
        ...


class Report:
    """Counts of what was read, and the names of what was left out and why."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.names: dict[str, list[str]] = {}

    def leave_out(self, kind: str, name: str, why: str = "") -> None:
        """Count something that does not enter the corpus and, up to a limit, remember its name."""
        assert kind in LEFT_OUT, kind
        self.counts[kind] += 1
        kept = self.names.setdefault(kind, [])
        if len(kept) < NAMES_KEPT:
            kept.append(f"{name}: {why}" if why else name)

    def lines(self) -> list[str]:
        """One line for each kind that was left out: how many, and the first names."""
        return describe_left_out(self.counts, self.names)

    def to_json(self) -> str:
        return (
            json.dumps({"counts": dict(self.counts), "left_out": self.names}, indent=1, sort_keys=True) + "\n"
        )


def describe_left_out(counts: dict[str, int] | Counter[str], names: dict[str, list[str]]) -> list[str]:
    """One line per kind, such as `left out 2 (empty): a.txt, b.txt`."""
    lines = []
    for kind, words in LEFT_OUT.items():
        if count := counts.get(kind, 0):
            shown = names.get(kind, [])[:NAMES_SHOWN]
            more = f" and {count - len(shown):,} more" if count > len(shown) else ""
            lines.append(f"left out {count:,} ({words}): {', '.join(shown)}{more}")
    return lines


def printable(name: str) -> str:
    """A file name as one line of valid text; odd bytes and control characters are escaped."""
    text = os.fsencode(name).decode("utf-8", errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def walk_files(
    root: Path, enter: Callable[[str], bool], unreadable: Callable[[str, OSError], None]
) -> Iterator[str]:
    """Paths of all files below a folder, relative and with "/", sorted by name within each folder.

    Links are followed; a folder that several paths lead to is entered once. `enter(name)` says whether to
    look at a file or folder of this name at all.
    """
    seen: set[tuple[int, int]] = set()
    pending = [""]
    while pending:
        relative = pending.pop()
        folder = root / relative
        try:
            status = folder.stat()
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            unreadable(relative or ".", error)
            continue
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        folders = []
        for entry in entries:
            if not enter(entry.name):
                continue
            if os.path.isdir(entry.path):  # False, not an error, for a link that leads nowhere
                folders.append(f"{relative}{entry.name}/")
            else:
                yield f"{relative}{entry.name}"
        pending.extend(reversed(folders))
