"""What `step_time.py` times: a training step of each rule, of peers, of a stand-in; bare products."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from stand_in import StandInGPT
from torch import Tensor, nn

from attnres.autocast import lacks_bfloat16
from attnres.compose import compose_trial
from attnres.config import ModelConfig, OptimConfig
from attnres.depth.kernel import checked_operator
from attnres.errors import UserError
from attnres.model import Transformer, rotary_table
from attnres.optim import make_optimizer
from attnres.residual import specs
from attnres.residual.attnres import depth_attention
from attnres.rules import VARIANTS

Step = Callable[[], object]
NORM_EPS = 1e-8
OPTIM = OptimConfig(
    name="adamw", learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip=None
)


@dataclass(frozen=True)
class Shape:
    width: int
    depth: int
    dtype: str  # float32, or bfloat16 autocast
    batch: int
    context: int
    vocabulary: int
    device: str

    @property
    def heads(self) -> int:
        channels = next(c for c in (64, 48, 32, 24, 16, 8, 4, 2) if self.width % c == 0)
        return self.width // channels

    @property
    def mlp_width(self) -> int:
        return round(self.width / 3) * 8

    def model_config(self) -> ModelConfig:
        return ModelConfig(
            name="bench",
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            head_width=None,
            mlp_width=self.mlp_width,
            context=self.context,
            batch_size=self.batch,
            learning_rate=1e-3,
            tie_embeddings=False,
            rope_base=10000.0,
            norm_eps=NORM_EPS,
        )


# Rule -> the spec that is timed for a number of sublayers. Block has 8 blocks, as in the paper.
RULES: Mapping[str, Callable[[int, Any], specs.RuleSpec]] = {
    "prenorm": lambda layers, implementation: specs.PreNorm(),
    "attnres_full": lambda layers, implementation: specs.AttnResFull(implementation=implementation),
    "attnres_block": lambda layers, implementation: specs.AttnResBlock(
        implementation=implementation, num_blocks=min(8, layers), block_size=None
    ),
    "attnres_window": lambda layers, implementation: specs.AttnResWindow(
        implementation=implementation, window=8
    ),
}
HOWS = ("fused", "reference", "kernel")  # implementations of these; kernel is a package's, for CUDA
# Rules without a fused form, with their YAML's options.
PLAIN_RULES: Sequence[str] = tuple(rule for rule in specs.SPECS if rule not in RULES)
# Label -> rule and the options in which it differs from its YAML, as in the table of `attnres.rules`.
OPTIONS: Mapping[str, tuple[str, Sequence[str]]] = {
    compose_trial([f"residual={rule}", *options]).residual.label(): (rule, options)
    for rule, several in VARIANTS.items()
    for options in several
}
PEERS: Mapping[str, tuple[str, str]] = {  # name -> (module, package)
    "x_transformers_prenorm": ("x_transformers", "x-transformers"),
    "x_transformers_attn_residual": ("x_transformers", "x-transformers"),
    "attn_res_none": ("attn_res", "attn-res"),
    "attn_res_full": ("attn_res", "attn-res"),
    "attn_res_block": ("attn_res", "attn-res"),
    "hyper_connections_4": ("hyper_connections", "hyper-connections"),
}


def names() -> list[tuple[str, str]]:
    """All (rule, implementation) pairs, prenorm first."""
    pairs = [("prenorm", "plain")]
    pairs += [(rule, how) for rule in RULES if rule != "prenorm" for how in HOWS]
    pairs += [(rule, "plain") for rule in PLAIN_RULES]
    pairs += [(label, "fused" if rule in RULES else "plain") for label, (rule, _) in OPTIONS.items()]
    return [*pairs, *((peer, "peer") for peer in PEERS), ("stand_in", "plain"), ("matmul", "bare")]


def absent(rule: str, width: int) -> str | None:
    """Why a peer cannot be timed here: its package is not installed, or does not take such a narrow model."""
    if rule not in PEERS:
        return None
    module, package = PEERS[rule]
    if importlib.util.find_spec(module) is None:
        return f"{package} is not installed"
    if rule == "x_transformers_attn_residual" and width <= 64:
        return f"{rule} needs more than 64 channels"
    return None


def unfit(rule: str, implementation: str, shape: Shape) -> str | None:
    """Why a rule of ours cannot be timed: depth heads do not divide the width, or there is no kernel here."""
    if implementation == "kernel" and shape.device != "cuda":
        return f"{rule}: residual.implementation=kernel needs --device cuda"
    try:
        spec = _spec(rule, implementation, shape)
        if implementation == "kernel" and isinstance(spec, specs.AttnRes):
            most, tokens = max(spec.sources(2 * shape.depth)), shape.batch * shape.context
            device = torch.device(shape.device, torch.cuda.current_device())
            checked_operator(device, shape.width, most, tokens, NORM_EPS, depth_attention)
    except UserError as error:
        return f"{rule}: {error}"
    return None


def build(rule: str, implementation: str, shape: Shape) -> Step:
    """A closure that does one training step: forward, backward, AdamW (or the bare products)."""
    torch.manual_seed(0)
    if rule == "matmul":
        return _products(shape)
    if spec := _spec(rule, implementation, shape):
        model = Transformer(shape.model_config(), spec, shape.vocabulary)
        model.initialise(0)
        return _training_step(model, model.loss, shape)
    if rule == "stand_in":
        gpt = StandInGPT(shape.width, shape.depth, shape.heads, shape.vocabulary, shape.context)
        return _training_step(gpt, gpt.loss, shape)
    model = _peer(rule, shape)

    def loss(inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs_BT).float().flatten(0, 1), targets_BT.flatten())

    return _training_step(model, loss, shape)


def _spec(rule: str, implementation: str, shape: Shape) -> specs.RuleSpec | None:
    """What a rule of ours, or a variant, is in this shape. Raises ConfigError where it fits none."""
    layers = 2 * shape.depth
    if rule in RULES:
        spec = RULES[rule](layers, implementation)
    elif rule in PLAIN_RULES or rule in OPTIONS:
        rule, options = OPTIONS.get(rule, (rule, ()))
        more = [f"residual.num_blocks={min(8, layers)}"] if rule == "rms_block" else []
        spec = compose_trial([f"residual={rule}", f"model.depth={shape.depth}", *options, *more]).residual
    else:
        return None
    spec.check(layers, shape.width)
    return spec


def _training_step(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], shape: Shape) -> Step:
    model.to(shape.device)
    optimizer = make_optimizer(model, OPTIM)
    tokens = torch.randint(0, shape.vocabulary, (shape.batch, shape.context + 1), device=shape.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> float:
        with torch.autocast(shape.device, dtype=torch.bfloat16, enabled=shape.dtype == "bfloat16"):
            loss = loss_of(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _products(shape: Shape) -> Step:
    """The products of projections, MLP and unembedding, forward and both of backward; no attention scores."""
    d, f, tokens = shape.width, shape.mlp_width, shape.batch * shape.context
    # As the model multiplies: in float32 where the processor has no bfloat16 arithmetic.
    emulated = shape.device == "cpu" and lacks_bfloat16()
    dtype = torch.bfloat16 if shape.dtype == "bfloat16" and not emulated else torch.float32
    sizes = [(d, d)] * 4 + [(d, f)] * 2 + [(f, d)]
    triples = [
        tuple(torch.randn(s, dtype=dtype, device=shape.device) for s in ((tokens, i), (i, o), (tokens, o)))
        for i, o in [*sizes, (d, shape.vocabulary)]
    ]

    def step() -> None:
        for index, (x, weight, y) in enumerate(triples):
            for _ in range(1 if index == len(sizes) else shape.depth):
                torch.mm(x, weight)
                torch.mm(y, weight.t())
                torch.mm(y.t(), x)

    return step


def _peer(name: str, shape: Shape) -> nn.Module:
    if name.startswith("x_transformers"):
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(
            dim=shape.width,
            depth=shape.depth,
            heads=shape.heads,
            attn_dim_head=shape.width // shape.heads,
            attn_flash=True,
            attn_qk_norm=False,
            ff_swish=True,
            ff_glu=True,
            ff_no_bias=True,
            ff_mult=shape.mlp_width / shape.width,
            rotary_pos_emb=True,
            use_rmsnorm=True,
            attn_aggregated_residuals=name.endswith("attn_residual"),
        )
        return TransformerWrapper(
            num_tokens=shape.vocabulary, max_seq_len=shape.context, use_abs_pos_emb=False, attn_layers=layers
        )
    if name.startswith("attn_res"):
        from attn_res import AttnResMode, AttnResTransformer, TransformerConfig

        config = TransformerConfig(
            d_model=shape.width,
            n_layers=2 * shape.depth,
            n_heads=shape.heads,
            n_kv_heads=shape.heads,
            vocab_size=shape.vocabulary,
            max_seq_len=shape.context,
            ffn_mult=shape.mlp_width / shape.width,
            attn_res_mode=AttnResMode(name.removeprefix("attn_res_")),
            n_blocks=_divisor_up_to(8, 2 * shape.depth),
        )
        return AttnResTransformer(config)
    return _HyperConnections(shape)


def _divisor_up_to(limit: int, number: int) -> int:
    return next(n for n in range(limit, 0, -1) if number % n == 0)


class _HyperConnections(nn.Module):
    """Our sublayers inside the package's 4 streams."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from hyper_connections import get_init_and_expand_reduce_stream_functions

        self.inner = Transformer(shape.model_config(), specs.PreNorm(), shape.vocabulary)
        self.inner.initialise(0)
        init, self.expand, self.reduce = get_init_and_expand_reduce_stream_functions(4)
        sublayers = [sublayer for block in self.inner.blocks for sublayer in (block.attention, block.mlp)]
        self.wrapped = nn.ModuleList(init(dim=shape.width, branch=sublayer) for sublayer in sublayers)

    def forward(self, inputs_BT: Tensor) -> Tensor:
        inner = self.inner
        x = self.expand(inner.embedding(inputs_BT))
        config = inner.config
        table = rotary_table(inputs_BT.shape[1], config.head_channels, config.rope_base, x.dtype, x.device)
        for layer in self.wrapped:
            x = layer(x, table)
        return inner.unembedding(inner.final_norm(self.reduce(x)))
