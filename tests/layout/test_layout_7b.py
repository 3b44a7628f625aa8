"""The layout of a 7B-parameter decoder and its AdamW state on an abstract mesh of 256 devices."""

from pathlib import Path

import jax
import pytest

import meshwright as mw
from meshwright import P

EXAMPLE = Path(__file__).parents[2] / "examples" / "layout_7b.py"

VOCAB, DIM, MLP, LAYERS = 32_000, 4_096, 11_008, 32
MATRICES = 2 * VOCAB * DIM + LAYERS * (4 * DIM * DIM + 3 * DIM * MLP)
NORMS = (2 * LAYERS + 1) * DIM
COPIES = 3  # the parameters and AdamW's two moments, all in float32
COUNTERS = 2 * 4  # the step and AdamW's count


@pytest.fixture
def no_devices(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a device was used")

    for name in ("devices", "local_devices", "device_count", "local_device_count", "device_put", "default_backend"):
        monkeypatch.setattr(jax, name, refuse)


def test_exact_layout_without_a_device(no_devices):
    job = mw.load_job(f"{EXAMPLE}:job")
    mesh = mw.create_abstract_mesh("fsdp:32,tp:8")
    layout = mw.make_layout(job.rules, mw.abstract_init(job.init), mesh)
    text = str(layout)

    assert mesh.size == 256
    assert MATRICES + NORMS == 6_738_415_616
    assert layout.bytes_total == COPIES * 4 * (MATRICES + NORMS) + COUNTERS
    assert layout.bytes_per_device == COPIES * 4 * (MATRICES // 256 + NORMS) + COUNTERS
    assert len(layout.leaves) == COPIES * (2 + 7 * LAYERS + 2 * LAYERS + 1) + 2
    for prefix in ("params", "opt_state/0/mu", "opt_state/0/nu"):
        assert layout[f"{prefix}/embed/table"].spec == P("tp", "fsdp")
        for layer in range(LAYERS):
            assert layout[f"{prefix}/layers/{layer}/attn/q/kernel"].spec == P("fsdp", "tp")
            assert layout[f"{prefix}/layers/{layer}/mlp/down/kernel"].shard_shape == (MLP // 8, DIM // 32)
            assert layout[f"{prefix}/layers/{layer}/mlp_norm/scale"].is_replicated
    assert layout.report().ok
    assert layout.report().concerns() == []
    assert "params/layers/{0..31}/mlp/up/kernel (x32)" in text
    assert text.endswith(f"{len(layout.leaves)} leaves on fsdp=32 x tp=8: 75.3 GiB in total, 304.3 MiB per device")


def test_without_the_optional_axis(no_devices):
    job = mw.load_job(f"{EXAMPLE}:job")
    layout = mw.make_layout(job.rules, mw.abstract_init(job.init), mw.create_abstract_mesh("fsdp:128"))
    assert layout["params/layers/0/mlp/up/kernel"].spec == P("fsdp", None)
    assert layout["params/embed/table"].shard_shape == (VOCAB, DIM // 128)


def test_no_backend_starts(run_python):
    code = """
    import sys
    import meshwright as mw
    job = mw.load_job(sys.argv[1] + ":job")
    layout = mw.make_layout(job.rules, mw.abstract_init(job.init), mw.create_abstract_mesh(job.mesh))
    print(layout.bytes_per_device, len(str(layout)) > 1000)
    mw.Layout.from_json(layout.to_json())
    layout.picture("params/layers/0/mlp/up/kernel", svg=True)
    import jax
    print(jax._src.xla_bridge.backends_are_initialized())
    """
    result = run_python(code, str(EXAMPLE))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(COPIES * 4 * (MATRICES // 256 + NORMS) + COUNTERS), "True", "False"]
