"""Checkpoints in a folder and a store: uploads, retention, damage, and the newest intact step of both."""

import random
import shutil

import jax
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.checkpoint import DurableSteps, Keep, TieredCheckpoints, read_manifest, verify_step
from meshwright.errors import CheckpointError, StoreError
from meshwright.remote import open_store
from meshwright.remote.object_store import ObjectStore
from meshwright.train import init_state, state_layout

memory = pytest.mark.parametrize("url", ["memory"], indirect=True)
both = pytest.mark.parametrize("url", ["memory", "s3"], indirect=True)


@pytest.fixture(scope="module")
def first():
    job = mw.Job(init=lambda key: {"w": jax.random.normal(key, (64, 8))}, rules=[("w", mw.P("fsdp"))])
    layout = state_layout(job, optax.adam(1e-3), mw.create_mesh("fsdp:8"))
    return layout, init_state(job, optax.adam(1e-3), layout, jax.random.key(0))


@pytest.fixture
def tiers(first, store, tmp_path):
    """Makes the checkpoints of a run: `tiers.save(1, 2, every=2)`."""
    return Tiers(*first, store, tmp_path / "local")


class Tiers:
    def __init__(self, layout, state, store, folder):
        self.layout, self.state, self.store, self.folder = layout, state, store, folder

    def open(self, *, keep=None, every=None, **options):
        durable = DurableSteps(self.store, keep=keep, every=every)
        return TieredCheckpoints(self.folder, durable=durable, keep=keep, **options)

    def save(self, *steps, **options):
        checkpoints = self.open(**options)
        for step in steps:
            assert checkpoints.save(self.state, step=step, layout=self.layout, facts={"step": step})
        checkpoints.close()
        assert checkpoints.problems == []
        return checkpoints

    def largest(self, step):
        sizes = {name: size for name, size in self.store.list(str(step)).items() if "manifest.json" not in name}
        return max(sizes, key=sizes.get)

    def flip(self, name, place=0):
        data = bytearray(self.store.read(name))
        data[place] ^= 1
        self.store.put(name, bytes(data))


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@both
def test_every_nth_step_is_durable_and_the_newest_of_both_is_restored(tiers):
    checkpoints = tiers.save(1, 2, 3, 4, 5, every=2, keep_local=2)
    assert checkpoints.durable.steps() == [2, 4]
    assert sorted(path.name for path in tiers.folder.iterdir()) == ["4", "5"]
    assert checkpoints.steps() == [2, 4, 5]
    restored = tiers.open().restore(tiers.layout)
    assert (restored.step, restored.facts) == (5, {"step": 5})
    # Damaged in the folder: the step before is in both places.
    largest = max((path for path in (tiers.folder / "5").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(b"x" + largest.read_bytes()[1:])
    shutil.rmtree(tiers.folder / "4" / "state")
    restored = tiers.open().restore(tiers.layout)
    assert restored.step == 4
    assert "skipped checkpoint 5, which is damaged" in restored.notes[0]
    assert same(restored.state.params, tiers.state.params)
    assert verify_step(tiers.folder / "4") == []
    # Another machine has only the store.
    shutil.rmtree(tiers.folder)
    assert tiers.open().restore(tiers.layout).step == 4
    assert tiers.open().restore(tiers.layout, step=2).step == 2


@memory
def test_the_store_has_its_own_retention_and_keeps_the_best_step(tiers):
    checkpoints = tiers.save(1, 2, 3, 4, 5, 6, keep=Keep(last=2, every=4))
    assert checkpoints.durable.steps() == [4, 5, 6]
    assert [path.name for path in tiers.folder.iterdir()] == ["6"]
    shutil.rmtree(tiers.folder)
    checkpoints = tiers.save(7, 8, 9, keep=Keep(last=1, steps=(7,)), every=100)
    assert checkpoints.durable.steps() == [7]  # the best step is uploaded although it is not due
    assert sorted(path.name for path in tiers.folder.iterdir()) == ["7", "9"]


@memory
def test_the_last_step_becomes_durable(tiers):
    checkpoints = tiers.save(1, 2, 3, every=2)
    checkpoints.make_durable(3)
    checkpoints.make_durable(3)
    assert checkpoints.durable_steps() == [2, 3]
    assert checkpoints.durable.problems(3) == []


@memory
def test_a_step_without_its_manifest_does_not_exist(tiers, monkeypatch):
    tiers.save(1)
    real = ObjectStore.put

    def killed(self, name, data):
        if name.endswith("manifest.json"):
            raise StoreError("killed")
        real(self, name, data)

    checkpoints, told = tiers.open(tell=lambda *event: told.append(event)), []
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", killed)
        assert checkpoints.save(tiers.state, step=2, layout=tiers.layout, facts={})
        checkpoints.close()
    assert "could not upload step 2: killed. Training continues; the step is in" in checkpoints.problems[0]
    assert told[-1][:2] == ("checkpoint_failed", 2)
    assert (checkpoints.durable.steps(), checkpoints.durable.unfinished()) == ([1], [2])
    assert checkpoints.steps() == [1, 2]
    tiers.save(3)  # removes what the killed upload left
    assert (checkpoints.durable.steps(), checkpoints.durable.unfinished()) == ([1, 3], [])


@memory
def test_a_step_of_an_earlier_course_is_replaced(tiers):
    tiers.save(1, 2)
    before = set(tiers.store.list("2"))
    shutil.rmtree(tiers.folder)
    checkpoints = tiers.save(2)
    assert checkpoints.durable.problems(2) == []
    assert before != set(tiers.store.list("2"))  # Orbax names its files anew


@both
def test_flipped_bits_are_found_in_every_object(tiers):
    checkpoints = tiers.save(1, 2)
    shutil.rmtree(tiers.folder)
    random.seed(0)
    names = [name for name, size in tiers.store.list("2").items() if size]
    for name in names:
        kept = tiers.store.read(name)
        tiers.flip(name, random.randrange(len(kept)))
        problems = checkpoints.durable.problems(2)
        assert len(problems) == 1
        assert name.removeprefix("2/") in problems[0]
        tiers.store.put(name, kept)
    assert checkpoints.durable.problems(2) == []
    tiers.flip(tiers.largest(2))
    restored = tiers.open().restore(tiers.layout)
    assert restored.step == 1
    assert "skipped checkpoint 2, which is damaged" in restored.notes[0]
    with pytest.raises(CheckpointError, match=r"cannot restore step 2: .*contents changed.*\nhint: restore step 1"):
        tiers.open().restore(tiers.layout, step=2)
    tiers.store.remove([tiers.largest(1)])
    tiers.store.put("1/stranger", b"")
    problems = checkpoints.durable.problems(1)
    assert sorted(problem.rpartition(": ")[2] for problem in problems) == ["missing", "not in the manifest"]
    assert tiers.open().restore(tiers.layout).step == 1  # the folder has an intact copy
    shutil.rmtree(tiers.folder)
    with pytest.raises(CheckpointError, match="there is no step to restore"):
        tiers.open().restore(tiers.layout)


@memory
def test_a_copy_for_reading_follows_the_store(tiers):
    tiers.save(1)
    tiers.open(trust_local=False).restore(tiers.layout)
    old = read_manifest(tiers.folder / "1")
    other = Tiers(tiers.layout, tiers.state, tiers.store, tiers.folder.with_name("other"))
    other.save(1)  # another course of the run
    reader = tiers.open(trust_local=False)
    assert reader.restore(tiers.layout).step == 1
    assert read_manifest(tiers.folder / "1").files != old.files
    assert reader.manifest(1) == read_manifest(tiers.folder / "1")
    other.save(2, every=100)
    assert reader.steps() == [1]  # the folder of the reader does not count


@memory
def test_an_unreachable_store_does_not_stop_a_run(tiers, monkeypatch):
    def unreachable(*_, **__):
        raise StoreError("cannot write", hint="check the network.")

    checkpoints = tiers.save(1)
    with monkeypatch.context() as patch:
        for name in ("put", "upload", "remove", "infos"):
            patch.setattr(ObjectStore, name, unreachable)
        assert checkpoints.save(tiers.state, step=2, layout=tiers.layout, facts={})
        checkpoints.close()
    assert checkpoints.problems == [
        f"could not upload step 2: cannot write. Training continues; the step is in {tiers.folder}."
    ]
    checkpoints.make_durable(2)
    assert open_store(tiers.store.url).read("2/manifest.json") is not None
