"""Overlap as a tested property: the overlapped matmuls compiled for machines that are not here.

Needs libtpu (the `tpu` extra; `dev.py test` installs it where it exists) or JAX's CUDA plugin. Programs are compiled in
one subprocess per target, because a compiler for another machine may change the state of the process it runs in.
"""

import json
import sys
from pathlib import Path

import pytest

from meshwright.plan.topology import can_compile_for

ROOT = Path(__file__).parents[2]

# Per target: operation -> most compute over the unsplit form that is accepted, as recorded in RESULTS.md plus 2%.
TPU_FORWARD = {
    "v5e:16x16": {"gather": 1.06, "scatter": 1.13},
    "v5p:4x4x8": {"gather": 1.05, "scatter": 1.05},
    "v6e:16x16": {"gather": 1.06, "scatter": 1.12},
}
TPU_GRADIENTS = {
    "v5p:4x4x8": {"gather grad": 1.05, "scatter grad": 1.03, "MLP f+b": 1.05},
    "v5e:16x16": {"gather grad": 1.15, "scatter grad": 1.09, "scan of 4": 1.12},
}
GPU = {"h200:1x8": {"gather": None, "scatter": None, "scatter grad": None}}


def measured(run_python, target, operations):
    quoted = " ".join(f'"{name}"' for name in operations)
    code = (
        "import runpy, shlex, sys\n"
        f"sys.argv = ['overlap.py', '--json', '--targets', {target!r}, '--only', *shlex.split({quoted!r})]\n"
        f"runpy.run_path({str(ROOT / 'benchmarks' / 'overlap.py')!r}, run_name='__main__')\n"
    )
    done = run_python(code, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    text = done.stdout[done.stdout.index("{") :]
    return {(row["operation"], row["form"]): row for row in json.loads(text)["rows"]}


def check(run_python, target, limits, *, less_memory=()):
    if not can_compile_for(target):
        pytest.skip(f"the compiler for {target} is not installed")
    rows = measured(run_python, target, limits)
    for operation, limit in limits.items():
        ours, unsplit = rows[operation, "ours"], rows[operation, "unsplit"]
        hidden, total = map(int, ours["hidden"].split("/"))
        assert hidden == total > 1, f"{target} {operation}: {hidden} of {total} hops hidden"
        assert ours["bytes"] <= 1.01, f"{target} {operation}: {ours['bytes']} times the least bytes"
        if limit is not None:
            assert ours["cycles"] <= limit, f"{target} {operation}: compute {ours['cycles']} over unsplit"
        if operation in less_memory:
            assert ours["temp_mib"] < unsplit["temp_mib"], f"{target} {operation}: {ours['temp_mib']} MiB"


@pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists for Linux only")
@pytest.mark.slow
@pytest.mark.parametrize("target", TPU_FORWARD)
def test_forward_hides_every_hop_on_tpus(run_python, target):
    check(run_python, target, TPU_FORWARD[target], less_memory=("gather", "scatter"))


@pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists for Linux only")
@pytest.mark.slow
@pytest.mark.parametrize("target", TPU_GRADIENTS)
def test_gradients_hide_every_hop_on_tpus(run_python, target):
    check(run_python, target, TPU_GRADIENTS[target])


@pytest.mark.slow
@pytest.mark.parametrize("target", GPU)
def test_rings_hide_every_hop_on_gpus(run_python, target):
    check(run_python, target, GPU[target], less_memory=("gather", "scatter"))
