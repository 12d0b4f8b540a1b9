"""Wrong forms of AttnRes with options and with a window: each must fail a check that the right ones pass."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attnres_options_support import CASES, as_reference, spec_of
from model_support import TINY, make_model
from rules_support import check_is_prenorm, check_model, check_reads, random_rule
from torch import Tensor

from attnres.model import Transformer
from attnres.optim import parameter_groups
from attnres.residual import attnres
from attnres.residual.rule import ResidualRule

LAYERS, WIDTH = TINY.layers, TINY.width


class WrongState(attnres._FullState):
    """The equations once more in a naive form, over outputs or over a window, with one mistake by name."""

    mistake = "none"

    def readable(self) -> Sequence[Tensor]:
        embedding, *outputs = self.sources
        window = self.rule.window
        if self.mistake == "window counts the embedding":
            return [embedding, *outputs[-window + 1 :]]
        if self.mistake == "window of one more":
            return [embedding, *outputs[-window - 1 :]]
        if self.mistake == "window slides over the embedding":
            return self.sources[-window - 1 :]
        if self.mistake == "output reads all" and len(outputs) == LAYERS:
            return self.sources
        return [embedding, *outputs[-window:]]

    def query(self, sources: Sequence[Tensor], row: int) -> Tensor:
        query, mistake = self.rule.queries_RD[row], self.mistake
        if self.rule.spec.query == "learned":
            return query
        latest = {"query from the embedding": sources[0], "query from the source before": sources[-2]}.get(
            mistake, sources[-1]
        )
        if mistake == "query detached":
            latest = latest.detach()
        if mistake != "query without norm":
            latest = latest * (latest.square().mean(-1, keepdim=True) + self.rule.eps).rsqrt()
        matrix = self.matrices[row]
        added = latest @ (matrix if mistake == "matrix transposed" else matrix.T)
        return added if mistake == "query of the matrix alone" else query + added

    def logits(self, sources: Sequence[Tensor], row: int) -> Tensor:
        """[N, B, T, H]."""
        v, spec, mistake = torch.stack(list(sources)), self.rule.spec, self.mistake
        if spec.weights == "static":
            scalars_NH = self.scalars[row]
            if mistake == "scalars in the order of sources reversed":
                scalars_NH = scalars_NH.flip(0)
            if mistake == "one scalar for all heads":
                scalars_NH = scalars_NH.mean(1, keepdim=True).expand_as(scalars_NH)
            return scalars_NH[:, None, None].expand(*v.shape[:3], -1)
        keys_by_head = v.unflatten(-1, (spec.heads, -1))
        scale = (v.square().mean(-1) + self.rule.eps).rsqrt()[..., None, None]
        if mistake == "norm per head":
            scale = (keys_by_head.square().mean(-1, keepdim=True) + self.rule.eps).rsqrt()
        if spec.key_norm or mistake == "norm though there is none":
            keys_by_head = keys_by_head * scale
        query = self.query(sources, row)
        if spec.key_norm:
            query = query * self.rule.gains_RD[row]
        logits = (keys_by_head * query.unflatten(-1, (spec.heads, -1))).sum(-1)
        return (
            logits / (v.shape[-1] / spec.heads) ** 0.5 if mistake == "scaled by the head's width" else logits
        )

    def attend(self, sources: Sequence[Tensor], row: int) -> Tensor:
        logits, heads, mistake = self.logits(sources, row), self.rule.spec.heads, self.mistake
        softmax = self.rule.spec.normaliser == "softmax"
        if mistake == "softmax over heads":
            weights = torch.softmax(logits, -1) * heads / len(sources)
        elif softmax:
            weights = torch.softmax(logits, 0)
        else:
            weights = torch.sigmoid(logits)
            if mistake == "sigmoid normalised":
                weights = weights / weights.sum(0)
            if mistake == "sigmoid of twice the mean":
                weights = weights * 2 / len(sources)
        v = torch.stack(list(sources))
        if mistake == "channels of heads interleaved":
            return (weights[..., None, :] * v.unflatten(-1, (-1, heads))).sum(0).flatten(-2)
        return (weights[..., None] * v.unflatten(-1, (heads, -1))).sum(0).flatten(-2)

    def read(self, layer: int) -> Tensor:
        if layer == 0 and self.mistake == "first read halved":
            return self.sources[0] / 2
        return super().read(layer)


def wrong(name: str, mistake: str) -> ResidualRule:
    """The rule of a case with random parameters and the state above."""
    rule = random_rule(CASES[name], LAYERS, WIDTH)
    state = type("State", (WrongState,), {"mistake": mistake})
    rule.__class__ = type("Wrong", (type(rule),), {"start": lambda self, embedding: state(self, embedding)})
    return rule


def wrong_model(name: str, mistake: str) -> Transformer:
    model = make_model(CASES[name])
    model.residual = wrong(name, mistake)
    model.residual.eps = TINY.norm_eps
    return model


MISTAKES = {
    "sigmoid normalised": "full_sigmoid",
    "sigmoid of twice the mean": "full_sigmoid",
    "first read halved": "full_sigmoid",
    "norm per head": "full_h2",
    "channels of heads interleaved": "full_h2",
    "softmax over heads": "full_h2",
    "scaled by the head's width": "full_h2",
    "norm though there is none": "full_no_key_norm",
    "query from the embedding": "full_input",
    "query from the source before": "full_input",
    "query detached": "full_input",
    "query without norm": "full_input",
    "query of the matrix alone": "full_input",
    "matrix transposed": "full_input",
    "scalars in the order of sources reversed": "full_static",
    "one scalar for all heads": "full_static_sigmoid_h2",
    "window counts the embedding": "w3_plain",
    "window of one more": "w3_plain",
    "window slides over the embedding": "w3_plain",
    "output reads all": "w3_plain",
}


@pytest.mark.parametrize("name", sorted(set(MISTAKES.values())))
def test_the_naive_form_without_a_mistake_passes_every_check(name: str) -> None:
    check_reads(CASES[name], wrong(name, "none"), LAYERS, WIDTH)
    check_model(wrong_model(name, "none"), CASES[name])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_reads_expose(mistake: str) -> None:
    with pytest.raises(AssertionError):
        check_reads(CASES[MISTAKES[mistake]], wrong(MISTAKES[mistake], mistake), LAYERS, WIDTH)


# The pre-norm of the sublayer that reads removes a factor of the whole read: no loss can tell these.
ONLY_A_FACTOR = {"sigmoid normalised", "sigmoid of twice the mean", "first read halved"}


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m not in ONLY_A_FACTOR])
def test_the_whole_model_exposes(mistake: str) -> None:
    with pytest.raises(AssertionError):
        check_model(wrong_model(MISTAKES[mistake], mistake), CASES[MISTAKES[mistake]])


@pytest.mark.parametrize("mistake", sorted(ONLY_A_FACTOR))
def test_the_whole_model_is_blind_to_a_factor_of_a_read(mistake: str) -> None:
    """Why the reads themselves are compared: with the final norm behind it, only they show these."""
    check_model(wrong_model(MISTAKES[mistake], mistake), CASES[MISTAKES[mistake]])


# What the start exposes: parameters that a generic initialisation drew, and reads that are no plain mean.
@pytest.mark.parametrize(
    ("option", "parameter"),
    [("input", "queries_RD"), ("static", "scalars_PH"), ("sigmoid", "queries_RD"), ("h2", "queries_RD")],
)
def test_the_start_exposes_a_generic_initialisation(option: str, parameter: str) -> None:
    for spec in (spec_of("full", option), as_reference(spec_of("full", option))):
        model = make_model(spec)
        check_is_prenorm(model)
        torch.nn.init.normal_(getattr(model.residual, parameter), std=0.02)
        with pytest.raises(AssertionError):
            check_is_prenorm(model)


def test_the_start_exposes_a_matrix_of_the_query_that_is_not_zero() -> None:
    model = make_model(spec_of("full", "input"))
    check_is_prenorm(model)
    torch.nn.init.normal_(model.residual.query_weights_RDD, std=0.02)
    with pytest.raises(AssertionError):
        check_is_prenorm(model)


def test_options_outside_the_residual_prefix_would_be_decayed() -> None:
    """What the test of the groups looks at: by shape alone, the matrices of queries are like any others."""
    model = make_model(CASES["full_input"])
    own = dict(model.residual.named_parameters())
    renamed = [(f"depth.{name}", parameter) for name, parameter in own.items()]
    assert any(group["weight_decay"] for group in parameter_groups(renamed, 0.1))
    right = [(f"residual.{name}", parameter) for name, parameter in own.items()]
    assert not any(group["weight_decay"] for group in parameter_groups(right, 0.1))
