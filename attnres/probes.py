"""Statistics over depth of a model in training: magnitudes, gradients, and what each read is made of.

Off the hot path: a probe is a forward and a backward pass of its own over some validation windows, in which a
recording state stands around the rule's. Parameters, gradients and optimizer are left as they were.
docs/record.md has the schema. Shapes: B sequences, T tokens, D channels, L sublayers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnres.depth_mixing import Read, reads
from attnres.learner import Learner, Tokens
from attnres.model import Transformer
from attnres.residual.rule import ResidualRule, ResidualState

Array = npt.NDArray[np.float64]
# Above this relative error a matrix does not explain what was read: a rule that depth_mixing takes for a
# fixed one looks at content. Rounding in float32 stays a hundred times below.
MIXING_TOLERANCE = 1e-3


class RecordingRule(ResidualRule):
    """Forwards the verbs of `rule`; `outputs` holds v_0 .. v_L with their gradients, `reads` h_1 .. h_L and
    the output's.
    """

    def __init__(self, rule: ResidualRule) -> None:
        super().__init__()
        self.rule = rule
        self.outputs: list[Tensor] = []
        self.reads: list[Tensor] = []

    def start(self, embedding_BTD: Tensor) -> ResidualState:
        self.keep(embedding_BTD)
        return _RecordingState(self, self.rule.start(embedding_BTD))

    def keep(self, output_BTD: Tensor) -> None:
        if output_BTD.requires_grad:
            output_BTD.retain_grad()
        self.outputs.append(output_BTD)


class _RecordingState(ResidualState):
    def __init__(self, recording: RecordingRule, state: ResidualState) -> None:
        self.recording, self.state = recording, state

    def read(self, layer: int) -> Tensor:
        return self._keep(self.state.read(layer))

    def write(self, layer: int, output_BTD: Tensor) -> None:
        self.recording.keep(output_BTD)
        self.state.write(layer, output_BTD)

    def finish(self) -> Tensor:
        return self._keep(self.state.finish())

    def _keep(self, h_BTD: Tensor) -> Tensor:
        self.recording.reads.append(h_BTD.detach())
        return h_BTD


@contextmanager
def recording(model: Transformer) -> Iterator[RecordingRule]:
    """While open, the model's rule is recorded. One forward pass."""
    rule = model.residual
    model.residual = RecordingRule(rule)
    try:
        yield model.residual
    finally:
        model.residual = rule


def measure(learner: Learner, inputs: Tokens, targets: Tokens) -> dict[str, Array]:
    """The statistics of docs/record.md over windows [windows, context], by name, without the probe axis."""
    model, tokens = learner.model, inputs.size
    total: dict[str, Array] = {}
    assert all(parameter.grad is None for parameter in model.parameters())
    try:
        for start in range(0, len(inputs), learner.microbatch_size):
            part = slice(start, start + learner.microbatch_size)
            share = inputs[part].size / tokens
            for name, value in _measure_part(learner, inputs[part], targets[part]).items():
                total[name] = total.get(name, 0.0) + share * value
        whole = learner.parallel.whole
        squares = [
            sum(_squares(None if p.grad is None else whole(p.grad)) for p in block.parameters())
            for block in model.blocks
        ]
    finally:
        learner.optimizer.zero_grad(set_to_none=True)
    for name in [name for name in total if name.endswith("_rms")]:
        total[name] = np.sqrt(total[name])
    unexplained = total["mixing_error"] > MIXING_TOLERANCE
    total["mixing"][unexplained] = np.nan
    total["block_gradient_norm"] = np.sqrt(np.array(squares)) / tokens
    return total


def _measure_part(learner: Learner, inputs: Tokens, targets: Tokens) -> dict[str, Array]:
    """Means over the tokens of a part; under the names in _rms, mean squares. Adds to the gradients.

    The gradients are those of the sum of the losses, so that they do not depend on the number of tokens.
    """
    model = learner.model
    with recording(model) as record:
        with learner.precision():
            losses_BT = model.loss(learner.move(inputs), learner.move(targets), reduction="none")
        losses_BT.sum().backward()
    wide = torch.promote_types(record.outputs[0].dtype, torch.float32)
    outputs = [output_BTD.detach().to(wide) for output_BTD in record.outputs]
    gradients = [output_BTD.grad for output_BTD in record.outputs]
    sums = [first + second for first, second in zip(outputs[1::2], outputs[2::2], strict=True)]
    with learner.parallel.whole_rule():
        mixing = _mixing(model.residual, outputs, record.reads)
    return {
        "loss_nats": np.array(losses_BT.detach().double().mean().item()),
        "read_rms": _mean_squares(record.reads),
        "output_rms": _mean_squares(outputs),
        "output_gradient_rms": _mean_squares([g for g in gradients if g is not None]),
        "block_output_rms": _mean_squares(sums),
        **mixing,
    }


def _squares(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.double().square().sum())


def _mean_squares(tensors: Sequence[Tensor]) -> Array:
    return np.array([float(x.double().square().mean()) for x in tensors])


@torch.no_grad()
def _mixing(rule: ResidualRule, outputs: Sequence[Tensor], seen: Sequence[Tensor]) -> dict[str, Array]:
    """mixing, its error, and for rules with weights of their own these and their entropy."""
    mixing, errors = np.zeros((len(seen), len(outputs))), np.zeros(len(seen))
    weighing: dict[int, Read] = {}
    for layer, (read, h_BTD) in enumerate(zip(reads(rule, outputs), seen, strict=True)):
        h_BTD = h_BTD.to(outputs[0].dtype)
        errors[layer] = float((read.of(outputs) - h_BTD).norm() / h_BTD.norm())
        mixing[layer, : layer + 1] = read.mixing_SBTD.double().mean((1, 2, 3)).cpu().numpy()
        if read.weights_NBTH is not None:
            weighing[layer] = read
    result = {"mixing": mixing, "mixing_error": errors}
    if not weighing:
        return result
    sources = 1 + max(max(read.sources) for read in weighing.values())
    weights, entropy = np.full((len(seen), sources), np.nan), np.full(len(seen), np.nan)
    for layer, read in weighing.items():
        assert read.weights_NBTH is not None
        weights_NBTH = read.weights_NBTH.double()
        weights[layer, list(read.sources)] = weights_NBTH.mean((1, 2, 3)).cpu().numpy()
        if bool((weights_NBTH >= 0).all()):
            shares_NBTH = weights_NBTH / weights_NBTH.sum(0)
            entropy[layer] = float(torch.special.entr(shares_NBTH).sum(0).mean())
    return result | {"depth_weights": weights, "depth_entropy_nats": entropy}
