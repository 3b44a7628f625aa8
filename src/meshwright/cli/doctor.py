"""`meshwright doctor`: versions, devices and capabilities of this machine, with fixes for missing ones."""

from __future__ import annotations

import json as json_module
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from meshwright.checkpoint.manifest import current_versions
from meshwright.cli import simulate_devices
from meshwright.errors import MeshError
from meshwright.layout import format_bytes, make_layout
from meshwright.layout.leaf import text_table
from meshwright.mesh.build import create_mesh
from meshwright.rules import P

_PACKAGES = ("meshwright", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "rich", "tyro")
_CUDA = ("jax-cuda13-plugin", "jax-cuda12-plugin")


@dataclass(frozen=True)
class Ability:
    """A capability of this machine, with a fix if it is missing."""

    what: str
    ready: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Examination:
    """The findings of `examine`."""

    versions: dict[str, str]
    platform: str
    devices: list[dict[str, Any]]
    abilities: list[Ability]
    self_check: str
    healthy: bool

    def text(self) -> str:
        counts: dict[str, int] = {}
        for device in self.devices:
            label = f"{device['kind']}{', ' + device['memory'] if device['memory'] else ''}"
            counts[label] = counts.get(label, 0) + 1
        shown = ", ".join(f"{count} x {label}" for label, count in counts.items()) or "none"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        rows = [(each.what, "yes" if each.ready else "no", each.detail, each.fix) for each in self.abilities]
        table = text_table(("capability", "", "reason", "fix"), rows)
        return f"versions   {versions}\ndevices    {shown} ({self.platform})\nself-check {self.self_check}\n\n{table}"


def doctor(num_cpu_devices: int = 8, json: bool = False) -> int:
    """Check this machine: versions, devices and capabilities.

    Args:
        num_cpu_devices: number of CPU devices to simulate if there is no accelerator.
        json: print the findings as JSON.
    """
    if num_cpu_devices < 1:
        raise MeshError(f"cannot simulate {num_cpu_devices} CPU devices.", hint="use at least 1.")
    examination = examine(num_cpu_devices)
    print(json_module.dumps(asdict(examination), indent=1) if json else examination.text())
    return 0 if examination.healthy else 1


def examine(num_cpu_devices: int = 8) -> Examination:
    """Starts JAX, lists its devices and runs the self-check."""
    found = current_versions(_PACKAGES)
    simulate_devices(num_cpu_devices)
    try:
        devices = [_describe(device) for device in jax.devices()]
        check, healthy = _self_check(), True
    except Exception as error:  # any failure is a finding
        devices, check, healthy = [], f"FAILED: {type(error).__name__}: {error}", False
    name = jax.default_backend() if devices else "no backend"
    return Examination(found, name, devices, _abilities(name, len(devices)), check, healthy)


def _describe(device: Any) -> dict[str, Any]:
    stats = device.memory_stats() or {} if device.platform != "cpu" else {}
    limit = stats.get("bytes_limit")
    return {"id": device.id, "kind": device.device_kind, "memory": format_bytes(limit) if limit else ""}


def _self_check() -> str:
    """Shards a small tree over all devices and reads it back."""
    mesh = create_mesh("fsdp:-1")
    rows = 4 * mesh.size
    tree = {"weight": np.arange(rows * 64, dtype=np.float32).reshape(rows, 64), "bias": np.ones(64, np.float32)}
    layout = make_layout([("weight", P("fsdp")), ("bias", P())], tree, mesh)
    back = layout.gather(layout.shard(tree))
    if not all(np.array_equal(back[name], tree[name]) for name in tree):
        raise RuntimeError("a tree sharded over the devices came back changed")
    devices = "device" if mesh.size == 1 else "devices"
    return f"passed: a tree sharded over {mesh.size} {devices} came back unchanged"


def _abilities(backend: str, num_devices: int) -> list[Ability]:
    accelerated = backend in ("gpu", "tpu")
    return [
        Ability(
            "train on accelerators",
            accelerated,
            f"{num_devices} {backend} device(s)" if accelerated else f"only the {backend} backend is available",
            "" if accelerated else 'on a GPU or TPU machine: pip install "meshwright[gpu]" or "[tpu]"',
        ),
        Ability("train on simulated devices", backend == "cpu", f"{num_devices} {backend} device(s)"),
        Ability("plan layouts for any mesh", True, "needs no device"),
        _package("compile for TPUs", "libtpu", ("libtpu",), 'pip install "meshwright[tpu]"'),
        _package("compile for GPUs", "JAX's CUDA plugin", _CUDA, 'pip install "meshwright[gpu]"'),
        _command("launch with Slurm", "srun", "install Slurm's client tools, or run on a login node"),
        _command("launch with MPI", "mpirun", "install Open MPI (Debian: openmpi-bin)"),
        _package("launch with Ray", "ray", ("ray",), "pip install ray"),
    ]


def _command(what: str, program: str, fix: str) -> Ability:
    found = shutil.which(program) is not None
    return Ability(what, found, f"{program} is {'' if found else 'not '}on the PATH", "" if found else fix)


def _package(what: str, name: str, packages: Sequence[str], fix: str) -> Ability:
    found = [version for package, version in current_versions(packages).items() if package != "python"]
    return Ability(
        what, bool(found), f"{name} {found[0]}" if found else f"{name} is not installed", "" if found else fix
    )
