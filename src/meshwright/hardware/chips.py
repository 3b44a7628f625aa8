"""Chips that programs are planned for and measured on: what each can do at best, and where every figure comes from.

Figures are per device as JAX counts them. Most chips are one device; a TPU7x chip is two, and each has half of it.
Peaks are dense: vendors also print twice that, for matrices of which half is zeros. Speeds of links are those of one
direction; vendors mostly print the sum of both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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


_TPU_FLOAT32 = "at JAX's default precision a float32 matmul is one pass in bfloat16"
_TPU_MEMORY = "measured: the limit that libtpu 0.0.42 names when a program does not fit"
_TF32 = "TF32, which JAX uses for float32 by default"
_XLA_MEMORY = "as the driver reports it: XLA's published target configuration of this GPU"


def _tpu(
    name: str,
    title: str,
    kinds: tuple[str, ...],
    *,
    bfloat16: float,
    more: dict[str, float] | None = None,
    gib: float,
    bandwidth: float,
    link: float,
    torus_dims: int,
    pod: int,
    network: float | None,
    per_host: int,
    per_chip: int = 1,
    document: str,
    link_source: str,
    network_source: str,
) -> Chip:
    """Returns a TPU from the figures of its document, which are per chip."""
    half = "" if per_chip == 1 else f", over {per_chip} devices"
    peaks = {"bfloat16": bfloat16, **(more or {}), "float32": bfloat16}
    links = Links("ici", link / per_chip, 2 * torus_dims, torus_dims, pod * per_chip)
    return Chip(
        name,
        title,
        "tpu",
        kinds,
        {dtype: peak / per_chip for dtype, peak in peaks.items()},
        int(gib * GIB),
        bandwidth / per_chip,
        links,
        None if network is None else network / per_chip,
        per_host * per_chip,
        per_chip,
        sources={
            **{f"peaks.{dtype}": f"{document}: peak compute per chip{half}" for dtype in peaks},
            "peaks.float32": _TPU_FLOAT32,
            "memory_bytes": _TPU_MEMORY,
            "memory_bandwidth": f"{document}: HBM bandwidth per chip{half}",
            "links": f"{document}: {link_source}{half}",
            "network": f"{network_source}{half}",
            "devices_per_host": f"{document}: chips per host",
        },
    )


def _gpu(
    name: str,
    title: str,
    kinds: tuple[str, ...],
    *,
    peaks: dict[str, float],
    memory: int,
    bandwidth: float,
    nvlink: float,
    network: float,
    document: str,
    host: str,
    matmul_flops: float | None = None,
    measured: Mapping[str, str] | None = None,
) -> Chip:
    return Chip(
        name,
        title,
        "gpu",
        kinds,
        peaks,
        memory,
        bandwidth,
        Links("nvlink", nvlink, 1, 0, 8),
        network,
        8,
        matmul_flops=matmul_flops,
        sources={
            **{f"peaks.{dtype}": f"{document}: tensor cores, without sparsity" for dtype in peaks},
            "peaks.float32": f"{document}: {_TF32}, without sparsity",
            "memory_bytes": _XLA_MEMORY,
            "memory_bandwidth": f"{document}: GPU memory bandwidth",
            "links": f"{document}: NVLink, half of the printed sum of both directions; 8 GPUs on a switch ({host})",
            "network": f"{host}: one network card for each GPU",
            "devices_per_host": host,
            **(measured or {}),
        },
    )


_HOPPER = {"bfloat16": 989.4e12, "float16": 989.4e12, "float8": 1978.8e12, "int8": 1978.8e12, "float32": 494.7e12}
_AMPERE = {"bfloat16": 312e12, "float16": 312e12, "int8": 624e12, "float32": 156e12}
_BLACKWELL = {"bfloat16": 2250e12, "float16": 2250e12, "float8": 4500e12, "int8": 4500e12, "float32": 1125e12}

CHIPS: tuple[Chip, ...] = (
    _tpu(
        "v4",
        "TPU v4",
        ("TPU v4",),
        bfloat16=275e12,
        more={"int8": 275e12},
        gib=30.75,
        bandwidth=1200e9,
        link=50e9,
        torus_dims=3,
        pod=4096,
        network=None,
        per_host=4,
        document="Google Cloud, TPU v4",
        link_source="2400 Gbps of ICI over six links",
        network_source="not published per chip",
    ),
    _tpu(
        "v5e",
        "TPU v5e",
        ("TPU v5 lite", "TPU v5e"),
        bfloat16=197e12,
        more={"int8": 393e12},
        gib=15.75,
        bandwidth=819e9,
        link=50e9,
        torus_dims=2,
        pod=256,
        network=200e9 / 8 / 8,
        per_host=8,
        document="Google Cloud, TPU v5e",
        link_source="400 GB/s of ICI in both directions over four links",
        network_source="Google Cloud, TPU v5e: two cards of 100 Gbps per host of eight chips",
    ),
    _tpu(
        "v5p",
        "TPU v5p",
        ("TPU v5", "TPU v5p"),
        bfloat16=459e12,
        more={"float8": 459e12},
        gib=95.74,
        bandwidth=2765e9,
        link=100e9,
        torus_dims=3,
        pod=8960,
        network=50e9 / 8,
        per_host=4,
        document="Google Cloud, TPU v5p",
        link_source="1200 GB/s of ICI in both directions over six links",
        network_source="Google Cloud, TPU v5p: 50 Gbps of data center network per chip",
    ),
    _tpu(
        "v6e",
        "TPU v6e (Trillium)",
        ("TPU v6 lite", "TPU v6e"),
        bfloat16=918e12,
        more={"int8": 1836e12, "float8": 918e12},
        gib=31.25,
        bandwidth=1640e9,
        link=100e9,
        torus_dims=2,
        pod=256,
        network=800e9 / 8 / 8,
        per_host=8,
        document="Google Cloud, TPU v6e",
        link_source="800 GB/s of ICI in both directions over four links",
        network_source="Google Cloud, TPU v6e: four cards of 200 Gbps per host of eight chips",
    ),
    _tpu(
        "tpu7x",
        "TPU7x (Ironwood)",
        ("TPU7x", "TPU v7x"),
        bfloat16=2307e12,
        more={"float8": 4614e12},
        gib=94.75,
        bandwidth=7380e9,
        link=100e9,
        torus_dims=3,
        pod=9216,
        network=100e9 / 8,
        per_host=4,
        per_chip=2,
        document="Google Cloud, TPU7x",
        link_source="1200 GB/s of ICI in both directions over six links",
        network_source="Google Cloud, TPU7x: 100 Gbps of data center network per chip",
    ),
    _gpu(
        "a100-40",
        "NVIDIA A100 SXM 40 GB",
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        peaks=_AMPERE,
        memory=42331013120,
        bandwidth=1555e9,
        nvlink=300e9,
        network=25e9,
        document="NVIDIA, A100 data sheet",
        host="NVIDIA, DGX A100 data sheet: eight cards of 200 Gb/s",
    ),
    _gpu(
        "a100",
        "NVIDIA A100 SXM 80 GB",
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        peaks=_AMPERE,
        memory=85100068864,
        bandwidth=2039e9,
        nvlink=300e9,
        network=25e9,
        document="NVIDIA, A100 data sheet",
        host="NVIDIA, DGX A100 data sheet: eight cards of 200 Gb/s",
    ),
    _gpu(
        "h100",
        "NVIDIA H100 SXM",
        ("NVIDIA H100 80GB HBM3",),
        peaks=_HOPPER,
        memory=84942979072,
        bandwidth=3352e9,
        nvlink=450e9,
        network=50e9,
        document="NVIDIA, H100 data sheet",
        host="NVIDIA, DGX H100 data sheet: eight cards of 400 Gb/s",
    ),
    _gpu(
        "h200",
        "NVIDIA H200 SXM",
        ("NVIDIA H200",),
        peaks=_HOPPER,
        memory=150109880320,
        bandwidth=4814e9,
        nvlink=450e9,
        network=50e9,
        document="NVIDIA, H200 data sheet",
        host="NVIDIA, DGX H200 data sheet: eight cards of 400 Gb/s",
        matmul_flops=682e12,
        measured={
            "memory_bytes": "measured: reported by the driver of one H200",
            "memory_bandwidth": "measured: reported by the driver of one H200 (data sheet: 4.8 TB/s)",
            "matmul_flops": "measured: bfloat16 8192^3 without a pause on one H200; 770 to 798 TFLOP/s from idle",
        },
    ),
    _gpu(
        "b200",
        "NVIDIA B200",
        ("NVIDIA B200",),
        peaks=_BLACKWELL,
        memory=191514411008,
        bandwidth=7672e9,
        nvlink=900e9,
        network=50e9,
        document="NVIDIA, DGX B200 data sheet, an eighth of the system",
        host="NVIDIA, DGX B200 data sheet: eight cards of 400 Gb/s",
    ),
)

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
