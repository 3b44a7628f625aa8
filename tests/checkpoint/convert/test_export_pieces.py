"""Exports in pieces: the same bytes as whole tensors, from any mesh and from a checkpoint that is read leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import meshwright as mw
from meshwright.checkpoint.convert import stored_params
from meshwright.checkpoint.convert.import_export import export_pretrained, save_params
from meshwright.checkpoint.convert.pretrained import write_pretrained
from meshwright.checkpoint.convert.tensor_writer import Piece, TensorForm, write_tensors
from meshwright.checkpoint.manifest import model_fact
from meshwright.errors import CheckpointError
from meshwright.models import Decoder

MODEL = Decoder(vocab_size=56, num_layers=3, d_model=32, num_heads=4, num_kv_heads=2, d_ff=48)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(3)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_pieces_in_any_order_are_the_file_that_safetensors_writes(tmp_path):
    rng = np.random.default_rng(0)
    dtypes = {"z": "float32", "a.b": "bfloat16", "m": "float16", "c": "float32", "n": "bfloat16"}
    values = {name: rng.standard_normal((6, 5)).astype(jnp.dtype(dtype)) for name, dtype in dtypes.items()}
    values["vector"] = np.arange(7, dtype=np.float32)
    safetensors.numpy.save_file(values, tmp_path / "theirs", metadata={"format": "pt"})
    forms = {name: TensorForm(value.shape, value.dtype) for name, value in values.items()}
    pieces = [Piece(name, first, value[first : first + 4]) for first in (4, 0) for name, value in values.items()]
    (path,) = write_tensors(tmp_path, pieces, forms, max_shard_bytes=10**9)
    assert path.read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("family", ["llama", "phi3"])  # phi3 stores several leaves in one tensor
def test_arrays_on_a_mesh_are_written_as_those_on_the_host(family, params, tmp_path):
    options = {"family": family, "dtype": "bfloat16", "max_shard_bytes": 9000}
    write_pretrained(tmp_path / "host", MODEL, params, **options)
    layout = mw.make_layout(MODEL.rules, params, mw.create_mesh("dp:2,fsdp:2,tp:2"))
    write_pretrained(tmp_path / "mesh", MODEL, layout.shard(params), **options)
    assert contents(tmp_path / "mesh") == contents(tmp_path / "host")
    assert len(contents(tmp_path / "host")) > 4


def test_a_checkpoint_is_exported_one_group_of_leaves_at_a_time(params, tmp_path, monkeypatch):
    save_params(tmp_path / "steps", params, step=1, facts={"model": model_fact(MODEL)})
    write_pretrained(tmp_path / "wanted", MODEL, params)
    read, sizes = stored_params.read_step, []

    def counted(folder, layout, **options):
        sizes.append([leaf.bytes_per_device for leaf in layout.leaves])
        return read(folder, layout, **options)

    monkeypatch.setattr(stored_params, "read_step", counted)
    monkeypatch.setattr(stored_params, "GROUP", 20_000)
    export_pretrained(tmp_path / "steps", tmp_path / "found")
    assert contents(tmp_path / "found") == contents(tmp_path / "wanted")
    assert sum(map(sum, sizes)) == 4 * MODEL.num_params  # each leaf is read once
    assert max(sum(group) for group in sizes) <= 20_000
    assert len(sizes) > 2


def test_a_model_that_does_not_fit_has_no_fingerprint(params, tmp_path, monkeypatch):
    save_params(tmp_path / "steps", params, step=1, facts={"model": model_fact(MODEL)})
    monkeypatch.setattr("meshwright.checkpoint.convert.import_export.available_memory", lambda: 1000)
    told = []
    paths = export_pretrained(tmp_path / "steps", tmp_path / "out", fingerprint=True, tell=told.append)
    assert paths[-1].name == "config.json"
    assert "no fingerprint: the model takes" in told[0]


def test_a_failed_write_leaves_nothing_behind(params, tmp_path):
    def broken():
        raise OSError(28, "No space left on device")

    leaf = stored_params.LazyLeaf(params["embed"]["table"].shape, np.dtype("float32"), broken)
    with pytest.raises(CheckpointError, match=r"cannot write to .*No space left"):
        write_pretrained(tmp_path / "new", MODEL, params | {"embed": {"table": leaf}})
    assert not (tmp_path / "new").exists()
