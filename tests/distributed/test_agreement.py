"""Two real processes in one run: if one fails, both stop and name it; if they could differ, rank 0 decides."""

import json
import socket
import subprocess
import sys
import textwrap

import pytest

# Patches make rank 1 see a different file system, since a test has only one machine.
PROGRAM = """
    import json, os, sys
    from pathlib import Path
    import jax
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    from meshwright.errors import DataError, MeshwrightError
    from meshwright.distributed import join
    from meshwright.loop import decisions, run, run_callbacks, setup
    from meshwright.loop.folder import run_dir as folders
    from meshwright.loop.settings.config import TrainConfig
    from meshwright.loop.safety.spike import SpikeGuard
    from meshwright.distributed.agreement import together
    from unittest.mock import patch

    address, rank, options, where = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4])
    join(address, 2, rank, timeout=60)
    told = {}

    def case(name, act):
        try:
            told[name] = act()
        except (MeshwrightError, OSError) as error:
            told[name] = f"{type(error).__name__}: {error}"

    def fails_on(number):
        if rank == number:
            raise OSError("the disk is gone")
        return "done"

    def on_rank_1(target, name, value):
        return patch.object(target, name, value) if rank == 1 else patch.dict({}, {})

    def config(**changes):
        return TrainConfig().changed({**options, **changes})

    def open_folder(**changes):
        folder = folders.RunFolder.open(config(**changes), name="x")
        folder.close()
        return [str(folder.path), folder.resumed]

    case("no rank fails", lambda: together("reading", lambda: fails_on(5)))
    case("rank 0 fails", lambda: together("reading", lambda: fails_on(0)))
    case("rank 1 fails", lambda: together("reading", lambda: fails_on(1)))

    def no_data(*args, **kwargs):
        raise DataError("no such file")

    with on_rank_1(decisions, "make_source", no_data):
        case("data is missing on rank 1", lambda: run.train(config(run=str(where / "a")), say=print))
    with on_rank_1(Path, "is_dir", lambda self: False), patch.object(folders.time, "sleep", lambda seconds: None):
        case("folder is missing on rank 1", lambda: open_folder(run=str(where / "b")))
    case("nothing to resume", lambda: open_folder(run=str(where / "c"), resume=True))
    os.chdir(where / f"home-{rank}")  # the folder that each was started in
    case("folder", lambda: open_folder())
    (where / "d").mkdir(exist_ok=True)
    (where / "d" / "config.yaml").touch()
    with on_rank_1(Path, "is_file", lambda self: False):
        case("to resume", lambda: open_folder(run=str(where / "d"), resume=True, or_start=True))

    with on_rank_1(decisions, "device_memory", lambda: 1000):
        case("too little memory on rank 1", lambda: run.train(config(run=str(where / "e")), say=print))

    # Rank 1 would choose another mesh and sees no checkpoint; the loss jumps at step 6.
    class Guard(SpikeGuard):
        seen = 0

        def check(self, loss):
            self.seen += 1
            return self.seen == 6

    def train():
        result = run.train(config(run=str(where / "run"), steps=8, rollback=8.0, checkpoint_every=4), say=print)
        return [result.why, result.step, result.saved, result.metrics["loss"]]

    with (
        on_rank_1(decisions, "device_memory", lambda: 60_000),
        on_rank_1(setup.Checkpoints, "latest", lambda self: None),
        patch.object(run_callbacks, "SpikeGuard", Guard),
    ):
        case("train", train)
    print("TOLD" + json.dumps(told), flush=True)
    os._exit(0)
"""
OPTIONS = {
    "model": "decoder-tiny",
    "model_options": ["num_layers=1", "d_model=16", "d_ff=16", "num_heads=2"],
    "batch_size": 8,
    "num_tokens": 16,
    "warmup": 2,
    "eval_every": 0,
    "sample_tokens": 0,
    "report": False,
    "tensorboard": False,
    "hang": 0.0,
}


@pytest.fixture(scope="module")
def ranks(text_folder, token_cache, tmp_path_factory):
    """The reports of two processes."""
    where = tmp_path_factory.mktemp("together")
    for rank in range(2):
        (where / f"home-{rank}").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = json.dumps(OPTIONS | {"data": str(text_folder), "data_cache": str(token_cache)})
    args = [sys.executable, "-c", textwrap.dedent(PROGRAM), address]
    started = [
        subprocess.Popen(
            [*args, str(rank), options, str(where)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()
    found = []
    for text in said:
        lines = [line for line in text.splitlines() if line.startswith("TOLD")]
        assert lines, "\n".join(said)
        found.append(json.loads(lines[0][4:]))
    return where, found


def test_if_one_process_fails_all_stop_and_name_it(ranks):
    where, (first, second) = ranks
    assert first["no rank fails"] == second["no rank fails"] == "done"
    assert first["rank 0 fails"] == second["rank 1 fails"] == "OSError: the disk is gone"
    other = "MeshwrightError: rank {} of 2 failed while reading: OSError: the disk is gone"
    assert (second["rank 0 fails"], first["rank 1 fails"]) == (other.format(0), other.format(1))
    assert "no such file" in second["data is missing on rank 1"]
    assert "rank 1 of 2 failed while loading the job and its data" in first["data is missing on rank 1"]
    assert "but this process cannot see it" in second["folder is missing on rank 1"]
    assert "rank 1 of 2 failed while looking for the run's folder" in first["folder is missing on rank 1"]
    assert "found no mesh of 8 devices" in second["too little memory on rank 1"]
    assert "rank 1 of 2 failed while choosing a mesh" in first["too little memory on rank 1"]
    assert not (where / "a").exists()
    assert not (where / "e").exists()
    assert "holds no run to resume" in first["nothing to resume"]
    assert "holds no run to resume" in second["nothing to resume"]


def test_rank_0_chooses_the_folder(ranks):
    where, (first, second) = ranks
    assert first["folder"] == second["folder"] == [str(where / "home-0" / "runs" / "x-001"), False]
    assert first["to resume"] == second["to resume"] == [str(where / "d"), True]


def test_rank_0_decides_on_the_mesh_and_on_rollbacks(ranks, read_run):
    where, (first, second) = ranks
    assert first["train"] == second["train"]
    assert first["train"][:3] == ["finished", 8, True]
    assert json.loads((where / "run" / "run.json").read_text())["mesh"] == {"dp": 8}
    steps, _, events = read_run(where / "run")
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert [event["to"] for event in events if event["kind"] == "rollback"] == [4]
