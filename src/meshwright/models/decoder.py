"""A Llama-like decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Fields with defaults turn it into other published families (Mistral, Qwen, Gemma, OLMo, Phi), whose layers differ in
norms, biases, windows and rotary positions. The layers of a model have the same parameters, so they are stacked and
share one program. If they differ in their attention (`layer_pattern`), that program looks up the kind of a layer by its
number.

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
from meshwright.models.execution import PROJECTION
from meshwright.models.language import LanguageModel
from meshwright.models.layer_context import Context, init_mlp, scaled_normal
from meshwright.models.ops import geglu, rotary_tables, rotate, swiglu
from meshwright.models.rope import parse_scaling
from meshwright.parallel.heads import split_heads
from meshwright.parallel.tensor import sequence_norm, split_norm
from meshwright.types import PRNGKeyArray, PyTree

NORMS = {"pre": ("norm",), "post": ("post_norm",), "both": ("norm", "post_norm")}
"""Places of a block's norms: before it, after it (before the residual addition), or both."""
GATES = {"silu": swiglu, "gelu_tanh": geglu}
LAYER_KINDS = {"g": "global", "l": "local", "n": "global without rotary positions"}
"""Letters of `layer_pattern`."""
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
        whole_qk_norm: with `qk_norm`, normalize over the features of all heads, as OLMo 2 does.
        qkv_bias: whether queries, keys and values have a bias.
        query_scalar: attention logits are divided by its square root (default: `head_dim`).
        sliding_window: number of positions that a local layer attends to, including the current one.
        layer_pattern: kinds of the layers, repeated: "l" local (with `sliding_window`), "g" global, "n" global without
            rotary positions; e.g. "lllllg" (default: all local if there is a `sliding_window`, else all global).
        rope_scaling: scaling of rotary positions, e.g. "linear:factor=8"; see `meshwright.models.rope`.
        local_rope_theta: `rope_theta` of local layers, without scaling (default: the positions of global layers).
        rotary_fraction: fraction of a head's features that is rotated, starting with the first.
        norms: place of the norms of a block: "pre", "post" (of its output, before the residual addition), "both".
        norm_offset: whether norms multiply by `1 + scale`, as Gemma's do.
        scaled_embeddings: whether embeddings are multiplied by `sqrt(d_model)`, as Gemma's are.
        activation: activation of the feed-forward gate: "silu" or "gelu_tanh".

    Example:
        >>> model = Decoder.named("tiny")
        >>> sorted(model.init(jax.random.key(0))["layers"])
        ['attn', 'attn_norm', 'mlp', 'mlp_norm']
        >>> Decoder.named("tiny", num_layers=6, sliding_window=16, layer_pattern="llg").layer_kinds
        'llgllg'
    """

    num_heads: int
    d_ff: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    attention_soft_cap: float | None = None
    whole_qk_norm: bool = False
    qkv_bias: bool = False
    query_scalar: float | None = None
    sliding_window: int | None = None
    layer_pattern: str | None = None
    rope_scaling: str | None = None
    local_rope_theta: float | None = None
    rotary_fraction: float = 1.0
    norms: str = "pre"
    norm_offset: bool = False
    scaled_embeddings: bool = False
    activation: str = "silu"

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
        ("(attn|attn/q|attn/k|mlp)(_post)?_norm", P()),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None:
            self._require_division("d_model", "num_heads")
        if self._rotary_dim % 2 or not 0 < self.rotary_fraction <= 1:
            from_sizes = f" (d_model {self.d_model} / num_heads {self.num_heads})" if self.head_dim is None else ""
            part = f", of which {self._rotary_dim} are rotated" if self.rotary_fraction != 1 else ""
            raise ConfigError(
                f"Decoder heads have {self._head_dim} features{from_sizes}{part}, but rotary positions need an even "
                "number.",
                hint="use an even head_dim" + (", and a rotary_fraction above 0 and up to 1." if part else "."),
            )
        if self.num_kv_heads is not None:
            self._require_division("num_heads", "num_kv_heads")
        for field, known in (("norms", NORMS), ("activation", GATES)):
            if getattr(self, field) not in known:
                raise ConfigError(
                    f"{field} of Decoder is {getattr(self, field)!r}.", hint=f"use one of: {', '.join(known)}."
                )
        if self.query_scalar is not None and not self.query_scalar > 0:
            raise ConfigError(f"query_scalar of Decoder is {self.query_scalar}.", hint="use a number above 0.")
        if self.whole_qk_norm and not self.qk_norm:
            raise ConfigError("whole_qk_norm of Decoder has no effect without qk_norm.", hint="set qk_norm as well.")
        if self.rope_scaling is not None:
            parse_scaling(self.rope_scaling)
        self._check_layer_kinds()

    def _check_layer_kinds(self) -> None:
        pattern, has_window = self.layer_pattern, self.sliding_window is not None
        if pattern is not None and (not pattern or set(pattern) - set(LAYER_KINDS)):
            known = ", ".join(f"{letter} ({kind})" for letter, kind in LAYER_KINDS.items())
            raise ConfigError(f"layer_pattern of Decoder is {pattern!r}.", hint=f"use the letters {known}.")
        if ("l" in self.layer_kinds) != has_window:
            raise ConfigError(
                f"Decoder has sliding_window={self.sliding_window} and layer_pattern={pattern!r}: local layers need a "
                "window, and a window needs local layers.",
                hint="set both, e.g. sliding_window=1024, layer_pattern='lllllg'.",
            )
        if self.local_rope_theta is not None and not has_window:
            raise ConfigError(
                f"local_rope_theta={self.local_rope_theta} of Decoder has no effect without local layers.",
                hint="set sliding_window.",
            )

    @property
    def layer_kinds(self) -> str:
        """The kind of each layer, as letters of `layer_pattern`."""
        pattern = self.layer_pattern or ("g" if self.sliding_window is None else "l")
        return (pattern * (self.num_layers // len(pattern) + 1))[: self.num_layers]

    @property
    def _kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def _head_dim(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def _rotary_dim(self) -> int:
        return int(self._head_dim * self.rotary_fraction)

    @property
    def layer_rules(self) -> tuple[tuple[str, P], ...]:
        rules = list(self.LAYER_RULES)
        if self.whole_qk_norm:
            rules.insert(0, ("attn/(q|k)_norm", P("tp")))
        if self.qkv_bias:
            rules.append(("attn/(q|k|v)_bias", P("tp")))
        return tuple(rules)

    # --- Parameters ---

    def init_norm(self, size: int) -> Any:
        return jnp.zeros(size) if self.norm_offset else jnp.ones(size)

    def norm_scale(self, stored: Any) -> Any:
        return 1.0 + stored.astype(jnp.float32) if self.norm_offset else stored

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
        if self.qkv_bias:
            attn |= {"q_bias": jnp.zeros(queries), "k_bias": jnp.zeros(keys), "v_bias": jnp.zeros(keys)}
        if self.qk_norm:
            sizes = (queries, keys) if self.whole_qk_norm else (self._head_dim, self._head_dim)
            attn |= {"q_norm": self.init_norm(sizes[0]), "k_norm": self.init_norm(sizes[1])}
        mlp = init_mlp(k_gate, k_up, k_down, d_model=self.d_model, d_ff=self.d_ff, scale=small)
        names = [f"{block}_{place}" for block in ("attn", "mlp") for place in NORMS[self.norms]]
        return {"attn": attn, "mlp": mlp} | {name: self.init_norm(self.d_model) for name in names}

    # --- The function ---

    def enter(self, embedded: Any) -> Any:
        return embedded * jnp.asarray(self.d_model**0.5, embedded.dtype) if self.scaled_embeddings else embedded

    def prepare(self, positions: Any) -> Any:
        tables = rotary_tables(positions, self._rotary_dim, self.rope_theta, self.rope_scaling)
        if self.local_rope_theta is None:
            return tables, tables
        return tables, rotary_tables(positions, self._rotary_dim, self.local_rope_theta)

    def layer(self, params: PyTree, h: Any, context: Context) -> Any:
        h, x = self._norm_before(context, h, params, "attn_norm")
        h = h + context.drop(self._norm_after(context, self._attend(params["attn"], x, context), params, "attn"), 0)
        h, x = self._norm_before(context, h, params, "mlp_norm")
        y = context.feed_forward(params["mlp"], x, gated=GATES[self.activation])
        return h + context.drop(self._norm_after(context, y, params, "mlp"), 1)

    def _norm_before(self, context: Context, h: Any, params: PyTree, name: str) -> tuple[Any, Any]:
        return context.residual_norm(h, self.norm_scale(params[name])) if self.norms != "post" else (h, h)

    def _norm_after(self, context: Context, y: Any, params: PyTree, block: str) -> Any:
        return y if self.norms == "pre" else context.norm(y, self.norm_scale(params[f"{block}_post_norm"]))

    @jax.named_scope("attention")
    def _attend(self, params: PyTree, x: Any, context: Context) -> Any:
        axis = context.run.tensor()
        biases = [params[f"{name}_bias"] for name in "qkv"] if self.qkv_bias else None
        q, k, v = context.columns(x, params["q"], params["k"], params["v"], biases=biases)
        if self.whole_qk_norm:
            q = split_norm(q, self.norm_scale(params["q_norm"]), axis=axis, eps=self.norm_eps)
            k = split_norm(k, self.norm_scale(params["k_norm"]), axis=axis, eps=self.norm_eps)
        q = split_heads(q, self.num_heads, axis=axis)
        k, v = (split_heads(y, self._kv_heads, axis=axis, shared=True, what="key/value heads") for y in (k, v))
        if self.qk_norm and not self.whole_qk_norm:
            q = sequence_norm(q, self.norm_scale(params["q_norm"]), axis=axis, eps=self.norm_eps)
            k = sequence_norm(k, self.norm_scale(params["k_norm"]), axis=axis, eps=self.norm_eps)
        tables, window, is_windowed = self._kind_of_layer(context)
        if tables is not None:
            q, k = rotate(q, *tables), rotate(k, *tables)
        y = context.attend(
            q,
            k,
            v,
            soft_cap=self.attention_soft_cap,
            scale=None if self.query_scalar is None else self.query_scalar**-0.5,
            window=window,
            is_windowed=is_windowed,
        )
        return context.rows(checkpoint_name(y.reshape(*y.shape[:2], -1), PROJECTION), params["o"])

    def _kind_of_layer(self, context: Context) -> tuple[Any, int | None, Any]:
        """Returns a layer's rotary tables or None, its window or None, and whether the window applies if unknown."""
        (whole, local), kinds = context.shared, self.layer_kinds
        if len(set(kinds)) == 1 or isinstance(context.number, int):
            kind = kinds[context.number if isinstance(context.number, int) else 0]
            return {"g": whole, "l": local, "n": None}[kind], self.sliding_window if kind == "l" else None, None
        is_local, is_bare = (jnp.asarray([kind == letter for kind in kinds])[context.number] for letter in "ln")
        tables = whole
        if self.local_rope_theta is not None:
            tables = [jnp.where(is_local, mine, other) for mine, other in zip(local, whole, strict=True)]
        if "n" in kinds:
            tables = [jnp.where(is_bare, still, table) for still, table in zip((1.0, 0.0), tables, strict=True)]
        return tables, self.sliding_window, is_local
