"""Small models of every rule, and the checks of a rule that right ones pass and wrong ones must fail."""

from __future__ import annotations

import weakref
from dataclasses import replace

import reference_residual
import torch
from torch import Tensor

from attnres.config import ModelConfig
from attnres.model import Transformer
from attnres.normalise import RMSNorm
from attnres.residual import specs
from attnres.residual.prenorm import PreNorm
from attnres.residual.rule import ResidualRule

VOCABULARY = 19
TINY = ModelConfig(
    name="tiny",
    width=12,
    depth=5,
    heads=2,
    head_width=None,
    mlp_width=20,
    context=8,
    batch_size=2,
    learning_rate=1e-3,
    tie_embeddings=False,
    rope_base=1e4,
    norm_eps=1e-14,  # the rules differ from pre-norm at the start by about 1e3 x this
)
PRENORM = specs.PreNorm()


def full(implementation: str = "fused") -> specs.RuleSpec:
    return specs.AttnResFull(implementation)  # type: ignore[arg-type]


def block(size: int, implementation: str = "fused") -> specs.RuleSpec:
    return specs.AttnResBlock(implementation, num_blocks=None, block_size=size)  # type: ignore[arg-type]


# L = 10: even blocks, odd with a short last one, odd without, and a single one.
ATTNRES = {
    f"{name}_{implementation}": make(implementation)
    for implementation in ("reference", "fused")
    for name, make in {
        "full": full,
        **{f"block_s{size}": (lambda how, size=size: block(size, how)) for size in (2, 3, 5, 10)},
    }.items()
}
RULES = {"prenorm": PRENORM, **ATTNRES}


def make_model(
    spec: specs.RuleSpec,
    *,
    random_rule: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **changes: object,
) -> Transformer:
    """An initialised model; `random_rule` draws its queries and gains, which start where much cancels."""
    model = Transformer(replace(TINY, **changes), spec, VOCABULARY).to(dtype)  # type: ignore[arg-type]
    model.initialise(seed)
    if random_rule:
        randomise(model)
    return model


@torch.no_grad()
def randomise(model: Transformer) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.residual.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


def make_batch(model: Transformer, sequences: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (sequences, model.config.context + 1), generator=generator)
    tokens = tokens.to(model.embedding.weight.device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_gradients(model: Transformer) -> dict[str, Tensor]:
    """The loss of one batch under "loss", and each parameter's gradient under its name."""
    model.zero_grad()
    loss = model.loss(*make_batch(model))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | gradients


def relative_error(values: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest over the names in `expected` of the difference's norm over the norm."""
    assert values.keys() >= expected.keys(), expected.keys() - values.keys()
    return max(
        float((values[name].double() - value.double()).norm() / value.double().norm())
        for name, value in expected.items()
    )


def set_eps(model: Transformer, eps: float) -> None:
    """Also to values that the configuration refuses."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.eps = eps
    if not isinstance(model.residual, PreNorm):
        model.residual.eps = eps  # type: ignore[assignment]


def reference_loss_and_gradients(model: Transformer, block_size: int | None) -> dict[str, Tensor]:
    """As loss_and_gradients, by the independent implementation on copies of the model's parameters."""
    config = model.config
    shape = reference_residual.Shape(
        config.depth, config.heads, config.rope_base, config.norm_eps, block_size
    )
    parameters = {name: p.detach().double().clone().requires_grad_() for name, p in model.named_parameters()}
    loss = reference_residual.loss_nats(parameters, shape, *make_batch(model))
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in parameters.items() if p.grad is not None}


def block_size_of(spec: specs.RuleSpec) -> int | None:
    return spec.resolved_block_size(TINY.layers) if isinstance(spec, specs.AttnRes) else None


def run_rule(rule: ResidualRule, v: list[Tensor]) -> list[Tensor]:
    """All L + 1 reads of a rule whose sublayers put out v_1 .. v_L whatever they read."""
    state = rule.start(v[0])
    reads = []
    for layer, output in enumerate(v[1:]):
        reads.append(state.read(layer))
        state.write(layer, output)
    return [*reads, state.finish()]


class Canary:
    """Lives exactly as long as the node of the graph that holds it."""


class Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, canaries):
        ctx.canary = Canary()
        canaries.append(weakref.ref(ctx.canary))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def living_canaries(model: Transformer) -> int:
    """Nodes of the graph (one tapped behind the embedding and every sublayer) left after a backward pass."""
    canaries: list[weakref.ref] = []
    tapped = [model.embedding, *(m for b in model.blocks for m in (b.attention, b.mlp))]
    hooks = [m.register_forward_hook(lambda _m, _a, out: Tap.apply(out, canaries)) for m in tapped]
    model.loss(*make_batch(model)).backward()
    for hook in hooks:
        hook.remove()
    assert len(canaries) == len(tapped)
    return sum(canary() is not None for canary in canaries)


# The checks. Each is an assertion about one model, whose rule may be right or wrong.


def check_zero_queries_are_prenorm(model: Transformer) -> None:
    """With its starting values a rule has the loss and every shared gradient of pre-norm."""
    expected = loss_and_gradients(make_model(PRENORM))
    assert relative_error(loss_and_gradients(model), expected) < 1e-9


def check_output_query_learns(model: Transformer) -> None:
    """The last read is a choice: at zero queries its query already has a gradient, as all others have."""
    queries = loss_and_gradients(model)["residual.queries_RD"]
    assert float(queries.norm(dim=-1).min()) > 1e-6


def check_reads_equal_reference(model: Transformer, block_size: int | None) -> None:
    """Every single read, and the gradients of all of them. Scale counts here; the model's norms hide it."""
    randomise(model)
    config, rule = model.config, model.residual
    shape = reference_residual.Shape(0, 0, 0.0, config.norm_eps, block_size)
    generator = torch.Generator().manual_seed(3)
    size = (config.layers + 1, 2, 3, config.width)
    v, weights = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    v.requires_grad_()
    parameters = {f"residual.{name}": p for name, p in rule.named_parameters()}

    known = [list(v[: layer + 1]) for layer in range(config.layers + 1)]
    expected = [reference_residual.read(so_far, parameters, shape) for so_far in known]
    values = run_rule(rule, list(v))
    for read, right in zip(values, expected, strict=True):
        assert float((read - right).detach().abs().max()) < 1e-10
    wanted = [v, *parameters.values()]
    gradients, right_gradients = (
        torch.autograd.grad((torch.stack(reads) * weights).sum(), wanted) for reads in (values, expected)
    )
    for gradient, right in zip(gradients, right_gradients, strict=True):
        assert float((gradient - right).norm() / right.norm()) < 1e-10


def check_equals_reference(model: Transformer, block_size: int | None) -> None:
    """Loss and all gradients at random queries and gains."""
    randomise(model)
    expected = reference_loss_and_gradients(model, block_size)
    values = loss_and_gradients(model)
    assert values.keys() == expected.keys()
    assert relative_error(values, expected) < 1e-10
