"""Targets that are not here: what is refused, and, where their compilers are installed, what they look like."""

import pytest

from meshwright.errors import MeshError
from meshwright.plan.topology import can_compile_for, target_devices


@pytest.mark.parametrize("target", ["v9:4x4", "v5e", "v5e:16by16", "h200:", ""])
def test_unknown_targets(target):
    with pytest.raises(MeshError, match=r"is not a target.\nhint: for example v5e:16x16"):
        target_devices(target)


@pytest.mark.parametrize(("target", "extra"), [("v5e:16x16", "tpu"), ("h200:1x8", "gpu")])
def test_a_missing_compiler_names_the_extra(target, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not can_compile_for(target)
    with pytest.raises(MeshError, match=rf'hint: pip install "meshwright\[{extra}\]"'):
        target_devices.__wrapped__(target)


def test_a_tpu_that_is_not_here(run_python):
    if not can_compile_for("v5p:2x2x2"):
        pytest.skip("libtpu is not installed")
    code = """
from meshwright.plan.topology import target_devices, target_mesh

mesh = target_mesh("v5p:2x2x2", (2, 4), ("dp", "tp"))
print(len(target_devices("v5p:2x2x2")), mesh.abstract_mesh.abstract_device.device_kind)
"""
    done = run_python(code, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["8", "TPU", "v5"]
