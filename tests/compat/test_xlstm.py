"""The drop-in modules of `xlstm_jax`: every documented name, argument and default, XLA flags, and aliases."""

import dataclasses
import importlib
import inspect
import os

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax.core import FrozenDict

from meshwright.compat.xlstm_jax.distributed import xla_utils
from meshwright.errors import MeshError, MeshwrightError
from meshwright.mesh.simulate import GPU_FLAGS

ROOT = "meshwright.compat.xlstm_jax"

# The signatures in seed documents 000, 002 and 003, one line per name.
FUNCTIONS = {
    "array_utils": """
        fold_rng_over_axis(rng, axis_name)
        split_array_over_mesh(x, axis_name, split_axis)
        stack_params(params, axis_name, axis=0, mask_except=None)
        unstack_params(params, axis_name)
    """,
    "tensor_parallel": """
        scale_init(init_fn, scale_factor=1.0)
        async_gather(x, axis_name, shift_up=True)
        async_gather_bidirectional(x, axis_name, shift_up=True)
        async_gather_split(x, axis_name)
        async_scatter(xs, axis_name, shift_up=True)
        async_scatter_split(xs, axis_name)
    """,
    "single_gpu": """
        accumulate_gradients(state, batch, rng, num_minibatches, loss_fn, use_scan=False)
        accumulate_gradients_loop(state, batch, rng, num_minibatches, loss_fn)
        accumulate_gradients_scan(state, batch, rng, num_minibatches, loss_fn)
    """,
    "data_parallel": """
        shard_params(params, axis_name, min_weight_size=2**18)
        gather_params(params, axis_name, gather_dtype=None, grad_scatter_dtype=None)
        gather_array_with_mean_grads(x, axis, axis_name, gather_dtype=None, grad_scatter_dtype=None)
        shard_module_params(target, axis_name, min_weight_size=2**18, gather_dtype=None, grad_scatter_dtype=None)
        sync_gradients(grads, axis_names)
    """,
    "pipeline_parallel": """
        execute_pipeline_step(module, state, input, *args, model_axis_name, **kwargs)
        execute_pipeline(module, x, *args, num_microbatches, model_axis_name, **kwargs)
    """,
    "mesh_utils": """
        initialize_mesh(parallel_config, device_array=None, init_distributed_on_slurm=True)
    """,
    "xla_utils": """
        simulate_CPU_devices(device_count=8)
        set_XLA_flags()
    """,
}
LINES = [(module, line.strip()) for module, text in FUNCTIONS.items() for line in text.strip().splitlines()]
REQUIRED = dataclasses.MISSING
LECUN = nn.initializers.lecun_normal()

CLASSES = {
    ("tensor_parallel", "ModelParallelismWrapper"): {
        "model_axis_name": REQUIRED,
        "module_fn": REQUIRED,
        "mask_except_model_idx": None,
        "split_rngs": True,
        "module_kwargs": FrozenDict(),
    },
    ("tensor_parallel", "TPDense"): {
        "dense_fn": REQUIRED,
        "model_axis_name": REQUIRED,
        "tp_mode": "none",
        "skip_communication": False,
        "kernel_init": LECUN,
        "kernel_init_adjustment": 1.0,
        "use_bias": True,
        "dense_name": "module",
    },
    ("tensor_parallel", "TPAsyncDense"): {
        "dense_fn": REQUIRED,
        "model_axis_name": REQUIRED,
        "tp_mode": "none",
        "kernel_init": LECUN,
        "kernel_init_adjustment": 1.0,
        "use_bias": True,
        "dense_name": "module",
        "use_bidirectional_gather": True,
        "use_bidirectional_scatter": False,
    },
    ("pipeline_parallel", "PipelineModule"): {
        "model_axis_name": REQUIRED,
        "num_microbatches": REQUIRED,
        "module_fn": REQUIRED,
    },
}


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("module", "line"), LINES, ids=lambda text: text.partition("(")[0])
def test_functions_have_the_documented_signature(module, line):
    name, scope = line.partition("(")[0], {}
    exec(f"def {line}: ...", scope)
    home = importlib.import_module(f"{ROOT}.distributed.{module}")
    ours, theirs = parameters(getattr(home, name)), parameters(scope[name])
    # New keyword-only arguments with defaults do not affect callers.
    more = [p for p in ours if p not in theirs]
    assert [p for p in ours if p in theirs] == theirs
    assert all(
        kind is inspect.Parameter.KEYWORD_ONLY and default is not inspect.Parameter.empty for _, kind, default in more
    )
    assert getattr(importlib.import_module(f"{ROOT}.distributed"), name) is getattr(home, name)
    assert name in home.__all__


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=str)
def test_modules_have_the_documented_attributes(module, name):
    home = importlib.import_module(f"{ROOT}.distributed.{module}")
    cls = getattr(home, name)
    assert issubclass(cls, nn.Module)
    fields = [field for field in dataclasses.fields(cls) if field.name not in ("parent", "name")]
    documented = CLASSES[module, name]
    assert [field.name for field in fields][: len(documented)] == list(documented)
    for field in fields:
        default = field.default_factory() if field.default_factory is not REQUIRED else field.default
        expected = documented.get(field.name, default)
        if expected is LECUN:  # a function, compared by its values
            key = jax.random.key(0)
            assert (default(key, (4, 4)) == LECUN(key, (4, 4))).all()
        elif expected is REQUIRED:
            assert default is REQUIRED
        else:
            assert default == expected
    assert all(field.default is not REQUIRED for field in fields[len(documented) :])
    assert getattr(importlib.import_module(f"{ROOT}.distributed"), name) is cls


def test_distributed_exports_the_names_of_its_modules():
    distributed = importlib.import_module(f"{ROOT}.distributed")
    homes = [importlib.import_module(f"{ROOT}.distributed.{module}") for module in FUNCTIONS]
    assert sorted(distributed.__all__) == sorted(name for home in homes for name in home.__all__)


def test_types_are_meshwright_s():
    types = importlib.import_module(f"{ROOT}.common_types")
    assert set(types.__all__) == {"TrainState", "PyTree", "PRNGKeyArray", "Metrics", "Parameter"}
    fields = {field.name: field.default for field in dataclasses.fields(types.TrainState)}
    assert fields["mutable_variables"] is None
    assert fields["rng"] is None
    assert isinstance(nn.Partitioned(jnp.ones(1), ("tp",)), types.Parameter.__args__[1].__origin__)
    batch = importlib.import_module(f"{ROOT}.dataset").Batch(inputs=jnp.arange(6), targets=jnp.arange(6))
    assert batch[2:4].targets.tolist() == [2, 3]


def test_alias_makes_the_old_names_importable(run_python):
    done = run_python("""
        from meshwright.compat import alias
        alias("xlstm_jax")
        from xlstm_jax.common_types import TrainState
        from xlstm_jax.dataset import Batch
        from xlstm_jax.distributed import TPDense, simulate_CPU_devices
        from xlstm_jax.distributed.single_gpu import accumulate_gradients
        from xlstm_jax.distributed.xla_utils import set_XLA_flags
        from xlstm_jax.distributed.pipeline_parallel import PipelineModule
        simulate_CPU_devices(3)
        import jax
        print(TPDense.__module__, jax.device_count())
    """)
    assert done.stdout.split() == ["meshwright.linen.layers", "3"], done.stderr


def test_defect_11_flags_are_merged_and_known_to_xla(run_python):
    """The user's flags are kept, Meshwright's are added once, and XLA accepts them all (it aborts on unknown flags)."""
    mine = "--xla_force_host_platform_device_count=2 --xla_gpu_enable_latency_hiding_scheduler=false"
    done = run_python(
        f"""
        import os
        from {ROOT}.distributed import set_XLA_flags
        set_XLA_flags()
        set_XLA_flags()
        import jax
        print(jax.device_count())
        print(os.environ["XLA_FLAGS"])
        try:
            set_XLA_flags()
        except ValueError as error:
            print(error)
        """,
        XLA_FLAGS=mine,
    )
    devices, flags, *error = done.stdout.splitlines()
    assert devices == "2", done.stderr
    assert flags.startswith(mine)
    names = [flag.partition("=")[0].strip("-") for flag in flags.split()]
    assert len(names) == len(set(names))
    assert set(GPU_FLAGS) <= set(names)
    assert error[0] == "set_XLA_flags was called after JAX started, so it would have no effect."


def test_defect_11_simulating_devices_too_late_is_an_error():
    jax.devices()
    with pytest.raises(MeshError, match=r"already started with 8 cpu device\(s\); it is too late to simulate 4 CPU"):
        xla_utils.simulate_CPU_devices(4)
    before = dict(os.environ)
    with pytest.raises(MeshError, match="set_XLA_flags was called after JAX started"):
        xla_utils.set_XLA_flags()
    assert dict(os.environ) == before


def test_an_unknown_package_lists_the_known_ones():
    from meshwright.compat import alias

    with pytest.raises(MeshwrightError, match=r"no drop-in modules for 'xlstm'.\nhint: did you mean 'xlstm_jax'"):
        alias("xlstm")
