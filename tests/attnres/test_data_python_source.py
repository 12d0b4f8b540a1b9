"""The embedded corpus: which Python files belong to it, and that nothing else on the machine changes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_support import data_config

from attnres.data import python_source
from attnres.data.corpus import open_corpus, verify
from attnres.data.documents import Report
from attnres.data.python_source import PythonSource, required_packages, standard_library
from attnres.errors import DataError


def install(
    site: Path, name: str, requires: tuple[str, ...] = (), files: dict[str, str] | None = None, **extra: str
) -> None:
    """Lay out an installed package as pip does; `extra` are more files of its .dist-info folder."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    for path, text in (files or {}).items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files or {}) + f"{info.name}/METADATA,,\n")
    for file, text in extra.items():
        (info / file).write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of installed packages for a project named `study`, which the test fills."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(python_source, "PROJECT", "study")
    monkeypatch.setattr(python_source, "PYPROJECT", tmp_path / "pyproject.toml")
    python_source._installed_identity.cache_clear()
    yield folder
    python_source._installed_identity.cache_clear()


def package_documents(report: Report) -> dict[str, bytes]:
    packages = required_packages(report)
    return {
        name: text
        for package in packages
        for name, text in python_source.package_files(package, packages[package], report)
    }


def test_standard_library_has_its_source_without_tests_and_machine_paths() -> None:
    report = Report()
    documents = dict(standard_library(report))
    assert {"stdlib/os.py", "stdlib/json/decoder.py", "stdlib/unittest/case.py"} <= set(documents)
    assert len(documents) == report.counts["files"] > 500
    for name, text in documents.items():
        assert name.endswith(".py")
        assert not set(name.split("/")) & {"test", "tests", "idle_test", "site-packages", "dist-packages"}, (
            name
        )
        assert str(python_source.library_folder()).encode() not in text, name
    assert list(documents) == list(dict(standard_library(Report())))


def test_required_packages_are_the_core_requirements_and_what_these_need() -> None:
    report = Report()
    packages = required_packages(report)
    assert {"torch", "numpy", "hydra-core", "wandb"} <= set(packages)  # ours
    assert {"sympy", "antlr4-python3-runtime", "python-dateutil"} <= set(packages)  # theirs
    assert not {"pytest", "hypothesis", "ruff", "mypy", "attnres-study"} & set(packages)
    assert list(packages) == sorted(packages)
    documents = python_source.package_files("numpy", packages["numpy"], report)
    assert "numpy/numpy/__init__.py" in dict(documents)


def test_closure_follows_markers_extras_and_circles_but_no_tools(site: Path) -> None:
    install(site, "study", ("Alpha_One>=1", "never; python_version < '3'", "tool; extra == 'dev'"))
    install(site, "alpha-one", ("beta[fast]", "study", "slow; extra == 'slow'"))
    install(site, "beta", ("alpha_one", "gamma; extra == 'fast'", "delta; extra == 'other'"))
    for name in ("gamma", "delta", "tool", "slow", "never", "unrelated"):
        install(site, name)
    assert list(required_packages(Report())) == ["alpha-one", "beta", "gamma"]


def test_only_python_files_inside_the_package_folder_count_and_trouble_is_named(site: Path) -> None:
    install(site, "study", ("alpha", "absent-two; python_version < '3'", "editable", "listless"))
    files = {"alpha/b.py": "b", "alpha/a.py": "a", "alpha/data.txt": "no", "../bin/script.py": "#!/machine"}
    install(site, "alpha", ("nowhere",), files=files | {"alpha/gone.py": ""})
    (site / "alpha/gone.py").unlink()
    editable = {"direct_url.json": '{"dir_info": {"editable": true}}'}
    install(site, "editable", files={"finder.py": "x"}, **editable)
    install(site, "listless")
    (site / "listless-1.0.dist-info/RECORD").unlink()
    report = Report()
    documents = package_documents(report)
    assert documents == {"alpha/alpha/a.py": b"a", "alpha/alpha/b.py": b"b"}
    assert list(documents) == sorted(documents)
    assert report.names["not_installed"] == ["nowhere: required by alpha"]
    assert report.names["editable"] == ["editable: its files are not part of the installation"]
    assert report.names["no_file_list"] == ["listless"]
    # importlib.metadata itself drops files that are gone, from Python 3.12 on.
    assert report.names.get("unreadable", []) in (["alpha/alpha/gone.py: No such file or directory"], [])


def test_identity_follows_required_packages_and_nothing_else(site: Path) -> None:
    def identity() -> object:
        python_source._installed_identity.cache_clear()
        return PythonSource().identity()

    install(site, "study", ("alpha",))
    install(site, "alpha", files={"alpha.py": "a"})
    before = identity()
    install(site, "devtool", files={"devtool.py": "x"})
    assert identity() == before
    (site / "alpha-1.0.dist-info/RECORD").write_text("alpha.py,sha256=other,1\n")
    assert identity() != before


def test_a_missing_direct_requirement_is_an_error(site: Path) -> None:
    install(site, "study", ("alpha",))
    with pytest.raises(
        DataError, match=r"^data\.corpus=python_source: alpha, which study requires, is not inst"
    ):
        required_packages(Report())


def test_requirements_come_from_pyproject_in_a_bare_checkout(site: Path, tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    lines = [
        "[project]",
        'name = "study"',
        'dependencies = ["alpha"]',
        'optional-dependencies.dev = ["beta"]',
    ]
    pyproject.write_text("\n".join(lines))
    install(site, "alpha")
    install(site, "beta")
    assert list(required_packages(Report())) == ["alpha"]


@pytest.mark.parametrize("text", [None, "torn [", '[project]\nname = "another"\ndependencies = []', "[tool]"])
def test_without_installation_or_pyproject_is_an_error(site: Path, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(
        DataError, match=r"^data\.corpus=python_source: study is not installed, and .*pyproject\.toml"
    ):
        required_packages(Report())


def test_a_python_without_source_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"stdlib": str(tmp_path / "python.zip")}
    monkeypatch.setattr(python_source.sysconfig, "get_paths", lambda: paths)
    with pytest.raises(DataError, match=r"no standard library source in .*python\.zip; use data=text_files"):
        list(standard_library(Report()))


def test_the_corpus_of_a_small_installation_packs(site: Path, tmp_path: Path) -> None:
    install(site, "study", ("alpha",))
    install(site, "alpha", files={"alpha/a.py": "only in alpha = 1\n"})
    config = data_config(None, tmp_path / "cache", corpus="python_source")
    corpus = open_corpus(config, context=64)
    assert corpus.report["documents"] > 500
    assert corpus.train_tokens + corpus.validation_tokens > 5_000_000
    assert open_corpus(config, context=64) == corpus


def test_an_installation_while_the_corpus_is_packed_is_noticed(site: Path, tmp_path: Path) -> None:
    install(site, "study", ("alpha",))
    install(site, "alpha", files={"alpha.py": "a"})

    def reinstall(line: str) -> None:
        (site / "alpha-1.0.dist-info/RECORD").write_text("alpha.py,sha256=other,1\n")

    with pytest.raises(DataError, match="python_source: changed while it was packed; run again$"):
        open_corpus(data_config(None, tmp_path / "cache", corpus="python_source"), progress=reinstall)


@pytest.mark.slow
def test_the_whole_corpus_is_the_same_twice_and_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    configs = [data_config(None, tmp_path / name, corpus="python_source") for name in ("a", "b")]
    first, second = (open_corpus(config, context=256) for config in configs)
    verify(first)
    assert first.fingerprint == second.fingerprint
    assert first.validation_fingerprint == second.validation_fingerprint
    here = str(Path(python_source.__file__).parents[2]).encode()
    for tokens in (first.train(), first.validation()):
        assert here not in tokens.astype("uint8").tobytes()
