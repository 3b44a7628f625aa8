"""A run that dies between checkpoints continues from its snapshot in host memory, bit for bit."""

import os
import secrets
import shutil
from pathlib import Path

import pytest

from meshwright.launch.memory_folder import EVERY, FOLDER, is_memory
from meshwright.loop.run import train

from ..test_job_data import logged
from ..tiny_run import StopAt


class Dies(StopAt):
    """Ends a run without a last save, as SIGKILL does."""

    def wants_stop(self, loop):
        if super().wants_stop(loop):
            raise KeyboardInterrupt
        return False


@pytest.mark.slow
@pytest.mark.skipif(not is_memory(Path("/dev/shm")), reason="/dev/shm is not in memory")
def test_a_dead_run_continues_from_its_snapshot_and_from_its_checkpoint_if_that_is_damaged(desk, monkeypatch):
    plain = {"steps": 7, "eval_every": 3, "checkpoint_every": 3}
    whole = desk.run("arrays", name="whole", **plain)
    memory = Path(f"/dev/shm/meshwright-test-{secrets.token_hex(8)}")
    monkeypatch.setenv(FOLDER, str(memory))
    monkeypatch.setenv(EVERY, "2")
    try:
        monkeypatch.setattr("meshwright.loop.setup.Preemption", lambda: Dies(6))
        with pytest.raises(KeyboardInterrupt):
            train(desk.config("arrays", **plain), say=lambda text: None)
        assert sorted(os.listdir(memory)) == ["2", "4"]
        shutil.copytree(desk.folder(), desk.folder("damaged"))
        shutil.copytree(memory, desk.folder("memory"))
        said = []
        again = desk.run("arrays", resume=True, say=said.append, **plain)
        assert "step 4 is a snapshot in host memory" in said
        assert "resumed from step 4 on dp:8" in said
        assert os.listdir(memory) == []  # the run is finished and saved
        shutil.rmtree(memory)
        shutil.copytree(desk.folder("memory"), memory)
        data = memory / "4" / "rank-0.data"
        data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
        said.clear()
        damaged = desk.run("arrays", name="damaged", resume=True, say=said.append, **plain)
        assert any("skipped the snapshot of step 4 in host memory" in text for text in said)
        assert "resumed from step 3 on dp:8" in said
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    for name, result in (("run", again), ("damaged", damaged)):
        assert desk.bits(result.state) == desk.bits(whole.state)
        assert logged(desk.folder(name)) == logged(desk.folder("whole"))
