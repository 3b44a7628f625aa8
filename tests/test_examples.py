"""Every file in examples/ runs as a user would run it: in its own process, with warnings as errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# The text that an example must print; all must exit with 0.
VERIFIED = {f"verify_{kind}.py": "2 equal; " for kind in ("plain", "linen", "nnx", "equinox")}
SAYS = {"tensor_parallel_block.py": "all four runs agree"} | VERIFIED
SLOW = {"tensor_parallel_block.py", "verify_linen.py", "verify_nnx.py", "verify_equinox.py"}


def test_there_are_examples():
    assert EXAMPLES
    assert SAYS.keys() | SLOW <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.name, marks=pytest.mark.slow if p.name in SLOW else ()) for p in EXAMPLES]
)
def test_an_example_runs(path, tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,  # an example must not depend on the current directory
        env=env,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS.get(path.name, "") in done.stdout
