"""Every changed byte of a checkpoint is detected, including those of the manifest."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from meshwright.checkpoint import manifest as manifests
from meshwright.checkpoint import read_manifest, verify_step
from meshwright.checkpoint.manifest import Manifest, key_impl, plain_facts
from meshwright.errors import CheckpointError


@pytest.fixture(scope="module")
def step(lab, first, tmp_path_factory):
    folder = tmp_path_factory.mktemp("manifest")
    lab.saved(folder, *first, 3)
    return folder / "3"


def test_a_manifest_describes_the_step(step, first):
    layout, _ = first
    manifest = read_manifest(step)
    assert manifest.step == 3
    assert manifest.facts == {"step": 3}
    assert manifest.mesh == {
        "axes": {"fsdp": 4, "tp": 2}, "num_devices": 8, "device_kind": "cpu", "num_processes": 1,
    }  # fmt: skip
    assert [leaf.name for leaf in manifest.tree] == [leaf.name for leaf in layout.leaves]
    tree = {leaf.name: leaf for leaf in manifest.tree}
    assert tree["params/bias"][1:] == ((8,), "float32", (8,))
    assert tree["rng"].dtype == "key<threefry2x32>"
    assert manifest.rng == {"rng": "threefry2x32"}
    assert manifest.layout["params/up"] == ["fsdp", "tp"]
    assert manifest.versions["jax"] == jax.__version__
    assert "orbax-checkpoint" in manifest.versions
    found = {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()}
    assert found == {*manifest.files, "manifest.json"}
    raw = json.loads((step / "manifest.json").read_text())
    assert list(raw) == ["format", "step", "files", "tree", "mesh", "layout", "rng", "facts", "versions", "sha256"]


def test_every_flipped_bit_is_found_and_its_file_named(step, lab):
    """Flips random bits in all files, at least three in each; `benchmarks/byte_flips.py` tries many more."""
    rng = np.random.default_rng(0)
    files = sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size)
    sizes = np.array([path.stat().st_size for path in files])
    chosen = [*np.repeat(np.arange(len(files)), 3), *rng.choice(len(files), 60, p=sizes / sizes.sum())]
    for number in chosen:
        path, place, mask = files[number], int(rng.integers(sizes[number])), 1 << int(rng.integers(8))
        lab.flip(path, place, mask)
        problems = verify_step(step)
        lab.flip(path, place, mask)
        assert len(problems) == 1, (path, place, mask)
        assert path.relative_to(step).as_posix() in problems[0], (path, place, mask)
    assert verify_step(step) == []


def test_every_changed_byte_of_a_manifest_is_found(step):
    data = (step / "manifest.json").read_bytes()
    for place in range(0, len(data), 7):
        for mask in (1, 0x20):  # 0x20 changes the case of letters
            changed = bytearray(data)
            changed[place] ^= mask
            with pytest.raises(CheckpointError, match=r"the file (is not a manifest|was changed after it was written)"):
                Manifest.from_json(bytes(changed), where="the file")
    for changed in (data[:-1], data + b"\n", data.replace(b"\n", b"\r\n", 1), b""):
        with pytest.raises(CheckpointError):
            Manifest.from_json(changed, where="the file")
    assert Manifest.from_json(data, where="the file") == read_manifest(step)


def test_a_manifest_of_another_format_is_rejected(step, monkeypatch):
    manifest = read_manifest(step)
    monkeypatch.setattr(manifests, "FORMAT", 2)
    text = manifest.to_json()
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="the file has format 2; this release reads format 1"):
        Manifest.from_json(text.encode(), where="the file")


def test_facts_round_trip(step):
    facts = {"x": 0.1 + 0.2, "name": "größer", "nothing": None, "list": [1, [2.5e-300]], "big": 2**70}
    manifest = dataclasses.replace(read_manifest(step), facts=plain_facts(facts))
    assert Manifest.from_json(manifest.to_json().encode(), where="").facts == facts


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_key_impl(impl):
    assert key_impl(jax.random.key(0, impl=impl).dtype) == impl


def test_shares_of_several_processes_cover_all_files(step, lab):
    for path in sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size):
        lab.flip(path)
        found = [verify_step(step, share=(rank, 3)) for rank in range(3)]
        lab.flip(path)
        everyone = path.name == "manifest.json"
        assert sum(map(bool, found)) == (3 if everyone else 1)
