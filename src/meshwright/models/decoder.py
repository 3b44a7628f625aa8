"""A Llama-like decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes: B rows of a batch, S tokens, D features, H heads, G key/value heads, K features per head, F hidden features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.errors import ConfigError
from meshwright.models.attention import attention
from meshwright.models.execution import PROJECTION
from meshwright.models.language import Context, LanguageModel, init_mlp, scaled_normal
from meshwright.models.ops import rotary_tables, rotate
from meshwright.parallel.heads import split_heads
from meshwright.parallel.tensor import sequence_norm
from meshwright.types import PRNGKeyArray, PyTree

_LLAMA_3 = {"vocab_size": 128256, "num_kv_heads": 8, "rope_theta": 5e5}


@dataclass(frozen=True, kw_only=True)
class Decoder(LanguageModel):
    """A Llama-like decoder; `Decoder.named("7b")` has its usual sizes. See `LanguageModel` for other fields.

    Args:
        num_kv_heads: number of key/value heads (default: `num_heads`). It must divide the size of the tensor axis or be
            a multiple of it; if the axis is larger, neighboring devices share a head.
        head_dim: features per head (default: `d_model / num_heads`).
        qk_norm: whether to normalize queries and keys per head.
        attention_soft_cap: if given, attention logits become `cap * tanh(logits / cap)`.

    Example:
        >>> model = Decoder.named("tiny")
        >>> sorted(model.init(jax.random.key(0))["layers"])
        ['attn', 'attn_norm', 'mlp', 'mlp_norm']
    """

    num_heads: int
    d_ff: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    attention_soft_cap: float | None = None

    SIZES: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"vocab_size": 256, "num_layers": 2, "d_model": 64, "num_heads": 8, "d_ff": 128},
        "small": {"vocab_size": 256, "num_layers": 4, "d_model": 128, "num_heads": 8, "d_ff": 384},
        "125m": {"vocab_size": 32768, "num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 2048},
        "956m": {"vocab_size": 32768, "num_layers": 16, "d_model": 2048, "num_heads": 16, "d_ff": 5632},
        "1b": _LLAMA_3 | {"num_layers": 16, "d_model": 2048, "num_heads": 32, "d_ff": 8192, "tied_embeddings": True},
        "7b": {"vocab_size": 32000, "num_layers": 32, "d_model": 4096, "num_heads": 32, "d_ff": 11008},
        "70b": _LLAMA_3 | {"num_layers": 80, "d_model": 8192, "num_heads": 64, "d_ff": 28672},
    }
    LAYER_RULES: ClassVar[tuple[tuple[str, P], ...]] = (
        ("attn/(q|k|v)$", P("fsdp", "tp")),
        ("attn/o", P("tp", "fsdp")),
        ("mlp/(gate|up)", P("fsdp", "tp")),
        ("mlp/down", P("tp", "fsdp")),
        ("(attn|attn/q|attn/k|mlp)_norm", P()),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None:
            self._require_division("d_model", "num_heads")
        if self._head_dim % 2:
            from_sizes = f" (d_model {self.d_model} / num_heads {self.num_heads})" if self.head_dim is None else ""
            raise ConfigError(
                f"Decoder heads have {self._head_dim} features{from_sizes}, but rotary positions need an even number.",
                hint="use an even head_dim.",
            )
        if self.num_kv_heads is not None:
            self._require_division("num_heads", "num_kv_heads")

    @property
    def _kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def _head_dim(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    def init_layer(self, key: PRNGKeyArray) -> PyTree:
        k_q, k_k, k_v, k_o, k_gate, k_up, k_down = jax.random.split(key, 7)
        queries, keys = self.num_heads * self._head_dim, self._kv_heads * self._head_dim
        # Keeps the sum of all layers' outputs from growing with their number.
        small = (2 * self.num_layers) ** -0.5
        attn = {
            "q": scaled_normal(k_q, self.d_model, queries),
            "k": scaled_normal(k_k, self.d_model, keys),
            "v": scaled_normal(k_v, self.d_model, keys),
            "o": scaled_normal(k_o, queries, self.d_model, scale=small),
        }
        if self.qk_norm:
            attn |= {"q_norm": jnp.ones(self._head_dim), "k_norm": jnp.ones(self._head_dim)}
        mlp = init_mlp(k_gate, k_up, k_down, d_model=self.d_model, d_ff=self.d_ff, scale=small)
        return {"attn_norm": jnp.ones(self.d_model), "attn": attn, "mlp_norm": jnp.ones(self.d_model), "mlp": mlp}

    def prepare(self, positions: Any) -> Any:
        return rotary_tables(positions, self._head_dim, self.rope_theta)

    def layer(self, params: PyTree, h: Any, context: Context) -> Any:
        h, x = context.residual_norm(h, params["attn_norm"])
        h = h + context.drop(self._attend(params["attn"], x, context), 0)
        h, x = context.residual_norm(h, params["mlp_norm"])
        return h + context.drop(context.feed_forward(params["mlp"], x), 1)

    @jax.named_scope("attention")
    def _attend(self, params: PyTree, x: Any, context: Context) -> Any:
        axis = context.run.tensor()
        q, k, v = context.columns(x, params["q"], params["k"], params["v"])
        q = split_heads(q, self.num_heads, axis=axis)
        k, v = (split_heads(y, self._kv_heads, axis=axis, shared=True, what="key/value heads") for y in (k, v))
        if self.qk_norm:
            q = sequence_norm(q, params["q_norm"], axis=axis, eps=self.norm_eps)
            k = sequence_norm(k, params["k_norm"], axis=axis, eps=self.norm_eps)
        cos, sin = context.shared
        y = attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            segment_ids=context.segment_ids,
            soft_cap=self.attention_soft_cap,
            implementation=context.run.attention,
            max_segments=context.run.max_segments,
        )
        return context.rows(checkpoint_name(y.reshape(*y.shape[:2], -1), PROJECTION), params["o"])
