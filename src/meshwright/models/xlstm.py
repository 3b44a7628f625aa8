"""xLSTM: a language model of mLSTM blocks (arXiv 2405.04517, 2503.13427) with gated feed-forward layers.

Shapes: B rows, S tokens, D features, H heads, K key features per head, V value features per head, F hidden features.
"""

from __future__ import annotations

import math
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
from meshwright.parallel.heads import local_heads
from meshwright.types import PRNGKeyArray, PyTree


@dataclass(frozen=True, kw_only=True)
class XLSTM(LanguageModel):
    """A language model of mLSTM blocks; `XLSTM.named("7b")` has its usual sizes. See `LanguageModel` for other fields.

    Args:
        qk_factor: features of queries and keys, as a fraction of `d_model`; values have `d_model`.
        gate_soft_cap: gate pre-activations become `cap * tanh(x / cap)`; None disables it.
        chunk_size: number of tokens per chunk, which does not change the function (default: see `mlstm_chunkwise`).

    Example:
        >>> model = XLSTM.named("tiny")
        >>> params = model.init(jax.random.key(0))
        >>> model.apply(params, jnp.zeros((1, 8), jnp.int32)).shape
        (1, 8, 256)
    """

    num_heads: int
    d_ff: int
    qk_factor: float = 0.5
    gate_soft_cap: float | None = 15.0
    chunk_size: int | None = None

    SIZES: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"vocab_size": 256, "num_layers": 2, "d_model": 64, "num_heads": 8, "d_ff": 128, "chunk_size": 8},
        "small": {"vocab_size": 256, "num_layers": 4, "d_model": 128, "num_heads": 8, "d_ff": 384, "chunk_size": 64},
        "125m": {"vocab_size": 50304, "num_layers": 12, "d_model": 768, "num_heads": 4, "d_ff": 2112},
        "1b": {"vocab_size": 50304, "num_layers": 24, "d_model": 2048, "num_heads": 4, "d_ff": 5504},
        "7b": {
            "vocab_size": 50304,
            "num_layers": 32,
            "d_model": 4096,
            "num_heads": 8,
            "d_ff": 10944,
            "logit_soft_cap": 30.0,
        },
    }
    LAYER_RULES: ClassVar[tuple[tuple[str, P], ...]] = (
        ("mlstm/(q|k|v|o_gate|i_gate|f_gate)$", P("fsdp", "tp")),
        ("mlstm/out", P("tp", "fsdp")),
        ("mlstm/((i|f)_bias|head_norm)", P("tp")),
        ("mlp/(gate|up)", P("fsdp", "tp")),
        ("mlp/down", P("tp", "fsdp")),
        ("(mlstm|mlp)_norm", P()),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_division("d_model", "num_heads")
        if not (0 < self.qk_factor < math.inf and self._key_dim):
            raise ConfigError(
                f"qk_factor of XLSTM is {self.qk_factor!r}, which leaves no key features for {self.num_heads} heads.",
                hint="pass a fraction of d_model, such as 0.5.",
            )

    @property
    def _key_dim(self) -> int:
        return int(self.d_model * self.qk_factor) // self.num_heads

    def init_layer(self, key: PRNGKeyArray) -> PyTree:
        k_q, k_k, k_v, k_o, k_i, k_f, k_out, k_gate, k_up, k_down = jax.random.split(key, 10)
        keys, small = self.num_heads * self._key_dim, (2 * self.num_layers) ** -0.5
        mlstm = {
            "q": scaled_normal(k_q, self.d_model, keys),
            "k": scaled_normal(k_k, self.d_model, keys),
            "v": scaled_normal(k_v, self.d_model, self.d_model),
            "o_gate": scaled_normal(k_o, self.d_model, self.d_model),
            # Gates start almost independent of the input: heads forget slowly, at different rates, and write little.
            "i_gate": scaled_normal(k_i, self.d_model, self.num_heads, scale=0.1),
            "f_gate": scaled_normal(k_f, self.d_model, self.num_heads, scale=0.1),
            "i_bias": jnp.full(self.num_heads, -10.0),
            "f_bias": jnp.linspace(3.0, 6.0, self.num_heads),
            "head_norm": jnp.ones(self.d_model),
            "out": scaled_normal(k_out, self.d_model, self.d_model, scale=small),
        }
        mlp = init_mlp(k_gate, k_up, k_down, d_model=self.d_model, d_ff=self.d_ff, scale=small)
        return {"mlstm_norm": jnp.ones(self.d_model), "mlstm": mlstm, "mlp_norm": jnp.ones(self.d_model), "mlp": mlp}

    def layer(self, params: PyTree, h: Any, context: Context) -> Any:
        h, x = context.residual_norm(h, params["mlstm_norm"])
        h = h + context.drop(self._remember(params["mlstm"], x, context), 0)
        h, x = context.residual_norm(h, params["mlp_norm"])
        return h + context.drop(context.feed_forward(params["mlp"], x), 1)

    @jax.named_scope("mlstm")
    def _remember(self, params: PyTree, x: Any, context: Context) -> Any:
        heads = local_heads(self.num_heads, axis=context.run.tensor())
        names = ("q", "k", "v", "o_gate", "i_gate", "f_gate")
        q, k, v, o, i, f = context.columns(x, *(params[name] for name in names))
        q, k, v = (t.reshape(*t.shape[:2], heads, -1) for t in (q, k, v))
        i, f = self._gate(i, params["i_bias"]), self._gate(f, params["f_bias"])
        y = context.remember_gated(q, k, v, i, f, o, params["head_norm"], chunk_size=self.chunk_size)
        return context.rows(checkpoint_name(y.astype(x.dtype), PROJECTION), params["out"])

    def _gate(self, x: Any, bias: Any) -> Any:
        # float32, because the cell exponentiates it.
        x = x.astype(jnp.float32) + bias.astype(jnp.float32)
        cap = self.gate_soft_cap
        return x if cap is None else cap * jnp.tanh(x / cap)
