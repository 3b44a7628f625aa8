"""Chips that programs are planned for and measured on: what each can do at best, and where every figure comes from.

Figures are per device as JAX counts them. Most chips are one device; a TPU7x chip is two, and each has half of it.
Peaks are dense: vendors also print twice that, for matrices of which half is zeros. Speeds of links are those of one
direction; vendors mostly print the sum of both.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

GIB = 2**30


@dataclass(frozen=True)
class Links:
    """The fast links of a device to its neighbours.

    Args:
        kind: "ici" joins TPUs in a torus, "nvlink" the GPUs of a host through a switch.
        per_direction: bytes per second of one link, in one direction.
        count: links per device; along a dim of a torus there are two, one each way.
        torus_dims: 0 where every device reaches every other directly.
        domain: how many devices they can join at most.
    """

    kind: Literal["ici", "nvlink"]
    per_direction: float
    count: int
    torus_dims: int
    domain: int

    @property
    def total(self) -> float:
        """Bytes per second that a device can send over all of its links at once."""
        return self.per_direction * self.count


@dataclass(frozen=True)
class Chip:
    """One kind of device; `sources` says of every figure, by its name, where it comes from.

    Args:
        device_kinds: what JAX calls it (`jax.Device.device_kind`).
        peaks: FLOP/s of dense matmuls by the dtype of their operands. For float32, what JAX does by default.
        memory_bytes: what programs can have; a little less than what is printed on the chip.
        memory_bandwidth: bytes per second.
        network: bytes per second that a device can send out of its host (GPUs) or slice (TPUs); None if not published.
        devices_per_chip: how many JAX makes of one.
        devices_per_host: in the usual machine.
        matmul_flops: FLOP/s that large bfloat16 matmuls were measured to hold; None where we have not measured.
    """

    name: str
    title: str
    platform: Literal["tpu", "gpu"]
    device_kinds: tuple[str, ...]
    peaks: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    links: Links
    network: float | None
    devices_per_host: int
    devices_per_chip: int = 1
    matmul_flops: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def peak(self, dtype: str = "bfloat16") -> float | None:
        """Returns the peak for matmuls of this dtype, in FLOP/s; None where the table has none.

        Example:
            >>> chip_of("h100").peak("float8_e4m3fn") / chip_of("h100").peak()
            2.0
        """
        name = "float8" if str(dtype).startswith("float8") else str(dtype)
        return self.peaks.get(name)


def _read(name: str, row: Mapping[str, Any]) -> Chip:
    """Returns the device that JAX makes of a chip in `chips.toml`, with a source for every figure."""
    document, per_chip = row["document"], row.get("per_chip", 1)
    share = "" if per_chip == 1 else f", over {per_chip} devices"
    if row["platform"] == "tpu":
        peaks = {**row["peaks"], "float32": row["peaks"]["bfloat16"]}
        links = Links("ici", row["link"] / per_chip, 2 * row["torus_dims"], row["torus_dims"], row["pod"] * per_chip)
        memory, per_host = int(row["gib"] * GIB), row["per_host"]
        about = ("peak compute per chip", "at JAX's default precision a float32 matmul is one pass in bfloat16")
        sources = {
            "memory_bytes": "measured: the limit that libtpu 0.0.42 names when a program does not fit",
            "memory_bandwidth": f"{document}: HBM bandwidth per chip",
            "links": f"{document}: {row['link_source']}",
            "network": row["network_source"],
        }
        sources = {name: f"{text}{share if name != 'memory_bytes' else ''}" for name, text in sources.items()}
        sources["devices_per_host"] = f"{document}: chips per host"
    else:
        peaks, memory, per_host, host = row["peaks"], row["memory"], 8, row["host"]
        links = Links("nvlink", row["nvlink"], 1, 0, 8)
        about = (
            "tensor cores, without sparsity",
            f"{document}: TF32, which JAX uses for float32 by default, without sparsity",
        )
        sources = {
            "memory_bytes": "as the driver reports it: XLA's published target configuration of this GPU",
            "memory_bandwidth": f"{document}: GPU memory bandwidth",
            "links": f"{document}: NVLink, half of the printed sum of both directions; 8 GPUs on a switch ({host})",
            "network": f"{host}: one network card for each GPU",
            "devices_per_host": host,
            **row.get("measured", {}),
        }
    network = row.get("network")
    return Chip(
        name,
        row["title"],
        row["platform"],
        tuple(row["device_kinds"]),
        {dtype: peak / per_chip for dtype, peak in peaks.items()},
        memory,
        row["bandwidth"] / per_chip,
        links,
        None if network is None else network / per_chip,
        per_host * per_chip,
        per_chip,
        row.get("matmul_flops"),
        {
            **{f"peaks.{dtype}": f"{document}: {about[0]}{share}" for dtype in peaks},
            "peaks.float32": about[1],
            **sources,
        },
    )


_TABLE = tomllib.loads(resources.files("meshwright.hardware").joinpath("chips.toml").read_text(encoding="utf-8"))
CHIPS: tuple[Chip, ...] = tuple(_read(name, row) for name, row in _TABLE.items())
ALIASES: Mapping[str, str] = {"a100-80": "a100", "h100-sxm": "h100", "v5litepod": "v5e", "v7x": "tpu7x"}


def chip_of(kind: str) -> Chip | None:
    """Returns the chip with this name in the table, or of this `device_kind`; None where it is not in it.

    A name that only resembles one (an H100 on PCIe, a GH200) is not in it: it has other peaks.

    Example:
        >>> chip_of("TPU v5 lite").name, chip_of("NVIDIA H200").peak() / 1e12
        ('v5e', 989.4)
        >>> chip_of("cpu") is None
        True
    """
    wanted = re.sub(r"\s+", " ", str(kind).strip()).casefold()
    wanted = ALIASES.get(wanted, wanted)
    for chip in CHIPS:
        if wanted == chip.name or wanted in (known.casefold() for known in chip.device_kinds):
            return chip
    return None


def chip_family(mesh: Any) -> Literal["v5e", "v5p", "v6e", "gpu", "cpu"]:
    """Returns the name under which tables of this package list the devices of a mesh; "cpu" if they are unknown.

    TPUs without a row of their own are listed as v5p.

    Args:
        mesh: a `jax.sharding.Mesh` or `AbstractMesh`, for example `current_mesh()`; or None.
    """
    kind = _device_kind(mesh).lower()
    if "v6" in kind:
        return "v6e"
    if "v5 lite" in kind or "v5e" in kind:
        return "v5e"
    if "tpu" in kind:
        return "v5p"
    return "gpu" if "nvidia" in kind else "cpu"


def is_hopper(mesh: Any) -> bool:
    """Returns whether the devices of a mesh are Hopper GPUs, whose matmul instructions no other generation has."""
    return re.search(r"\bG?H(20|100|200|800)\b", _device_kind(mesh)) is not None


def _device_kind(mesh: Any) -> str:
    device = getattr(getattr(mesh, "abstract_mesh", mesh), "abstract_device", None)
    return str(getattr(device, "device_kind", "cpu"))
