"""Whole runs in a store: resumed here and elsewhere, refused early, read by the commands."""

import json
import os
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from meshwright.cli import main
from meshwright.errors import ConfigError, StoreError, TrainingError
from meshwright.loop.callbacks import Callback
from meshwright.loop.folder.remote_run import HeldLease, RemoteRun, read_remote
from meshwright.loop.run import train
from meshwright.loop.settings.config import TrainConfig
from meshwright.remote import open_store, take_lease

JOB = """
import numpy as np, jax, meshwright as mw
make_batch = lambda seed: {"x": np.random.default_rng(seed).normal(size=(8, 4)).astype(np.float32)}
job = mw.Job(
    init=lambda key: {"w": jax.random.normal(key, (4,))}, rules=[("w", mw.P())], mesh="dp:8",
    loss=lambda params, batch, rng: (((batch["x"] @ params["w"] - 1) ** 2).mean(), {}),
    batch=make_batch(0), make_batch=make_batch,
)
"""


class Kill(Exception):
    pass


class KillAt(Callback):
    """Ends a run without its usual end, as SIGKILL does."""

    def __init__(self, step):
        self.step = step

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def after_step(self, loop):
        if loop.number == self.step:
            raise Kill
        return False


@pytest.fixture
def desk(url, tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(JOB)
    return Desk(url, tmp_path, monkeypatch)


CLOSE = RemoteRun.close
memory = pytest.mark.parametrize("url", ["memory"], indirect=True)


def abandon(run):
    """Ends the threads of a run, but uploads nothing and keeps the lease, as a kill does."""
    run._over.set()
    if run.lease is not None:
        run.lease._over.set()
    run._lock.close()


class Desk:
    def __init__(self, url, folder, monkeypatch):
        self.url, self.folder, self.monkeypatch = url, folder, monkeypatch

    def train(self, *, kill=None, stop=None, say=lambda text: None, **changes):
        self.monkeypatch.setattr("meshwright.loop.setup.Preemption", lambda: stop or KillAt(kill))
        self.monkeypatch.setattr(RemoteRun, "close", abandon if kill else CLOSE)
        options = {"job": f"{self.folder}/job.py:job", "view": "global", "run": self.url, "steps": 12}
        options |= {"checkpoint_every": 2, "tensorboard": False, "report": False}
        options |= {"local_run": str(self.folder / "a")} if "run" not in changes else {}
        return train(TrainConfig().changed(options | changes), say=say)

    def losses(self, folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state.params, state.opt_state))]


@pytest.mark.parametrize("url", ["memory", "s3"], indirect=True)
def test_a_killed_run_is_resumed_to_the_bit_here_and_elsewhere(desk):
    told = []
    desk.monkeypatch.setattr("meshwright.remote.lease.LEASE_SECONDS", 0.5)  # another machine has to wait for it
    plain = desk.train(run=str(desk.folder / "plain"))
    with pytest.raises(Kill):
        desk.train(kill=5, upload_every=4)
    assert read_remote(desk.url)[1].steps() == [4]
    with pytest.raises(Kill):
        desk.train(kill=7, resume=True, upload_every=4, say=told.append)  # the same machine, from its last local step
    assert any("resumed from step 4" in line for line in told)
    with pytest.raises(Kill):
        desk.train(kill=7, resume=True, upload_every=4, say=told.append)
    assert any("resumed from step 6" in line for line in told)  # of the folder: the store has 4
    last = desk.train(resume=True, upload_every=4, local_run=str(desk.folder / "b"), say=told.append)
    assert sum("resumed from step 4" in line for line in told) == 2
    assert (last.why, last.saved, last.last_saved) == ("finished", True, 12)
    assert bits(last.state) == bits(plain.state)
    folder, checkpoints = read_remote(desk.url)
    assert checkpoints.steps() == [4, 8, 12]
    assert desk.losses(folder) == desk.losses(desk.folder / "plain")
    # The first machine's folder is out of date now, and made anew.
    again = desk.train(resume=True, steps=14, upload_every=4, say=told.append)
    assert any("resumed from step 12" in line for line in told)
    assert again.step == 14
    assert desk.losses(desk.folder / "a").keys() == set(range(1, 15))


@memory
def test_a_run_killed_before_its_first_checkpoint_starts_again(desk):
    told = []
    sync = RemoteRun.sync
    desk.monkeypatch.setattr(RemoteRun, "sync", lambda run: None)  # killed before the configuration is in the store
    with pytest.raises(Kill):
        desk.train(kill=1)
    desk.monkeypatch.setattr(RemoteRun, "sync", sync)
    with pytest.raises(ConfigError, match="holds no run to resume"):
        desk.train(resume=True)
    with pytest.raises(Kill):
        desk.train(kill=1)
    assert desk.train(resume=True, steps=2, say=told.append).saved
    assert any("starting again from step 0" in line for line in told)


@memory
def test_two_writers_are_refused(desk):
    lease = take_lease(open_store(desk.url, writes=True))
    lease.keep(seconds=0.05)
    with pytest.raises(StoreError, match="another process is training in"):
        desk.train()
    lease.release()
    desk.train(steps=2)
    with pytest.raises(ConfigError, match=f"{desk.url} already holds a run"):
        desk.train()
    assert json.loads(open_store(desk.url).read(".writers/000002"))["released"]  # a refused command takes no lease


@memory
def test_a_run_that_lost_its_lease_stops(desk):
    class TakeOver(KillAt):
        def after_step(self, loop):
            if loop.number == 4:
                uploaded = read_remote(desk.url)[1]
                deadline = time.monotonic() + 60
                while uploaded.steps() != [2] and time.monotonic() < deadline:
                    time.sleep(0.01)  # uploads run beside the training
                take_lease(open_store(desk.url, writes=True), seconds=0)
                guard = next(callback for callback in loop.callbacks if isinstance(callback, HeldLease))
                with pytest.raises(StoreError, match="taken over"):
                    guard.run.lease.check()  # as before every commit, and every few seconds
            return False

    with pytest.raises(TrainingError, match=f"{desk.url} was taken over by process"):
        desk.train(stop=TakeOver(None))
    assert read_remote(desk.url)[1].steps() == [2]  # nothing was finished after that


@memory
def test_options_of_stores_are_checked_first(desk, tmp_path):
    with pytest.raises(ConfigError, match="--upload-every 3 is not a multiple of --checkpoint-every 2"):
        desk.train(upload_every=3)
    with pytest.raises(ConfigError, match="have no effect without a store"):
        desk.train(run=str(tmp_path / "plain"), upload_every=4)
    with pytest.raises(ConfigError, match="upload_every=0 is out of range"):
        desk.train(upload_every=0)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="taken holds other files"):
        desk.train(local_run=str(tmp_path / "taken"))
    assert (tmp_path / "taken" / "thesis.txt").exists()
    desk.train(steps=2, local_run=str(tmp_path / "own"))
    with pytest.raises(ConfigError, match=f"own is the local folder of {desk.url}"):
        desk.train(run=f"{desk.url}-other", local_run=str(tmp_path / "own"))


@memory
def test_an_upload_that_fails_at_the_end_is_no_success(desk):
    from meshwright.remote.object_store import ObjectStore

    real = ObjectStore.put

    def refuse(self, name, data):
        if name == "manifest.json" and "/12" in self.url:
            raise StoreError("the bucket is gone")
        real(self, name, data)

    desk.monkeypatch.setattr(ObjectStore, "put", refuse)
    result = desk.train()
    assert (result.saved, result.last_saved) == (False, 10)
    desk.monkeypatch.setattr(ObjectStore, "put", real)
    assert desk.train(resume=True).saved  # nothing to train, but to upload
    assert read_remote(desk.url)[1].steps()[-1] == 12


@memory
def test_commands_read_runs_in_stores(desk, capsys):
    def run(*args):
        with pytest.raises(SystemExit) as done:
            main([*args])
        captured = capsys.readouterr()
        return done.value.code, captured.out + captured.err

    desk.train(ledger=False)
    code, text = run("checkpoint", "ls", desk.url)
    assert code == 0
    assert text.count("finished") == 3
    code, text = run("checkpoint", "verify", desk.url)
    assert code == 0
    assert text.count("fine") == 3
    code, text = run("checkpoint", "show", f"{desk.url}/checkpoints/10")
    assert code == 0
    assert "step 10:" in text
    code, text = run("report", desk.url)
    assert code == 0
    assert Path(text.split()[-1]).is_file()
    store = open_store(f"{desk.url}/checkpoints/10")
    name = max((name for name in store.list() if name != "manifest.json"), key=store.list().get)
    store.put(name, store.read(name)[:-1] + b"?")
    code, text = run("checkpoint", "verify", desk.url)
    assert code == 1
    assert "step 10: DAMAGED" in text
    assert "contents changed" in text
    for command in (["checkpoint", "ls"], ["checkpoint", "verify"], ["report"], ["generate", "--run"]):
        code, text = run(*command, f"{desk.url}/nothing")
        assert code == 1
        assert "hint:" in text


@memory
def test_the_folder_of_a_run_can_be_deleted(desk):
    desk.train(steps=4)
    shutil.rmtree(desk.folder / "a")
    os.unlink(desk.folder / "a.lock")
    assert desk.train(resume=True, steps=6).saved
