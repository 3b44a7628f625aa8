"""LoRA as a transform of a job: low-rank leaves beside frozen matrices, with rules that follow from theirs.

The transform changes `init`, `rules` and the loss, and nothing else, so it works for any job. A loss that takes `lora=`
(that of `language_job`) applies adapters inside its matmuls. Any other loss gets merged matrices, as if it had been
called without adapters.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshwright.dtypes import is_float
from meshwright.errors import JobError, did_you_mean
from meshwright.parallel.lora.block_quantize import check_blocks, quantize_blocks
from meshwright.parallel.lora.low_rank import BASE, LORA_A, LORA_B, SCALES, Adapters, is_adapted
from meshwright.rules import Rules
from meshwright.rules.matching import match_rules
from meshwright.rules.rule_set import Rule, compile_pattern
from meshwright.specs import canonical
from meshwright.train.fine_tuning.adapting import adapt, with_fields
from meshwright.train.fine_tuning.lora_settings import LoraSettings
from meshwright.train.job import abstract_init
from meshwright.train.precision import Precision
from meshwright.tree import named_leaves
from meshwright.types import PRNGKeyArray, PyTree

ADAPTERS = rf"(^|/)({LORA_A}|{LORA_B})$"
"""Regex of the leaves that adapters train."""


def lora(job: Any, settings: LoraSettings | str | None = None, **changes: Any) -> Any:
    """Returns a job that trains low-rank adapters of some matrices and freezes everything else, as `--lora` does.

    A target `W [..., inputs, outputs]` becomes `W + alpha / rank * A @ B`. Leading dims are stacked matrices, such as
    layers. B is zero at first, so the job starts with the function it had. Adapters are stored in float32, and split
    like the dims of W that they share. To train other parameters too, set the job's `trained` (`adapt(job, train=...)`)
    before.

    Args:
        settings: a `LoraSettings`, or its text as `--lora` takes it (default: `LoraSettings()`).
        changes: fields of `LoraSettings`: `rank`, `alpha`, `targets`, `dropout`, `base`, `block`.

    Example:
        >>> import meshwright as mw
        >>> job = mw.Job(init=lambda key: {"up": jnp.ones((8, 4)), "b": jnp.ones(4)}, rules=[(".*", P("fsdp"))])
        >>> adapted = lora(job, rank=2, targets="up")
        >>> {leaf.name: leaf.value.shape for leaf in named_leaves(abstract_init(adapted.init))}
        {'b': (4,), 'up/base': (8, 4), 'up/lora_a': (8, 2), 'up/lora_b': (2, 4)}
        >>> [spec for _, spec in adapted.rules][:3]
        [P('fsdp',), P('fsdp',), P()]
    """
    settings = LoraSettings.parse(settings) if isinstance(settings, str) else settings or LoraSettings()
    settings = dataclasses.replace(settings, **changes)
    before = abstract_init(job.init)
    names = _targets(before, settings)
    adapters = settings.adapters
    frozen, trained = _kept_patterns(job, before, names)
    extra = {leaf.name for leaf in named_leaves(before) for text in trained if compile_pattern(text).matches(leaf.name)}
    stays_wide = re.compile(Precision().keep)  # stacked norms and biases look like matrices
    narrow = tuple(
        leaf.name
        for leaf in named_leaves(before)
        if settings.base and len(leaf.value.shape) > 1 and is_float(leaf.value.dtype)
        if leaf.name not in extra and leaf.name not in names and not stays_wide.search(leaf.name)
    )
    kept = [ADAPTERS, *([rf"(^|/){SCALES}$"] if settings.base else [])]
    kept += [_exactly(name, BASE) for name in names] if settings.base else []
    kept += [_exactly(name) for name in narrow]
    given = getattr(job, "keep_dtypes", ()) or ()
    uses = {
        field: _with_adapters(getattr(job, field), adapters, settings, names)
        for field in ("loss", "eval_loss", "predict")
        if getattr(job, field, None) is not None
    }
    return with_fields(
        job,
        init=functools.partial(_init, job.init, settings, names, narrow),
        rules=_rules(job.rules, before, names),
        frozen=frozen,
        trained=(*trained, ADAPTERS),
        keep_dtypes=(*([given] if isinstance(given, str) else given), *kept),
        lora=settings,
        **uses,
    )


def adapt_job(
    job: Any, *, freeze: Sequence[str] = (), train: Sequence[str] = (), adapters: LoraSettings | str | None = None
) -> Any:
    """Returns a job as `--freeze`, `--train` and `--lora` adapt it."""
    job = adapt(job, freeze=freeze, train=train)
    return job if adapters is None else lora(job, adapters)


def merged(params: PyTree, settings: LoraSettings) -> PyTree:
    """Returns parameters with plain matrices: each adapted one plus its change, restored from blocks if needed.

    Example:
        >>> w = {"base": jnp.ones((2, 2)), "lora_a": jnp.ones((2, 1)), "lora_b": jnp.ones((1, 2))}
        >>> merged({"up": w}, LoraSettings(rank=1, alpha=2))["up"].tolist()
        [[3.0, 3.0], [3.0, 3.0]]
    """
    return settings.adapters.merged(params)


# --- Parameters ---


def _targets(params: PyTree, settings: LoraSettings) -> tuple[str, ...]:
    """Returns the paths of the target matrices; raises if there are none, or if one cannot be a target."""
    pattern, leaves = compile_pattern(settings.targets), named_leaves(params)
    if any(map(is_adapted, jax.tree.leaves(params, is_leaf=is_adapted))):
        raise JobError("the job already has adapters.", hint="call lora once, with a regex for all targets.")
    matches = [leaf for leaf in leaves if pattern.matches(leaf.name)]
    # Norms and biases of stacked layers have two dims, but are not matrices.
    stays = re.compile(Precision().keep)
    matrices = [
        leaf
        for leaf in matches
        if len(leaf.value.shape) > 1 and is_float(leaf.value.dtype) and not stays.search(leaf.name)
    ]
    if not matrices:
        many = [leaf.name for leaf in leaves if len(leaf.value.shape) > 1]
        hint = did_you_mean(settings.targets, many) or f"matrices are named like {', '.join(map(repr, many[:4]))}."
        no = f"matches only `{matches[0].name}`, which is not a matrix" if matches else "matches no parameter"
        raise JobError(f"lora: targets {settings.targets!r} {no}.", hint=hint if many else None)
    for leaf in matrices:
        smaller = min(leaf.value.shape[-2:])
        if settings.rank > smaller:
            raise JobError(
                f"lora: rank {settings.rank} is larger than the smaller side of `{leaf.name}` {leaf.value.shape}.",
                hint=f"use rank={max(1, smaller // 2)}, or leave it out of the targets.",
            )
        if settings.base in ("int8", "nf4"):
            check_blocks(leaf.value.shape, settings.base, block=settings.block, name=leaf.name)
    return tuple(leaf.name for leaf in matrices)


def _init(
    init: Callable[[Any], PyTree],
    settings: LoraSettings,
    names: Sequence[str],
    narrow: Sequence[str],
    key: PRNGKeyArray,
) -> PyTree:
    params = init(key)
    targets, cast = set(names), set(narrow)

    def change(name: str, leaf: Any) -> Any:
        if name in cast:
            return leaf.astype(jnp.bfloat16)
        if name not in targets:
            return leaf
        *lead, inputs, outputs = leaf.shape
        own, bound = jax.random.fold_in(key, zlib.crc32(name.encode()) >> 1), inputs**-0.5
        node = stored_base(leaf, settings)
        node[LORA_A] = jax.random.uniform(own, (*lead, inputs, settings.rank), jnp.float32, -bound, bound)
        node[LORA_B] = jnp.zeros((*lead, settings.rank, outputs), jnp.float32)
        return node

    changed = [change(leaf.name, leaf.value) for leaf in named_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), changed)


def stored_base(weight: Any, settings: LoraSettings) -> dict[str, Any]:
    """Returns the entries of an adapted weight that store the frozen weight."""
    if settings.base in (None, "bfloat16"):
        return {BASE: weight if settings.base is None else weight.astype(jnp.bfloat16)}
    stored, scales = quantize_blocks(weight, settings.base, block=settings.block)  # type: ignore[arg-type]
    return {BASE: stored, SCALES: scales}


def _kept_patterns(job: Any, before: PyTree, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the job's `frozen` and `trained` without patterns that match only targets, which are frozen anyway."""
    after = [leaf.name for leaf in named_leaves(before) if leaf.name not in set(names)]
    after += [f"{name}/{part}" for name in names for part in (BASE, LORA_A, LORA_B)]
    before_names = [leaf.name for leaf in named_leaves(before)]

    def kept(field: str) -> tuple[str, ...]:
        given = getattr(job, field, ()) or ()
        patterns = [given] if isinstance(given, str) else list(given)
        gone = [
            text
            for text in patterns
            if any(map(compile_pattern(text).matches, before_names))
            and not any(map(compile_pattern(text).matches, after))
        ]
        return tuple(text for text in patterns if text not in gone)

    return kept("frozen"), kept("trained")


# --- Rules ---


def _rules(rules: Any, before: PyTree, names: Sequence[str]) -> Rules:
    """Returns the rules with those of the new leaves first, and without those that decided only targets."""
    matches, targets = match_rules(rules, before), set(names)
    derived = []
    needed = {leaf.rule for leaf in matches.leaves if leaf.subject.name not in targets}
    for leaf in matches.leaves:
        name, shape = leaf.subject.name, leaf.subject.shape
        if name not in targets or leaf.spec is None:
            continue
        entries: list[Any] = [*leaf.spec, *[None] * (len(shape) - len(leaf.spec))]
        *lead, inputs, outputs = entries
        specs = {
            rf"({BASE}|{SCALES})": leaf.spec,
            LORA_A: canonical(P(*lead, inputs, None)),
            LORA_B: canonical(P(*lead, None, outputs)),
        }
        rule = None if leaf.rule is None else matches.rules.entries[leaf.rule]
        why, spread = ("", None) if rule is None else (f"adapter of rule {rule.pattern.text!r}", rule.spread)
        derived += [
            Rule(compile_pattern(_exactly(name, part)), spec, source=why, spread=spread) for part, spec in specs.items()
        ]
    others = [rule for place, rule in enumerate(matches.rules.entries) if not matches.hits[place] or place in needed]
    return Rules([*derived, *others], optional_axes=matches.rules.optional_axes)


def _exactly(name: str, part: str | None = None) -> str:
    return rf"(^|/){re.escape(name)}{'' if part is None else f'/{part}'}$"


# --- Losses ---


def _with_adapters(
    function: Callable[..., Any], adapters: Adapters, settings: LoraSettings, names: Sequence[str]
) -> Callable[..., Any]:
    """Returns a loss or prediction that takes parameters with adapters."""
    takes = "lora" in inspect.signature(function).parameters
    outside = [name for name in names if not takes or not name.startswith("layers/")]
    if settings.dropout and outside:
        why = "is not a matmul of a built-in layer" if takes else "belongs to a loss that gets merged matrices"
        raise JobError(
            f"lora: dropout cannot apply to the input of `{outside[0]}`, which {why}.",
            hint="use dropout=0, or other targets.",
        )
    return functools.partial(function, lora=adapters) if takes else MergedFunction(function, adapters)


class MergedFunction:
    """A loss or prediction of a job, called with merged matrices; its signature stays the same."""

    def __init__(self, function: Callable[..., Any], adapters: Adapters) -> None:
        self.__wrapped__, self._adapters = function, adapters

    def __call__(self, params: PyTree, *arguments: Any, **options: Any) -> Any:
        gather = options.get("gather")
        if gather is not None:
            # Slices are merged before they are gathered, so the loss gathers leaves like those it knows.
            specs, dtypes = _without_adapters(gather.specs, BASE), _without_adapters(gather.dtypes, LORA_A)
            options["gather"] = dataclasses.replace(gather, specs=specs, dtypes=dtypes)
        return self.__wrapped__(self._adapters.merged(params), *arguments, **options)


def _without_adapters(tree: PyTree, part: str) -> PyTree:
    """Returns a tree of specs or dtypes with one part of each adapted weight in its place."""
    return jax.tree.map(
        lambda node: node[part] if is_adapted(node) else node,
        tree,
        is_leaf=lambda node: is_adapted(node) or isinstance(node, P) or node is None,
    )
