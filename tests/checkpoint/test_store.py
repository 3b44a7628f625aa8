"""Saving, retention and fallback of a folder of checkpoints, including failures and damage."""

import json
import os
import resource
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.checkpoint import Checkpoints, Keep, store, verify_step
from meshwright.errors import CheckpointError, TrainingError


def test_a_state_round_trips_bit_for_bit(lab, first, tmp_path):
    layout, state = first
    checkpoints = lab.saved(tmp_path, layout, state, 7)
    restored = Checkpoints(tmp_path).restore(layout)
    assert (restored.step, restored.facts, restored.notes) == (7, {"step": 7}, [])
    assert lab.bits(restored.state) == lab.bits(state)
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    for leaf, known in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True):
        assert leaf.sharding == known.sharding
    assert jax.random.key_impl(restored.state.rng) == jax.random.key_impl(state.rng)
    assert checkpoints.latest() == 7


def test_a_save_is_correct_although_the_next_step_reuses_the_memory(lab, tmp_path):
    layout, state = lab.start(init=lambda key: lab.init(key, width=4096))
    known = lab.bits(state)
    step = jax.jit(
        lambda state: jax.tree.map(lambda x: x * 0 - 1 if jnp.issubdtype(x.dtype, jnp.floating) else x, state),
        donate_argnums=0,
        out_shardings=layout.shardings,
    )
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.save(state, step=1, layout=layout, facts={})
    state = step(state)
    checkpoints.wait()
    assert lab.bits(checkpoints.restore(layout).state) == known
    assert float(np.asarray(state.params["up"]).max()) == -1


def test_steps_are_kept_by_policy(lab, first, tmp_path):
    checkpoints = lab.saved(tmp_path, *first, 1, 2, 3, 4, 5, 6, keep=Keep(last=2, every=3))
    assert checkpoints.steps() == [3, 5, 6]
    assert sorted(os.listdir(tmp_path)) == ["3", "5", "6"]


def test_a_step_is_readable_with_orbax_alone(lab, first, tmp_path):
    from orbax.checkpoint import v1 as ocp

    layout, state = first
    lab.saved(tmp_path, layout, state, 1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.Context() as context:
        del context
        shapes = ocp.metadata(tmp_path / "1" / "state").metadata
        asked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
        tree = ocp.load(tmp_path / "1" / "state", asked)
    np.testing.assert_array_equal(tree["params"]["up"], state.params["up"])
    np.testing.assert_array_equal(tree["opt_state"]["0"]["mu"]["down"], np.zeros((32, 16)))
    np.testing.assert_array_equal(tree["rng"], jax.random.key_data(state.rng))


# --- Damage ---


@pytest.mark.parametrize("what", ["byte", "missing", "extra", "shorter", "manifest", "link"])
def test_damage_names_the_file_and_restores_the_step_before(lab, first, tmp_path, what):
    layout, state = first
    checkpoints = lab.saved(tmp_path, layout, state, 1, 2)
    path = lab.largest(tmp_path / "2")
    name = path.relative_to(tmp_path / "2").as_posix()
    if what == "byte":
        lab.flip(path, 1000)
        told = f"{name}: contents changed"
    elif what == "missing":
        path.unlink()
        told = f"{name}: missing"
    elif what == "extra":
        (tmp_path / "2" / "state" / "more").write_text("x")
        told = "state/more: not in the manifest"
    elif what == "shorter":
        size = path.stat().st_size
        os.truncate(path, size - 1)
        told = f"{name}: {size - 1} bytes instead of {size}"
    elif what == "manifest":
        lab.flip(tmp_path / "2" / "manifest.json", 40)
        told = "manifest.json"
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        told = f"{name}: is a link, not a file"
    assert any(told in problem for problem in verify_step(tmp_path / "2"))
    restored = checkpoints.restore(layout)
    assert restored.step == 1
    assert restored.facts == {"step": 1}
    assert len(restored.notes) == 1
    assert restored.notes[0].startswith("skipped checkpoint 2, which is damaged: ")
    assert told in restored.notes[0]
    with pytest.raises(CheckpointError, match="cannot restore step 2: ") as caught:
        checkpoints.restore(layout, step=2)
    assert told in str(caught.value)
    # Saving the same step again repairs it.
    assert checkpoints.save(state, step=2, layout=layout, facts={"again": True})
    checkpoints.wait()
    assert verify_step(tmp_path / "2") == []
    assert checkpoints.restore(layout).facts == {"again": True}


def test_damaged_steps_do_not_count_for_retention(lab, first, tmp_path):
    layout, state = first
    lab.saved(tmp_path, layout, state, 1, 2, 3)
    for step in ("2", "3"):
        lab.flip(lab.largest(tmp_path / step))
    checkpoints = Checkpoints(tmp_path, keep=Keep(last=2))
    assert checkpoints.restore(layout).step == 1
    checkpoints.save(state, step=4, layout=layout, facts={})
    checkpoints.wait()
    assert checkpoints.restore(layout).step == 4
    assert 1 in checkpoints.steps()


def test_a_step_without_manifest_is_an_error_by_number_and_skipped_otherwise(lab, first, tmp_path):
    layout, state = first
    checkpoints = lab.saved(tmp_path, layout, state, 1, 2)
    (tmp_path / "2" / "manifest.json").unlink()
    assert checkpoints.steps() == [1]
    with pytest.raises(CheckpointError, match=r"2 has no manifest.json: it is an unfinished step") as caught:
        checkpoints.restore(layout, step=2)
    assert str(caught.value).endswith("hint: restore step 1, the last good one (the default if no step is given).")
    restored = checkpoints.restore(layout)
    assert restored.step == 1
    assert restored.notes == ["skipped checkpoint 2, which is unfinished (it has no manifest)"]


def test_a_folder_without_a_good_step_lists_its_steps(lab, first, tmp_path):
    layout, state = first
    with pytest.raises(CheckpointError, match="there is no step to restore in"):
        Checkpoints(tmp_path / "none").restore(layout)
    checkpoints = lab.saved(tmp_path, layout, state, 5)
    lab.flip(lab.largest(tmp_path / "5"))
    with pytest.raises(CheckpointError, match=r"skipped checkpoint 5, which is damaged: state/.*contents changed"):
        checkpoints.restore(layout)


def test_a_manifest_of_another_step_is_detected(lab, first, tmp_path):
    lab.saved(tmp_path, *first, 1)
    shutil.move(tmp_path / "1", tmp_path / "9")
    assert verify_step(tmp_path / "9") == ["manifest.json: belongs to step 1, but the folder is named 9"]


# --- Killed saves ---


def test_only_the_files_of_killed_saves_are_removed(lab, first, tmp_path):
    layout, state = first
    lab.saved(tmp_path, layout, state, 1, 2, 3)
    (tmp_path / "2" / "manifest.json").rename(tmp_path / "2" / ".manifest.json.tmp")  # killed while writing it
    (tmp_path / "3" / "manifest.json").unlink()  # killed while removing the step
    shutil.rmtree(tmp_path / "3" / "state" / "state")
    (tmp_path / "4" / "state.orbax-checkpoint-tmp").mkdir(parents=True)  # killed while saving
    (tmp_path / "5").mkdir()
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / "mine.txt").write_text("keep me")
    (tmp_path / "notes").mkdir()
    (tmp_path / "7.txt").write_text("keep me")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [1]
    assert checkpoints.save(state, step=8, layout=layout, facts={})
    checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == ["1", "6", "7.txt", "8", "notes"]


def test_a_save_in_progress_of_another_run_is_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "4" / "state").mkdir(parents=True)
    assert checkpoints.clean() == []
    assert Checkpoints(tmp_path).clean() == [4]


def test_a_foreign_folder_is_not_overwritten(lab, first, tmp_path):
    layout, state = first
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "mine.txt").write_text("keep me")
    checkpoints = Checkpoints(tmp_path)
    assert not checkpoints.save(state, step=3, layout=layout, facts={})
    assert f"could not save step 3: {tmp_path / '3'} exists and is not a checkpoint" in checkpoints.problems[0]
    assert (tmp_path / "3" / "mine.txt").read_text() == "keep me"


def test_own_steps_are_not_written_twice_and_those_of_another_run_are_replaced(lab, first, tmp_path):
    layout, state = first
    told = []
    checkpoints = lab.saved(tmp_path, layout, state, 1, 2)
    assert not checkpoints.save(state, step=2, layout=layout, facts={})
    again = Checkpoints(tmp_path, tell=lambda *what: told.append(what))
    assert again.restore(layout, step=1).step == 1
    assert not again.save(state, step=1, layout=layout, facts={})
    assert again.save(state, step=2, layout=layout, facts={"new": 1})
    again.wait()
    assert again.restore(layout).facts == {"new": 1}
    assert told[0] == ("checkpoint", 2, "step 2: replacing the checkpoint of an earlier run")
    assert told[1][:2] == ("checkpoint", 2)


def test_later_steps_of_an_abandoned_course_are_neither_counted_nor_removed(lab, first, tmp_path):
    layout, state = first
    lab.saved(tmp_path, layout, state, 10, 20, 30)
    checkpoints = Checkpoints(tmp_path, keep=Keep(last=1))
    checkpoints.restore(layout, step=10)
    checkpoints.save(state, step=15, layout=layout, facts={})
    checkpoints.wait()
    assert checkpoints.steps() == [15, 20, 30]


# --- Full disks ---


def test_a_full_disk_is_reported_and_freed_and_the_next_save_works(lab, first, tmp_path):
    layout, state = lab.start(init=lambda key: lab.init(key, width=8192))
    told = []
    checkpoints = Checkpoints(tmp_path, tell=lambda *what: told.append(what))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        checkpoints.save(state, step=1, layout=layout, facts={})
        checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.steps() == []
    assert os.listdir(tmp_path) == []
    kind, step, text = told.pop()
    assert (kind, step, [text]) == ("checkpoint_failed", 1, checkpoints.problems)
    assert text.startswith("could not save step 1: the disk is full (")
    assert text.endswith(". Training continues; its files were removed.")
    assert checkpoints.save(state, step=2, layout=layout, facts={})
    checkpoints.wait()
    assert lab.bits(checkpoints.restore(layout).state) == lab.bits(state)


def test_too_little_disk_space_is_reported_with_numbers(lab, first, tmp_path, monkeypatch):
    layout, state = first
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    checkpoints = Checkpoints(tmp_path)
    assert not checkpoints.save(state, step=1, layout=layout, facts={})
    assert (
        "the disk is full (not enough space: the state takes 12.1 KiB, but only 1000 B are free)"
        in checkpoints.problems[0]
    )
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_read_does_not_end_the_run(lab, first, tmp_path, monkeypatch):
    layout, state = first
    checkpoints = lab.saved(tmp_path, layout, state, 1)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("os.listdir", refuse)
        assert not checkpoints.save(state, step=2, layout=layout, facts={})
    assert "could not save step 2: CheckpointError: " in checkpoints.problems[0]
    assert "cannot be read: Permission denied" in checkpoints.failures[2]
    assert checkpoints.save(state, step=3, layout=layout, facts={})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3]


@pytest.mark.parametrize("place", ["hash_files", "write_manifest"])
def test_a_failure_after_the_arrays_are_written_leaves_nothing(lab, first, tmp_path, monkeypatch, place):
    layout, state = first
    checkpoints = lab.saved(tmp_path, layout, state, 1)
    with monkeypatch.context() as patch:

        def fail(*args, **options):
            raise OSError(28, "No space left on device")

        patch.setattr(f"meshwright.checkpoint.peers.{place}", fail)
        assert checkpoints.save(state, step=2, layout=layout, facts={})
        checkpoints.wait()
    assert os.listdir(tmp_path) == ["1"]
    assert "could not save step 2: the disk is full ([Errno 28] No space left on device)" in checkpoints.problems[0]
    assert checkpoints.save(state, step=2, layout=layout, facts={})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]


def test_a_logger_that_fails_does_not_end_the_run(lab, first, tmp_path):
    def tell(*what):
        raise OSError(28, "No space left on device")

    layout, state = first
    checkpoints = Checkpoints(tmp_path, tell=tell)
    assert checkpoints.save(state, step=1, layout=layout, facts={})
    checkpoints.wait()
    assert checkpoints.steps() == [1]
    assert "step 1: could not report" in checkpoints.problems[0]


def test_a_synchronous_save_returns_whether_it_succeeded(lab, first, tmp_path, monkeypatch):
    layout, state = first
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    assert checkpoints.save(state, step=1, layout=layout, facts={})
    assert checkpoints.steps() == [1]
    assert threading.active_count() >= 1
    monkeypatch.setattr("meshwright.checkpoint.peers.write_manifest", lambda *args: json.loads("{"))
    assert not checkpoints.save(state, step=2, layout=layout, facts={})
    assert checkpoints.steps() == [1]


# --- Invalid input ---


def test_invalid_states_steps_and_facts_are_errors(lab, first, tmp_path):
    layout, state = first
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="cannot save step -1"):
        checkpoints.save(state, step=-1, layout=layout, facts={})
    with pytest.raises(CheckpointError, match=r"facts of a checkpoint must be JSON: .*not JSON serializable"):
        checkpoints.save(state, step=1, layout=layout, facts={"x": np.ones(2)})
    with pytest.raises(TrainingError, match="missing \\['step'"):
        checkpoints.save({"params": state.params}, step=1, layout=layout, facts={})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(("names", "text"), [
    (("a.b", "a/b"), "`a/b` and `a.b` would both be stored as 'a.b'"),
    (("a", "a.b"), "`a` is an array, but `a.b` would be stored below it"),
])  # fmt: skip
def test_names_that_orbax_confuses_are_rejected(tmp_path, names, text):
    tree = {}
    for name in names:
        inside = tree
        *folders, last = name.split("/")
        for folder in folders:
            inside = inside.setdefault(folder, {})
        inside[last] = jnp.ones(8)
    layout = mw.make_layout([(".*", mw.P())], tree, mw.create_mesh("dp:8"))
    with pytest.raises(CheckpointError, match=text):
        Checkpoints(tmp_path).save(layout.shard(tree), step=1, layout=layout, facts={})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(("options", "text"), [
    ({"last": 0}, "`last` must be at least 1; got 0"),
    ({"every": 0}, "`every` must be at least 1; got 0"),
])  # fmt: skip
def test_invalid_policies_are_errors(options, text):
    with pytest.raises(CheckpointError, match=text):
        Keep(**options)
