"""The parts of the launcher: commands, GPUs, heartbeats, output, and the newest verified checkpoint."""

import io

import pytest

from meshwright.checkpoint.file_hashes import hash_files
from meshwright.checkpoint.manifest import Manifest, write_manifest
from meshwright.errors import ConfigError
from meshwright.launch import pulse
from meshwright.launch.backends.local import count_oom_kills, find_gpus, gpus_per_process
from meshwright.launch.command import check_command, to_shrink
from meshwright.launch.events import Ending
from meshwright.launch.messages import describe_ending
from meshwright.launch.relay import Relay
from meshwright.launch.safe_step import newest_verified


def save(folder, step, data=b"abc"):
    place = folder / str(step)
    (place / "state").mkdir(parents=True)
    (place / "state" / "x").write_bytes(data)
    others = {"tree": (), "mesh": {}, "layout": {}, "rng": {}, "facts": {"name": "ä"}, "versions": {}}
    write_manifest(place, Manifest(step=step, files=hash_files(place, ["state/x"]), **others))
    return place


def test_the_newest_verified_step_is_complete_and_unchanged(tmp_path):
    for step in (5, 10, 15, 20, 25):
        save(tmp_path, step)
    (tmp_path / "30").mkdir()  # unfinished
    assert newest_verified(tmp_path) == 25
    (tmp_path / "25" / "state" / "x").write_bytes(b"ab")
    assert newest_verified(tmp_path) == 20
    manifest = tmp_path / "20" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 20', '"step": 21'))
    assert newest_verified(tmp_path) == 15
    (tmp_path / "15" / "state" / "x").write_bytes(b"abd")  # the same size
    assert newest_verified(tmp_path) == 15
    assert newest_verified(tmp_path, every_byte=True) == 10
    (tmp_path / "15" / "state" / "x").unlink()
    (tmp_path / "10" / "manifest.json").write_text("[" * 100_000)
    (tmp_path / "10").rename(tmp_path / "12")  # a manifest of another step
    assert newest_verified(tmp_path) == 5
    assert newest_verified(tmp_path / "missing") is None


def test_the_launcher_imports_no_jax_and_refuses_wrong_commands(run_python):
    code = """
    import sys
    from meshwright.cli import main
    wrong = ("--", "-- plan", "--processes 0 -- train", "-- train --process-id=1", "--min-processes 3 -- train")
    for words in (*wrong, "--dry-run --processes 2 -- train"):
        try:
            main(["launch", *words.split()])
        except SystemExit as ended:
            print(ended.code)
    print("jax" in sys.modules, "numpy" in sys.modules)
    """
    done = run_python(code)
    *codes, printed, last, loaded = done.stdout.splitlines()
    assert codes == ["1", "1", "2", "1", "2"], done.stderr
    assert printed.endswith("-m meshwright train --devices 4")
    assert (last, loaded) == ("0", "False False")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], r"launch got no command.\nhint: add it after --"),
        (["plan"], r"cannot launch `plan`"),
        (["train", "--num-processes", "2"], r"--num-processes is set by the launcher"),
    ],
)
def test_commands_that_cannot_be_launched(words, text):
    with pytest.raises(ConfigError, match=text):
        check_command(words)


def test_gpus_are_all_used_or_counted(tmp_path):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert find_gpus({}, tmp_path) == ["0", "1"]
    assert gpus_per_process(8, 2, 3) == 3  # two stay unused, as asked
    with pytest.raises(ConfigError, match=r"8 GPUs cannot be split evenly over 3 processes; 2 would be idle"):
        gpus_per_process(8, 3, None)
    with pytest.raises(ConfigError, match=r"4 processes with 4 GPUs each need 16; this host has 8"):
        gpus_per_process(8, 4, 4)


def test_a_run_shrinks_along_its_data_axis_only():
    assert to_shrink("!dp:4@dcn,tp:2", 3, before=2, now=1) == ["--mesh", "!dp:2@dcn,tp:2", "--minibatches", "6"]
    assert to_shrink("dp:3,tp:2", 1, before=2, now=1) is None
    assert to_shrink("dp:2,tp:2", 1, before=3, now=2) is None


def test_torn_and_foreign_heartbeats_are_ignored(tmp_path):
    with pulse.Pulse(tmp_path, rank=0) as own:
        own.step = 3
        own.flush()
    path = tmp_path / "rank-0.beat"
    good = path.read_bytes()
    for bad in (b"", good[:40], good.replace(b'"step": 3', b'"step": 4'), b"00000000 []".ljust(8192), b"\xff" * 9000):
        path.write_bytes(bad)
        assert pulse.read_pulse(tmp_path, 0) is None
    path.write_bytes(good)
    assert pulse.read_pulse(tmp_path, 0)["step"] == 3


def test_chained_tracebacks_and_runtime_messages_stay_in_the_log(tmp_path):
    text = b"""WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
F0000 00:00:1763.1 77 client.h:80] Terminating process because the JAX distributed service detected fatal errors.
*** Check failure stack trace: ***
    @     0x7f12  absl::Fatal()
Traceback (most recent call last):
  File "a.py", line 1, in f

ValueError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in g
jax.errors.JaxRuntimeError: INTERNAL: Gloo all-reduce failed

saved step 5
"""
    shown = []
    relay = Relay(io.BytesIO(text), tmp_path / "rank-0.log", shown.append)
    relay.finish()
    log = tmp_path / "rank-0.log"
    assert [line for line in shown if line] == [
        f"ValueError: first (traceback in {log})",
        f"jax.errors.JaxRuntimeError: INTERNAL: Gloo all-reduce failed (traceback in {log})",
        "saved step 5",
    ]
    assert log.read_bytes() == text
    assert relay.message == "jax.errors.JaxRuntimeError: INTERNAL: Gloo all-reduce failed"


def test_endings_in_words(tmp_path):
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 3\n")
    assert count_oom_kills(tmp_path / "memory.events") == 3
    assert count_oom_kills(tmp_path / "missing") == 0
    assert "out-of-memory killer" in describe_ending(Ending(signal=9, out_of_memory=True))
    assert describe_ending(Ending(signal=6)) == "aborted (SIGABRT)"
    assert describe_ending(Ending(signal=99)) == "was killed (signal 99)"
    assert "device memory" in describe_ending(Ending(code=1, message="RESOURCE_EXHAUSTED: Out of memory allocating"))
