"""Target devices and meshes, with and without installed compilers."""

import re

import pytest

from meshwright.errors import MeshError
from meshwright.hardware.chips import CHIPS
from meshwright.plan.compiled.topology import (
    can_compile_for,
    gpu_target_config,
    mesh_on_target,
    target_devices,
    target_mesh,
)


@pytest.mark.parametrize("target", ["v9:4x4", "v5e", "v5e:16by16", "h200:", ""])
def test_unknown_targets(target):
    with pytest.raises(MeshError, match=r"is not a target[\s\S]*v5e:16x16"):
        target_devices(target)


@pytest.mark.parametrize(("target", "extra"), [("v5e:16x16", "tpu"), ("h200:1x8", "gpu")])
def test_a_missing_compiler_names_the_extra(target, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not can_compile_for(target)
    with pytest.raises(MeshError, match=rf'hint: run `pip install "meshwright\[{extra}\]"`'):
        target_devices.__wrapped__(target)


def test_simulated_devices():
    assert can_compile_for("cpu:8")
    assert target_mesh("cpu:8", (4, 2), ("fsdp", "tp")).shape == {"fsdp": 4, "tp": 2}
    assert mesh_on_target("cpu:4", "dp:-1").size == 4
    with pytest.raises(MeshError, match=r"cpu:64 needs 64 CPU devices; this process has 8"):
        target_devices("cpu:64")


def test_several_slices_need_an_axis_that_crosses_them():
    with pytest.raises(MeshError, match=r"has 2 slices, but no axis of mesh 'dp:4,fsdp:8' crosses them"):
        mesh_on_target("v5p:2x2x4*2", "dp:4,fsdp:8")


@pytest.mark.parametrize("chip", [chip for chip in CHIPS if chip.platform == "gpu"], ids=lambda chip: chip.name)
def test_gpu_descriptions_match_the_chip_table(chip):
    text = gpu_target_config(chip.name)
    assert int(re.search(r"device_memory_size: (\d+)", text)[1]) == chip.memory_bytes
    assert int(re.search(r"memory_bandwidth: (\d+)", text)[1]) == pytest.approx(chip.memory_bandwidth, rel=1e-3)
    assert f'device_description_str: "{chip.device_kinds[0]}"' in text
    assert text.count("{") == text.count("}")
    assert ("unit_description" in text) == (chip.name == "h200")


def test_devices_of_tpus(run_compiler):
    if not can_compile_for("v5p:2x2x2"):
        pytest.skip("libtpu is not installed")
    code = """
from meshwright.plan.compiled.topology import mesh_on_target, target_devices, target_mesh

mesh = target_mesh("v5p:2x2x2", (2, 4), ("dp", "tp"))
print(len(target_devices("v5p:2x2x2")), mesh.abstract_mesh.abstract_device.device_kind)
slices = mesh_on_target("v5p:2x2x1*2", "dp:2@dcn,fsdp:4").devices
print([{device.slice_index for device in row} for row in slices])
print(len(target_devices("v4:2x2x1")), len(target_devices("tpu7x:2x2x1")))
"""
    done = run_compiler(code, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["8 TPU v5", "[{0}, {1}]", "4 8"]
