"""Diagnosis of a case that differs, with a few extra computations to tell likely causes apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.mesh.build import create_mesh
from meshwright.train.views import GATHER_AXES, View
from meshwright.verify.compare import Comparison, largest, ratio_of
from meshwright.verify.diagnose import causes, program_causes
from meshwright.verify.diagnose.causes import Cause
from meshwright.verify.diagnose.program import TracedProgram
from meshwright.verify.measure import Measured, Placed
from meshwright.verify.reference import LEAST, Reference, all_worst_copies, largest_of_all, rounding, worst_copies

LOSS_VARIES = "the loss varies along"
"""Part of the error of a loss that still varies along an axis which it should have summed over."""


@dataclass(frozen=True)
class Finding:
    """A case that differs: its measurements and comparisons."""

    reference: Reference
    placed: Placed
    measured: Measured
    comparisons: Mapping[str, Comparison]
    view: View
    num_minibatches: int
    tolerance: float

    def causes(self) -> list[Cause]:
        """Returns the likely causes, most specific first."""
        loss, grads, params = (self.comparisons[what] for what in ("loss", "gradients", "parameters"))
        if loss.ok and grads.ok:
            found = [] if params.ok else [self._optimizer()]
            for what, cause in (("model state", causes.model_state), ("metrics", causes.metric)):
                compared = self.comparisons.get(what)
                if compared is not None and compared.first is not None:
                    found.append(cause(compared.first.path, self._parts))
            return found
        specific = next(self._specific(loss, grads), None)
        found = [specific] if specific is not None else []
        return [*found, causes.backward()] if loss.ok else found

    def _specific(self, loss: Comparison, grads: Comparison) -> Iterator[Cause]:
        """Yields the causes that apply, most specific first; evaluated lazily, because later ones cost more."""
        reference, measured = self.reference, self.measured
        if not loss.ok:
            what, name, expected, array = "the loss", None, reference.loss, measured.loss
        else:
            name = grads.different[0]
            what, expected, array = f"the gradient of `{name}`", reference.grads[name], measured.grads[name]
        got = worst_copies(array, expected)
        errors = reference.rounding_errors["loss" if name is None else "grads"]
        allowed = self.tolerance * max(largest(expected), LEAST * largest_of_all(reference.grads))
        allowed = max(allowed, errors["loss" if name is None else name])
        tried = (
            lambda: causes.not_finite(expected, got, what=what),
            lambda: causes.copies(what, causes.copies_along(array, allowed=allowed)),
            self._random,
            lambda: self._reduction(loss, grads),
            lambda: program_causes.sum_of_equals(self._program.sums, self._sizes),
            lambda: program_causes.sum_of_rows(self._program.sums, self._row_axes, self._rows_at_once),
            lambda: program_causes.fixed_key(self._program.draws),
            lambda: self._mean_of_means(float(got)) if not loss.ok else None,
            lambda: self._one_block_of_rows(name, got, what),
            lambda: causes.one_part(
                expected, got, array.sharding.devices_indices_map(array.shape), allowed=allowed, what=what
            ),
            self._axes_alone,
        )
        yield from (cause for attempt in tried if (cause := attempt()) is not None)

    def _same(self, placed: Placed, rng: Any, expected: tuple[Any, dict[str, Any]]) -> bool:
        """Whether loss and gradients on a mesh are as expected; False if they cannot be computed."""
        function = placed.gradients(self.view, self.num_minibatches)
        try:
            loss, grads = function(self.reference.inputs.batch, rng)
        except Exception:
            return False
        compared = self.reference.compare_gradients(loss, grads, self.tolerance, expected=expected)
        return all(comparison.ok for comparison in compared)

    @cached_property
    def _program(self) -> TracedProgram:
        """The sums and draws of the local view; empty in the global view, where XLA communicates."""
        try:
            return self.placed.program(self.num_minibatches) if self.view == "local" else TracedProgram()
        except Exception:  # a hint is not worth another error
            return TracedProgram()

    @property
    def _sizes(self) -> dict[str, int]:
        return {axis: int(size) for axis, size in self.placed.mesh.shape.items()}

    @property
    def _row_axes(self) -> list[str]:
        return [axis for axis in self.placed.row_axes if self._sizes[axis] > 1]

    @property
    def _rows_at_once(self) -> int:
        return self.reference.inputs.num_rows // (self.placed.ways * self.num_minibatches)

    def _random(self) -> Cause | None:
        expected = self.reference.without_rng
        if expected is None or not self._same(self.placed, None, expected):
            return None
        drawn = self._program.draws
        equal = next((draw for draw in drawn if self._row_axes and not set(self._row_axes) & set(draw.varies)), None)
        if equal is not None:
            return causes.random_numbers(same=True, line=equal.line)
        return causes.random_numbers(same=self._is_first_rows_key(), line=drawn[0].line if drawn else "")

    def _is_first_rows_key(self) -> bool:
        """Whether every block of rows gets the random numbers of the first, on the mesh."""
        if self.placed.ways * self.num_minibatches == 1:
            return False
        try:
            losses, _ = self.reference.by_block(self.view, self.placed.ways, self.num_minibatches, same_key=True)
        except Exception:  # the loss may need more rows
            return False
        measured = float(worst_copies(self.measured.loss, self.reference.loss))
        return abs(float(np.mean(losses)) - measured) <= 10 * self.tolerance * max(abs(measured), LEAST)

    def _reduction(self, loss: Comparison, grads: Comparison) -> Cause | None:
        if not loss.ok:
            assert loss.first is not None
            return self._with_line(causes.reduction(loss.first.ratio, self._sizes, what="the loss"))
        for name in grads.different:
            expected = self.reference.grads[name]
            ratio = ratio_of(expected, worst_copies(self.measured.grads[name], expected))
            cause = causes.reduction(ratio, self._sizes, what=f"the gradient of `{name}`")
            if cause is not None:
                return self._with_line(cause)
        return None

    def _with_line(self, cause: Cause | None) -> Cause | None:
        """Adds the line of a sum that counts values twice, if there is one."""
        found = program_causes.sum_of_equals(self._program.sums, self._sizes) if cause is not None else None
        if cause is None or found is None:
            return cause
        return dataclasses.replace(cause, text=f"{cause.text} {found.text[0].upper()}{found.text[1:]}")

    def _by_block(self) -> tuple[list[Any], list[dict[str, Any]]]:
        if self.placed.ways * self.num_minibatches == 1:
            return [], []
        try:
            return self.reference.by_block(self.view, self.placed.ways, self.num_minibatches)
        except Exception:  # the loss may need more rows
            return [], []

    def _mean_of_means(self, loss: float) -> Cause | None:
        losses = [float(x) for x in self._by_block()[0]]
        one = float(self.reference.loss)
        return causes.mean_of_means(loss, one, losses, tolerance=self.tolerance, blocks=self._parts)

    @property
    def _parts(self) -> str:
        """The parts of a batch that the loss sees one at a time, in words."""
        parts = [f"{self.placed.ways} devices"] * (self.placed.ways > 1 and self.view == "local")
        parts += [f"{self.num_minibatches} minibatches"] * (self.num_minibatches > 1)
        return " and ".join(parts)

    def _one_block_of_rows(self, name: str | None, got: Any, what: str) -> Cause | None:
        losses, grads = self._by_block() if self.num_minibatches == 1 else ([], [])
        blocks = losses if name is None else [grad[name] for grad in grads]
        return causes.one_block_of_rows(got, blocks, self._row_axes, what=what, tolerance=self.tolerance)

    def _axes_alone(self) -> Cause | None:
        """Repeats the computation on each axis of the mesh alone, to find the one that differs."""
        mesh = self.placed.mesh
        axes = [axis for axis, size in mesh.shape.items() if size > 1]
        if len(axes) == 1:
            return causes.axes_alone({axes[0]: False})
        agrees = {}
        for axis in axes:
            text = ",".join(f"{name}:{size if name == axis else 1}" for name, size in mesh.shape.items())
            part = create_mesh(text, devices=list(mesh.devices.flat[: mesh.shape[axis]]))
            try:
                placed = self.reference.inputs.place(part).starting_from(self.reference.params)
            except Exception:  # the job does not fit this mesh, so nothing is known about the axis
                continue
            expected = (self.reference.loss, self.reference.grads)
            agrees[axis] = self._same(placed, self.reference.rng, expected)
        return causes.axes_alone(agrees)

    def _optimizer(self) -> Cause:
        reference, measured = self.reference, self.measured
        wanted = reference.changes(reference.first)
        got = reference.changes(all_worst_copies(measured.first, reference.first))
        allowed = {
            name: max(
                self.tolerance * largest(change),
                rounding(reference.first[name]),
                reference.rounding_errors["first"][name],
            )
            for name, change in wanted.items()
        }
        equal = all(np.abs(wanted[name] - got[name]).max(initial=0.0) <= allowed[name] for name in wanted)
        blocks = {name: leaf.sharding.devices_indices_map(leaf.shape) for name, leaf in measured.first.items()}
        return causes.optimizer(wanted, got, blocks, after_one_step=equal, allowed=allowed)


def cause_of_error(error: Exception, placed: Placed, view: View, num_minibatches: int) -> Cause | None:
    """Returns the likely cause of an error that a step raised on a mesh."""
    if view != "local":
        return None
    # Along axes that neither split rows nor gather parameters, only the loss can communicate.
    used = (*placed.row_axes, *GATHER_AXES)
    others = [axis for axis, size in placed.mesh.shape.items() if size > 1 and axis not in used]
    if not isinstance(error, MeshwrightError):
        return causes.sees_slices(others)
    if not others or LOSS_VARIES not in str(error):  # the message and its hint say it
        return None
    try:
        sums = placed.program(num_minibatches, complete=True).sums
    except Exception:  # the loss has other problems
        return causes.sees_slices(others)
    varying = [axis for axis in others if f"{axis!r}" in str(error).partition(", but")[0]]
    rows = placed.inputs.num_rows // (placed.ways * num_minibatches)
    return program_causes.sum_of_rows(sums, placed.row_axes, rows) or program_causes.missing_sum(
        varying or others, sums
    )
