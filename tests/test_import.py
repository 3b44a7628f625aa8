"""Importing the package starts no backend and needs few dependencies."""

import pytest


def test_import_starts_no_backend_and_loads_nothing_heavy(run_python):
    code = """
    import sys
    import jax
    import meshwright
    print(jax._src.xla_bridge.backends_are_initialized())
    heavy = {"flax", "optax", "rich", "tyro", "orbax"}
    print(sorted(heavy & set(sys.modules)))
    meshwright.TrainState  # only now is flax needed
    print(sorted({"flax", "tyro"} & set(sys.modules)))
    """
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["False", "[]", "['flax']"]


BLOCK = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.parametrize("names", [("rich", "tyro"), ("rich", "tyro", "flax", "optax")])
def test_the_core_works_without(run_python, names):
    code = (
        BLOCK.format(names=names)
        + """
import numpy as np
import meshwright as mw
from meshwright import P
from meshwright.compat.fjformer import partition_utils

mw.simulate_cpu_devices(2)
tree = {"w": np.arange(4, dtype=np.float32)}
layout = mw.make_layout([("w", P("dp"))], tree, mw.create_mesh("dp:2"))
print(layout)
print(layout.picture("w"), layout.gather(layout.shard(tree))["w"].tolist())
"""
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("[0.0, 1.0, 2.0, 3.0]")
