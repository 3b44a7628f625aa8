"""Running stacked layers in a loop, unrolled, or in blocks, with optional FSDP prefetch.

With FSDP, a plain loop waits for each layer's weights before its first matmul. With prefetch, each loop step gathers
the next layer's weights while the current layer computes, in the forward and the backward pass. The backward loop is
custom, because autodiff would keep the carry of the forward loop: the gathered weights of all layers. Weights are
excluded from the residuals of a layer and gathered again, also without prefetch: a `jax.checkpoint` policy that names
the gather would keep what follows it, such as a cast. With remat, `jax.checkpoint` decides which residuals are left.

The last layer's weights are kept for the backward pass, which starts with them. The last step of the backward loop
gathers the first layer once more than needed, because all steps run the same program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from meshwright.errors import LayoutError
from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import pcast_varying, varying_axes
from meshwright.mesh.current import current_mesh
from meshwright.models.execution import Layers, Remat, remat_policy
from meshwright.models.ops import unstack
from meshwright.parallel.fsdp import Gather
from meshwright.tree import split_primals
from meshwright.types import PyTree

# On GPUs, slicing stacked weights and residuals in a scan costs about 10% (benchmarks/results/decoder_h200.md).
_BEST_FORM: dict[str, Layers] = {"gpu": "unroll"}


def run_layers(
    block: Callable[[PyTree, Any, Any], Any],
    layers: PyTree,
    h: Any,
    *,
    first: Any = 0,
    form: Layers = "auto",
    remat: Remat = "none",
    gather: Gather | None = None,
    prefetch: bool = True,
    kernels: bool | None = None,
    beside: Sequence[dict[str, PyTree]] | None = None,
) -> Any:
    """Returns `h` after all layers: `h = block(layer, h, number)` for each.

    Args:
        layers: the layers' parameters, stacked along the leading dim.
        first: the number of the first layer.
        form: "scan", "unroll", a number of layers per loop step, or "auto".
        remat: activations to recompute in the backward pass; see `LanguageModel.apply`.
        gather: gathers a layer's weights just before use, and again for the backward pass.
        prefetch: whether to gather each layer's weights while the previous layer computes.
        kernels: whether a Pallas kernel stacks the layers' gradients; see `Execution`.
        beside: more entries of each layer, as separate arrays. Unlike stacked ones, they need not be sliced if layers
            are unrolled, and those of a block are not slices of one array. Not for gathered layers.
    """
    count = int(jax.tree.leaves(layers)[0].shape[0])
    size = _block_size(layers_form(form, gathers=gather is not None), count)
    numbers = first + jnp.arange(count)
    whole = gather.layer() if gather is not None else None

    def run(layer: PyTree, h: Any, number: Any) -> Any:
        return block(layer if whole is None else whole(layer), h, number)

    policy = remat_policy(remat)
    if whole is not None and (policy is None or (prefetch and count > 1)):
        if policy is not None:
            block = jax.checkpoint(block, policy=policy, prevent_cse=size > 1)
        return run_gathered(block, layers, h, numbers, whole=whole, ahead=prefetch and count > 1, unroll=size)
    if policy is not None:
        # Without a loop, XLA would merge the recomputation with the original computation.
        run = jax.checkpoint(run, policy=policy, prevent_cse=size == count)
    if size == count:
        for number, layer in enumerate(unstack(layers, count, kernels=kernels)):
            h = run(layer if beside is None else {**layer, **beside[number]}, h, numbers[number])
        return h

    def step(h: Any, x: Any) -> tuple[Any, None]:
        layer, number, others = x
        if size == 1:
            return run({**layer, **others[0]} if others else layer, h, number), None
        for place, single in enumerate(unstack(layer, size, kernels=kernels)):
            h = run({**single, **others[place]} if others else single, h, number[place])
        return h, None

    if size > 1:
        layers = jax.tree.map(lambda leaf: jnp.reshape(leaf, (count // size, size, *leaf.shape[1:])), layers)
        numbers = jnp.reshape(numbers, (count // size, size))
    # Stacked by their place in a block, each is one slice in a loop step.
    stacks = [_stacked(beside[place::size]) for place in range(size)] if beside else []
    return lax.scan(step, h, (layers, numbers, stacks))[0]


def _stacked(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def layers_form(form: Layers, *, gathers: bool) -> Layers:
    """Returns the form that "auto" stands for on the current mesh, and any other form as it is.

    Args:
        gathers: whether layers are gathered one by one.
    """
    if form != "auto":
        return form
    # Layers gathered one by one are slices already, and unrolled programs with FSDP take minutes to compile.
    return "scan" if gathers else _BEST_FORM.get(chip_family(current_mesh()), "scan")


def _block_size(form: Layers, count: int) -> int:
    if form == "scan":
        return 1
    if form == "unroll":
        return count
    if not isinstance(form, int) or form < 1 or count % form:
        fitting = [str(size) for size in range(1, count + 1) if count % size == 0]
        raise LayoutError(
            f"{count} layers cannot be run in blocks of {form!r}.",
            hint=f'use "scan", "unroll" or one of: {", ".join(fitting)}.',
        )
    return form


# --- Layers of FSDP ---


def run_gathered(
    block: Callable[[PyTree, Any, Any], Any],
    layers: PyTree,
    h: Any,
    numbers: Any,
    *,
    whole: Callable[[PyTree], PyTree],
    ahead: bool = True,
    unroll: int = 1,
) -> Any:
    """Returns `h` after all layers, `h = block(whole(layer), h, number)` for each; no gathered weights are kept.

    Args:
        layers: shards of the layers' parameters, stacked along the leading dim.
        numbers: the number of each layer.
        whole: gathers a layer's weights; its gradient is the reduce-scatter.
        ahead: whether to gather each layer's weights while the one before it computes.
        unroll: number of layers per loop step; all layers give no loop.
    """
    count = int(numbers.shape[0])
    constants: list[Any] = []
    if not ahead:
        # Stages of a pipeline are traced before they are differentiated. JAX then traces the forward pass below again,
        # when the arrays that `block` closes over are gone.
        one = jax.eval_shape(lambda layers: whole(jax.tree.map(lambda leaf: leaf[0], layers)), layers)
        block, constants = _with_constants(block, one, h, numbers[0])
    # Set when the forward pass is traced, used by the backward pass.
    shape_of_pull: list[Any] = []
    learned_by: list[bool] = []

    def neighbor(layers: PyTree, place: Any, by: int, h: Any) -> tuple[PyTree, Any]:
        """Returns the gathered weights of the layer `by` places on, and `h`, on which the gather depends."""
        # Past either end, gather the layer at that end, because all steps run the same program.
        place = tied = jnp.clip(place + by, 0, count - 1)
        if unroll > 1:
            # Without a loop, only this barrier keeps XLA from gathering all layers at once.
            h, tied = lax.optimization_barrier((h, place))

        def take(leaf: Any) -> Any:
            # The tied index varies like `h`; leaves that vary along fewer axes are not gathered and need no tie.
            index = tied if varying_axes(tied) <= varying_axes(leaf) else place
            return lax.dynamic_index_in_dim(leaf, index, keepdims=False)

        return whole(jax.tree.map(take, layers)), h

    def forward(
        layers: PyTree, h: Any, numbers: Any, constants: list[Any], learns: list[bool] | None
    ) -> tuple[Any, Any]:
        run_block = block if ahead else functools.partial(block, constants)

        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            h, weights = carry
            place, number = x
            if ahead:
                following, h = neighbor(layers, place, 1, h)
            else:
                (weights, h), following = neighbor(layers, place, 0, h), ()
            if learns is None:
                return (run_block(weights, h, number), following), None
            learned, fixed = _split(weights, learns)

            def run(learned: list[Any], h: Any) -> Any:
                return run_block(_joined(learned, fixed, weights, learns), h, number)

            out, pull = jax.vjp(run, learned, h)
            kept, shape = _without(pull, weights)
            shape_of_pull[:] = [shape]
            return (out, following), kept

        first = whole(jax.tree.map(lambda leaf: leaf[0], layers)) if ahead else ()
        (h, last), kept = lax.scan(step, (h, first), (jnp.arange(count), numbers), unroll=unroll)
        return h, (kept, last, layers)

    @jax.custom_vjp
    def all_layers(layers: PyTree, h: Any, numbers: Any, constants: list[Any]) -> Any:
        return forward(layers, h, numbers, constants, None)[0]

    def start(layers: PyTree, h: Any, numbers: Any, constants: list[Any]) -> tuple[Any, Any]:
        # Frozen weights are not perturbed: nothing is computed, sent or kept for their gradients.
        layers, learns = split_primals(layers)
        learned_by[:] = learns
        constants, differentiated = split_primals(constants)
        assert not any(differentiated), "a block gets all that it learns as weights"
        return forward(layers, h.value, numbers.value, constants, learns)

    def backward(saved: Any, dh: Any) -> tuple[PyTree, Any, None, None]:
        (kept, last, layers), learns = saved, list(learned_by)
        if isinstance(dh, SymbolicZero):
            dh = pcast_varying(jnp.zeros(dh.shape, dh.dtype), sorted(varying_axes(dh)))

        def step(carry: Any, x: Any) -> tuple[Any, PyTree]:
            dh, weights = carry
            kept, place = x
            if ahead:
                before, dh = neighbor(layers, place, -1, dh)
            else:
                (weights, dh), before = neighbor(layers, place, 0, dh), ()
            d_weights, dh = _with(kept, weights, shape_of_pull[0])(dh)
            layer = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, place, keepdims=False), layers)
            learned, fixed = _split(layer, learns)

            def gathered(learned: list[Any]) -> list[Any]:
                return _split(whole(_joined(learned, fixed, layer, learns)), learns)[0]

            (d_layer,) = jax.vjp(gathered, learned)[1](d_weights)
            return (dh, before), d_layer

        xs = (kept, jnp.arange(count))
        (dh, _), d_learned = lax.scan(step, (dh, last), xs, reverse=True, unroll=unroll)
        return _joined(d_learned, [None] * learns.count(False), layers, learns), dh, None, None

    all_layers.defvjp(start, backward, symbolic_zeros=True)
    return all_layers(layers, h, numbers, constants)


def _with_constants(function: Callable[..., Any], *examples: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Returns a function that gets the arrays that `function` closes over as its first argument, and these arrays."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*examples)
    structure: Any = jax.tree.structure(shapes)

    def run(constants: list[Any], *args: Any) -> Any:
        return structure.unflatten(jax.core.eval_jaxpr(closed.jaxpr, constants, *jax.tree.leaves(args)))

    return run, list(closed.consts)


def _split(tree: PyTree, learns: list[bool]) -> tuple[list[Any], list[Any]]:
    """Returns the leaves of a tree that are learned, and the others."""
    pairs = list(zip(jax.tree.leaves(tree), learns, strict=True))
    return [leaf for leaf, learn in pairs if learn], [leaf for leaf, learn in pairs if not learn]


def _joined(learned: list[Any], fixed: list[Any], like: PyTree, learns: list[bool]) -> PyTree:
    rest = (iter(fixed), iter(learned))
    structure: Any = jax.tree.structure(like)
    return structure.unflatten([next(rest[learn]) for learn in learns])


def _without(pull: PyTree, weights: PyTree) -> tuple[list[Any], Any]:
    """Returns the residuals of a VJP function without the weights, and the structure to rebuild it."""
    leaves, structure = jax.tree.flatten(pull)
    places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(weights))}
    sources = [places.get(id(leaf)) for leaf in leaves]
    kept = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
    return kept, (structure, sources)


def _with(kept: list[Any], weights: PyTree, shape: Any) -> Any:
    structure, sources = shape
    whole, rest = jax.tree.leaves(weights), iter(kept)
    return structure.unflatten([next(rest) if source is None else whole[source] for source in sources])
