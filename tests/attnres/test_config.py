"""A user's mistakes in a configuration: each is one line that names the field and the value."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from attnres.cli import run_command
from attnres.compose import compose_trial, config_dir, group_options
from attnres.config import build_trial_config, to_mapping
from attnres.errors import ConfigError, UserError

MISTAKES = [
    # (overrides, what the line must name)
    (["optim.lrr=1"], ["optim.lrr", "1"]),
    (["+optim.lrr=1"], ["optim.lrr", "1"]),
    (["++optim.lrr=1"], ["optim.lrr", "1"]),
    (["~optim.beta1"], ["optim.beta1"]),
    (["optim.learning_rate=abc"], ["optim.learning_rate", "abc"]),
    (["optim.learning_rate="], ["optim.learning_rate"]),
    (["optim.learning_rate=-1"], ["optim.learning_rate", "-1"]),
    (["optim.learning_rate=nan"], ["optim.learning_rate", "nan"]),
    (["optim.beta2=1"], ["optim.beta2", "1"]),
    (["optim.name=sgd"], ["optim.name", "sgd", "adamw"]),
    (["optim=mun"], ["optim=mun", "muon"]),
    (["optim.momentum=0.9"], ["optim.momentum", "0.9", "another choice of optim"]),
    (["model.depth=1000000000"], ["model.depth=1000000000", "at most 1000 transformer blocks"]),
    (["optim.name=muon"], ["optim.name=muon", "optim.ns_steps", "optim=muon sets all"]),
    (["residual.rule=mhc"], ["residual.rule=mhc", "residual.streams", "residual=mhc sets all"]),
    (["optim=muon", "optim.momentum=1"], ["optim.momentum", "1"]),
    (["optim=muon", "optim.muon_learning_rate=0"], ["optim.muon_learning_rate", "0"]),
    (["optim=muon", "optim.adjust_lr_fn=keller"], ["optim.adjust_lr_fn", "keller", "match_rms_adamw"]),
    (["optim=muon", "optim.ns_steps=100"], ["optim.ns_steps", "100"]),
    (["optim=muon", "optim.beta1=1"], ["optim.beta1", "1"]),
    (["model=cpu_5k"], ["model=cpu_5k", "cpu_50k"]),
    (["model.width=25"], ["model.width", "25"]),
    (["model.width=24", "model.heads=5"], ["model.width=24", "model.heads=5"]),
    (["model.head_width=7"], ["model.head_width", "7", "odd"]),
    (["model.depth=0"], ["model.depth", "0"]),
    (["model.depth=2.5"], ["model.depth", "2.5", "whole number"]),
    (["model.norm_eps=1e-5"], ["model.norm_eps", "1e-05"]),
    (["residual=attnres_bloc"], ["residual=attnres_bloc", "attnres_block"]),
    (["residual=attnres_block", "residual.nun_blocks=4"], ["residual.nun_blocks", "4"]),
    (
        ["residual=attnres_block", "residual.block_size=2"],
        ["residual.num_blocks", "residual.block_size", "2"],
    ),
    (["residual=attnres_block", "residual.num_blocks=null"], ["residual.num_blocks", "None"]),
    (["residual=attnres_block", "residual.num_blocks=17"], ["residual.num_blocks", "17", "16"]),
    (["residual=attnres_block", "residual.num_blocks=null", "residual.block_size=17"], ["block_size", "17"]),
    (["residual=attnres_block", "residual.num_blocks=0"], ["residual.num_blocks", "0"]),
    (["budget.tokens=-5", "budget.tokens_per_parameter=null"], ["budget.tokens", "-5"]),
    (["budget.tokens_per_parameter=-1"], ["budget.tokens_per_parameter", "-1"]),
    (["budget.tokens=1000"], ["budget.tokens", "budget.tokens_per_parameter"]),
    (["budget.tokens_per_parameter=null"], ["budget.tokens"]),
    (["schedule=wsd", "schedule.decay_fraction=1.5"], ["schedule.decay_fraction", "1.5"]),
    (["schedule.decay_fraction=0.5"], ["schedule.decay_fraction", "0.5", "wsd"]),
    (["data=text_files"], ["data.path"]),
    (["data.path=x"], ["data.path", "x", "text_files"]),
    (["data.interim_validation_tokens=1e9"], ["data.interim_validation_tokens", "1000000000"]),
    (["model.batch_size=16", "runtime.microbatch_size=5"], ["runtime.microbatch_size", "5", "16"]),
    (["runtime.threads=100000"], ["runtime.threads", "100000", "1024"]),
    (["runtime.dtype=float16"], ["runtime.dtype", "float16"]),
    (["tracking.tags=[a,'']"], ["tracking.tags"]),
    (["seed=-1"], ["seed", "-1"]),
    (["seed=1", "seed=2"], ["seed=2", "twice", "seed=1"]),
    (["seed=1,2"], ["seed", "1,2"]),
    (["study_name=../x"], ["study_name", "../x"]),
    (["study_name=.."], ["study_name", ".."]),
    (["hydra.run.dir=x"], ["hydra.run.dir", "x"]),
    (["hydra/launcher=basic"], ["hydra/launcher", "basic"]),
    (["foo"], ["foo"]),
    (["seed=[1"], ["seed=[1"]),
    (["optim.learning_rate=${nope}"], ["nope"]),
]


@pytest.mark.parametrize(("overrides", "named"), MISTAKES, ids=[" ".join(o) for o, _ in MISTAKES])
def test_mistake_is_one_line_that_names_field_and_value(overrides: list[str], named: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        compose_trial(overrides)
    line = str(caught.value)
    assert "\n" not in line
    for word in named:
        assert word in line
    # Names of Python or Hydra internals help nobody.
    for word in ("object_type", "Traceback", "DictConfig", "struct"):
        assert word not in line


def test_typo_in_a_users_yaml_is_named(tmp_path) -> None:
    (tmp_path / "optim").mkdir()
    text = (config_dir() / "optim" / "adamw.yaml").read_text()
    (tmp_path / "optim" / "mine.yaml").write_text(text.replace("beta1", "betta1"))
    with pytest.raises(ConfigError, match=r"optim\.betta1=0\.9: unknown key"):
        compose_trial(["optim=mine"], str(tmp_path))


def test_users_own_config_folder(tmp_path) -> None:
    (tmp_path / "model").mkdir()
    text = (config_dir() / "model" / "cpu_50k.yaml").read_text()
    (tmp_path / "model" / "mine.yaml").write_text(text.replace("name: cpu_50k", "name: mine"))
    assert compose_trial(["model=mine"], str(tmp_path)).model.name == "mine"
    with pytest.raises(UserError, match="no such folder"):
        compose_trial([], str(tmp_path / "absent"))


def test_a_float_that_is_whole_counts_as_an_integer() -> None:
    config = compose_trial(["budget=tokens", "budget.tokens=1e6"])
    assert config.budget.tokens == 1_000_000
    assert isinstance(config.budget.tokens, int)


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_mapping_round_trip(optim: str) -> None:
    config = compose_trial(["residual=attnres_block", f"optim={optim}", "tracking.tags=[a,b]"])
    assert build_trial_config(yaml.safe_load(yaml.safe_dump(to_mapping(config)))) == config


@pytest.mark.parametrize("key", ["optim.eps", "seed", "residual"])
def test_missing_key_is_named(key: str) -> None:
    mapping = to_mapping(compose_trial([]))
    group, _, name = key.rpartition(".")
    del (mapping[group] if group else mapping)[name]
    with pytest.raises(ConfigError, match=key):
        build_trial_config(mapping)


def every_choice() -> list[str]:
    trial_groups = {"model", "residual", "data", "optim", "schedule", "budget", "runtime", "tracking"}
    return [f"{g}={name}" for g, names in group_options().items() if g in trial_groups for name in names]


@pytest.mark.parametrize("choice", every_choice())
def test_every_yaml_composes(choice: str) -> None:
    extra = ["data.path=x"] if choice == "data=text_files" else []
    extra += ["model=cpu_400k"] if not choice.startswith("model") else []
    config = compose_trial([choice, *extra])
    group, _, name = choice.partition("=")
    if group == "model":
        assert config.model.name == name, "a size's YAML and its name must agree: records carry the name"
    if group == "residual":
        assert config.residual.rule == name or config.residual.label() == name


def test_configuration_is_frozen() -> None:
    config = compose_trial([])
    with pytest.raises(AttributeError):
        config.seed = 1  # type: ignore[misc]


def test_composing_imports_neither_torch_nor_wandb() -> None:
    code = (
        "import sys; from attnres.compose import compose_trial; compose_trial([]);"
        "print([m for m in ('torch', 'wandb', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_error_is_one_line_whatever_it_quotes(capsys) -> None:
    def command(argv: list[str]) -> int:
        raise ConfigError("field", "a\nb\x1b[31m\u2028é", "no")

    assert run_command(command, []) == 2
    assert capsys.readouterr().err == "error: field=a\\nb\\x1b[31m\\u2028é: no\n"
