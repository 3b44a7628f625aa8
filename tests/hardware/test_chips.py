"""The table of chips: every figure has a source and agrees with the vendor's figures."""

from types import SimpleNamespace

import pytest

import meshwright as mw
from meshwright.hardware.chips import CHIPS, chip_family, chip_of, is_hopper

BY_NAME = {chip.name: chip for chip in CHIPS}


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_every_figure_has_a_source(chip):
    figures = ["memory_bytes", "memory_bandwidth", "links", "network", "devices_per_host", "rates"]
    figures += [f"peaks.{dtype}" for dtype in chip.peaks] + [f"rates.{dtype}" for dtype in chip.rates.dtypes]
    assert sorted(chip.sources) == sorted(figures)
    assert all(len(source) > 10 for source in chip.sources.values())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("nvidia  h200 ", "h200"),
        ("NVIDIA B200", "b200"),
        ("a100-80", "a100"),
        ("h200", "h200"),
    ],
)
def test_chips_by_device_kind(kind, name):
    assert chip_of(kind).name == name


@pytest.mark.parametrize(
    "kind",
    ["cpu", "", "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "TPU v3", "TPU v4 lite"],
)
def test_similar_names_are_not_in_the_table(kind):
    assert chip_of(kind) is None


def test_names_and_kinds_are_unique():
    known = [name for chip in CHIPS for name in {chip.name, *(kind.casefold() for kind in chip.device_kinds)}]
    assert len(known) == len(set(known))


def mesh_of(kind):
    return SimpleNamespace(abstract_device=SimpleNamespace(device_kind=kind))


@pytest.mark.parametrize(
    ("kind", "family"),
    [("TPU v5 lite", "v5e"), ("TPU v5e", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU v4", "v5p"),
     ("NVIDIA H200", "gpu"), ("cpu", "cpu"), ("something else", "cpu")],
)  # fmt: skip
def test_chip_family_of_a_mesh(kind, family):
    assert chip_family(mesh_of(kind)) == family
    assert chip_family(SimpleNamespace(abstract_mesh=mesh_of(kind))) == family


def test_chip_family_without_accelerators_is_cpu():
    for mesh in (None, mw.create_abstract_mesh("dp:8"), mw.create_mesh("dp:8")):
        assert chip_family(mesh) == "cpu"


@pytest.mark.parametrize(
    ("kind", "is_one"),
    [("NVIDIA H200", True), ("NVIDIA H100 80GB HBM3", True), ("NVIDIA GH200 480GB", True), ("NVIDIA B200", False),
     ("NVIDIA A100-SXM4-80GB", False), ("NVIDIA RTX 2000", False), ("cpu", False)],
)  # fmt: skip
def test_is_hopper_by_device_kind(kind, is_one):
    assert is_hopper(mesh_of(kind)) is is_one


# Published by vendors: TFLOP/s of bfloat16, GB, GB/s, GB/s of all links in both directions.
PRINTED = {
    "v4": (275, 32, 1200, 600),
    "v5e": (197, 16, 819, 400),
    "v5p": (459, 95, 2765, 1200),
    "v6e": (918, 32, 1640, 800),
    "tpu7x": (2307, 192, 7380, 1200),
    "a100-40": (312, 40, 1555, 600),
    "a100": (312, 80, 2039, 600),
    "h100": (989.4, 80, 3350, 900),
    "h200": (989.4, 141, 4800, 900),
    "b200": (2250, 180, 7700, 1800),
}


@pytest.mark.parametrize(("name", "printed"), PRINTED.items())
def test_figures_against_vendors(name, printed):
    chip, (tflops, gigabytes, bandwidth, links) = BY_NAME[name], printed
    ways = chip.devices_per_chip
    assert chip.peak("bfloat16") * ways == pytest.approx(tflops * 1e12)
    # Published sizes are powers of two or of ten, and the system reserves a part.
    assert gigabytes * 1e9 * 0.98 <= chip.memory_bytes * ways <= gigabytes * 2**30 * 1.01
    assert chip.memory_bandwidth * ways == pytest.approx(bandwidth * 1e9, rel=0.005)
    assert chip.links.total * 2 * ways == pytest.approx(links * 1e9)


def test_all_chips_are_compared():
    assert list(BY_NAME) == list(PRINTED)


def test_peaks_by_dtype():
    h100 = chip_of("h100")
    assert h100.peak("float8_e5m2") == h100.peak("float8_e4m3fn") == 2 * h100.peak("float16")
    assert h100.peak("float32") == h100.peak() / 2  # TF32
    assert chip_of("v5p").peak("float32") == chip_of("v5p").peak()  # one pass in bfloat16
    assert chip_of("a100").peak("float8_e4m3fn") is None


def test_rates_are_shares_of_the_peak_and_guesses_have_a_wide_error():
    for chip in CHIPS:
        assert 0.2 <= chip.rates.attention <= chip.rates.matmul < 1
        assert (chip.rates.error >= 0.35) == chip.rates.source.startswith("assumed"), chip.name
    assert round(chip_of("h200").rates.matmul * chip_of("h200").peak() / 1e12) == 683  # 682 measured


def test_other_dtypes_reach_other_shares_of_their_peaks():
    h200, v5p = chip_of("h200"), chip_of("v5p")
    # Two matmuls of benchmarks/results/fp8_h200.md and their gradients, ms: bfloat16 over fp8, of twice the peak.
    speedups = [(0.950 + 0.961 + 1.198) / (0.514 + 0.504 + 0.573), (5.177 + 5.468 + 5.657) / (2.847 + 2.878 + 2.923)]
    assert h200.rates.share("float8_e5m2") / h200.rates.share() == pytest.approx(sum(speedups) / 2 / 2, abs=0.005)
    assert h200.rates.share("float32") / h200.rates.share() == pytest.approx(
        (320.8 / 494.7) / (779.3 / 989.4), abs=0.005
    )
    a100 = chip_of("a100").rates
    assert a100.share("float32") / a100.share() == pytest.approx((116 / 156) / (230 / 312), abs=0.005)
    assert v5p.rates.share("float32") == v5p.rates.share()  # one pass in bfloat16
    assert chip_of("h100").rates.dtypes["float8"].source.startswith("assumed")
    assert h200.rates.dtypes["float8"].source.startswith("measured")
