"""Settings of the config group `executor`: where a study's trials run. None can change their numbers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attnres.config import build
from attnres.errors import ConfigError

_MEMORY = re.compile(r"[1-9][0-9]*[KMGT]")
_PARAMETER = re.compile(r"[a-z][a-z-]*(=[^\s'\"\\`$;&|<>]+)?")  # nothing that a shell would read otherwise
_RESOURCE = re.compile(r"([A-Za-z][A-Za-z0-9_.:-]*)=([0-9]+(?:\.[0-9]+)?)")
_BYTES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# sbatch options that the executor sets itself.
_OURS = {"array", "job-name", "output", "error", "open-mode", "signal", "requeue", "no-requeue"}
_OURS |= {"nodes", "ntasks", "ntasks-per-node", "wckey", "chdir", "parsable", "wrap"}
# sbatch options that have a setting of their own.
_SETTINGS = {"partition": "partition", "account": "account", "qos": "qos", "time": "time_minutes"}
_SETTINGS |= {"cpus-per-task": "cpus", "gpus-per-node": "gpus", "mem": "memory"}


@dataclass(frozen=True)
class ExecutorConfig:
    """What the choices have in common: their names."""

    name: str


@dataclass(frozen=True)
class LocalConfig(ExecutorConfig):
    """A process per trial on this machine; how many at once is `launch.workers`."""

    name: Literal["local"]


@dataclass(frozen=True)
class SlurmConfig(ExecutorConfig):
    """Jobs of a Slurm cluster. None leaves a choice to the cluster, but for cpus and gpus: to the trial."""

    name: Literal["slurm"]
    partition: str | None
    account: str | None
    qos: str | None
    time_minutes: int | None
    cpus: int | None
    gpus: int | None
    memory: str | None
    at_once: int | None
    requeues: int
    signal_seconds: int
    poll_seconds: float
    on_interrupt: Literal["cancel", "leave"]
    folder: str | None
    parameters: tuple[str, ...]  # name=value, or the name of a flag

    def __post_init__(self) -> None:
        _check_positive(self, "time_minutes", "cpus", "at_once", "signal_seconds", "poll_seconds")
        _check_not_negative(self, "gpus", "requeues")
        _check_memory(self.memory)
        if self.time_minutes is not None and self.time_minutes * 60 <= self.signal_seconds:
            why = f"must be longer than executor.signal_seconds={self.signal_seconds}"
            raise ConfigError("executor.time_minutes", self.time_minutes, why)
        _check_distinct("executor.parameters", self.parameters)
        for text in self.parameters:
            option = text.partition("=")[0]
            if not _PARAMETER.fullmatch(text):
                why = "write name=value, or name alone, of a long option of sbatch (without --)"
                raise ConfigError("executor.parameters", text, why)
            if option in _OURS:
                raise ConfigError("executor.parameters", text, "is set by the executor itself")
            if option in _SETTINGS:
                raise ConfigError("executor.parameters", text, f"set executor.{_SETTINGS[option]} instead")

    @property
    def options(self) -> dict[str, str | bool]:
        """`parameters` by name; a flag is True."""
        pairs = (text.partition("=") for text in self.parameters)
        return {name: value if equals else True for name, equals, value in pairs}


@dataclass(frozen=True)
class RayConfig(ExecutorConfig):
    """Tasks of a Ray cluster, or of Ray on this machine."""

    name: Literal["ray"]
    address: str | None
    cpus: float | None
    gpus: float | None
    memory: str | None
    resources: tuple[str, ...]  # name=amount

    def __post_init__(self) -> None:
        _check_positive(self, "cpus")
        _check_not_negative(self, "gpus")
        _check_memory(self.memory)
        if self.address == "":
            raise ConfigError("executor.address", "", "is empty; null starts Ray on this machine")
        _check_distinct("executor.resources", self.resources)
        for text in self.resources:
            match = _RESOURCE.fullmatch(text)
            if match is None or float(match[2]) <= 0:
                raise ConfigError("executor.resources", text, "write name=amount, such as a100=1")
            if match[1] in ("CPU", "GPU", "memory"):
                raise ConfigError("executor.resources", text, "set executor.cpus, gpus or memory instead")

    @property
    def amounts(self) -> dict[str, float]:
        """`resources` by name."""
        return {name: float(amount) for name, _, amount in (text.partition("=") for text in self.resources)}

    @property
    def memory_bytes(self) -> int | None:
        return memory_bytes(self.memory) if self.memory else None


_KINDS: Mapping[str, type[ExecutorConfig]] = {"local": LocalConfig, "ray": RayConfig, "slurm": SlurmConfig}


def build_executor(mapping: Any) -> ExecutorConfig:
    """The group's mapping, as composed from YAML -> its settings, or a ConfigError."""
    if not isinstance(mapping, Mapping) or mapping.get("name") not in _KINDS:
        name = mapping.get("name") if isinstance(mapping, Mapping) else mapping
        raise ConfigError("executor.name", name, f"one of {', '.join(_KINDS)}")
    kind = _KINDS[mapping["name"]]
    names = {field.name for field in dataclasses.fields(kind)}
    if (missing := sorted(names - mapping.keys())) and mapping.keys() <= names:
        why = f"needs {', '.join(missing)}; executor={mapping['name']} sets all its options"
        raise ConfigError("executor.name", mapping["name"], why)
    return build(kind, mapping, "executor")


def check_executor_keys(overrides: Sequence[str]) -> None:
    """ConfigError for an option of another executor than the one that is chosen, by name."""
    given = dict(word.partition("=")[::2] for word in overrides)
    kind = _KINDS.get(given.get("executor", "local"))
    for key, value in given.items():
        group, _, option = key.partition(".")
        if group != "executor" or kind is None or option in _options(kind):
            continue
        if having := [name for name, other in _KINDS.items() if option in _options(other)]:
            chosen = given.get("executor", "local")
            why = f"is an option of executor={' or '.join(having)}, and this is executor={chosen}"
            raise ConfigError(key, value, why)


def _options(kind: type[ExecutorConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def memory_bytes(text: str) -> int:
    """8G -> 8 * 2**30, of a text that has been checked."""
    return int(text[:-1]) * _BYTES[text[-1]]


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"executor.{name}", value, "must be positive")


def _check_not_negative(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 0:
            raise ConfigError(f"executor.{name}", value, "must not be negative")


def _check_distinct(field: str, texts: Sequence[str]) -> None:
    names = [text.partition("=")[0] for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(field, list(texts), f"{name} is given twice")


def _check_memory(memory: str | None) -> None:
    if memory is not None and not _MEMORY.fullmatch(memory):
        raise ConfigError("executor.memory", memory, "write a number and K, M, G or T, such as 8G")
