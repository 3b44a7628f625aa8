"""The automatic choice of a mesh, and its reason."""

import optax
import pytest

from meshwright.errors import MeshError
from meshwright.loop.settings.choices import choose_mesh
from meshwright.mesh import create_abstract_mesh
from meshwright.models import Decoder
from meshwright.train import language_job, state_layout

MODEL = Decoder.named("tiny")
OPTIMIZER = optax.adam(1e-3)


def choose(num_devices, batch_size, memory, model=MODEL):
    job = language_job(model, batch_size=batch_size, num_tokens=16)
    heads = {"heads": model.num_heads, "kv_heads": model.num_kv_heads}
    return choose_mesh(job, OPTIMIZER, num_devices=num_devices, batch_size=batch_size, memory=memory, **heads)


@pytest.mark.parametrize(
    ("num_devices", "batch_size", "memory", "mesh", "reason"),
    [
        (1, 3, None, "dp:1", "one device"),
        (8, 16, 2**34, "dp:8", "data parallel, which communicates only gradients"),
        (8, 16, 2**20, "fsdp:8", "dp:8 needs .* of 1.0 MiB per device for the state alone"),
        (8, 16, None, "fsdp:8", "the device memory is unknown"),
        (8, 4, 2**34, "dp:4,tp:2", "4 rows over 4 devices, features over 2"),
        (8, 4, 10**6, "fsdp:4,tp:2", "dp:4,tp:2 needs"),
        (8, 1, 2**34, "tp:8", "cannot be split"),
        (6, 12, 2**34, "dp:6", "only gradients"),
    ],
)
def test_the_least_communication_that_fits(num_devices, batch_size, memory, mesh, reason):
    import re

    choice = choose(num_devices, batch_size, memory)
    assert choice.mesh == mesh
    assert re.search(reason, choice.reason), choice.reason


def test_the_choice_can_be_laid_out():
    choice = choose(8, 4, 10**6)
    job = language_job(MODEL, batch_size=4, num_tokens=16)
    layout = state_layout(job, OPTIMIZER, create_abstract_mesh(choice.mesh))
    assert layout.bytes_per_device < 0.35 * 10**6


def test_the_error_lists_every_rejected_mesh():
    with pytest.raises(MeshError, match=r"fsdp:8 needs .*\nhint: set --mesh"):
        choose(8, 16, 1000)


@pytest.mark.parametrize(("batch_size", "mesh"), [(1, "tp:8"), (2, "dp:2,tp:4")])
def test_devices_may_share_heads_of_keys_and_values(batch_size, mesh):
    assert choose(8, batch_size, 2**34, Decoder.named("tiny", num_kv_heads=2)).mesh == mesh


def test_heads_limit_the_tensor_axis():
    model = Decoder.named("tiny", num_heads=2)
    with pytest.raises(MeshError, match="found no mesh of 8 devices for a batch of 1 rows"):
        choose(8, 1, 2**34, model)
