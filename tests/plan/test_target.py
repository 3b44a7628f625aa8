"""Names of target machines, valid and invalid."""

import re

import pytest

from meshwright.errors import MeshError
from meshwright.mesh.string import parse_mesh
from meshwright.plan.job_on_mesh import prepare
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import check_slices, parse_target


@pytest.mark.parametrize(
    ("text", "platform", "devices", "hosts", "gib"),
    [
        ("cpu:8", "cpu", 8, 1, None),
        ("v5e:16x16", "tpu", 256, 32, 15.75),
        ("v5p:4x4x8", "tpu", 128, 32, 95.74),
        ("v5p:16x16x16", "tpu", 4096, 1024, 95.74),
        ("v6e:16x16", "tpu", 256, 32, 31.25),
        ("tpu7x:4x4x4", "tpu", 128, 16, 94.75),  # two devices per chip
        ("v4:2x2x1", "tpu", 4, 1, 30.75),
        ("v5p:4x4x8*4", "tpu", 512, 128, 95.74),
        ("h200:8x8", "gpu", 64, 8, 139.8),
        ("H100:32x8", "gpu", 256, 32, 79.1),
        ("a100-80:1x4", "gpu", 4, 1, 79.25),
        ("b200:9x8", "gpu", 72, 9, 178.4),
    ],
)
def test_valid_targets(text, platform, devices, hosts, gib):
    target = parse_target(text)
    assert (target.platform, target.num_devices, target.num_hosts) == (platform, devices, hosts)
    assert target.memory_bytes is None if gib is None else target.memory_bytes / 2**30 == pytest.approx(gib, rel=2e-3)
    assert parse_target(target.name) == target
    assert parse_target(target) is target


def test_aliases_resolve_to_one_name():
    assert parse_target("a100-80:1x8").name == "a100:1x8"


def test_titles_count_hosts():
    titles = [parse_target(text).title for text in ("h200:1x8", "h200:2x8")]
    assert [title.partition("(")[2] for title in titles] == ["1 host of 8)", "2 hosts of 8)"]


def test_dims_that_wrap_around():
    assert parse_target("v5e:16x8").wraps == (True, False)
    assert parse_target("v5p:2x4x8").wraps == (False, True, True)
    assert parse_target("h200:1x8").wraps == ()


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("v5p:128", "has 3 dims; got 1", "use v5p:4x4x8"),
        ("v5e:256", "has 2 dims; got 1", "v5e:16x16"),
        ("v5e:4x4x4", "has 2 dims; got 3", "v5e:8x8"),
        ("v5e:3x5", "1, 2, 4, 8 or 16; got 3", "v5e:4x4"),
        ("v5p:4x4x6", "1, 2 or a multiple of 4; got 6", "v5p:4x4x"),
        ("v5p:32x32x32", "at most 8960 chips; got 32768", "several slices"),
        ("h200:64", "hosts x GPUs per host; got 1", "h200:8x8"),
        ("h200:4x16", "at most 8 GPUs; got 16", "h200:8x8"),
        ("h200:2x8*2", "only TPUs have slices", "h200:4x8"),
        ("cpu:2x4", "simulated CPU devices take one number", "cpu:8"),
        ("h200:99999999x8", "at most 1,048,576 chips can be planned; got 799,999,992", "use e.g."),
        ("v5p:4x4x8*9999999", "at most 1,048,576 chips", "use e.g."),
        ("v5e:0x4", "sizes must be at least 1", "use e.g. v5e:16x16"),
        ("h20:8x8", "is not a target", "did you mean 'h200'"),
        ("v5x:4x4", "is not a target", "did you mean 'v5"),
        ("", "is not a target", "use e.g. v5e:16x16"),
        ("v5e:16by16", "is not a target", "use e.g. v5e:16x16"),
    ],
)
def test_errors_suggest_the_nearest_target(text, says, hint):
    with pytest.raises(MeshError, match=says) as caught:
        parse_target(text)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("target", "mesh", "says", "hint"),
    [
        ("v5p:4x4x8*4", "fsdp:512", "4 slices, but no axis of mesh 'fsdp:512' crosses them", "fsdp:512@dcn=4"),
        ("v5p:4x4x8*4", "dp:4,fsdp:128", "no axis of mesh", "dp:4@dcn,fsdp:128, or"),
        ("v5p:2x2x2*2", "fsdp:8,dp:2", "no axis of mesh", "fsdp:8,dp:2@dcn, or"),
        ("v5p:4x4x4*3", "dp:2@dcn,fsdp:96", "crosses 2", "dp:2,fsdp:96@dcn=3"),
        ("v5p:4x4x4*6", "dp:4@dcn,fsdp:96", "crosses 4", "dp:4,fsdp:96@dcn=6"),
        ("v5p:2x2x1*6", "dp:8,fsdp:3", "no axis", "dp:8@dcn=2,fsdp:3@dcn, or"),
        ("v5p:4x4x8*4", "dp:2@dcn,fsdp:256", "mesh 'dp:2@dcn,fsdp:256' crosses 2", "fsdp:256@dcn=4"),
        ("v5e:4x4*3", "dp:16,tp:3", "no axis", "tp:3@dcn"),
        ("v5p:4x4x8", "dp:2@dcn,fsdp:64", "has 1 slice, but mesh", "drop @dcn"),
    ],
)
def test_a_mesh_must_cross_the_slices(target, mesh, says, hint):
    """Otherwise the slow network would be priced as if it were fast."""
    machine = parse_target(target)
    with pytest.raises(MeshError, match=re.escape(says)) as caught:
        check_slices(machine, parse_mesh(mesh).resolve(machine.num_devices))
    assert hint in caught.value.hint
    if suggested := re.match(r"write (\S+), or", caught.value.hint):
        check_slices(machine, parse_mesh(suggested[1]).resolve(machine.num_devices))
    with pytest.raises(MeshError, match=re.escape(says)):
        prepare(None, target, Setup(mesh=mesh))


@pytest.mark.parametrize(
    ("target", "mesh", "hint"),
    [
        ("h200:8x8", "fsdp:32", "use fsdp:64, or plan for h200:4x8"),
        ("v5p:4x4x4", "fsdp:64,tp:2", "use fsdp:32,tp:2, or plan for v5p:4x4x8"),
        ("v5p:4x4x8*4", "dp:2@dcn,fsdp:128", "use dp:2@dcn,fsdp:256, or plan for v5p:4x4x8*2"),
        ("v5p:4x4x8*4", "dp:4@dcn,fsdp:96", "use dp:4@dcn,fsdp:128"),
        ("cpu:8", "fsdp:3", "use fsdp:8, or plan for cpu:3"),
    ],
)
def test_a_mesh_of_another_size_suggests_one_that_fits_and_its_machine(target, mesh, hint):
    with pytest.raises(MeshError, match="devices, but there are") as caught:
        prepare(None, target, Setup(mesh=mesh))
    assert caught.value.hint.startswith(hint)


def test_meshes_that_cross_the_slices():
    twice = "dp:2@dcn,fsdp:256@dcn=2"
    for target, mesh in [("v5p:4x4x8*4", twice), ("h200:2x8", "fsdp:16"), ("h200:2x8", "dp:2@dcn,fsdp:8")]:
        check_slices(parse_target(target), parse_mesh(mesh))
