"""Peak compute, memory and link speeds of accelerators, with a source for every figure.

Figures are per JAX device. Most chips are one device; a TPU7x chip is two. Peaks are dense, without the factor of two
for structured sparsity. Link speeds are per direction; vendors mostly publish the sum of both.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from meshwright.hardware.link_rates import CollectiveRate, link_rates

GIB = 2**30


@dataclass(frozen=True)
class Links:
    """Fast links between a device and its neighbors.

    Args:
        kind: "ici" (TPUs in a torus) or "nvlink" (GPUs of a host on a switch).
        per_direction: bytes per second of one link in one direction.
        count: links per device, two for each dim of a torus.
        torus_dims: number of torus dims; 0 if all devices are directly connected.
        domain: largest number of connected devices.
        rates: how fast each collective runs on them, by its XLA name.
    """

    kind: Literal["ici", "nvlink"]
    per_direction: float
    count: int
    torus_dims: int
    domain: int
    rates: Mapping[str, CollectiveRate] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Bytes per second that a device can send over all its links together."""
        return self.per_direction * self.count


@dataclass(frozen=True)
class DtypeRate:
    """Share of its own peak that matmuls of a dtype reach, as a multiple of bfloat16's share.

    Args:
        of_bfloat16: the multiple.
        source: the measurement; starts with "assumed" if it was made on another chip.
    """

    of_bfloat16: float
    source: str


@dataclass(frozen=True)
class Rates:
    """Shares of the peak FLOP/s that training steps reach.

    Args:
        matmul: share that plain matmuls in bfloat16 reach.
        attention: share that fused attention reaches.
        error: relative error of predicted step times: the largest among published runs.
        source: the runs or measurements.
        dtypes: other dtypes whose share of their peak differs from bfloat16's.
    """

    matmul: float
    attention: float
    error: float
    source: str
    dtypes: Mapping[str, DtypeRate] = field(default_factory=dict)

    def share(self, dtype: str = "bfloat16") -> float:
        """Returns the share of its peak that plain matmuls of a dtype reach.

        Example:
            >>> rates = chip_of("h200").rates
            >>> rates.share(), round(rates.share("float8_e4m3fn"), 2)
            (0.69, 0.66)
        """
        known = self.dtypes.get(peak_name(dtype))
        return self.matmul * (1.0 if known is None else known.of_bfloat16)

    @property
    def is_fitted(self) -> bool:
        """Whether the shares were fitted to published runs on this chip."""
        return self.source.startswith("fitted")

    @property
    def is_measured(self) -> bool:
        """Whether the shares were measured by this project on this chip."""
        return self.source.startswith("measured")


@dataclass(frozen=True)
class Chip:
    """One kind of device; `sources` maps the name of each figure to its source.

    Args:
        device_kinds: JAX's names for it (`jax.Device.device_kind`).
        peaks: FLOP/s of dense matmuls by operand dtype; float32 at JAX's default precision.
        memory_bytes: memory available to programs, slightly less than the nominal size.
        memory_bandwidth: bytes per second.
        network: bytes per second that a device can send out of its host (GPUs) or slice (TPUs); None if not published.
        devices_per_host: JAX devices in the usual machine.
        devices_per_chip: JAX devices per chip.
        rates: shares of the peak that training reaches.
        network_rates: how fast each collective runs on the network, by its XLA name.
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
    rates: Rates = field(kw_only=True)
    network_rates: Mapping[str, CollectiveRate] = field(kw_only=True)
    sources: Mapping[str, str] = field(default_factory=dict)

    def peak(self, dtype: str = "bfloat16") -> float | None:
        """Returns the peak FLOP/s of matmuls with this dtype, or None if unknown.

        Example:
            >>> chip_of("h100").peak("float8_e4m3fn") / chip_of("h100").peak()
            2.0
        """
        return self.peaks.get(peak_name(dtype))


def peak_name(dtype: str) -> str:
    """Returns the name under which the peak of a dtype is listed: all kinds of float8 have the same.

    Example:
        >>> peak_name("float8_e5m2"), peak_name("bfloat16")
        ('float8', 'bfloat16')
    """
    return "float8" if str(dtype).startswith("float8") else str(dtype)


def _read(name: str, row: Mapping[str, Any]) -> Chip:
    """Returns one JAX device of a chip in `chips.toml`."""
    document, per_chip = row["document"], row.get("per_chip", 1)
    share = "" if per_chip == 1 else f", over {per_chip} devices"
    if row["platform"] == "tpu":
        peaks = {**row["peaks"], "float32": row["peaks"]["bfloat16"]}
        dims = row["torus_dims"]
        links = Links("ici", row["link"] / per_chip, 2 * dims, dims, row["pod"] * per_chip, link_rates("ici"))
        memory, per_host = int(row["gib"] * GIB), row["per_host"]
        about = ("peak compute per chip", "at JAX's default precision a float32 matmul is one pass in bfloat16")
        sources = {
            "memory_bytes": "measured: limit reported by libtpu 0.0.42 when a program does not fit",
            "memory_bandwidth": f"{document}: HBM bandwidth per chip",
            "links": f"{document}: {row['link_source']}",
            "network": row["network_source"],
        }
        sources = {name: f"{text}{share if name != 'memory_bytes' else ''}" for name, text in sources.items()}
        sources["devices_per_host"] = f"{document}: chips per host"
    else:
        peaks, memory, per_host, host = row["peaks"], row["memory"], 8, row["host"]
        links = Links("nvlink", row["nvlink"], 1, 0, 8, link_rates(row["fabric"]))
        about = (
            "tensor cores, without sparsity",
            f"{document}: TF32, which JAX uses for float32 by default, without sparsity",
        )
        sources = {
            "memory_bytes": "reported by the driver, from XLA's published target configuration of this GPU",
            "memory_bandwidth": f"{document}: GPU memory bandwidth",
            "links": f"{document}: NVLink, half of the published sum of both directions; 8 GPUs on a switch ({host})",
            "network": f"{host}: one network card for each GPU",
            "devices_per_host": host,
            **row.get("measured", {}),
        }
    network = row.get("network")
    dtypes = {dtype: DtypeRate(**rate) for dtype, rate in row.get("dtypes", {}).items()}
    rates = Rates(**row["rates"], dtypes=dtypes)
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
        {
            **{f"peaks.{dtype}": f"{document}: {about[0]}{share}" for dtype in peaks},
            "peaks.float32": about[1],
            **sources,
            "rates": rates.source,
            **{f"rates.{dtype}": rate.source for dtype, rate in dtypes.items()},
        },
        rates=rates,
        network_rates=link_rates("dcn" if row["platform"] == "tpu" else "infiniband"),
    )


_TABLE = tomllib.loads(resources.files("meshwright.hardware").joinpath("chips.toml").read_text(encoding="utf-8"))
CHIPS: tuple[Chip, ...] = tuple(_read(name, row) for name, row in _TABLE.items())
ALIASES: Mapping[str, str] = {"a100-80": "a100", "h100-sxm": "h100", "v5litepod": "v5e", "v7x": "tpu7x"}


def multiplies_fp8(platform: str, chip: Chip | None) -> bool:
    """Returns whether XLA multiplies fp8 values as they are on a device, instead of widening them first.

    Example:
        >>> multiplies_fp8("gpu", chip_of("h200")), multiplies_fp8("gpu", chip_of("a100")), multiplies_fp8("cpu", None)
        (True, False, False)
    """
    return platform == "gpu" and (chip is None or chip.peak("float8") is not None)


def chip_of(kind: str) -> Chip | None:
    """Returns the chip with this name or `device_kind`, or None if it is not in the table.

    Similar names, such as an H100 on PCIe or a GH200, do not match, because their figures differ.

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
    """Returns the chip family of a mesh's devices: "cpu" if unknown, "v5p" for other TPUs.

    Args:
        mesh: a `jax.sharding.Mesh` or `AbstractMesh`, such as `current_mesh()`, or None.

    Example:
        >>> chip_family(None)
        'cpu'
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
    """Returns whether the devices of a mesh are Hopper GPUs, whose matmul instructions are unique to them.

    Example:
        >>> is_hopper(None)
        False
    """
    return is_hopper_kind(_device_kind(mesh))


def is_hopper_kind(device_kind: str) -> bool:
    """Returns whether a JAX device kind is that of a Hopper GPU.

    Example:
        >>> is_hopper_kind("NVIDIA H200"), is_hopper_kind("NVIDIA A100-SXM4-80GB")
        (True, False)
    """
    return re.search(r"\bG?H(20|100|200|800)\b", device_kind) is not None


def _device_kind(mesh: Any) -> str:
    device = getattr(getattr(mesh, "abstract_mesh", mesh), "abstract_device", None)
    return str(getattr(device, "device_kind", "cpu"))
