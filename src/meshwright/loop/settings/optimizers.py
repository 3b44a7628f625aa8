"""Optimizers and learning rate schedules: built in, of a job, or named as `module:attribute`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from meshwright.errors import ConfigError, JobError, MeshwrightError
from meshwright.layout import Layout
from meshwright.loop.settings.options import OptimizerOptions
from meshwright.train.jobs.job_loading import load_attribute
from meshwright.train.optimizer.muon import muon, orthogonalized_names
from meshwright.train.state import only_trainable, trainable_leaves
from meshwright.tree import named_leaves, named_tree_map
from meshwright.types import PyTree

Schedule = Callable[[Any], Any]


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer of a run.

    Args:
        optimizer: the optax optimizer.
        schedule: learning rate by step, or None if the optimizer does not tell it.
        is_builtin: whether the schedule is one that the options describe.
        text: description of an optimizer or schedule that is not built in, or an empty string.
    """

    optimizer: Any
    schedule: Schedule | None
    is_builtin: bool
    text: str = ""

    def rates(self, num_steps: int) -> np.ndarray | _InBlocks | None:
        """Returns the learning rate of every step, or None if it is not known."""
        if self.schedule is None:
            return None
        return _InBlocks(self.schedule) if num_steps > _MOST_AT_ONCE else _rates_of(self.schedule, 0, num_steps)


_MOST_AT_ONCE = 1 << 20
_SHOWN = 8  # names in the line about muon


def _rates_of(schedule: Callable[[Any], Any], start: int, stop: int) -> np.ndarray:
    try:
        # Compute all at once, since each single call would dispatch a small program.
        return np.asarray(jax.vmap(schedule)(jax.numpy.arange(start, stop)))
    except TypeError:  # a schedule for the log only may be plain Python, which JAX cannot trace
        return np.asarray([float(schedule(step)) for step in range(start, stop)])


class _InBlocks:
    """The learning rates of a very long run, of which only one block is in memory."""

    def __init__(self, schedule: Callable[[Any], Any]) -> None:
        self._schedule, self._start, self._block = schedule, 0, np.empty(0)

    def __getitem__(self, step: int) -> Any:
        if not 0 <= step - self._start < len(self._block):
            self._start = step - step % 4096
            self._block = _rates_of(self._schedule, self._start, self._start + 4096)
        return self._block[step - self._start]


def choose_optimizer(options: OptimizerOptions, num_steps: int, job: Any = None) -> OptimizerChoice:
    """Returns the optimizer and schedule of a run: those of the options, else of the job, else the built-in defaults.

    Raises if an option is set that the chosen optimizer or schedule does not use.

    Example:
        >>> from types import SimpleNamespace
        >>> job = SimpleNamespace(optimizer=lambda num_steps: optax.sgd(1 / num_steps), schedule=lambda step: 0.5)
        >>> choice = choose_optimizer(OptimizerOptions(), 100, job)
        >>> choice.text, choice.rates(2).tolist()
        ("optimizer: the job's; learning rate: the job's schedule, logged only", [0.5, 0.5])
    """
    own, owner = _own("optimizer", options.optimizer, job)
    rate, rater = _own("schedule", options.schedule, job)
    if rate is not None:
        _check_schedule(rate, rater)
    if own is None:
        if rate is None:
            schedule = make_learning_rate(options, num_steps)
            return OptimizerChoice(make_optimizer(options, num_steps, job=job), schedule, is_builtin=True)
        _require_default(options, ("learning_rate", "warmup", "final_learning_rate"), f"{rater} sets the learning rate")
        built = make_optimizer(options, num_steps, schedule=rate, job=job)
        return OptimizerChoice(built, rate, is_builtin=False, text=f"learning rate: {rater}")
    names = ("learning_rate", "warmup", "final_learning_rate", "weight_decay", "beta1", "beta2")
    _require_default(options, names, f"{owner} replaces the built-in ones")
    if rate is None:
        _require_default(options, ("schedule",), f"{owner} has its own learning rate")
    told = "unknown, so not logged" if rate is None else f"{rater}, logged only"
    text = f"optimizer: {owner.removesuffix(' optimizer')}; learning rate: {told}"
    return OptimizerChoice(_built(own, owner, num_steps), rate, is_builtin=False, text=text)


def _own(field: str, option: str | None, job: Any) -> tuple[Any, str]:
    """Returns the object that `module:attribute` or the job gives, and its name in messages; None if neither does."""
    if option is not None:
        return (load_attribute(option), f"--{field} {option}") if ":" in option else (None, "")
    return getattr(job, field, None), f"the job's {field}"


def _built(own: Any, owner: str, num_steps: int) -> Any:
    """Returns an optax optimizer, made for the number of steps if it is a function."""
    found = own
    if callable(own) and not hasattr(own, "update"):
        if _takes_a_rate(own):
            raise JobError(
                f"{owner} takes a learning rate, but would be called with the number of steps, {num_steps}.",
                hint="give a function such as `lambda num_steps: optax.lamb(1e-3)`, or an optimizer that it returned.",
            )
        try:
            found = own(num_steps)
        except MeshwrightError:
            raise
        except Exception as error:
            raise JobError(
                f"{owner} failed for {num_steps} steps: {type(error).__name__}: {error}",
                hint="it is called with the number of steps and returns an optax optimizer.",
            ) from error
    if not (hasattr(found, "init") and hasattr(found, "update")):
        raise JobError(
            f"{owner} is a {type(found).__name__}, not an optax optimizer.",
            hint="give an optax optimizer, e.g. optax.adam(1e-3), or a function from the number of steps to one.",
        )
    return found


def _takes_a_rate(factory: Callable[..., Any]) -> bool:
    """Returns whether a function is a factory such as `optax.adam`, whose first argument is a learning rate."""
    try:
        first = next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):  # some callables have no signature
        return False
    return first.endswith("learning_rate")


def _check_schedule(schedule: Any, who: str) -> None:
    if not callable(schedule):
        raise JobError(f"{who} is a {type(schedule).__name__}.", hint="give a function from the step to a number.")
    first = schedule(0)
    if np.ndim(first) or not np.isfinite(float(first)):
        raise JobError(f"{who} returned {first} for step 0.", hint="return one finite number.")


def _require_default(options: OptimizerOptions, names: tuple[str, ...], why: str) -> None:
    """Raises if an option was set that would have no effect."""
    for name in names:
        value = getattr(options, name)
        if value != getattr(OptimizerOptions(), name):
            raise ConfigError(f"{name} is {value}, which would have no effect: {why}.", hint=f"leave {name} out.")


def make_learning_rate(options: OptimizerOptions, num_steps: int) -> Schedule:
    """Returns the learning rate schedule: a function of the number of steps taken so far.

    Example:
        >>> rate = make_learning_rate(OptimizerOptions(learning_rate=1.0, warmup=10), 100)
        >>> [round(float(rate(n)), 2) for n in (0, 5, 10, 100)]
        [0.09, 0.55, 1.0, 0.1]
    """
    peak, warmup = options.learning_rate, min(options.warmup, num_steps)
    last, rest = peak * options.final_learning_rate, max(1, num_steps - warmup)
    after: Schedule = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, options.final_learning_rate),
        "linear": lambda: optax.linear_schedule(peak, last, rest),
        "constant": lambda: optax.constant_schedule(peak),
    }[options.schedule or "cosine"]()
    if not warmup:
        return after
    # Start above 0, so that the first step is not wasted.
    rising = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    joined: Schedule = optax.join_schedules([rising, after], [warmup])
    return joined


def make_optimizer(
    options: OptimizerOptions, num_steps: int, *, schedule: Schedule | None = None, job: Any = None
) -> Any:
    """Returns a built-in optimizer with its schedule; the train step clips gradients.

    Args:
        schedule: learning rate by step, instead of the one that the options describe.
        job: the job, whose `is_matrix` says what muon orthogonalizes.

    Example:
        >>> import jax.numpy as jnp
        >>> optimizer = make_optimizer(OptimizerOptions(optimizer="sgd", warmup=0, beta1=0.0, weight_decay=0.0), 100)
        >>> params = {"w": jnp.ones(2)}
        >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
        >>> [round(float(update), 4) for update in updates["w"]]
        [-0.003, -0.003]
    """
    rate = make_learning_rate(options, num_steps) if schedule is None else schedule
    decay = options.weight_decay
    if options.optimizer in (None, "adamw"):
        return optax.adamw(rate, b1=options.beta1, b2=options.beta2, weight_decay=decay, mask=decayed)
    if options.optimizer == "muon":
        return muon(
            rate,
            weight_decay=decay,
            weight_decay_mask=decayed,
            adam_beta1=options.beta1,
            adam_beta2=options.beta2,
            is_matrix=getattr(job, "is_matrix", None),
        )
    if options.optimizer == "lion":
        return optax.lion(rate, b1=options.beta1, b2=options.beta2, weight_decay=decay, mask=decayed)
    if options.optimizer == "adafactor":
        return optax.adafactor(rate, weight_decay_rate=decay or None, weight_decay_mask=decayed)
    return optax.chain(optax.add_decayed_weights(decay, mask=decayed), optax.sgd(rate, momentum=options.beta1 or None))


def muon_line(layout: Layout, job: Any) -> str | None:
    """Returns one line about the parameters that Muon orthogonalizes, and those that take AdamW steps; None without it.

    Example:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> init = lambda key: {"up": jnp.zeros((8, 8)), "head": jnp.zeros((8, 8)), "norm": jnp.zeros(8)}
        >>> job = mw.Job(init=init, rules=[(".*", mw.P())])
        >>> muon_line(mw.state_layout(job, muon(1e-3), mw.create_abstract_mesh("dp:8")), job)
        'muon: orthogonalizes 1 of 3 parameters (64 of 136 values); head, norm take AdamW steps'
    """
    params, opt_state = layout.abstract.params, layout.abstract.opt_state
    chosen = set(orthogonalized_names(opt_state))
    if not chosen:
        return None
    learned = named_leaves(only_trainable(params, trainable_leaves(job, params)))
    sizes = {leaf.name: math.prod(leaf.value.shape) for leaf in learned}
    rest = [name for name in sizes if name not in chosen]
    values = f"{sum(sizes[name] for name in chosen):,} of {sum(sizes.values()):,} values"
    line = f"muon: orthogonalizes {len(chosen)} of {len(sizes)} parameters ({values})"
    more = f" and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""
    takes = "takes" if len(rest) == 1 else "take"
    return f"{line}; {', '.join(rest[:_SHOWN])}{more} {takes} AdamW steps" if rest else line


def decayed(params: PyTree) -> PyTree:
    """Returns a mask of the parameters with weight decay: matrices, but not norms and biases stacked over layers.

    Example:
        >>> import jax.numpy as jnp
        >>> decayed({"mlp": {"up": jnp.ones((2, 4, 8))}, "mlp_norm": {"scale": jnp.ones((2, 4))}})
        {'mlp': {'up': True}, 'mlp_norm': {'scale': False}}
    """

    def decays(name: str, leaf: Any) -> bool:
        return leaf.ndim > 1 and not any(word in name for word in ("norm", "bias", "scale"))

    return named_tree_map(decays, params, sep="/")
