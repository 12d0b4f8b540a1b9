"""Options and costs of Attention Residuals (2603.15031): full, block and window, and the variants of its
ablations, which all three have."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from attnres.errors import ConfigError
from attnres.residual.rule_spec import RuleSpec, check_blocks, sublayers_per_block


@dataclass(frozen=True)
class AttnRes(RuleSpec):
    """What the AttnRes rules share. Full is block with one sublayer per block, and window with W >= L.

    query: input adds W_l RMSNorm(latest source) to the learned query, W_l a d x d matrix.
    weights: static replaces all logits by learned scalars, one per read and source (and depth head).
    normaliser: sigmoid weighs each source on its own: the weights need not sum to 1.
    key_norm: false takes the sources as they are for keys, and there is no gain.
    heads: channels are split in as many depth heads with weights of their own; the norm is over all channels.
    implementation: kernel is a package's, for CUDA, without the options above (`attnres.depth.kernel`).
    """

    implementation: Literal["fused", "reference", "kernel"]  # how it is computed; never what is computed

    _: KW_ONLY
    query: Literal["learned", "input"] = "learned"
    weights: Literal["content", "static"] = "content"
    normaliser: Literal["softmax", "sigmoid"] = "softmax"
    key_norm: bool = True
    heads: int = 1

    def check(self, layers: int, width: int) -> None:
        if self.heads < 1:
            raise ConfigError("residual.heads", self.heads, "must be at least 1")
        if width % self.heads:
            raise ConfigError("residual.heads", self.heads, f"does not divide model.width={width}")
        if self.weights == "static" and self.query == "input":
            raise ConfigError("residual.query", "input", "residual.weights=static has no queries")
        if self.weights == "static" and not self.key_norm:
            raise ConfigError("residual.key_norm", False, "residual.weights=static has no keys to norm")
        if self.implementation == "kernel" and not self.plain():
            why = f"computes the paper's main form, not {self.label()}; use fused"
            raise ConfigError("residual.implementation", "kernel", why)

    def label(self) -> str:
        """The rule and what differs from the paper's main form."""
        parts = [
            self.shape_label(),
            "input" if self.query == "input" else "",
            "static" if self.weights == "static" else "",
            "sigmoid" if self.normaliser == "sigmoid" else "",
            "" if self.key_norm else "no_key_norm",
            f"h{self.heads}" if self.heads > 1 else "",
        ]
        return "_".join(filter(None, parts))

    def shape_label(self) -> str:
        """The rule and which sources it reads."""
        return self.rule

    def plain(self) -> bool:
        """Whether all options are those of the paper's main form."""
        return self.label() == self.shape_label()

    def resolved_block_size(self, layers: int) -> int:
        """S: how many consecutive sublayers make one source."""
        raise NotImplementedError

    def resolved_window(self, layers: int) -> int:
        """How many sources at most a read sees beside the embedding."""
        return layers

    def sources(self, layers: int) -> tuple[int, ...]:
        """How many sources each of the L + 1 reads has: one per sublayer, then the output's.

        v_0, every finished block (of the window), and, inside a block, its running sum.
        """
        size, window = self.resolved_block_size(layers), self.resolved_window(layers)
        reads = [1 + min(window, layer // size + (layer % size > 0)) for layer in range(layers)]
        return (*reads, 1 + min(window, -(-layers // size)))

    def parameters(self, layers: int, width: int) -> int:
        """Per read that has a choice a query, a gain and the query's matrix, or its scalars."""
        counts = [count for count in self.sources(layers) if count > 1]
        if self.weights == "static":
            return self.heads * sum(counts)
        matrix = width * width if self.query == "input" else 0
        return len(counts) * (width * (1 + self.key_norm) + matrix)

    def flops_per_token(self, layers: int, width: int) -> int:
        """Per read and source one logit and one term of the mixture; per source one norm; running sums.

        A query from the input is a product, the addition of the learned part and the gain (which otherwise is
        work per parameter), and the norm of the latest source where the keys have not made it.
        """
        counts = [count for count in self.sources(layers) if count > 1]
        additions = layers - -(-layers // self.resolved_block_size(layers))  # none for a block's first output
        if self.weights == "static":
            return width * (2 * sum(counts) + additions)
        norms = 1 + layers if self.key_norm else 0  # v_0, and what stands after each sublayer
        flops = width * (4 * sum(counts) + 2 * norms + additions)
        if self.query == "input":
            extra = 1 if self.key_norm else 2
            flops += len(counts) * width * (2 * width + 1 + extra)
        return flops


@dataclass(frozen=True)
class AttnResFull(AttnRes):
    """h_l = sum over i < l of softmax_i(q_l . (g_l * RMSNorm(v_i))) v_i."""

    rule: ClassVar[str] = "attnres_full"

    def resolved_block_size(self, layers: int) -> int:
        return 1


@dataclass(frozen=True)
class AttnResWindow(AttnRes):
    """As full, over the embedding and the last `window` sublayer outputs (W); the output's read too."""

    rule: ClassVar[str] = "attnres_window"

    window: int  # in sublayers

    def check(self, layers: int, width: int) -> None:
        super().check(layers, width)
        if self.window < 1:
            raise ConfigError("residual.window", self.window, "must be at least 1 sublayer")

    def shape_label(self) -> str:
        return f"{self.rule}_w{self.window}"

    def resolved_block_size(self, layers: int) -> int:
        return 1

    def resolved_window(self, layers: int) -> int:
        return self.window


@dataclass(frozen=True)
class AttnResBlock(AttnRes):
    """As full, over the embedding, sums of `block_size` sublayer outputs and the current block's running sum.

    Exactly one of `num_blocks` (N, which gives block_size = ceil(L / N)) and `block_size` (S, in sublayers).
    Where N does not divide L there may be fewer blocks than N: L = 20 and N = 8 give S = 3 and seven blocks.
    """

    rule: ClassVar[str] = "attnres_block"

    num_blocks: int | None
    block_size: int | None

    def check(self, layers: int, width: int) -> None:
        super().check(layers, width)
        check_blocks(self.num_blocks, self.block_size, layers)

    def resolved_block_size(self, layers: int) -> int:
        return sublayers_per_block(self.num_blocks, self.block_size, layers)

    def shape_label(self) -> str:
        return (
            f"{self.rule}_n{self.num_blocks}"
            if self.block_size is None
            else f"{self.rule}_s{self.block_size}"
        )
