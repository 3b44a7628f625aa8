"""Base class of the language models: embedding, a stack of layers, a norm and a head, on any mesh.

A model is a frozen dataclass of sizes with pure functions: `init(key)` returns a plain tree of parameters, and
`apply(params, tokens)` uses it. Parameters do not depend on the mesh. Layers are stacked along the leading dim of each
leaf under `layers`.

Shapes: B rows of a batch, S tokens, D features, V vocabulary.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshwright.constraints import with_sharding_constraint
from meshwright.errors import ConfigError, LayoutError, MeshwrightError, PlacementError, did_you_mean
from meshwright.mesh.axes import axis_index
from meshwright.mesh.current import current_mesh
from meshwright.models.execution import Execution, Remat, recomputes_stages
from meshwright.models.fp8_layers import AMAXES, CASTS, check_fp8, gather_beside, of_stage
from meshwright.models.layer_context import Context, scaled_normal
from meshwright.models.stack import run_layers
from meshwright.models.stage_ends import gathered_ends
from meshwright.parallel.fp8.weight import Amaxes
from meshwright.parallel.fsdp import Gather
from meshwright.parallel.lora.low_rank import Adapters
from meshwright.parallel.pipeline.engine import pipeline
from meshwright.parallel.pipeline.named_schedules import make_schedule
from meshwright.parallel.pipeline.training_engine import pipeline_loss
from meshwright.parallel.tensor import column_dense, sequence_norm
from meshwright.parallel.vocabulary import vocab_embed
from meshwright.rng import abstract_key
from meshwright.rules import Rule, Rules
from meshwright.rules.rule_set import compile_pattern
from meshwright.specs import ceil_div, round_up, spec_axes
from meshwright.types import PRNGKeyArray, PyTree

ENDS = ("embed/", "head/", "final_norm/")
"""Paths of the parameters outside of layers, which only the first and the last stage of a pipeline use."""

Finish = Callable[[Any, Any, PyTree], PyTree]
"""`finish(h, head, targets)` computes the result from the last hidden states `[B, S, D]` and the head `[D, V]`."""


@dataclass(frozen=True, kw_only=True)
class LanguageModel(abc.ABC):
    """Base class of the models; a subclass defines `init_layer`, `layer` and `LAYER_RULES`.

    Args:
        tied_embeddings: whether the head is the transpose of the embedding table.
        logit_soft_cap: if given, logits become `cap * tanh(logits / cap)`.
        dropout: dropout rate on the outputs added by layers, used if a key is given.
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
        """Returns the model with a named size, with some fields replaced.

        Example:
            >>> from meshwright.models import Decoder
            >>> Decoder.named("tiny", num_layers=4).num_layers
            4
        """
        if size not in cls.SIZES:
            hint = did_you_mean(size, cls.SIZES) or f"use one of: {', '.join(cls.SIZES)}."
            raise MeshwrightError(f"{cls.__name__} has no size {size!r}.", hint=hint)
        return cls(**(cls.SIZES[size] | changes))

    # --- Validation of sizes ---

    def __post_init__(self) -> None:
        """Raises if an integer field is below 1 or the dropout rate is not in [0, 1)."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" or (field.type == "int | None" and value is not None):
                is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
                if not is_whole or value < 1:
                    problem = f"{field.name} of {self._kind} must be a positive integer; got {value!r}."
                    raise ConfigError(problem, hint="pass 1 or more.")
        if not 0 <= self.dropout < 1:
            problem = f"dropout of {self._kind} must be at least 0 and below 1; got {self.dropout!r}."
            raise ConfigError(problem, hint="pass a rate such as 0.1.")

    def _require_division(self, whole: str, parts: str) -> None:
        size, count = getattr(self, whole), getattr(self, parts)
        if size % count:
            below, above = size // count * count, round_up(size, count)
            near = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"{whole} of {self._kind} is {size}, which is not a multiple of {parts} ({count}).",
                hint=f"use {whole}={near}, or a different {parts}.",
            )

    @property
    def _kind(self) -> str:
        return type(self).__name__

    # --- Parameters ---

    @property
    def rules(self) -> Rules:
        """Rules that split parameters over the axes fsdp, tp and pp, if the mesh has them.

        Over pp, layers are split into stages. Embedding and head are only stored that way (decision 15).
        """
        layers = [(f"layers/{name}", P("pp", *spec)) for name, spec in self.layer_rules]
        ends: list[Any] = [_spread("embed/table", P("tp", "fsdp")), ("final_norm", P())]
        ends += [] if self.tied_embeddings else [_spread("head/kernel", P("fsdp", "tp"))]
        return Rules([*layers, *ends], optional_axes=("fsdp", "tp", "pp"))

    @property
    def layer_rules(self) -> tuple[tuple[str, P], ...]:
        """Rules for the parameters of one layer: `LAYER_RULES`, unless fields of the model add others."""
        return self.LAYER_RULES

    def init(self, key: PRNGKeyArray) -> PyTree:
        """Returns the parameters, in float32."""
        k_embed, k_layers, k_head = jax.random.split(key, 3)
        params = {
            "embed": {"table": 0.02 * jax.random.normal(k_embed, (self.vocab_size, self.d_model))},
            "layers": jax.vmap(self.init_layer)(jax.random.split(k_layers, self.num_layers)),
            "final_norm": {"scale": self.init_norm(self.d_model)},
        }
        if not self.tied_embeddings:
            params["head"] = {"kernel": scaled_normal(k_head, self.d_model, self.vocab_size)}
        return params

    @property
    def num_params(self) -> int:
        """Number of parameters, without computing them."""
        shapes = jax.eval_shape(self.init, abstract_key())
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
        fp8: Amaxes | None = None,
        fp8_weights: PyTree = None,
        lora: Adapters | None = None,
        finish: Finish | None = None,
        targets: PyTree = None,
    ) -> Any:
        """Returns float32 logits `[B, S, V]`, or the result of `finish`.

        Args:
            positions: `[B, S]` (default: counted from the start of each document).
            segment_ids: `[B, S]`, the document of each token, counted from 1 in each row; 0 is padding. Documents do
                not attend to each other.
            rng: the key for dropout (default: no dropout).
            gather: gathers shards of parameters in the local view; see `meshwright.parallel.Gather`.
            remat: activations to recompute in the backward pass: "none", "dots" (all except matmul results), "full"
                (all except the inputs of layers), "offload" (matmul results move to host memory), or a `jax.checkpoint`
                policy.
            fp8: the amaxes of the layers' weights that are multiplied in fp8; see `meshwright.train.Fp8`.
            fp8_weights: these weights in fp8, if they are cast already: a `CastWeight` each, in dicts like the
                parameters, of stacked layers or with a list of layers.
            lora: how to use the adapters in the parameters, if they have any; see `meshwright.train.fine_tuning.lora`.
            finish: `finish(h, head, targets)`, called instead of computing logits. In a pipeline it runs on the last
                stage for each microbatch, and its results are summed. With a schedule other than "gpipe", it must
                return a loss `((sum, count), metrics)`.
            targets: arrays with the rows of `tokens`, passed to `finish`.

        Example:
            >>> from meshwright.models import Decoder
            >>> model = Decoder.named("tiny")
            >>> params = model.init(jax.random.key(0))
            >>> model.apply(params, jnp.zeros((1, 8), jnp.int32)).shape
            (1, 8, 256)
        """
        run = run or Execution()
        if tokens.ndim != 2:
            raise PlacementError(f"{self._kind} got tokens of shape {tokens.shape}.", hint="pass [B, S].")
        rng = rng if self.dropout or (lora is not None and lora.dropout) else None
        extras = {"positions": positions, "segment_ids": segment_ids}
        stages = run.stages()
        scheduled = stages is not None and finish is not None and run.pipeline != "gpipe"
        if stages is not None:
            sizes: Any = {"vocab_size": self.vocab_size, "d_model": self.d_model, "tensor": run.tensor()}
            params, gather = gathered_ends(params, gather, stages=stages, **sizes)
        layers, gather_layers = params["layers"], None if gather is None else gather["layers"]
        num_stages = 1 if stages is None else jax.lax.axis_size(stages)
        num_microbatches = run.num_microbatches or 2 * num_stages
        count = int(jax.tree.leaves(params["layers"])[0].shape[0])
        each: list[dict[str, PyTree]] | None = None
        if fp8 is not None:
            check_fp8(self._kind, fp8, lora)
            if stages is not None:
                fp8 = of_stage(fp8, stages, count).per_microbatch(num_microbatches)
                microbatches = jnp.arange(tokens.shape[0]) // max(tokens.shape[0] // num_microbatches, 1)
                extras["microbatch"] = microbatches
            # Amaxes are stacked like layers, and pass through the loop over layers beside them.
            layers = {**layers, AMAXES: fp8.tree["layers"]}
            casts = None if fp8_weights is None else fp8_weights["layers"]
            each = [{CASTS: one} for one in casts] if isinstance(casts, list) else None
            layers |= {} if casts is None or each else {CASTS: casts}
            gather_layers = None if gather_layers is None else gather_beside(gather_layers, layers)
        own = "embed" if self.tied_embeddings else "head"
        ends = {"final_norm": params["final_norm"], own: params[own]}

        def enter(params: PyTree, tokens: Any) -> Any:
            # Replicate features, because XLA would look up slices of features and reshard them to rows inefficiently.
            table = _constrained(_whole(params, gather, "embed", lora)["table"], P(run.tensor_axis))
            embedded = vocab_embed(tokens, table, axis=run.tensor(), sequence_parallel=run.sequence_parallel)
            return _rows_split(self.enter(embedded), run)

        if count != ceil_div(self.num_layers, num_stages):
            raise LayoutError(
                f"{self._kind} has {self.num_layers} layers, but the parameters hold {num_stages} x {count}.",
                hint="split the stacked layers over the pipeline axis only.",
            )

        def stage(params: PyTree, h: Any, extras: PyTree, *, rng: Any = None, num_layers: Any = None) -> Any:
            layers, first = params
            if fp8 is not None and stages is not None:
                taken = replace(fp8, tree=layers[AMAXES]).of_microbatch(extras["microbatch"][0])
                layers = {**layers, AMAXES: taken.tree}
            # Stages may differ in their number of layers; the places after the last one are computed and ignored.
            end = None if num_layers is None else first[0] + num_layers
            positions, segment_ids = extras["positions"], extras["segment_ids"]
            shared = self.prepare(_positions(segment_ids, tokens.shape[-1]) if positions is None else positions)

            def block(layer: PyTree, h: Any, number: Any) -> Any:
                if fp8 is not None:
                    layer = dict(layer)
                    amaxes, casts = replace(fp8, tree=layer.pop(AMAXES)), layer.pop(CASTS, None)
                    options = {"is_gathered": gather is not None, "stages": stages, "kernels": run.kernels}
                    layer = amaxes.weights(layer, prefix="layers", casts=casts, **options)
                key = None if rng is None else jax.random.fold_in(rng, number)
                layer = layer if lora is None else lora.weights(layer, key)
                context = Context(run, segment_ids, shared, key, self.dropout, self.norm_eps, number)
                made = _rows_split(self.layer(layer, h, context), run)
                return made if end is None else jnp.where(number < end, made, h)

            return run_layers(
                block,
                layers,
                h,
                first=first[0],
                form=run.layers,
                # Stages that start again from their inputs need not do so for each layer as well.
                remat="none" if scheduled and recomputes_stages(remat) else remat,
                gather=gather_layers,
                prefetch=run.prefetch and stages is None,
                kernels=run.kernels,
                beside=each,
            )

        def last(params: PyTree, h: Any, targets: PyTree = None) -> Any:
            scale = self.norm_scale(params["final_norm"]["scale"])
            h = sequence_norm(h, scale, axis=run.tensor(), eps=self.norm_eps)
            if self.tied_embeddings:
                head = _whole(params["embed"], gather, "embed", lora)["table"].T
            else:
                head = _whole(params["head"], gather, "head", lora)["kernel"]
                if run.stores_along() is not None:
                    # Otherwise XLA would split the features of activations like those of the head.
                    head = _constrained(head, P(None, run.tensor_axis))
            if finish is not None:
                return finish(h, head, targets)
            logits = column_dense(h, head, axis=run.tensor(), sequence_parallel=run.sequence_parallel)
            logits, cap = logits.astype(jnp.float32), self.logit_soft_cap
            return logits if cap is None else cap * jnp.tanh(logits / cap)

        if stages is None:
            h = stage((layers, jnp.zeros(1, jnp.int32)), enter(params["embed"], tokens), extras, rng=rng)
            return last(ends, h, targets)
        # Dropout draws by layer number, so each stage gets the numbers of its layers.
        numbers = count * axis_index(stages) + jnp.arange(count, dtype=jnp.int32)
        both: Any = {
            "axis": stages,
            "first": enter,
            "first_params": params["embed"],
            "last_params": ends,
            "targets": targets,
            "rng": rng,
            "num_layers": self.num_layers,
        }
        inputs = (layers, numbers), tokens, extras
        if not scheduled:
            combine: Any = "sum" if finish is not None else "concatenate"
            return pipeline(stage, *inputs, num_microbatches=num_microbatches, last=last, combine=combine, **both)

        def loss(params: PyTree, h: Any, targets: PyTree = None) -> tuple[Any, Any]:
            (total, count), metrics = last(params, h, targets)
            return total, (count, metrics)

        schedule = make_schedule(run.pipeline, num_stages, num_microbatches, num_rounds=run.pipeline_rounds)
        total, (valid, metrics) = pipeline_loss(
            stage,
            *inputs,
            schedule=schedule,
            last=loss,
            remat=recomputes_stages(remat),
            **both,
        )
        return (total, valid), metrics

    def prepare(self, positions: Any) -> Any:
        """Returns values that all layers share, such as rotary tables, computed once."""
        return None

    def enter(self, embedded: Any) -> Any:
        """Returns the input of the first layer."""
        return embedded

    def init_norm(self, size: int) -> Any:
        """Returns the stored scale of a norm that multiplies by one."""
        return jnp.ones(size)

    def norm_scale(self, stored: Any) -> Any:
        """Returns the factor of a norm from its stored scale."""
        return stored


def _spread(name: str, spec: P) -> Rule:
    return Rule(compile_pattern(name), spec, spread="pp")


def _whole(params: PyTree, gather: Gather | None, name: str, lora: Adapters | None) -> PyTree:
    whole = params if gather is None else gather[name](params)
    return whole if lora is None else lora.merged(whole)


def _rows_split(h: Any, run: Execution) -> Any:
    """In the global view, keeps activations split by rows and, between blocks, by the sequence."""
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
