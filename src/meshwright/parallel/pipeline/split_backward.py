"""Splits the backward pass of a stage in two: input gradients now, weight gradients later.

`jax.vjp` computes both in one function. Calling it twice, once for each, would compute the chain of input gradients
twice. So this module reads the jaxpr of the function: an operation that the input gradients need belongs to the first
part, any other to the second. The values that pass from the first part to the second, such as the inputs of the matmuls
and the gradients of their outputs, are what a schedule keeps in memory between the two.

A scan over layers computes both kinds in each step. It becomes two scans, and the second one gets the values of each
step stacked. Recomputation (`jax.checkpoint`) inside the backward pass belongs to the first part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from meshwright.mesh.axes import pcast_varying

Env = dict[Hashable, Any]


@dataclass(frozen=True)
class Op:
    """One operation: `run(*values of ins)` returns the values of outs."""

    run: Callable[..., Sequence[Any]]
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]


@dataclass(frozen=True)
class SplitJaxpr:
    """The operations of a jaxpr in two parts. The first part needs nothing from the second."""

    first: tuple[Op, ...]
    second: tuple[Op, ...]


def split_jaxpr(jaxpr: Any, wanted: Sequence[bool]) -> SplitJaxpr:
    """Splits a jaxpr into the operations that its wanted outputs need, and the others that its outputs need."""
    needed = {var for var, want in zip(jaxpr.outvars, wanted, strict=True) if want and _is_var(var)}
    first: list[Op] = []
    rest: list[Op] = []
    for eqn in reversed(jaxpr.eqns):
        outs = [var in needed for var in eqn.outvars]
        if not any(outs):
            rest.append(_plain(eqn))
            continue
        parts = None if all(outs) else _split_eqn(eqn, outs)
        now, later = (_plain(eqn), None) if parts is None else parts
        first.append(now)
        needed.update(filter(_is_var, now.ins))
        if later is not None:
            rest.append(later)
    # Without the operations whose results nobody uses.
    used, second = {var for var in jaxpr.outvars if _is_var(var)}, []
    for op in rest:
        if used & set(op.outs):
            second.append(op)
            used.update(filter(_is_var, op.ins))
    return SplitJaxpr(tuple(reversed(first)), tuple(reversed(second)))


def run_ops(ops: Iterable[Op], env: Env) -> None:
    """Runs operations, with their inputs from an environment and their outputs into it."""
    for op in ops:
        env.update(zip(op.outs, op.run(*(read(env, var) for var in op.ins)), strict=True))


def read(env: Env, var: Any) -> Any:
    """Returns the value of a variable or literal."""
    return var.val if isinstance(var, Literal) else env[var]


def values_read(ops: Iterable[Op]) -> dict[Any, None]:
    """Returns the variables that operations read, in order."""
    return dict.fromkeys(var for op in ops for var in op.ins if _is_var(var))


def values_made(ops: Iterable[Op]) -> set[Any]:
    """Returns the variables that operations compute."""
    return {var for op in ops for var in op.outs}


def _is_var(var: Any) -> bool:
    return not isinstance(var, Literal)


def _plain(eqn: Any) -> Op:
    return Op(lambda *values: _bind(eqn, values), tuple(eqn.invars), tuple(eqn.outvars))


def _bind(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    if eqn.primitive.name == "pvary":
        # Values of another tick vary along the pipeline's axis, also those that did not when they were traced, such as
        # results of GPU kernels.
        return [pcast_varying(value, eqn.params["axes"]) for value in values]
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # differs between versions of JAX
    with _scope(eqn), eqn.ctx.manager:
        found = eqn.primitive.bind(*functions, *values, **params)
    return found if eqn.primitive.multiple_results else [found]


def _scope(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    name = str(eqn.source_info.name_stack)
    return jax.named_scope(name) if name else contextlib.nullcontext()


# --- Operations that contain others ---

_INLINED = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint")


def _split_eqn(eqn: Any, outs: Sequence[bool]) -> tuple[Op, Op | None] | None:
    """Returns an operation in two parts, or None if it must run as a whole."""
    name = eqn.primitive.name
    if name == "scan":
        return _split_scan(eqn, list(outs))
    return _split_call(eqn, outs) if name in _INLINED else None


def _split_call(eqn: Any, outs: Sequence[bool]) -> tuple[Op, Op | None] | None:
    jaxpr, known = _opened(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
    parts = split_jaxpr(jaxpr, outs)
    made = values_made(parts.first)
    later = values_made(parts.second)
    pairs = list(zip(eqn.outvars, jaxpr.outvars, strict=True))
    now_outs, later_outs = [p for p in pairs if p[1] not in later], [p for p in pairs if p[1] in later]
    carried = [var for var in values_read(parts.second) if var in made]
    outer = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    from_outside = [var for var in values_read(parts.second) if var in outer]
    barrier = bool(eqn.params.get("prevent_cse", False))

    def now(*values: Any) -> list[Any]:
        given = [_behind_barrier(value) for value in values] if barrier else values
        env: Env = {**known, **dict(zip(jaxpr.invars, given, strict=True))}
        with _scope(eqn):
            run_ops(parts.first, env)
        return [*(read(env, inside) for _, inside in now_outs), *(env[var] for var in carried)]

    def afterwards(*values: Any) -> list[Any]:
        env: Env = {**known, **dict(zip([*carried, *from_outside], values, strict=True))}
        with _scope(eqn):
            run_ops(parts.second, env)
        return [env[inside] for _, inside in later_outs]

    fresh = [object() for _ in carried]
    op = Op(now, tuple(eqn.invars), (*(out for out, _ in now_outs), *fresh))
    if not later_outs:
        return op, None
    second = Op(afterwards, (*fresh, *(outer[var] for var in from_outside)), tuple(out for out, _ in later_outs))
    return op, second


def _opened(jaxpr: Any) -> tuple[Any, Env]:
    """Returns a jaxpr, closed or not, and the values of its constants."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, dict(zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=True))


def _behind_barrier(value: Any) -> Any:
    """Keeps XLA from merging a recomputation with the original computation, as `jax.checkpoint` does.

    One barrier per value, because the results of one barrier vary along the same axes.
    """
    is_key = jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)  # a barrier does not take random keys
    return value if is_key or not jnp.ndim(value) else lax.optimization_barrier(value)


def _split_scan(eqn: Any, outs: list[bool]) -> tuple[Op, Op | None] | None:
    params = eqn.params
    body, known = _opened(params["jaxpr"])
    if "num_consts" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:  # since jax 0.11
        num_consts, num_carry, _ = (len(part) for part in params["ft_in"].unpack())
    loop = {name: params[name] for name in ("length", "reverse", "unroll")}
    const_in, carry_in, x_in = _thirds(body.invars, num_consts, num_carry)
    outer_const, outer_carry, outer_x = _thirds(eqn.invars, num_consts, num_carry)
    while True:
        parts = split_jaxpr(body, outs)
        later = values_made(parts.second)
        read_now = {*values_read(parts.first), *_pick(body.outvars, outs)}
        # A result that the first part has anyway is not left to the second, and a carry that the first part reads must
        # be carried by it.
        wanted = [
            out or var not in later or (place < num_carry and carry_in[place] in read_now)
            for place, (out, var) in enumerate(zip(outs, body.outvars, strict=True))
        ]
        if wanted == outs:
            break
        outs = wanted
    if all(outs):
        return None
    now_carry, now_y = outs[:num_carry], outs[num_carry:]
    carry_out, y_out = body.outvars[:num_carry], body.outvars[num_carry:]
    used_now, used_later = {*values_read(parts.first), *_pick(body.outvars, outs)}, values_read(parts.second)
    sources = values_made(parts.first) | set(_pick(carry_in, now_carry))
    stacked = [var for var in used_later if var in sources]
    first_const, second_const = ([var in used for var in const_in] for used in (used_now, used_later))
    first_x, second_x = ([var in used for var in x_in] for used in (used_now, used_later))

    def first_step(given: Env, carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        env: Env = {**given, **dict(zip(_pick(carry_in, now_carry), carry, strict=True))}
        env.update(zip(_pick(x_in, first_x), xs, strict=True))
        run_ops(parts.first, env)
        made = [read(env, var) for var in _pick(carry_out, now_carry)]
        return made, [*(read(env, var) for var in _pick(y_out, now_y)), *(env[var] for var in stacked)]

    def now(*values: Any) -> list[Any]:
        given_consts, start, xs = _thirds(values, sum(first_const), sum(now_carry))
        given = {**known, **dict(zip(_pick(const_in, first_const), given_consts, strict=True))}
        with _scope(eqn):
            carry, ys = lax.scan(lambda carry, x: first_step(given, carry, x), start, xs, **loop)
        return [*carry, *ys]

    later_carry, later_y = [not out for out in now_carry], [not out for out in now_y]

    def second_step(given: Env, carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        env: Env = {**given, **dict(zip(_pick(carry_in, later_carry), carry, strict=True))}
        env.update(zip([*_pick(x_in, second_x), *stacked], xs, strict=True))
        run_ops(parts.second, env)
        made = [read(env, var) for var in _pick(carry_out, later_carry)]
        return made, [read(env, var) for var in _pick(y_out, later_y)]

    def afterwards(*values: Any) -> list[Any]:
        given_consts, start, xs = _thirds(values, sum(second_const), sum(later_carry))
        given = {**known, **dict(zip(_pick(const_in, second_const), given_consts, strict=True))}
        with _scope(eqn):
            carry, ys = lax.scan(lambda carry, x: second_step(given, carry, x), start, xs, **loop)
        return [*carry, *ys]

    fresh = [object() for _ in stacked]
    carries, ys = eqn.outvars[:num_carry], eqn.outvars[num_carry:]
    first = Op(
        now,
        (*_pick(outer_const, first_const), *_pick(outer_carry, now_carry), *_pick(outer_x, first_x)),
        (*_pick(carries, now_carry), *_pick(ys, now_y), *fresh),
    )
    second = Op(
        afterwards,
        (*_pick(outer_const, second_const), *_pick(outer_carry, later_carry), *_pick(outer_x, second_x), *fresh),
        (*_pick(carries, later_carry), *_pick(ys, later_y)),
    )
    return first, second


def _thirds(values: Sequence[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    values = list(values)
    return values[:first], values[first : first + second], values[first + second :]


def _pick(values: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    return [value for value, want in zip(values, wanted, strict=True) if want]
