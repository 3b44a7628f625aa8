"""Link speeds of mesh axes."""

from dataclasses import replace

import pytest

from meshwright.mesh.string import parse_mesh
from meshwright.plan.costs.communication import Traffic, computed_sent
from meshwright.plan.costs.links import HOP_SECONDS, LINK_SHARE, NETWORK_ASSUMED, axis_links, transfer_seconds
from meshwright.plan.target import parse_target


def speeds(target, mesh):
    links = axis_links(parse_target(target), parse_mesh(mesh))
    return {axis: (link.name, pytest.approx(link.speed)) for axis, link in links.items()}


@pytest.mark.parametrize(
    ("target", "mesh", "expected"),
    [
        ("h200:8x8", "fsdp:8,tp:8", {"fsdp": ("network", 50e9), "tp": ("nvlink", 450e9)}),
        # All eight network cards of a host serve one ring: 7/8 of the bytes enter the host, 63/64 leave each GPU.
        ("h200:8x8", "fsdp:64", {"fsdp": ("network", 8 * 50e9 * (63 / 64) / (7 / 8))}),
        # Each group of eight has four GPUs per host.
        ("h200:2x8", "fsdp:8,tp:2", {"fsdp": ("network", 4 * 50e9 * (7 / 8) / (1 / 2)), "tp": ("nvlink", 450e9)}),
        ("h200:1x8", "dp:2,tp:4", {"dp": ("nvlink", 450e9), "tp": ("nvlink", 450e9)}),
        ("v5p:4x4x8", "fsdp:128", {"fsdp": ("ici", 6 * 100e9)}),
        ("v5p:4x4x8", "fsdp:16,tp:8", {"fsdp": ("ici", 4 * 100e9), "tp": ("ici", 2 * 100e9)}),
        ("v5e:16x16", "fsdp:16,tp:16", {"fsdp": ("ici", 2 * 50e9), "tp": ("ici", 2 * 50e9)}),
        ("v5e:8x8", "fsdp:8,tp:8", {"fsdp": ("ici", 50e9), "tp": ("ici", 50e9)}),  # lines, not rings
        ("v5p:4x4x8*2", "dp:2@dcn,fsdp:128", {"dp": ("network", 50e9 / 8), "fsdp": ("ici", 6 * 100e9)}),
        ("v4:4x4x4*2", "dp:2@dcn,fsdp:64", {"dp": ("network", NETWORK_ASSUMED), "fsdp": ("ici", 6 * 50e9)}),
        # Limited by the links inside a slice, as the network of 128 chips is faster.
        ("v5p:4x4x8*2", "dp:256@dcn=2", {"dp": ("network", 6 * 100e9)}),
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


def test_permutes_and_rings_are_priced_by_hops():
    target, spec = parse_target("h200:8x8"), parse_mesh("fsdp:2,tp:32")
    links = axis_links(target, spec)
    assert transfer_seconds("collective-permute", 40e9, 5, ["tp"], links) == pytest.approx(1.0)
    whole = 450e9 * LINK_SHARE  # the cards of a host together are faster than a link inside it
    waits = links["tp"].hops * HOP_SECONDS["network"]
    assert transfer_seconds("all-gather", whole, 1, ["tp"], links) == pytest.approx(1.0 + waits)
    rings = Traffic("tp", "all-gather", "activations", 40e9, 1, hides=True)
    sent = computed_sent((rings, replace(rings, wire_bytes=whole, hides=False)), links, target, spec)
    assert [item.seconds for item in sent] == [pytest.approx(1.0 + waits)] * 2


def test_an_axis_that_does_not_fill_a_dim_shares_one():
    links = axis_links(parse_target("v5e:16x16"), parse_mesh("fsdp:32,tp:8"))
    assert "shares" in links["tp"].words
    assert links["tp"].speed == 50e9


def test_axes_of_one_device_have_no_link():
    assert list(axis_links(parse_target("h200:1x8"), parse_mesh("dp:1,tp:8"))) == ["tp"]


def test_time_includes_bytes_and_hops():
    link = axis_links(parse_target("h200:1x8"), parse_mesh("tp:8"))["tp"]
    assert link.seconds(450e9 * LINK_SHARE) == pytest.approx(1 + 7 * HOP_SECONDS["nvlink"])
    assert link.seconds(0, count=3) == pytest.approx(3 * 7 * HOP_SECONDS["nvlink"])
