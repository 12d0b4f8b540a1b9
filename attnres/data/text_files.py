"""A user's own files as a corpus: .txt, .md and .py files, and .jsonl files with one document per line."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from attnres.data.documents import Document, Report, printable, walk_files
from attnres.errors import DataError

WHOLE_FILE = (".txt", ".md", ".py")  # one document per file
PER_LINE = (".jsonl",)  # one document per line
EXTENSIONS = WHOLE_FILE + PER_LINE


class TextFiles:
    """All usable files below a folder, or one file. Hidden files and folders are not looked at."""

    def __init__(self, path: str, text_field: str) -> None:
        self.label = f"data.path={path}"
        self.text_field = text_field
        self.path = self._checked(path)

    def identity(self) -> Any:
        """Path, and the size, modification time and readability of every usable file below it."""
        files = [[name, *self._state(name)] for name in self._files(Report())]
        return {"path": str(self.path), "text_field": self.text_field, "files": files}

    def documents(self, report: Report) -> Iterator[Document]:
        files = list(self._files(report))
        if not files:
            found = "; ".join(report.lines()) or "it is empty"
            raise DataError(f"{self.label}: holds no {', '.join(EXTENSIONS)} files; {found}")
        for name in files:
            report.counts["files"] += 1
            try:
                if name.lower().endswith(PER_LINE):
                    yield from self._json_lines(name, report)
                else:
                    with self._open(name) as file:
                        text = file.read()
                    yield Document(printable(name), text)
            except OSError as error:
                report.leave_out("unreadable", printable(name), error.strerror or str(error))

    def _checked(self, path: str) -> Path:
        try:
            resolved = Path(path).expanduser().resolve()
            mode = resolved.stat().st_mode
        except FileNotFoundError:
            raise DataError(f"{self.label}: no such file or folder") from None
        except (OSError, RuntimeError) as error:  # RuntimeError: unknown user in ~name, or links in a circle
            why = getattr(error, "strerror", None) or str(error)
            raise DataError(f"{self.label}: cannot be read: {why}") from None
        if not stat.S_ISDIR(mode) and not resolved.name.lower().endswith(EXTENSIONS):
            raise DataError(f"{self.label}: cannot read this kind of file; one of {', '.join(EXTENSIONS)}")
        return resolved

    def _files(self, report: Report) -> Iterator[str]:
        """Names of the usable files, relative to the folder; what is skipped is counted in the report."""
        if not self.path.is_dir():
            yield self.path.name
            return

        def enter(name: str) -> bool:
            if name.startswith("."):
                report.leave_out("hidden", printable(name))
            return not name.startswith(".") and name != "__pycache__"

        def unreadable(name: str, error: OSError) -> None:
            report.leave_out("unreadable", printable(name), error.strerror or str(error))

        for name in walk_files(self.path, enter, unreadable):
            if name.lower().endswith(EXTENSIONS):
                yield name
            else:
                report.leave_out("unknown_extension", printable(name))

    def _locate(self, name: str) -> Path:
        return self.path / name if self.path.is_dir() else self.path

    def _state(self, name: str) -> list[int]:
        path = self._locate(name)
        try:
            status = path.stat()
        except OSError:  # a link that leads nowhere: it is reported when it is read
            return []
        # A change of permissions alone leaves the time as it was.
        return [status.st_size, status.st_mtime_ns, int(os.access(path, os.R_OK))]

    def _open(self, name: str) -> BinaryIO:
        path = self._locate(name)
        # Opening a named pipe would wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(0, "not a regular file")
        return open(path, "rb")

    def _json_lines(self, name: str, report: Report) -> Iterator[Document]:
        with self._open(name) as file:
            for number, line in enumerate(file, 1):
                where = f"{printable(name)}:{number}"
                if not line.strip():
                    report.leave_out("empty", where)
                    continue
                if (text := self._text_of(line, where, report)) is not None:
                    # A half of a surrogate pair passes through and is reported as not UTF-8.
                    yield Document(where, text.encode("utf-8", errors="surrogatepass"))

    def _text_of(self, line: bytes, where: str, report: Report) -> str | None:
        """The text of a JSON line, or None after reporting why there is none."""
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            report.leave_out("not_utf8", where, f"byte {error.start} of the line")
            return None
        except (ValueError, RecursionError) as error:
            report.leave_out("bad_json", where, str(error))
            return None
        if not isinstance(value, dict):
            report.leave_out("bad_json", where, "not an object")
            return None
        text = value.get(self.text_field)
        if not isinstance(text, str):
            why = (
                "is not a text"
                if self.text_field in value
                else f"is missing; there are {', '.join(value) or 'none'}"
            )
            report.leave_out("no_text_field", where, f"data.text_field={self.text_field} {why}")
            return None
        return text
