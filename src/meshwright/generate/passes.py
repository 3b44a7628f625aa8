"""The two passes of generation: over whole prompts, and over one new token per row.

Both are the model's own layers, with a context that keeps or reads caches. Layers are unrolled and have separate
caches, because a loop over stacked caches would copy all of them for each token.

Shapes: B rows, S tokens, D features, V tokens in the vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshwright.generate.cache import PromptContext, TokenContext
from meshwright.generate.spread import Spread
from meshwright.models.execution import Execution
from meshwright.models.language import LanguageModel
from meshwright.models.layer_context import Context
from meshwright.parallel.tensor import sequence_norm
from meshwright.types import PyTree

Cache = tuple[tuple[Any, ...], ...]
"""The caches of each layer, in the order of its calls."""


def read_prompts(
    model: LanguageModel,
    weights: PyTree,
    tokens: Any,
    lengths: Any,
    *,
    length: int,
    spread: Spread,
    room: int | None = None,
) -> tuple[Any, Cache]:
    """Returns the last hidden states `[B, S, D]` of prompts, and a cache.

    Args:
        tokens: `[B, S]`, with padding after each prompt.
        lengths: `[B]`, the number of tokens of each prompt.
        length: maximum number of tokens of a row, on which some rotary scalings depend.
        room: number of tokens that fit the cache (default: `length`).
    """
    num_tokens = tokens.shape[1]
    real = jnp.arange(num_tokens) < lengths[:, None]
    shared = jax.tree.map(lambda table: table[:, :num_tokens], model.prepare(jnp.arange(length)[None]))
    h, cache = _embed(model, weights, tokens, spread), list[tuple[Any, ...]]()
    for number, layer in enumerate(weights["layers"]):
        context = PromptContext(
            **_context(model, number, shared, spread),
            length=room or length,
            spread=spread,
            real=real,
            lengths=lengths,
            kept=[],
        )
        h = spread.split_features(model.layer(layer, h, context))
        cache.append(tuple(context.kept))
    return h, tuple(cache)


def read_tokens(
    model: LanguageModel, weights: PyTree, tokens: Any, places: Any, cache: Cache, shared: Any, *, spread: Spread
) -> tuple[Any, Cache]:
    """Returns the last hidden states `[B, 1, D]` of one new token per row, and the updated cache.

    Args:
        tokens: `[B]`.
        places: `[B]`, the number of tokens before each new one.
        shared: `model.prepare` of all places.
    """
    here = jax.tree.map(lambda table: table[0, places][:, None], shared)
    h, updated = _embed(model, weights, tokens[:, None], spread), list[tuple[Any, ...]]()
    for number, layer in enumerate(weights["layers"]):
        context = TokenContext(
            **_context(model, number, here, spread), places=places, spread=spread, caches=cache[number], kept=[]
        )
        h = spread.split_features(model.layer(layer, h, context))
        updated.append(tuple(context.kept))
    return h, tuple(updated)


def logits_of(model: LanguageModel, weights: PyTree, h: Any, *, spread: Spread) -> Any:
    """Returns float32 logits `[B, S, V]` of last hidden states."""
    h = sequence_norm(h, model.norm_scale(weights["final_norm"]["scale"]), axis=None, eps=model.norm_eps)
    head = weights["embed"]["table"].T if model.tied_embeddings else weights["head"]["kernel"]
    logits = jnp.einsum("BSD,DV->BSV", spread.split_features(h), head, preferred_element_type=jnp.float32)
    cap = model.logit_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _embed(model: LanguageModel, weights: PyTree, tokens: Any, spread: Spread) -> Any:
    return spread.split_features(model.enter(jnp.take(weights["embed"]["table"], tokens, axis=0)))


def _context(model: LanguageModel, number: int, shared: Any, spread: Spread) -> dict[str, Any]:
    """Returns the fields of a `Context` for one layer, which leaves the partitioning to XLA."""
    is_alone = spread.mesh is None or spread.mesh.size == 1
    run = Execution(
        tensor_axis=None,
        data_axes=(),
        pipeline_axis=None,
        sequence_parallel=False,
        attention=None if is_alone else "xla",
        kernels=False,
    )
    given = Context(run, None, shared, None, 0.0, model.norm_eps, number)
    return {name: getattr(given, name) for name in Context.__dataclass_fields__}
