"""Wrong rules, as found in public code: each must fail a check that the right ones pass."""

from __future__ import annotations

import pytest
import torch
from model_support import (
    block,
    check_equals_reference,
    check_output_query_learns,
    check_reads_equal_reference,
    check_zero_queries_are_prenorm,
    full,
    make_model,
)
from torch import Tensor

from attnres.model import Transformer
from attnres.residual.rule import ResidualRule


class WrongRule(ResidualRule):
    """Block AttnRes in a naive form, with one mistake chosen by name. It is its own state."""

    def __init__(self, mistake: str, size: int, layers: int, width: int) -> None:
        super().__init__()
        self.mistake, self.size, self.layers, self.eps = mistake, size, layers, 1e-14
        self.queries_RD = torch.nn.Parameter(torch.zeros(layers, width, dtype=torch.float64))
        self.gains_RD = torch.nn.Parameter(torch.ones(layers, width, dtype=torch.float64))

    def start(self, embedding_BTD: Tensor) -> WrongRule:  # type: ignore[override]
        self.sources = [embedding_BTD]
        self.running: Tensor | None = embedding_BTD if self.mistake == "embedding twice" else None
        self.sum = embedding_BTD
        return self

    def mix(self, sources: list[Tensor], row: int) -> Tensor:
        v = torch.stack(sources)
        keys = v * (v.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.gains_RD[row]
        if self.mistake == "no key gain":
            keys = v * (v.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        logits = (keys * self.queries_RD[row]).sum(-1, keepdim=True)
        if self.mistake == "scaled logits":
            logits = logits / v.shape[-1] ** 0.5
        values = keys if self.mistake == "normed values" else v
        return (torch.softmax(logits, 0) * values).sum(0)

    def read(self, layer: int) -> Tensor:
        sources = [*self.sources]
        if layer % self.size or self.mistake == "embedding twice":
            assert self.running is not None
            sources.append(self.running)
        elif self.mistake == "zero source":
            sources.append(torch.zeros_like(sources[0]))
        elif self.mistake == "running sum at a block's start" and layer:
            sources.append(self.sources[-1])
        return self.mix(sources, layer - 1) if layer else sources[0]

    def write(self, layer: int, output_BTD: Tensor) -> None:
        self.running = output_BTD if self.running is None else self.running + output_BTD
        self.sum = self.sum + output_BTD
        if (layer + 1) % self.size == 0:
            self.sources.append(self.running.detach() if self.mistake == "detached blocks" else self.running)
            if self.mistake != "sums that never restart":
                self.running = None
        if self.mistake == "embedding twice" and self.running is None:
            self.running = torch.zeros_like(output_BTD)

    def finish(self) -> Tensor:
        if self.mistake == "plain sum at the end":
            return self.sum
        if self.mistake == "last block dropped":
            return self.mix(self.sources, self.layers - 1)
        last = [] if self.layers % self.size == 0 else [self.running]
        return self.mix([*self.sources, *last], self.layers - 1)  # type: ignore[list-item]


def wrong_model(mistake: str, size: int = 3) -> Transformer:
    model = make_model(block(size))
    model.residual = WrongRule(mistake, size, model.config.layers, model.config.width)
    return model


def test_the_naive_form_without_a_mistake_passes_every_check() -> None:
    check_zero_queries_are_prenorm(wrong_model("none"))
    check_output_query_learns(wrong_model("none"))
    check_equals_reference(wrong_model("none"), 3)
    check_reads_equal_reference(wrong_model("none"), 3)


START_MISTAKES = ["embedding twice", "sums that never restart", "detached blocks", "last block dropped"]
START_MISTAKES += ["running sum at a block's start", "normed values"]


@pytest.mark.parametrize("mistake", START_MISTAKES)
def test_zero_queries_expose(mistake: str) -> None:
    with pytest.raises(AssertionError):
        check_zero_queries_are_prenorm(wrong_model(mistake))


def test_the_output_query_exposes_a_plain_sum_at_the_end() -> None:
    with pytest.raises(AssertionError):
        check_output_query_learns(wrong_model("plain sum at the end"))


MISTAKES = [*START_MISTAKES, "plain sum at the end", "no key gain", "scaled logits"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_independent_implementation_exposes(mistake: str) -> None:
    with pytest.raises(AssertionError):
        check_equals_reference(wrong_model(mistake), 3)


@pytest.mark.parametrize("mistake", [*MISTAKES, "zero source"])
def test_the_reads_expose(mistake: str) -> None:
    """A zero tensor as a source only scales a read: no loss can tell, so the read itself is compared."""
    with pytest.raises(AssertionError):
        check_reads_equal_reference(wrong_model(mistake), 3)


def test_zero_queries_expose_a_generic_initialisation() -> None:
    model = make_model(full())
    torch.nn.init.normal_(model.residual.queries_RD, std=0.02)
    with pytest.raises(AssertionError):
        check_zero_queries_are_prenorm(model)
