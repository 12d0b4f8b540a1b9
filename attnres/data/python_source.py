"""The embedded corpus: the Python source code that is on every machine this runs on.

Two parts: the standard library without its test folders, and the .py files of the packages that this project
requires, directly or through others. What it does not require (development tools, extras) and its own files
are no part of the corpus, so installing a tool does not change it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata as metadata
import json
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from attnres.data.documents import Document, Report, printable, walk_files
from attnres.errors import DataError

LABEL = "data.corpus=python_source"
PROJECT = "attnres-study"
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "lib-dynload"})
# Written when Python is built or configured: they hold paths of the machine.
_MACHINE_FILES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")


class PythonSource:
    """Standard library and required packages, as a source of documents."""

    label = LABEL

    def identity(self) -> Any:
        return _installed_identity()

    def documents(self, report: Report) -> Iterator[Document]:
        _installed_identity.cache_clear()  # so that an installation during the reading is noticed after it
        yield from standard_library(report)
        for name, package in required_packages(report).items():
            yield from package_files(name, package, report)


@functools.cache  # packages do not change under a running process, and a plan asks once per trial
def _installed_identity() -> dict[str, Any]:
    """Which Python and which packages: where they are, a hash of each one's list of files.

    An edit inside an installed package goes unnoticed until it is installed anew; the packed corpus stays
    valid, for its fingerprint is of what was read.
    """
    folder = library_folder()
    status = (folder / "os.py").stat()
    return {
        "python": [sys.implementation.name, sys.version, str(folder), status.st_size, status.st_mtime_ns],
        "packages": [
            [name, str(package.locate_file("")), _file_list_hash(package)]
            for name, package in required_packages(Report()).items()
        ],
    }


def _file_list_hash(package: metadata.Distribution) -> str:
    text = package.read_text("RECORD") or package.version  # the list names the version, too
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).hexdigest()[:16]


def library_folder() -> Path:
    """Folder of the standard library's source. Raises DataError where Python comes without it (in a zip)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not (folder / "os.py").is_file():
        raise DataError(
            f"{LABEL}: this Python has no standard library source in {folder}; "
            "use data=text_files data.path=FOLDER"
        )
    return folder


def standard_library(report: Report) -> Iterator[Document]:
    """The standard library's .py files without tests, installed packages and files with machine paths."""
    folder = library_folder()

    def enter(name: str) -> bool:
        return not (name in _TEST_FOLDERS or name in _NOT_LIBRARY or name.startswith((".", *_MACHINE_FILES)))

    def unreadable(name: str, error: OSError) -> None:
        report.leave_out("unreadable", f"stdlib/{printable(name)}", error.strerror or str(error))

    for relative in walk_files(folder, enter, unreadable):
        if relative.endswith(".py"):
            yield from _read(folder / relative, f"stdlib/{relative}", report)


def package_files(name: str, package: metadata.Distribution, report: Report) -> Iterator[Document]:
    """The .py files that a package installed, as its own file list names them."""
    if _is_editable(package):
        report.leave_out("editable", name, "its files are not part of the installation")
        return
    files = package.files
    if files is None:
        report.leave_out("no_file_list", name)
        return
    relative = {file.as_posix() for file in files if file.suffix == ".py"}
    for path in sorted(relative):
        if not path.startswith(
            ".."
        ):  # scripts beside the interpreter: their first line is a path of the machine
            yield from _read(Path(str(package.locate_file(path))), f"{name}/{path}", report)


def _read(path: Path, name: str, report: Report) -> Iterator[Document]:
    report.counts["files"] += 1
    try:
        yield Document(printable(name), path.read_bytes())
    except OSError as error:
        report.leave_out("unreadable", printable(name), error.strerror or str(error))


def required_packages(report: Report) -> dict[str, metadata.Distribution]:
    """Every installed package that the project needs, directly or through others, in the order of names.

    Markers are evaluated for this machine; extras count only where a requirement asks for them. A direct
    requirement that is missing is a DataError (the installation is broken); one further down is reported.
    """
    found: dict[str, metadata.Distribution] = {}
    asked: set[tuple[str, str]] = set()
    pending = [
        (requirement, "") for requirement in _applicable(project_requirements(), {""}, PROJECT, report)
    ]
    while pending:
        requirement, wanted_by = pending.pop()
        name = canonicalize_name(requirement.name)
        new = {extra for extra in {"", *requirement.extras} if (name, extra) not in asked}
        if name == PROJECT or not new:
            continue
        asked |= {(name, extra) for extra in new}
        try:
            found[name] = found.get(name) or metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            if not wanted_by:
                raise DataError(f"{LABEL}: {name}, which {PROJECT} requires, is not installed") from None
            report.leave_out("not_installed", name, f"required by {wanted_by}")
            continue
        pending += [(item, name) for item in _applicable(found[name].requires or [], new, name, report)]
    return {name: found[name] for name in sorted(found)}


def project_requirements() -> list[str]:
    """The project's requirements, from its installation or else from pyproject.toml beside the package."""
    try:
        return list(metadata.requires(PROJECT) or [])
    except metadata.PackageNotFoundError:
        pass
    try:
        project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, ValueError):
        project = {}
    if project.get("name") != PROJECT:
        raise DataError(f"{LABEL}: {PROJECT} is not installed, and {PYPROJECT} is not its description")
    return list(project.get("dependencies", []))


def _applicable(texts: list[str], extras: set[str], wanted_by: str, report: Report) -> list[Requirement]:
    """Requirements whose markers hold on this machine for one of the extras ("" is none)."""
    requirements = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            report.leave_out("not_installed", text, f"required by {wanted_by}: {str(error).splitlines()[0]}")
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            requirements.append(requirement)
    return requirements


def _is_editable(package: metadata.Distribution) -> bool:
    text = package.read_text("direct_url.json")
    return bool(text) and bool(json.loads(text or "{}").get("dir_info", {}).get("editable"))
