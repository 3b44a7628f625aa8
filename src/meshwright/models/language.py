"""What all language models of ours share: embedding, a stack of layers, a norm, a head; on one device or on any mesh.

A model is a frozen dataclass of sizes with pure functions: `init(key)` makes a plain tree of parameters, `apply(params,
tokens)` uses it. Parameters do not depend on the mesh. Layers are stacked: each leaf under `layers` has them as its
leading dim.

Shapes: B rows of a batch, S tokens, D features, V vocabulary.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.constraints import with_sharding_constraint
from meshwright.errors import ConfigError, LayoutError, MeshwrightError, PlacementError, did_you_mean
from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import axis_index, is_manual, ways_along
from meshwright.mesh.build import current_mesh
from meshwright.models.execution import PROJECTION, Execution, Remat
from meshwright.models.ops import swiglu
from meshwright.models.stack import run_layers
from meshwright.parallel.dropout import dropout
from meshwright.parallel.fsdp import Gather
from meshwright.parallel.kernels.gradient_kernels import residual_norm
from meshwright.parallel.pipeline.engine import pipeline
from meshwright.parallel.tensor import column_dense, fused_column_dense, row_dense, sequence_norm
from meshwright.parallel.vocabulary import vocab_embed
from meshwright.rules import Rules
from meshwright.specs import round_up, spec_axes
from meshwright.types import PRNGKeyArray, PyTree

Finish = Callable[[Any, Any, PyTree], PyTree]
"""`finish(h, head, targets)`: what becomes of the last hidden states, `[B, S, D]`; the head is `[D, V]`."""


@dataclass(frozen=True, kw_only=True)
class LanguageModel(abc.ABC):
    """Base of the models; a subclass says what a layer is.

    Args:
        tied_embeddings: the head is the transpose of the embedding table.
        logit_soft_cap: squashes logits to this range by `cap * tanh(logits / cap)`.
        dropout: the rate at which what a layer adds is dropped, where a key is given.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    tied_embeddings: bool = False
    logit_soft_cap: float | None = None
    dropout: float = 0.0
    norm_eps: float = 1e-6

    SIZES: ClassVar[dict[str, dict[str, Any]]] = {}
    LAYER_RULES: ClassVar[tuple[tuple[str, P], ...]] = ()

    @classmethod
    def named(cls, size: str, **changes: Any) -> Self:
        """Returns the model of a named size, with some fields changed.

        Example:
            >>> from meshwright.models import Decoder
            >>> Decoder.named("tiny", num_layers=4).num_layers
            4
        """
        if size not in cls.SIZES:
            hint = did_you_mean(size, cls.SIZES) or f"use one of: {', '.join(cls.SIZES)}."
            raise MeshwrightError(f"{cls.__name__} has no size {size!r}.", hint=hint)
        return cls(**(cls.SIZES[size] | changes))

    # --- Sizes, checked when a model is made: a wrong one would only be met deep in a program ---

    def __post_init__(self) -> None:
        """Raises where a field of whole numbers has one below 1, or where a rate is none.

        Example:
            >>> from meshwright.models import Decoder
            >>> Decoder.named("tiny", num_layers=0)
            Traceback (most recent call last):
            meshwright.errors.ConfigError: num_layers of Decoder is 0.
            hint: a whole number from 1 on.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" or (field.type == "int | None" and value is not None):
                is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
                if not is_whole or value < 1:
                    raise ConfigError(f"{field.name} of {self._kind} is {value!r}.", hint="a whole number from 1 on.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout of {self._kind} is {self.dropout!r}.", hint="a rate, 0 up to below 1.")

    def _require_division(self, whole: str, parts: str) -> None:
        """Raises where one size does not divide another."""
        size, count = getattr(self, whole), getattr(self, parts)
        if size % count:
            below, above = size // count * count, round_up(size, count)
            near = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"{whole} of {self._kind} is {size}, which its {parts} of {count} does not divide.",
                hint=f"{whole} of {near}, or another {parts}.",
            )

    @property
    def _kind(self) -> str:
        return type(self).__name__

    # --- Parameters ---

    @property
    def rules(self) -> Rules:
        """How parameters are split over the axes dp, fsdp, tp and pp, as far as a mesh has them."""
        layers = [(f"layers/{name}", P("pp", *spec)) for name, spec in self.LAYER_RULES]
        ends = [("embed/table", P("tp", "fsdp")), ("final_norm", P())]
        ends += [] if self.tied_embeddings else [("head/kernel", P("fsdp", "tp"))]
        return Rules([*layers, *ends], optional_axes=("fsdp", "tp", "pp"))

    def init(self, key: PRNGKeyArray) -> PyTree:
        """Returns the parameters, in float32."""
        k_embed, k_layers, k_head = jax.random.split(key, 3)
        params = {
            "embed": {"table": 0.02 * jax.random.normal(k_embed, (self.vocab_size, self.d_model))},
            "layers": jax.vmap(self.init_layer)(jax.random.split(k_layers, self.num_layers)),
            "final_norm": {"scale": jnp.ones(self.d_model)},
        }
        if not self.tied_embeddings:
            params["head"] = {"kernel": scaled_normal(k_head, self.d_model, self.vocab_size)}
        return params

    @property
    def num_params(self) -> int:
        """How many parameters there are; nothing is computed."""
        shapes = jax.eval_shape(self.init, jax.eval_shape(lambda: jax.random.key(0)))
        return sum(int(leaf.size) for leaf in jax.tree.leaves(shapes))

    @abc.abstractmethod
    def init_layer(self, key: PRNGKeyArray) -> PyTree:
        """Returns the parameters of one layer."""

    # --- The function ---

    @abc.abstractmethod
    def layer(self, params: PyTree, h: Any, context: Context) -> Any:
        """Returns `h` after one layer."""

    def apply(
        self,
        params: PyTree,
        tokens: Any,
        *,
        positions: Any = None,
        segment_ids: Any = None,
        rng: PRNGKeyArray | None = None,
        run: Execution | None = None,
        gather: Gather | None = None,
        remat: Remat = "none",
        finish: Finish | None = None,
        targets: PyTree = None,
    ) -> Any:
        """Returns logits `[B, S, V]` in float32, or what `finish` makes of the last hidden states.

        Args:
            positions: `[B, S]`; by default they count from each document's start.
            segment_ids: `[B, S]`: which document a token belongs to, from 1 on in each row; 0 is padding. Documents do
                not see each other.
            rng: a key for dropout; without it there is none.
            gather: makes slices of parameters whole in the local view; see `meshwright.parallel.Gather`.
            remat: what is computed again in the backward pass: "none", "dots" (all but results of matmuls), "full" (all
                but the inputs of layers), "offload" (results of matmuls wait in the host's memory), or a policy of
                `jax.checkpoint`.
            finish: `finish(h, head, targets)`. In a pipeline it runs on the last stage for each microbatch, and its
                results are summed.
            targets: what `finish` gets beside the hidden states: arrays with the rows of `tokens`.

        Example:
            >>> from meshwright.models import Decoder
            >>> model = Decoder.named("tiny")
            >>> params = model.init(jax.random.key(0))
            >>> model.apply(params, jnp.zeros((1, 8), jnp.int32)).shape
            (1, 8, 256)
        """
        run = run or Execution()
        if tokens.ndim != 2:
            raise PlacementError(f"{self._kind} got tokens of shape {tokens.shape}.", hint="use [B, S].")
        rng = rng if self.dropout else None
        extras = {"positions": positions, "segment_ids": segment_ids}
        stages = run.stages()
        ends = {"embed": params["embed"], "final_norm": params["final_norm"]}
        if not self.tied_embeddings:
            ends["head"] = params["head"]

        def enter(params: PyTree, tokens: Any) -> Any:
            # Whole along features, as our gather makes it: XLA would look up slices of features, and has no good way
            # from there to rows.
            table = _constrained(_whole(params, gather, "embed")["table"], P(run.tensor_axis))
            embedded = vocab_embed(tokens, table, axis=run.tensor(), sequence_parallel=run.sequence_parallel)
            return _rows_split(embedded, run)

        def stage(params: PyTree, h: Any, extras: PyTree, *, rng: Any = None) -> Any:
            layers, first = params
            positions, segment_ids = extras["positions"], extras["segment_ids"]
            shared = self.prepare(_positions(segment_ids, tokens.shape[-1]) if positions is None else positions)

            def block(layer: PyTree, h: Any, number: Any) -> Any:
                key = None if rng is None else jax.random.fold_in(rng, number)
                context = Context(run, segment_ids, shared, key, self.dropout, self.norm_eps)
                return _rows_split(self.layer(layer, h, context), run)

            return run_layers(
                block,
                layers,
                h,
                first=first[0],
                form=run.layers,
                remat=remat,
                gather=None if gather is None else gather["layers"],
                prefetch=run.prefetch and stages is None,
                kernels=run.kernels,
            )

        def last(params: PyTree, h: Any, targets: PyTree = None) -> Any:
            h = sequence_norm(h, params["final_norm"]["scale"], axis=run.tensor(), eps=self.norm_eps)
            if self.tied_embeddings:
                head = _whole(params["embed"], gather, "embed")["table"].T
            else:
                head = _whole(params["head"], gather, "head")["kernel"]
            if finish is not None:
                return finish(h, head, targets)
            logits = column_dense(h, head, axis=run.tensor(), sequence_parallel=run.sequence_parallel)
            logits, cap = logits.astype(jnp.float32), self.logit_soft_cap
            return logits if cap is None else cap * jnp.tanh(logits / cap)

        # A stage's layers come with the number of the first of them, which dropout draws by.
        count = int(jax.tree.leaves(params["layers"])[0].shape[0])
        num_stages = 1 if stages is None else jax.lax.axis_size(stages)
        if count * num_stages != self.num_layers:
            raise LayoutError(
                f"{self._kind}: {num_stages} x {count} layers are here, and it has {self.num_layers}.",
                hint="the rules must split the stack of layers over the pipeline's axis, and over no other.",
            )
        if stages is None:
            h = stage((params["layers"], jnp.zeros(1, jnp.int32)), enter(params["embed"], tokens), extras, rng=rng)
            return last(ends, h, targets)
        first_number = jnp.full(1, count * axis_index(stages), jnp.int32)
        return pipeline(
            stage,
            (params["layers"], first_number),
            tokens,
            extras,
            axis=stages,
            num_microbatches=run.num_microbatches or 2 * jax.lax.axis_size(stages),
            first=enter,
            first_params=params["embed"],
            last=last,
            last_params=ends,
            targets=targets,
            rng=rng,
            combine="sum" if finish is not None else "concatenate",
        )

    def prepare(self, positions: Any) -> Any:
        """Returns what all layers share, computed once: tables of angles, say."""
        return None


@dataclass(frozen=True)
class Context:
    """What a layer needs besides its parameters: the run, and dense layers and norms that use it."""

    run: Execution
    segment_ids: Any
    shared: Any
    key: Any
    dropout_rate: float
    norm_eps: float

    def norm(self, h: Any, scale: Any) -> Any:
        return sequence_norm(h, scale, axis=self.run.tensor(), eps=self.norm_eps)

    def residual_norm(self, h: Any, scale: Any) -> tuple[Any, Any]:
        """Returns `h` to go on with, and its norm: their gradients are added where the norm's is computed."""
        return residual_norm(h, scale, axis=self.run.tensor(), eps=self.norm_eps, kernels=self.run.kernels)

    def columns(self, h: Any, *weights: Any) -> tuple[Any, ...]:
        """Returns `h @ w` for each weight, features split; they share one gather of `h`."""
        run, axis = self.run, self.run.tensor()
        gathers = run.sequence_parallel and axis is not None
        options: Any = {"save_gathered": run.save_gathered, "kernels": run.kernels} if gathers else {}
        ys = fused_column_dense(h, weights, axis=axis, sequence_parallel=run.sequence_parallel, **options)
        return tuple(checkpoint_name(y, PROJECTION) for y in ys)

    def rows(self, y: Any, weight: Any) -> Any:
        """Returns `y @ w` where features are split, with the sequence split again."""
        run, axis = self.run, self.run.tensor()
        options: Any = {"kernels": run.kernels} if run.sequence_parallel else {}
        h = row_dense(y, weight, axis=axis, sequence_parallel=run.sequence_parallel, **options)
        arrives = run.sequence_parallel and ways_along(axis, who="rows") > 1
        if chip_family(current_mesh()) == "gpu" and not arrives:
            # What is added to it next stays out of the matmul: XLA would copy that first, to let cuBLAS add to it.
            h = lax.optimization_barrier(h)
        return checkpoint_name(h, PROJECTION)

    @jax.named_scope("mlp")
    def feed_forward(self, params: PyTree, x: Any) -> Any:
        """Returns `(silu(x @ gate) * (x @ up)) @ down`."""
        gate, up = self.columns(x, params["gate"], params["up"])
        return self.rows(swiglu(gate, up), params["down"])

    def drop(self, h: Any, site: int) -> Any:
        """Returns `h` with dropout, where there is a key; `site` tells the places within a layer apart."""
        if self.key is None:
            return h
        axis = self.run.tensor()
        split = axis is not None and is_manual(axis) and self.run.sequence_parallel
        return dropout(h, self.dropout_rate, jax.random.fold_in(self.key, site), spec=P(None, axis) if split else P())


def scaled_normal(key: PRNGKeyArray, fan_in: int, *rest: int, scale: float = 1.0) -> Any:
    """Returns a weight `[fan_in, ...]` whose products keep the variance of what they multiply, times `scale**2`."""
    return jax.random.normal(key, (fan_in, *rest)) * (scale / fan_in**0.5)


def init_mlp(k_gate: Any, k_up: Any, k_down: Any, *, d_model: int, d_ff: int, scale: float) -> PyTree:
    """Returns the weights of `Context.feed_forward`; what it adds is scaled."""
    return {
        "gate": scaled_normal(k_gate, d_model, d_ff),
        "up": scaled_normal(k_up, d_model, d_ff),
        "down": scaled_normal(k_down, d_ff, d_model, scale=scale),
    }


def _whole(params: PyTree, gather: Gather | None, name: str) -> PyTree:
    return params if gather is None else gather[name](params)


def _rows_split(h: Any, run: Execution) -> Any:
    """Tells XLA, where it decides, to keep activations split by rows and, between blocks, by the sequence."""
    return _constrained(h, P(run.data_axes, run.tensor_axis if run.sequence_parallel else None))


def _constrained(x: Any, spec: P) -> Any:
    mesh = current_mesh()
    if mesh is None or len(mesh.manual_axes) == len(mesh.axis_names):
        return x
    return with_sharding_constraint(x, spec, optional_axes=spec_axes(spec))


def _positions(segment_ids: Any, num_tokens: int) -> Any:
    places = jnp.arange(num_tokens)[None]
    if segment_ids is None:
        return places
    starts = jnp.concatenate([jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], 1)
    return places - jax.lax.cummax(jnp.where(starts, places, 0), axis=1)
