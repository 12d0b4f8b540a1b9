"""Typed, frozen, validated configuration of one trial.

Hydra stops here: `attnres.compose` turns YAML and overrides into a plain mapping, `build` turns the mapping
into these dataclasses. Every mistake is a ConfigError that names the field and the value; past this module
no key is optional and nothing is mutable.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union

from attnres.errors import ConfigError
from attnres.residual.specs import SPECS, RuleSpec

MAX_DEPTH = 1000  # lists of sources grow with its square; more is a slip of the keys
MUON_GROUP = "block_matrices"  # name of the parameter group that Muon has
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _require(condition: bool, field: str, value: object, why: str) -> None:
    if not condition:
        raise ConfigError(field, value, why)


def _require_positive(prefix: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value is None or value > 0, f"{prefix}.{name}", value, "must be positive")


@dataclass(frozen=True)
class ModelConfig:
    """A size: shape of the decoder, and the batch and learning rate that belong to it."""

    name: str
    width: int  # d_model
    depth: int  # transformer blocks; the model has 2 * depth sublayers
    heads: int
    head_width: int | None  # channels of a head; null: width / heads
    mlp_width: int  # hidden units of SwiGLU (each of the two input projections has this many)
    context: int  # tokens per training sequence
    batch_size: int  # sequences per optimizer step
    learning_rate: float  # peak rate, chosen on the baseline of this size
    tie_embeddings: bool
    rope_base: float
    norm_eps: float

    def __post_init__(self) -> None:
        _require(
            bool(NAME_PATTERN.fullmatch(self.name)),
            "model.name",
            self.name,
            "use letters, digits, . _ - only",
        )
        _require_positive("model", self, "width", "depth", "heads", "mlp_width", "context", "batch_size")
        _require(
            self.depth <= MAX_DEPTH, "model.depth", self.depth, f"at most {MAX_DEPTH} transformer blocks"
        )
        _require_positive("model", self, "learning_rate", "rope_base", "norm_eps")
        _require_positive("model", self, "head_width")
        if self.head_width is None and self.width % self.heads:
            raise ConfigError("model.width", self.width, f"is not divisible by model.heads={self.heads}")
        if self.head_channels % 2:
            field = "width" if self.head_width is None else "head_width"
            why = f"head size {self.head_channels} is odd; RoPE needs it even"
            raise ConfigError(f"model.{field}", getattr(self, field), why)
        # An AttnRes read averages n sources, n times smaller than their sum: more would handicap deep models.
        _require(self.norm_eps <= 1e-8, "model.norm_eps", self.norm_eps, "must be at most 1e-8")

    @property
    def layers(self) -> int:
        """Number of sublayers L (attention and MLP counted separately)."""
        return 2 * self.depth

    @property
    def head_channels(self) -> int:
        """Channels of one attention head."""
        return self.head_width if self.head_width is not None else self.width // self.heads


@dataclass(frozen=True)
class DataConfig:
    """A corpus, how it is tokenized and split, and the fixed validation set."""

    corpus: Literal["python_source", "text_files"]
    path: str | None  # file or folder; text_files only
    text_field: str  # field of a .jsonl line that holds the text
    tokenizer: Literal["bytes"]
    validation_fraction: float  # of documents, by hash
    validation_tokens: int  # size of the fixed validation set, read at the end of the run
    interim_validation_tokens: int  # its first part, read at evaluations before the end
    cache_dir: str | None  # null: $XDG_CACHE_HOME/attnres or ~/.cache/attnres

    def __post_init__(self) -> None:
        _require_positive("data", self, "validation_tokens", "interim_validation_tokens")
        fraction = self.validation_fraction
        _require(0 < fraction < 1, "data.validation_fraction", fraction, "must be between 0 and 1")
        _require(
            self.interim_validation_tokens <= self.validation_tokens,
            "data.interim_validation_tokens",
            self.interim_validation_tokens,
            f"must be at most data.validation_tokens={self.validation_tokens}",
        )
        if self.corpus == "text_files":
            _require(bool(self.path), "data.path", self.path, "data=text_files needs a file or folder")
        else:
            _require(self.path is None, "data.path", self.path, "only data=text_files reads a path")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW for all parameters. `optim=muon` is MuonConfig: the name decides which is built."""

    name: Literal["adamw", "muon"]
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float | None  # global norm; null: no clipping

    def __post_init__(self) -> None:
        _require_positive("optim", self, "learning_rate", "eps", "grad_clip")
        _require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "must not be negative")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optim.{name}", value, "must be at least 0 and below 1")

    def peak_rate(self, group: str) -> float:
        """Peak learning rate of a parameter group, by its name."""
        return self.learning_rate


@dataclass(frozen=True)
class MuonConfig(OptimConfig):
    """Muon for the matrices of the transformer blocks; the fields of OptimConfig are for the rest.

    `weight_decay` is that of all matrices.
    """

    muon_learning_rate: float
    momentum: float
    nesterov: bool
    ns_steps: int  # of Newton and Schulz, which make the update nearly orthogonal
    adjust_lr_fn: Literal["original", "match_rms_adamw"]  # of the rate to a matrix's shape

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("optim", self, "muon_learning_rate", "ns_steps")
        _require(self.ns_steps < 100, "optim.ns_steps", self.ns_steps, "must be below 100")  # torch's limit
        momentum = self.momentum
        _require(0 <= momentum < 1, "optim.momentum", momentum, "must be at least 0 and below 1")

    def peak_rate(self, group: str) -> float:
        return self.muon_learning_rate if group == MUON_GROUP else self.learning_rate


OPTIMIZERS: Mapping[str, type[OptimConfig]] = {"adamw": OptimConfig, "muon": MuonConfig}


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate as a fraction of its peak over the run's own horizon."""

    name: Literal["cosine", "wsd"]
    warmup_fraction: float  # of all steps
    final_fraction: float  # rate at the last step over the peak
    decay_fraction: float | None  # wsd only: the part of all steps that decays

    def __post_init__(self) -> None:
        warmup, final = self.warmup_fraction, self.final_fraction
        _require(0 <= warmup < 1, "schedule.warmup_fraction", warmup, "must be in [0, 1)")
        _require(0 <= final <= 1, "schedule.final_fraction", final, "must be in [0, 1]")
        if self.name == "wsd":
            decay = self.decay_fraction
            if decay is None or not 0 < decay <= 1 - self.warmup_fraction:
                why = f"schedule=wsd needs a part in (0, {1 - self.warmup_fraction:g}]"
                raise ConfigError("schedule.decay_fraction", decay, why)
        elif self.decay_fraction is not None:
            raise ConfigError(
                "schedule.decay_fraction", self.decay_fraction, "only schedule=wsd has a decay part"
            )


@dataclass(frozen=True)
class BudgetConfig:
    """How long to train: exactly one of three ways. The size sets it, never the rule's own parameters."""

    tokens: int | None
    tokens_per_parameter: float | None  # per non-embedding parameter of the prenorm model of this size
    flops: float | None  # of the prenorm model of this size, convention "total"
    evaluations: int  # evenly spaced over the run, the last one at its end

    def __post_init__(self) -> None:
        _require_positive("budget", self, "tokens", "tokens_per_parameter", "flops", "evaluations")
        given = {name: getattr(self, name) for name in ("tokens", "tokens_per_parameter", "flops")}
        given = {name: value for name, value in given.items() if value is not None}
        if not given:
            raise ConfigError("budget.tokens", None, "give tokens, tokens_per_parameter or flops")
        if len(given) > 1:
            (first, value), *others = given.items()
            also = " and ".join(f"budget.{name}={other!r}" for name, other in others)
            why = f"and {also} are both given; choose one, e.g. budget={first} budget.{first}={value!r}"
            raise ConfigError(f"budget.{first}", value, why)


@dataclass(frozen=True)
class RuntimeConfig:
    """How to run on this machine. Only `device` and `dtype` can change a trial's numbers beyond rounding."""

    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]  # bfloat16 is autocast; parameters and optimizer stay float32
    threads: int
    microbatch_size: int | None  # sequences per forward pass of a process; null: its whole share at once
    compile: bool
    checkpoint_activations: bool
    checkpoint_seconds: float
    progress: Literal["auto", "bar", "lines", "none"]
    log_every_steps: int
    keep_weights: bool  # leave the final weights as weights.pt beside the record
    parallel: Literal["none", "ddp", "fsdp"]  # how several processes share one trial
    processes: int  # of one trial, each with `threads` threads or a GPU of its own

    def __post_init__(self) -> None:
        _require_positive("runtime", self, "threads", "microbatch_size", "checkpoint_seconds")
        _require_positive("runtime", self, "log_every_steps")
        # Far more threads than any processor has cores end in a crash of the thread library.
        _require(self.threads <= 1024, "runtime.threads", self.threads, "must be at most 1024")
        _require_positive("runtime", self, "processes")
        if self.parallel == "none":
            why = "one trial in several processes needs runtime=ddp or runtime=fsdp"
            _require(self.processes == 1, "runtime.processes", self.processes, why)

    @property
    def cores(self) -> int:
        """Processor cores that a trial keeps busy."""
        return self.threads * self.processes


@dataclass(frozen=True)
class TrackingConfig:
    wandb: Literal["offline", "online", "disabled"]
    project: str
    entity: str | None
    tags: tuple[str, ...]
    init_timeout_seconds: float
    probes_at: tuple[float, ...]  # fractions of all steps after which statistics over depth are taken
    probe_tokens: int  # of the validation set, from its start, in whole windows

    def __post_init__(self) -> None:
        _require_positive("tracking", self, "init_timeout_seconds", "probe_tokens")
        for fraction in self.probes_at:
            _require(
                0 <= fraction <= 1, "tracking.probes_at", fraction, "fractions of training are in [0, 1]"
            )
        _require(bool(self.project), "tracking.project", self.project, "must not be empty")
        for tag in self.tags:
            _require(1 <= len(tag) <= 64, "tracking.tags", tag, "W&B tags have 1 to 64 characters")


@dataclass(frozen=True)
class TrialConfig:
    """Everything that one training run is told."""

    model: ModelConfig
    residual: RuleSpec
    data: DataConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    budget: BudgetConfig
    runtime: RuntimeConfig
    tracking: TrackingConfig
    seed: int
    study_name: str
    runs_dir: str

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**32, "seed", self.seed, "must be in [0, 2^32)")
        # The name is a folder below runs_dir: nothing in it may lead elsewhere.
        valid = bool(NAME_PATTERN.fullmatch(self.study_name))
        _require(valid, "study_name", self.study_name, "names a folder: 1 to 64 letters, digits, . _ -")
        self._check_shares()
        self.residual.check(self.model.layers, self.model.width)

    def _check_shares(self) -> None:
        """Processes have equal shares of a batch, and their microbatches one size: the mean of the means is
        then the mean. Shards are refused to an optimizer that needs whole matrices.
        """
        batch, processes = self.model.batch_size, self.runtime.processes
        if self.runtime.parallel == "fsdp" and processes > 1 and isinstance(self.optim, MuonConfig):
            why = "optim=muon updates whole matrices, not shards; choose runtime=ddp"
            raise ConfigError("runtime.parallel", "fsdp", why)
        microbatch = self.runtime.microbatch_size
        if batch % processes:
            why = f"does not divide model.batch_size={batch}: each takes an equal share of every batch"
            raise ConfigError("runtime.processes", processes, why)
        if microbatch is not None and batch // processes % microbatch:
            of = f" / runtime.processes={processes}" if processes > 1 else ""
            raise ConfigError(
                "runtime.microbatch_size", microbatch, f"does not divide model.batch_size={batch}{of}"
            )


T = TypeVar("T")


def build_trial_config(mapping: Mapping[str, Any]) -> TrialConfig:
    """Plain mapping (as composed from YAML) -> TrialConfig, or a ConfigError that names field and value."""
    mapping = dict(mapping)
    residual = mapping.get("residual")
    if not isinstance(residual, Mapping) or "rule" not in residual:
        raise ConfigError("residual", residual, f"choose a rule: {', '.join(SPECS)}")
    rule = residual["rule"]
    if rule not in SPECS:
        raise ConfigError("residual.rule", rule, f"unknown rule; one of {', '.join(SPECS)}")
    options = {key: value for key, value in residual.items() if key != "rule"}
    _require_whole_group(SPECS[rule], options, "residual.rule", rule)
    mapping["residual"] = build(SPECS[rule], options, "residual")
    optim = mapping.get("optim")
    if isinstance(optim, Mapping) and "name" in optim:
        name = optim["name"]
        if name not in OPTIMIZERS:
            raise ConfigError("optim.name", name, f"one of {', '.join(OPTIMIZERS)}")
        _require_whole_group(OPTIMIZERS[name], optim, "optim.name", name)
        mapping["optim"] = build(OPTIMIZERS[name], optim, "optim")
    return build(TrialConfig, mapping, "")


def _require_whole_group(kind: type, options: Mapping[str, Any], field: str, choice: str) -> None:
    """Whoever sets the choice alone has the options of another one."""
    group = field.partition(".")[0]
    names = [f.name for f in dataclasses.fields(kind)]
    missing = [f"{group}.{name}" for name in names if name not in options]
    if missing and options.keys() <= {*names}:  # else a key is mistyped, which `build` names
        raise ConfigError(field, choice, f"needs {', '.join(missing)}; {group}={choice} sets all its options")


def build(cls: type[T], mapping: Mapping[str, Any], path: str) -> T:
    """Fill a dataclass from a mapping; unknown, missing and mistyped keys are ConfigErrors with a path."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    prefix = f"{path}." if path else ""
    for key, value in mapping.items():
        if key not in fields:
            known = f"{path or 'the top level'} has {', '.join(fields) or 'no options'}"
            raise ConfigError(f"{prefix}{key}", value, f"unknown key; {known}")
    values = {}
    for name, hint in fields.items():
        if name not in mapping:
            raise ConfigError(f"{prefix}{name}", None, "is missing")
        values[name] = _convert(mapping[name], hint, f"{prefix}{name}")
    return cls(**values)


def _convert(value: Any, hint: Any, path: str) -> Any:
    """Check a YAML value against a type hint. Strings are never parsed into numbers: `lr=abc` is an error."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = [arg for arg in args if arg is not type(None)]
        return _convert(value, inner, path)
    if origin is Literal:
        if value not in args:
            raise ConfigError(path, value, f"one of {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(path, value, "must be a list")
        return tuple(_convert(item, args[0], f"{path}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(path, value, "must be a group of keys")
        return build(hint, value, path)  # type: ignore[arg-type]
    return _convert_scalar(value, hint, path)


def _convert_scalar(value: Any, hint: type, path: str) -> Any:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if numeric and not math.isfinite(value):
        raise ConfigError(path, value, "must be finite")
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and numeric and float(value).is_integer():
        return int(value)  # budget.tokens=1e6 means one million
    if hint is float and numeric:
        return float(value)
    if hint is str and isinstance(value, str):
        return value
    if hint is str and numeric:
        return str(value)  # a name such as 2026 is a number to YAML
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    raise ConfigError(path, value, f"must be {names[hint]}")


def to_mapping(config: Any) -> dict[str, Any]:
    """The inverse of `build_trial_config`: plain JSON- and YAML-ready mapping."""
    mapping: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, RuleSpec):
            mapping[field.name] = {"rule": value.rule, **to_mapping(value)}
        elif dataclasses.is_dataclass(value):
            mapping[field.name] = to_mapping(value)
        else:
            mapping[field.name] = list(value) if isinstance(value, tuple) else value
    return mapping
