"""Which mesh to use where the user names none, and the reason, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.errors import LayoutError, MeshError
from meshwright.layout import format_bytes
from meshwright.mesh.build import create_abstract_mesh
from meshwright.parallel.heads import heads_fit
from meshwright.train.state import state_layout

# What a state may take of a device's memory: gradients take a third to a half as much again, and activations the rest.
STATE_SHARE = 0.35


@dataclass(frozen=True)
class MeshChoice:
    """A mesh as a string, and why it was chosen."""

    mesh: str
    reason: str


def choose_mesh(
    job: Any,
    optimizer: Any,
    *,
    num_devices: int,
    batch_size: int,
    memory: int | None,
    precision: Any = "float32",
    heads: int | None = None,
    kv_heads: int | None = None,
    minibatches: int = 1,
) -> MeshChoice:
    """Returns the mesh with the least communication on which the state fits and the batch can be split.

    That is data parallelism where each device can hold the whole state, FSDP where it cannot, and tensor parallelism on
    top where there are more devices than rows.

    Args:
        memory: bytes of one device; None where nobody knows, and then the state is split.
        heads: how many attention heads a model has, which a tensor axis must divide.
        kv_heads: heads of keys and values, if fewer; an axis must divide them or be a multiple of them.
        minibatches: parts of a batch, each of which must have rows for all devices.

    Example:
        >>> import optax
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=16, num_tokens=16)
        >>> choose_mesh(job, optax.adam(1e-3), num_devices=8, batch_size=16, memory=2**30).mesh
        'dp:8'
        >>> choose_mesh(job, optax.adam(1e-3), num_devices=8, batch_size=16, memory=2**20).mesh
        'fsdp:8'
    """
    if num_devices == 1:
        return MeshChoice("dp:1", "there is one device.")
    tried = []
    rows = batch_size // minibatches if batch_size % minibatches == 0 else 0
    for mesh, how in _candidates(num_devices, rows, heads or 0, kv_heads or 0):
        try:
            layout = state_layout(job, optimizer, create_abstract_mesh(mesh), precision=precision)
        except LayoutError:
            tried.append(f"{mesh} does not fit the model's rules")
            continue
        need = layout.bytes_per_device
        if mesh.startswith("dp:") and "," not in mesh and memory is None:
            tried.append(f"{mesh} would need {format_bytes(need)} on each device, whose memory is not known")
            continue
        if memory is not None and need > STATE_SHARE * memory:
            tried.append(f"{mesh} would need {format_bytes(need)} of {format_bytes(memory)} for the state alone")
            continue
        room = "" if memory is None else f" of {format_bytes(memory)}"
        before = f" ({'; '.join(tried)})" if tried else ""
        return MeshChoice(mesh, f"{how}; the state takes {format_bytes(need)}{room} on each device{before}.")
    raise MeshError(
        f"no mesh of {num_devices} devices was found for a batch of {batch_size} rows"
        f"{f' in {minibatches} parts' if minibatches > 1 else ''}{': ' if tried else ''}{'; '.join(tried)}.",
        hint="name one with --mesh, use more devices, or more rows per batch.",
    )


def _candidates(num_devices: int, rows: int, heads: int, kv_heads: int) -> Iterator[tuple[str, str]]:
    """Yields meshes in the order of how much they communicate: data, then parameters, then activations."""
    if not rows:
        return
    if rows % num_devices == 0:
        yield f"dp:{num_devices}", "every device has its rows, and only gradients travel"
        yield f"fsdp:{num_devices}", "every device has its rows and a slice of the state"
    for tensor in range(2, num_devices + 1):
        ways = num_devices // tensor
        fit = heads_fit(heads, tensor) and heads_fit(kv_heads or heads, tensor, shared=True)
        if num_devices % tensor or rows % ways or not fit:
            continue
        if ways > 1:
            yield f"dp:{ways},tp:{tensor}", f"{rows} rows over {ways}, features over {tensor} devices"
            yield f"fsdp:{ways},tp:{tensor}", f"{rows} rows and the state over {ways}, features over {tensor}"
        else:
            yield f"tp:{tensor}", f"features over all devices, since {rows} rows cannot be split over them"
