"""`meshwright checkpoint ls|show|verify|convert`, called like the command line does."""

import io
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import tyro

import meshwright as mw
from meshwright.checkpoint import Checkpoints, read_manifest
from meshwright.checkpoint import file_hashes as files
from meshwright.checkpoint.convert.pretrained import read_pretrained
from meshwright.cli.checkpoint import checkpoint, convert
from meshwright.cli.rules import rules
from meshwright.errors import CheckpointError
from meshwright.linen.global_params import DenseForm, from_global
from meshwright.models import Decoder
from meshwright.train import language_job, state_layout

MODEL = Decoder(vocab_size=48, num_layers=2, d_model=16, num_heads=2, d_ff=24)


@pytest.fixture
def cli(capsys):
    def run(*args):
        code = tyro.extras.subcommand_cli_from_dict(
            {"checkpoint": checkpoint, "rules": rules}, prog="meshwright", args=["checkpoint", *map(str, args)]
        )
        return code, capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run whose checkpoints 10 and 20 hold a decoder, with a killed save of step 30."""
    folder = tmp_path_factory.mktemp("run")
    job, optimizer = language_job(MODEL, batch_size=8, num_tokens=8), optax.sgd(0.1)
    layout = state_layout(job, optimizer, mw.create_mesh("fsdp:4,tp:2"))
    rng = np.random.default_rng(0)
    leaves = [
        jax.random.key(0) if leaf.name == "rng" else rng.random(leaf.shape).astype(leaf.dtype) for leaf in layout.leaves
    ]
    state = layout.shard(layout.structure.unflatten(leaves))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for step in (10, 20):
            checkpoints.save(state, step=step, layout=layout, facts={"model": repr(MODEL)})
    (folder / "checkpoints" / "30" / "state").mkdir(parents=True)
    return folder, layout, state


def test_ls(cli, run_folder):
    folder, _, _ = run_folder
    code, out = cli("ls", folder)
    assert code == 0
    lines = [line.split("  ") for line in out.splitlines()]
    assert [line[0].strip() for line in lines[2:]] == ["10", "20", "30"]
    assert "finished" in out.splitlines()[2]
    assert out.splitlines()[2].endswith("fsdp=4 x tp=2")
    assert "unfinished" in out.splitlines()[4]
    code, out = cli("ls", folder / "checkpoints", "--json")
    entries = json.loads(out)
    assert [entry["status"] for entry in entries] == ["finished", "finished", "unfinished"]
    assert entries[0]["bytes"] == read_manifest(folder / "checkpoints" / "10").num_bytes


def test_show(cli, run_folder):
    folder, _, _ = run_folder
    code, out = cli("show", folder)
    assert code == 0
    assert out.startswith("step 20: ")
    assert "mesh: fsdp=4 x tp=2, 8 devices (cpu)" in out
    assert f"jax {jax.__version__}" in out
    row = next(line for line in out.splitlines() if line.startswith("params/layers/attn/q"))
    assert row.split("  ")[-1].strip() == "P(None, 'fsdp', 'tp')"
    assert "2x16x16" in row
    _, out = cli("show", folder, "--step", 10, "--json")
    assert out.encode() == (folder / "checkpoints" / "10" / "manifest.json").read_bytes()
    _, again = cli("show", folder / "checkpoints" / "10", "--json")
    assert again == out
    with pytest.raises(CheckpointError, match=r"30 has no manifest.json"):
        cli("show", folder, "--step", 30)


def test_verify(cli, run_folder, lab):
    folder, _, _ = run_folder
    code, out = cli("verify", folder)
    assert code == 0
    assert [line.split(",")[0] for line in out.splitlines()] == [
        "step 30: unfinished", "step 10: fine", "step 20: fine",
    ]  # fmt: skip
    path = lab.largest(folder / "checkpoints" / "20")
    lab.flip(path, 99)
    try:
        code, out = cli("verify", folder)
        assert code == 1
        assert "step 20: DAMAGED" in out
        assert f"  {path.relative_to(folder / 'checkpoints' / '20').as_posix()}: contents changed" in out
        assert cli("verify", folder, "--step", 10)[0] == 0
        assert cli("verify", folder / "checkpoints" / "20")[0] == 1
    finally:
        lab.flip(path, 99)
    os.makedirs(folder / "empty")
    with pytest.raises(CheckpointError, match="there is no finished step"):
        cli("verify", folder / "empty")
    with pytest.raises(CheckpointError, match="is not a folder"):
        cli("ls", folder / "nothing")


def test_missing_steps_are_errors(cli, run_folder, tmp_path):
    folder, _, _ = run_folder
    for command in (["verify"], ["show"], ["convert", tmp_path / "out"]):
        with pytest.raises(CheckpointError, match=r"there is no step 999 in .*\nhint: use one of: 10, 20\."):
            cli(command[0], folder, *command[1:], "--step", 999)
    for command in (["ls"], ["ls", "--json"], ["verify"], ["verify", "--step", 1], ["show"]):
        with pytest.raises(CheckpointError, match=r"there is no finished step in .*\nhint: pass a run folder"):
            cli(command[0], tmp_path, *command[1:])


def test_unreadable_steps_are_reported_and_never_skipped(cli, run_folder, lab, tmp_path, monkeypatch):
    """Patches system calls to fail, since permissions do not bind tests that run as root."""
    folder = shutil.copytree(run_folder[0], tmp_path / "run")
    steps = folder / "checkpoints"
    forbidden = []

    def refusing(function):
        def call(path, *args, **options):
            if any(str(path) == str(place) for place in forbidden):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *args, **options)

        return call

    for module, name in ((os, "listdir"), (os, "scandir"), (os, "open"), (io, "open"), (files, "open")):
        monkeypatch.setattr(module, name, refusing(getattr(module, name, open)), raising=False)

    forbidden[:] = [steps / "10" / "manifest.json"]
    _, out = cli("ls", folder, "--json")
    assert [entry["status"] for entry in json.loads(out)] == ["unreadable", "finished", "unfinished"]
    code, out = cli("verify", folder)
    assert code == 1
    assert "step 10: UNREADABLE\n" in out
    assert "10/manifest.json: cannot be read: Permission denied\nstep 20: fine" in out

    for place in (lab.largest(steps / "20"), steps / "20" / "state"):
        forbidden[:] = [place]
        code, out = cli("verify", folder, "--step", 20)
        name = place.relative_to(steps / "20").as_posix()
        assert (code, out) == (1, f"step 20: UNREADABLE\n  {name}: cannot be read: Permission denied\n")
    # It may be intact, so a run does not silently resume from an earlier step.
    with pytest.raises(CheckpointError, match=r"cannot restore step 20: state: cannot be read"):
        Checkpoints(steps).restore(run_folder[1])

    forbidden[:] = [steps]
    for command in ("ls", "verify", "show"):
        with pytest.raises(CheckpointError, match=r"checkpoints: cannot be read: Permission denied\nhint: check its"):
            cli(command, folder)


def test_convert_to_a_folder_that_cannot_be_written(cli, run_folder, tmp_path, monkeypatch):
    folder, _, _ = run_folder
    (tmp_path / "file").write_text("x")
    cli("convert", folder, tmp_path / "hf")
    for source in (folder, tmp_path / "hf"):
        for target in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing/here"):
            with pytest.raises(CheckpointError, match=r"cannot write to .*: (File exists|Not a dir|No such file)"):
                cli("convert", source, target)

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "kept").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryFile", refuse)
        for source in (folder, tmp_path / "hf"):
            for target in (tmp_path / "kept", tmp_path / "new" / "deep"):
                with pytest.raises(CheckpointError, match=r"cannot write to .*: Permission denied\.\nhint: pass"):
                    cli("convert", source, target)
    with monkeypatch.context() as patch:
        patch.setattr("meshwright.checkpoint.convert.pretrained.write_atomically", refuse)
        for target in (tmp_path / "kept", tmp_path / "new"):
            with pytest.raises(CheckpointError, match=r"cannot write to .*: PermissionError"):
                cli("convert", folder, target)
    with monkeypatch.context() as patch:
        patch.setattr("meshwright.checkpoint.peers.write_manifest", refuse)
        with pytest.raises(CheckpointError, match=r"could not write step 0 to .*/new: PermissionError: .*denied\.$"):
            cli("convert", tmp_path / "hf", tmp_path / "new")
    for bytes_ in (0, -1):
        with pytest.raises(CheckpointError, match=f"max_shard_bytes must be at least 1; got {bytes_}"):
            cli("convert", folder, tmp_path / "new", "--shard-bytes", bytes_)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "hf", "kept"]
    assert not any((tmp_path / "kept").iterdir())


def test_convert_of_truncated_files(cli, run_folder, tmp_path):
    cli("convert", run_folder[0], tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) - 7):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: (.|\n)*hint: fetch it again"):
            cli("convert", tmp_path / "hf", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_convert_uses_the_last_good_step(cli, run_folder, lab, tmp_path, capsys):
    folder = shutil.copytree(run_folder[0], tmp_path / "run")
    lab.flip(lab.largest(folder / "checkpoints" / "20"), 99)
    code = checkpoint(lambda: convert(str(folder), str(tmp_path / "hf")))
    assert code == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("skipped checkpoint 20, which is damaged: state/")
    assert told[1] == "exporting step 10, the last good one"
    with pytest.raises(
        CheckpointError, match=r"cannot restore step 20: (.|\n)*hint: restore step 10, the last good one"
    ):
        cli("convert", folder, tmp_path / "other", "--step", 20)
    lab.flip(lab.largest(folder / "checkpoints" / "10"), 99)
    with pytest.raises(
        CheckpointError,
        match=r"there is no good step in (.|\n)*checkpoint 20, which is dam(.|\n)*checkpoint 10, which is dam",
    ):
        cli("convert", folder, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"hint: restore a backup; no other step is intact"):
        cli("convert", folder, tmp_path / "other", "--step", 20)
    assert not (tmp_path / "other").exists()


def test_convert_to_a_model_folder_and_back(cli, run_folder, tmp_path):
    folder, layout, state = run_folder
    code, out = cli("convert", folder, tmp_path / "hf", "--step", 10, "--shard-bytes", 6000)
    assert code == 0
    written = [str(tmp_path / "hf" / name) for name in ("config.json", "meshwright_logits.json")]
    assert out.splitlines()[-2:] == written
    found = read_pretrained(tmp_path / "hf")
    jax.tree.map(np.testing.assert_array_equal, found.params, state.params)
    code, out = cli("convert", tmp_path / "hf", tmp_path / "back", "--step", 5)
    assert code == 0
    restored = Checkpoints(tmp_path / "back").restore(layout, part="params")
    assert restored.step == 5
    jax.tree.map(np.testing.assert_array_equal, restored.state, state.params)
    assert restored.state["head"]["kernel"].sharding == state.params["head"]["kernel"].sharding
    # An imported checkpoint records its model, so it can be exported again.
    cli("convert", tmp_path / "back", tmp_path / "again", "--dtype", "bfloat16")
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, np.asarray(b).astype(jnp.bfloat16)),
        read_pretrained(tmp_path / "again").params,
        state.params,
    )
    with pytest.raises(CheckpointError, match="already has a step 5"):
        cli("convert", tmp_path / "hf", tmp_path / "back", "--step", 5)


def test_check_compares_logits_with_those_of_the_export(cli, run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.checkpoint.convert.fingerprint.has_transformers", lambda: False)
    cli("convert", run_folder[0], tmp_path / "hf", "--dtype", "bfloat16")
    code, out = cli("check", tmp_path / "hf", "--mesh", "fsdp:4,tp:2")
    assert (code, out.split(" by ")[0]) == (0, "same: logits differ")
    assert "from logits stored from an export of step 20 (accepted: 1e-04)" in out
    path = tmp_path / "hf" / "model.safetensors"
    weights = safetensors.numpy.load_file(path)
    weights["model.norm.weight"] = np.asarray(weights["model.norm.weight"] * jnp.bfloat16(1.01))
    safetensors.numpy.save_file(weights, path)
    code, out = cli("check", tmp_path / "hf")
    assert (code, out.split(":")[0]) == (1, "DIFFERENT")
    with pytest.raises(CheckpointError, match=r"--tolerance must be above 0"):
        cli("check", tmp_path / "hf", "--tolerance", 0)


def test_convert_needs_to_know_the_model(cli, lab, first, tmp_path):
    lab.saved(tmp_path / "run", *first, 1)
    with pytest.raises(CheckpointError, match="step 1 does not name its model"):
        cli("convert", tmp_path / "run", tmp_path / "hf")
    with pytest.raises(CheckpointError, match="the parameters do not match the model"):
        cli("convert", tmp_path / "run", tmp_path / "hf", "--model", "decoder-tiny")


def test_convert_linen_trees(cli, tmp_path):
    """A per-device linen model that Orbax saved on four devices, with its boxes, becomes global arrays."""
    from orbax.checkpoint import v1 as ocp

    rng = np.random.default_rng(0)
    whole = {
        name: {"kernel": rng.random((8, 16), np.float32), "bias": rng.random(16, np.float32)} for name in ("up", "down")
    } | {"norm": {"scale": np.ones(8, np.float32)}}
    forms = {
        "up": DenseForm(tp_mode="gather", axis_size=4, axis_name="tp"),
        "down": DenseForm(tp_mode="gather", axis_size=4, axis_name="tp", pieces=True),
    }
    ocp.save(tmp_path / "seed", {"params": jax.tree.map(jnp.asarray, from_global(whole, forms))})
    code, _ = cli(
        "convert", tmp_path / "seed", tmp_path / "ours", "--linen", "up=gather:4", "down=gather:4:pieces"
    )  # fmt: skip
    assert code == 0
    manifest = read_manifest(tmp_path / "ours" / "0")
    assert {leaf.name: leaf.shape for leaf in manifest.tree} == {
        "params/up/kernel": (8, 16), "params/up/bias": (16,), "params/down/kernel": (8, 16),
        "params/down/bias": (16,), "params/norm/scale": (8,),
    }  # fmt: skip
    layout = mw.make_layout([(".*", mw.P())], {"params": whole}, mw.create_mesh("dp:8"))
    jax.tree.map(np.testing.assert_array_equal, Checkpoints(tmp_path / "ours").restore(layout).state["params"], whole)
    with pytest.raises(CheckpointError, match="cannot parse --linen 'up=sideways:4'"):
        cli("convert", tmp_path / "seed", tmp_path / "other", "--linen", "up=sideways:4")
