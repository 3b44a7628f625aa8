"""Link speeds of mesh axes."""

from dataclasses import replace

import pytest

from meshwright.hardware.chips import CHIPS, chip_of
from meshwright.hardware.link_rates import COLLECTIVES
from meshwright.mesh.string import parse_mesh
from meshwright.plan.costs.communication import Traffic, computed_sent
from meshwright.plan.costs.links import NETWORK_ASSUMED, axis_links, slowest_link, transfer_seconds
from meshwright.plan.target import parse_target


def speeds(target, mesh):
    links = axis_links(parse_target(target), parse_mesh(mesh))
    return {axis: (link.name, pytest.approx(link.speed)) for axis, link in links.items()}


@pytest.mark.parametrize(
    ("target", "mesh", "expected"),
    [
        ("h200:8x8", "fsdp:8,tp:8", {"fsdp": ("network", 50e9), "tp": ("nvlink", 450e9)}),
        ("h200:8x8", "fsdp:64", {"fsdp": ("network", 8 * 50e9)}),  # a ring through each network card of a host
        # Each group of eight has four GPUs per host.
        ("h200:2x8", "fsdp:8,tp:2", {"fsdp": ("network", 4 * 50e9), "tp": ("nvlink", 450e9)}),
        ("h200:1x8", "dp:2,tp:4", {"dp": ("nvlink", 450e9), "tp": ("nvlink", 450e9)}),
        ("v5p:4x4x8", "fsdp:128", {"fsdp": ("ici", 6 * 100e9)}),
        ("v5p:4x4x8", "fsdp:16,tp:8", {"fsdp": ("ici", 4 * 100e9), "tp": ("ici", 2 * 100e9)}),
        ("v5e:16x16", "fsdp:16,tp:16", {"fsdp": ("ici", 2 * 50e9), "tp": ("ici", 2 * 50e9)}),
        ("v5e:8x8", "fsdp:8,tp:8", {"fsdp": ("ici", 50e9), "tp": ("ici", 50e9)}),  # lines, not rings
        ("v5p:4x4x8*2", "dp:2@dcn,fsdp:128", {"dp": ("network", 50e9 / 8), "fsdp": ("ici", 6 * 100e9)}),
        ("v4:4x4x4*2", "dp:2@dcn,fsdp:64", {"dp": ("network", NETWORK_ASSUMED), "fsdp": ("ici", 6 * 50e9)}),
        # Limited by the links inside a slice, as the network of 128 chips is faster.
        ("v5p:4x4x8*2", "dp:256@dcn=2", {"dp": ("network", 6 * 100e9)}),
        # In a gather of 8 bytes, each device sends 7; 4 go to the other slice, one through each of four network cards.
        ("v5p:2x2x1*2", "fsdp:8@dcn=2", {"fsdp": ("network", 7 * 50e9 / 8)}),
        ("cpu:8", "fsdp:8", {}),
    ],
)
def test_speeds_of_axes(target, mesh, expected):
    assert speeds(target, mesh) == expected


@pytest.mark.parametrize(
    ("target", "mesh", "expected"),
    [
        # A ring over 32 GPUs of four hosts leaves each host from one of them, with one network card.
        ("h200:8x8", "fsdp:2,tp:32", {"fsdp": 50e9, "tp": 50e9}),
        ("h200:8x8", "fsdp:8,tp:8", {"fsdp": 50e9, "tp": 450e9}),
        # On a torus, a ring uses both directions of one dim at a time, or the one lane of a line.
        ("v5p:4x4x8", "fsdp:8,tp:16", {"fsdp": 2 * 100e9, "tp": 2 * 100e9}),
        ("v5e:8x8", "fsdp:8,tp:8", {"fsdp": 50e9, "tp": 50e9}),
        ("v5p:4x4x8*2", "dp:256@dcn=2", {"dp": 50e9 / 8}),
    ],
)
def test_speeds_of_rings(target, mesh, expected):
    links = axis_links(parse_target(target), parse_mesh(mesh))
    assert {axis: link.hop_speed for axis, link in links.items()} == expected


def link_of(target, mesh, axis):
    return axis_links(parse_target(target), parse_mesh(mesh))[axis]


# By hand: start + hops * latency + bytes / (speed * share), with the figures of hardware/link_rates.toml.
BY_HAND = [
    # Seven hops around eight H100s; each sends 7/8 of 256 MiB.
    ("h100:1x8", "fsdp:8", "all-gather", 235e6, 9.2e-6 + 7 * 2.8e-6 + 235e6 / (450e9 * 0.75)),
    ("h100:1x8", "fsdp:8", "reduce-scatter", 470e6, 9.2e-6 + 7 * 2.8e-6 + 470e6 / (450e9 * 0.71)),
    ("h100:1x8", "fsdp:8", "all-reduce", 470e6, 14e-6 + 7 * 2.7e-6 + 470e6 / (450e9 * 0.85)),
    ("h100:1x8", "fsdp:8", "all-to-all", 59e6, 9.2e-6 + 7 * 2.1e-6 + 59e6 / (450e9 * 0.67)),
    ("h100:1x8", "fsdp:8", "collective-permute", 17e6, 11.5e-6 + 17e6 / (450e9 * 0.165)),
    # Between 8 and 16 MB the share is in the middle of 0.45 and 0.58 at the geometric mean of their sizes.
    ("h100:1x8", "fsdp:8", "all-gather", (7.3e6 * 25e6) ** 0.5, 28.8e-6 + (7.3e6 * 25e6) ** 0.5 / (450e9 * 0.515)),
    # A few bytes take the start and the hops; huge transfers the largest share.
    ("h100:1x8", "fsdp:8", "all-gather", 1, 28.8e-6),
    ("a100:1x8", "fsdp:8", "all-gather", 30e9, 14e-6 + 7 * 1.9e-6 + 30e9 / (300e9 * 0.77)),
    ("b200:1x8", "fsdp:8", "collective-permute", 1.1e9, 11.5e-6 + 1.1e9 / (900e9 * 0.58)),
    # Two rings of 16 hosts: 15 hops between hosts, 112 inside them.
    ("h100:16x8", "fsdp:128", "all-gather", 1.9e9, 14e-6 + 15 * 4e-6 + 112 * 1.9e-6 + 1.9e9 / (400e9 * 0.94)),
    # A tree over four hosts. With one network card of eight per host, shares are those of eight times the bytes.
    ("h100:4x8", "dp:32", "all-reduce", 520e6, 88e-6 + 2 * 5e-6 + 520e6 / (400e9 * 0.75)),
    ("h100:4x8", "dp:4,tp:8", "all-reduce", 65e6, 88e-6 + 2 * 5e-6 + 65e6 / (50e9 * 0.75)),
    ("h100:2x8", "pp:2,fsdp:8", "collective-permute", 34e6, 28e-6 + 34e6 / (50e9 * 0.86)),
    ("h100:2x8", "fsdp:16", "all-to-all", 1e9, 28e-6 + 1e9 / (50e9 * 0.92)),  # by the card of each GPU
    # A ring of 16 on a torus: the farthest device is 8 hops away. On two dims, it is 8 + 8.
    ("v5e:16x16", "fsdp:16,tp:16", "all-gather", 10e6, 2.4e-6 + 8e-6 + 10e6 / (2 * 50e9 * 0.855)),
    ("v5e:16x16", "fsdp:256", "reduce-scatter", 10e6, 2.4e-6 + 16e-6 + 10e6 / (4 * 50e9 * 0.855)),
    ("v5e:16x16", "fsdp:256", "all-reduce", 20e6, 4.8e-6 + 32e-6 + 20e6 / (4 * 50e9 * 0.855)),
    ("v5e:8x8", "fsdp:8,tp:8", "all-gather", 10e6, 2.4e-6 + 7e-6 + 10e6 / (50e9 * 0.855 * 0.87)),  # lines
    ("v5p:4x4x8", "fsdp:16,tp:8", "collective-permute", 10e6, 2.4e-6 + 1e-6 + 10e6 / (2 * 100e9 * 0.855)),
    # An all-to-all in a ring of 16 sends its bytes over four links on average, both ways at once.
    ("v5e:16x16", "fsdp:16,tp:16", "all-to-all", 10e6, 2.4e-6 + 8e-6 + 4 * 10e6 / (2 * 50e9 * 0.855)),
    ("v5p:4x4x8*2", "dp:2@dcn,fsdp:128", "all-reduce", 1e9, 10e-6 + 1e9 / (6.25e9 * 0.8)),
]


@pytest.mark.parametrize(("target", "mesh", "kind", "size", "expected"), BY_HAND)
def test_transfers_by_hand(target, mesh, kind, size, expected):
    axis = parse_mesh(mesh).names[0]
    assert link_of(target, mesh, axis).seconds(kind, size) == pytest.approx(expected, rel=1e-4)


def test_published_measurements_are_met():
    """Whole transfers as measured, from which starts and shares were taken apart: eight H100s, four hosts, v5e."""
    hosts = link_of("h100:1x8", "fsdp:8", "fsdp")
    for kind, size, factor, rate in [  # bytes of the whole array, sent share of them, bytes over time
        ("all-gather", 2**30, 7 / 8, 393.3e9),
        ("all-gather", 2**28, 7 / 8, 368.1e9),
        ("all-gather", 2**23, 7 / 8, 128.9e9),
        ("reduce-scatter", 2**29, 7 / 8, 358.8e9),
        ("reduce-scatter", 2**25, 7 / 8, 251.3e9),
        ("all-reduce", 2**31, 14 / 8, 230.0e9),
        ("all-reduce", 2**28, 14 / 8, 212.7e9),
        ("all-reduce", 2**23, 14 / 8, 80.1e9),
        ("all-to-all", 2**30, 7 / 8, 384.0e9),
        ("collective-permute", 2**24, 1, 70.5e9),
        ("collective-permute", 2**27, 1, 144.4e9),
        ("collective-permute", 2**31, 1, 292.4e9),
    ]:
        assert hosts.seconds(kind, size * factor) == pytest.approx(size / rate, rel=0.05), (kind, size)
    four = link_of("b200:4x8", "dp:32", "dp")
    for size, rate in [(2**20, 6.44e9), (2**26, 102.07e9), (2**28, 146.18e9), (2**34, 194.43e9)]:
        assert four.seconds("all-reduce", size * 2 * 31 / 32) == pytest.approx(size / rate, rel=0.05), size
    # 34 MB gathered over a line of four chips: 680 us.
    assert link_of("v5e:8x4", "dp:8,tp:4", "tp").seconds("all-gather", 2048 * 8192 * 2 * 3 / 4) == pytest.approx(
        680e-6, rel=0.02
    )


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_every_rate_has_a_source_and_a_share_that_rises(chip):
    for rates in (chip.links.rates, chip.network_rates):
        assert set(rates) == set(COLLECTIVES)
        for kind, rate in rates.items():
            shares = [share for _, share in rate.shares]
            assert shares == sorted(shares), kind
            assert 0 < shares[0] <= shares[-1] < 1
            assert [size for size, _ in rate.shares] == sorted({size for size, _ in rate.shares})
            assert len(rate.source) > 10
            assert rate.start >= 0 <= rate.hop


def test_rates_of_a_chip_can_be_replaced():
    chip = chip_of("h100")
    twice = {kind: rate.scaled(0.5) for kind, rate in chip.links.rates.items()}
    other = replace(chip, links=replace(chip.links, rates=twice))
    sizes = [rate["all-gather"].share(1e9) for rate in (chip.links.rates, other.links.rates)]
    assert sizes[1] == pytest.approx(sizes[0] / 2)


def test_rings_are_priced_hop_by_hop():
    target, spec = parse_target("h200:8x8"), parse_mesh("fsdp:2,tp:32")
    links = axis_links(target, spec)
    hop = 28e-6 + 34e6 / (50e9 * 0.86)
    assert transfer_seconds("collective-permute", 34e6, ["tp"], links) == pytest.approx(hop)
    rings = Traffic("tp", "all-gather", "activations", 5 * 31 * 34e6, 5, hides=True, in_rings=1.0)
    whole = replace(rings, in_rings=0.0)
    some = replace(rings, in_rings=0.4)
    spent = [item.seconds for item in computed_sent((rings, whole, some), links, target, spec)]
    assert spent[0] == pytest.approx(5 * 31 * hop)
    assert spent[1] == pytest.approx(5 * links["tp"].seconds("all-gather", 31 * 34e6))
    assert spent[2] == pytest.approx(0.4 * spent[0] + 0.6 * spent[1])


def test_the_slowest_of_several_links_counts():
    links = axis_links(parse_target("h200:8x8"), parse_mesh("dp:8,fsdp:8"))
    assert slowest_link(["dp", "fsdp"], links) is links["dp"]
    assert transfer_seconds("all-gather", 1e6, ["unknown"], links) is None


def test_an_axis_that_does_not_fill_a_dim_shares_one():
    links = axis_links(parse_target("v5e:16x16"), parse_mesh("fsdp:32,tp:8"))
    assert "shares" in links["tp"].words
    assert links["tp"].speed == 50e9


def test_axes_of_one_device_have_no_link():
    assert list(axis_links(parse_target("h200:1x8"), parse_mesh("dp:1,tp:8"))) == ["tp"]


def test_equal_transfers_take_as_long_as_each():
    link = link_of("h200:1x8", "tp:8", "tp")
    assert link.seconds("all-gather", 3e8, 3) == pytest.approx(3 * link.seconds("all-gather", 1e8))
    assert link.seconds("all-gather", 0, 3) == pytest.approx(3 * 28.8e-6)
    assert link.seconds("all-gather", 0, 0) == 0.0
    # Kinds that only compiled programs have are priced as the nearest.
    assert link.seconds("ragged-all-to-all", 1e8) == link.seconds("all-to-all", 1e8)
    assert link.seconds("collective-broadcast", 1e8) == link.seconds("all-gather", 1e8)
