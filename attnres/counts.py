"""Parameters and FLOPs of a model, by part and by convention; exact, and free of torch.

A multiply-add is two FLOPs. Attention is causal: a query sees half of the context on average, so scores and
mixing count half the square. Backward costs twice the forward pass. RMSNorm, RoPE, SwiGLU's product, softmax
and the optimizer are not counted (they are memory-bound); the residual rule's own work is: it is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnres.config import ModelConfig
from attnres.residual.specs import RuleSpec

FLOP_PER_PFLOPS_DAY = 8.64e19  # 1e15 FLOP/s for 86,400 s

# What C can mean. "total" is the default everywhere; the others show how an answer moves with the convention.
CONVENTIONS: Mapping[str, str] = {
    "total": "3 x forward FLOPs of projections, causal attention, MLP, unembedding and the residual rule",
    "without_residual": "as total, without the residual rule's own work",
    "6nd": "6 x parameters x tokens, without the embedding table, with the unembedding",
    "6nd_non_embedding": "6 x parameters x tokens, without embedding and unembedding",
    "6nd_all": "6 x all parameters x tokens",
}


@dataclass(frozen=True)
class Counts:
    """Counts of one model.

    `parameters` has embedding, unembedding, attention, mlp, norm, residual: disjoint; with tied embeddings
    the table is under embedding and unembedding is 0. `forward_flops_per_token` has attention_projections,
    attention_scores, mlp, unembedding, residual.
    """

    parameters: Mapping[str, int]
    forward_flops_per_token: Mapping[str, int]
    tied: bool

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def non_embedding_parameters(self) -> int:
        return self.total_parameters - self.parameters["embedding"] - self.parameters["unembedding"]

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs per token, convention "total"."""
        return self.training_flops_per_token()["total"]

    def training_flops_per_token(self) -> dict[str, int]:
        """FLOPs of forward and backward per token, by convention."""
        forward = sum(self.forward_flops_per_token.values())
        unembedding = self.parameters["embedding"] if self.tied else self.parameters["unembedding"]
        flops = {
            "total": 3 * forward,
            "without_residual": 3 * (forward - self.forward_flops_per_token["residual"]),
            "6nd": 6 * (self.non_embedding_parameters + unembedding),
            "6nd_non_embedding": 6 * self.non_embedding_parameters,
            "6nd_all": 6 * self.total_parameters,
        }
        assert flops.keys() == CONVENTIONS.keys()
        return flops


def count(model: ModelConfig, spec: RuleSpec, vocabulary: int) -> Counts:
    """Counts of a model of this size under this residual rule."""
    width, depth, layers = model.width, model.depth, model.layers
    attention_width = model.heads * model.head_channels
    table = vocabulary * width
    parameters = {
        "embedding": table,
        "unembedding": 0 if model.tie_embeddings else table,
        "attention": depth * 4 * width * attention_width,  # query, key, value, output
        "mlp": depth * 3 * width * model.mlp_width,  # gate, up, down
        # A gain per sublayer and the final one; per attention the query's and the key's (QK-norm).
        "norm": (layers + 1) * width + depth * 2 * model.head_channels,
        "residual": spec.parameters(layers, width),
    }
    forward = {
        "attention_projections": depth * 2 * 4 * width * attention_width,
        # Two products (query-key, weights-value) over half of the context.
        "attention_scores": depth * 2 * 2 * attention_width * model.context // 2,
        "mlp": depth * 2 * 3 * width * model.mlp_width,
        "unembedding": 2 * table,
        "residual": spec.flops_per_token(layers, width),
    }
    return Counts(parameters, forward, model.tie_embeddings)
