"""A fuzzer for everything read from disk or the network: about 5,000 damaged and forged inputs, from fixed seeds.

Each reader either returns a value or raises an error of Meshwright, quickly and in little memory. Readers of files with
a checksum accept no changed value.
"""

import contextlib
import hashlib
import json
import os
import resource
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

from meshwright.bounded_reader import parse_json, read_bytes, read_json
from meshwright.bounded_yaml import parse_yaml
from meshwright.checkpoint import Checkpoints
from meshwright.checkpoint.convert.config_json import ConfigJson
from meshwright.checkpoint.convert.families import family_named
from meshwright.checkpoint.convert.peft_adapters import peft_settings
from meshwright.checkpoint.convert.pretrained import PretrainedFolder, write_pretrained
from meshwright.checkpoint.file_hashes import FileHash
from meshwright.checkpoint.manifest import MANIFEST, Manifest, StoredLeaf, read_manifest, verify_step, write_manifest
from meshwright.cli.checkpoint import ls, show
from meshwright.data import load_tokenizer
from meshwright.data.documents import open_documents
from meshwright.data.formats.bin_tokens import open_bin_tokens
from meshwright.distributed.roll_report import Report, parse_report, signed_report
from meshwright.errors import CheckpointError, ConfigError, DataError, FileFormatError, MeshwrightError
from meshwright.loop.logging.run_log import JsonLines, read_lines
from meshwright.loop.report.run_record import read_run
from meshwright.loop.settings.config import TrainConfig, read_config
from meshwright.models import Decoder

from .mutations import damaged, forged, forged_texts

FAMILIES = sorted(Path(__file__).parent.glob("checkpoint/convert/families/*.json"))
MOST_SECONDS, MOST_BYTES = 30.0, 400e6


@pytest.fixture(autouse=True)
def memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MOST_BYTES


def outcomes(inputs, read, *errors):
    """Returns what `read` makes of each input, or None if it raises one of the errors; any other error fails."""
    expected = errors or (MeshwrightError,)
    found, wrong = [], {}
    for number, one in enumerate(inputs):
        began = time.monotonic()
        try:
            found.append(read(one))
        except expected:
            found.append(None)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            wrong.setdefault("".join(traceback.format_exception(error)[-2:]), f"input {number}: {str(one)[:500]}")
        assert time.monotonic() - began < MOST_SECONDS, f"input {number}: {str(one)[:500]}"
    assert not wrong, "\n".join(f"{place}  {one}" for place, one in wrong.items())
    return found


# --- Manifests ---


def a_manifest():
    leaves = (
        StoredLeaf("params/w", (8, 3), "float32", (8, 4)),
        StoredLeaf("rng", (), "key<threefry2x32>", ()),
    )
    return Manifest(
        step=3,
        files={"state/d/1": FileHash(4, hashlib.sha256(b"abcd").hexdigest())},
        tree=leaves,
        mesh={"axes": {"dp": 2, "tp": 4}, "num_devices": 8, "device_kind": "cpu", "num_processes": 1},
        layout={"params/w": ["dp", ["tp"]], "rng": []},
        rng={"rng": "threefry2x32"},
        facts={"config": {"seed": 0, "steps": 10}, "data": {"next_row": 24}, "model": None},
        versions={"jax": "0.10.2"},
    )


def test_no_damaged_manifest_is_accepted():
    data = a_manifest().to_json().encode()
    found = outcomes(damaged(data, 400, seed=1), lambda one: one != data and Manifest.from_json(one, where="x"))
    assert not any(found)


@pytest.fixture
def steps(tmp_path):
    """A run with the finished steps 3 and 7."""
    for step in (3, 7):
        place = tmp_path / "checkpoints" / str(step)
        (place / "state" / "d").mkdir(parents=True)
        (place / "state" / "d" / "1").write_bytes(b"abcd")
        manifest = a_manifest()
        write_manifest(place, Manifest(**{**vars(manifest), "step": step}))
    return tmp_path


def forge_manifest(body):
    """Returns a manifest with the right hash of wrong contents."""
    if not isinstance(body, dict):
        return json.dumps(body).encode()
    body.pop("sha256", None)
    text = json.dumps(body, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return (json.dumps(body | {"sha256": digest}, indent=1) + "\n").encode()


def test_forged_manifests_stop_neither_ls_nor_an_earlier_step(steps, capsys):
    place = steps / "checkpoints" / "7"
    body = json.loads(a_manifest().to_json())
    body["step"] = 7
    accepted = 0

    def look(forgery):
        nonlocal accepted
        (place / MANIFEST).write_bytes(forge_manifest(forgery))
        assert ls(str(steps)) == 0
        problems = verify_step(place)
        good, notes = Checkpoints(steps / "checkpoints").last_good()
        assert good == (3 if problems else 7)
        assert bool(notes) == bool(problems)
        with contextlib.suppress(CheckpointError):
            show(str(place))
            accepted += 1

    for forgery in [{name: value for name, value in body.items() if name != lost} for lost in body]:
        look(forgery)
    outcomes(forged(body, 300, seed=2), look)
    assert accepted > 0  # changed facts and versions have a valid form
    capsys.readouterr()


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "link to nothing", "too large"])
def test_special_files_never_block(kind, steps, monkeypatch, capsys):
    path = steps / "checkpoints" / "7" / MANIFEST
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to nothing":
        path.symlink_to(steps / "nothing")
    else:
        with path.open("wb") as file:
            file.truncate(2**30)
    began = time.monotonic()
    assert ls(str(steps)) == 0
    assert Checkpoints(steps / "checkpoints").last_good()[0] == 3
    with pytest.raises(CheckpointError):
        read_manifest(path.parent)
    with pytest.raises((OSError, FileFormatError)):
        read_json(path, most=2**20)
    with pytest.raises((ConfigError, DataError)):
        read_config(path)
    with pytest.raises(DataError):
        load_tokenizer(str(path))
    assert time.monotonic() - began < 30  # a FIFO would block for ever
    capsys.readouterr()


def test_a_file_of_a_step_that_became_a_fifo_is_reported(steps):
    path = steps / "checkpoints" / "7" / "state" / "d" / "1"
    path.unlink()
    os.mkfifo(path)
    assert verify_step(steps / "checkpoints" / "7") == ["state/d/1: is not a regular file"]


# --- Logs and run.json ---

LINES = [{"time": 1.5 * n, "step": n, "kind": "x", "text": "é", "data": {"next_row": 8 * n}} for n in range(1, 9)]


def test_no_changed_line_of_a_log_is_accepted(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = JsonLines(path)
    for line in LINES:
        lines.add(line)
    lines.close()
    data = path.read_bytes()

    def read(one):
        path.write_bytes(one)
        return list(read_lines(path))

    # A file without any checksum is one of an older release.
    inputs = [one for one in damaged(data, 550, seed=3) if one.count(b'", "crc": "') + one.count(b'}, "crc": "') > 5]
    assert len(inputs) > 400
    found = outcomes(inputs, read)
    assert all(line in LINES for kept in found for line in kept)
    assert sum(len(kept) for kept in found) > 4 * len(inputs)


def test_a_log_of_an_older_release_gets_checksums(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\n{"step": 2}\n')
    lines = JsonLines(path)
    lines.add({"step": 3})
    lines.close()
    broken = []
    assert list(read_lines(path, broken=broken)) == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert broken == [2]
    assert path.read_bytes().count(b'"crc"') == 3


def test_a_run_folder_with_forged_files_is_read(tmp_path):
    facts = {
        "name": "a", "config": {"seed": 0}, "mesh": {"dp": 2}, "layout": {"leaves": []}, "versions": {"jax": "0"},
        "num_params": 5, "devices": ["cpu"], "mixture": {"a": 1}, "num_processes": 1, "resume_command": "x",
    }  # fmt: skip
    line = {"step": 1, "time": 2.5, "loss": 0.5, "seconds": {"step": 0.1}, "by": [[1.0, 2.0], [3.0, 4.0]]}

    def read(pair):
        (tmp_path / "run.json").write_bytes(pair[0])
        (tmp_path / "metrics.jsonl").write_bytes(pair[1] + b"\n")
        (tmp_path / "events.jsonl").write_bytes(pair[1] + b"\n")
        run = read_run(tmp_path)
        return run.name, run.config, run.last_time, run.step_seconds

    pairs = zip(forged_texts(facts, 250, seed=4), forged_texts(line, 250, seed=5), strict=True)
    assert None not in outcomes(pairs, read)
    pairs = zip(
        damaged(json.dumps(facts).encode(), 150, seed=6), damaged(json.dumps(line).encode(), 150, 7), strict=True
    )
    assert None not in outcomes(pairs, read)


# --- YAML ---

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


def test_damaged_options_are_read_or_refused(tmp_path):
    path = tmp_path / "run.yaml"
    text = TrainConfig().changed({"data": ["web=a", "code=b"], "profile": "10:15", "clip": None}).to_yaml().encode()

    def read(one):
        path.write_bytes(one)
        return read_config(path)

    found = outcomes([*damaged(text, 250, seed=8), *damaged(b"profile: 10:15\nsteps: 5\n", 150, seed=9)], read)
    assert any(found)
    assert not all(found)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (BOMB, "has more than 16 aliases"),
        ("a: &a [*a]", "contains itself"),
        ("a: " + "[" * 5000, "nested more than 16 deep"),
        ("- " * 5000 + "a", "nested more than 16 deep"),
        ("a: !!python/object/apply:os.system [ls]", "which is not allowed"),
        ("a: !!timestamp 2026-99-99", "which is not allowed"),
        ("a: !!binary aGk=", "which is not allowed"),
        ("a: 1\na: 2", "gives `a` twice"),
    ],
)
def test_hostile_yaml_is_refused(text, error):
    with pytest.raises(FileFormatError, match=error):
        parse_yaml(text, where="x")


def test_yaml_scalars_are_not_reinterpreted(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("profile: 10:15\nlearning_rate: 1e-3\nprompt: 2026-01-01\nclip: 1_0.5\n".replace("1_0.5", "10.5"))
    config = read_config(path)
    assert config.run.profile == "10:15"
    assert config.run.prompt == "2026-01-01"
    assert (config.optimizer.learning_rate, config.optimizer.clip) == (1e-3, 10.5)
    for wrong in ("seed: 010", "seed: 0x10", "seed: 1:30", "steps: 2026-01-01", f"steps: {'9' * 5000}"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"use a whole number"):
            read_config(path)


# --- Hugging Face folders ---


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
def test_forged_model_configurations_are_read_or_refused(path):
    config = json.loads(path.read_text())["config"]

    def read(one):
        return family_named(one.get("model_type")).decoder(ConfigJson(one))

    outcomes(forged(config, 40, seed=10), read, CheckpointError)
    for layers in (10**6, 10**9):
        with pytest.raises(CheckpointError, match="num_hidden_layers"):
            read(config | {"num_hidden_layers": layers})
    with pytest.raises(CheckpointError, match=r"eps.*=nan"):
        read(config | {"rms_norm_eps": float("nan")})


def test_damaged_model_folders_are_refused(tmp_path):
    import jax

    model = Decoder.named("tiny", num_layers=1, vocab_size=16)
    write_pretrained(tmp_path / "hf", model, model.init(jax.random.key(0)))
    config, weights = (tmp_path / "hf" / name for name in ("config.json", "model.safetensors"))
    kept = config.read_bytes(), weights.read_bytes()
    size = 8 + int.from_bytes(kept[1][:8], "little")

    def read(pair):
        config.write_bytes(pair[0])
        weights.write_bytes(pair[1])
        return PretrainedFolder(tmp_path / "hf").shapes

    head = ((kept[0], one + kept[1][size:]) for one in damaged(kept[1][:size], 150, seed=11))
    outcomes(head, read, CheckpointError)
    outcomes(((one, kept[1]) for one in damaged(kept[0], 100, seed=12)), read, CheckpointError)
    for dtype in ("I8", "BOOL", "F64", "U8"):
        with pytest.raises(CheckpointError):
            read((kept[0], kept[1].replace(b'"F32"', f'"{dtype}"'.ljust(5).encode(), 1)))
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(CheckpointError, match="is a FIFO, not a regular file"):
        PretrainedFolder(tmp_path / "hf")


def test_forged_adapters_are_refused(tmp_path):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "lora_dropout": 0.1}

    def read(one):
        (tmp_path / "adapter_config.json").write_bytes(one)
        return peft_settings(tmp_path)

    outcomes([*forged_texts(config, 100, seed=13), *damaged(json.dumps(config).encode(), 50, seed=14)], read)


# --- Data ---


def test_damaged_json_lines_are_read_or_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    text = "".join(json.dumps({"text": f"line {n}", "more": [n, {"x": None}]}) + "\n" for n in range(6)).encode()

    def read(one):
        path.write_bytes(one)
        documents = open_documents(str(path))
        return [document.text() for document in documents.stream()]

    outcomes(damaged(text, 250, seed=15), read, DataError)
    outcomes(forged_texts({"text": "a", "more": [1, {"x": None}]}, 100, seed=16), read, DataError)
    with pytest.raises(DataError, match="nested more than 64 deep"):
        read(b'{"text": ' + b"[" * 100_000 + b"}\n")


def test_damaged_tokenizers_are_read_or_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1, "b": 2}, "unk_token": "a"}
    special = {"id": 0, "content": "</s>", "special": True}
    special |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special], "normalizer": None}
    content |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": model}

    def read(one):
        path.write_bytes(one)
        return load_tokenizer(str(path)).encode("a b").tolist()

    outcomes(forged_texts(content, 150, seed=17), read, DataError)
    outcomes(damaged(json.dumps(content).encode(), 150, seed=18), read, DataError)


def test_damaged_array_records_are_read_or_refused(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    path = tmp_path / "a.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for n in range(5):
        writer.write(f"record {n} {'x' * 50}".encode())
    writer.close()
    data, wanted = path.read_bytes(), [f"record {n} {'x' * 50}".encode() for n in range(5)]
    assert len(data) > 100

    def read(one):
        path.write_bytes(one)
        return [document.text() for document in open_documents(str(path)).stream()]

    # Riegeli's own checksums cover the records.
    for kept in outcomes(damaged(data, 100, seed=19), read, DataError):
        assert kept is None or all(text in wanted for text in kept)


def test_forged_sidecars_of_packed_tokens_are_refused(tmp_path):
    path, tokenizer = tmp_path / "a.bin", load_tokenizer("bytes")
    np.array([1, 2, 0, 3, 0], "<u2").tofile(path)

    def read(one):
        path.with_name("a.bin.json").write_bytes(one)
        return open_bin_tokens(path, tokenizer, folder=tmp_path / "cache").num_documents

    sidecar = {"dtype": "uint16", "vocab_size": 256, "end": 0, "header_bytes": 0}
    outcomes(forged_texts(sidecar, 100, seed=20), read, DataError)


# --- JSON itself, and the roll call ---


def test_json_means_the_same_as_to_python_or_is_refused():
    value = {"a": [1, 2.5, None, True, "é\\u0041"], "b": {"c": {}, "d": [[]]}, "e": -1e-5}
    for one in damaged(json.dumps(value).encode(), 500, seed=21):
        with contextlib.suppress(FileFormatError):
            found = parse_json(one, where="x")
            assert repr(found) == repr(json.loads(one))


def test_no_changed_report_is_accepted_at_the_roll_call():
    token, server = "a token of this test", "5e1f"
    report = Report(3, 8, "host", 77, {"seed": "0", "code": "sha256:00"})
    line = signed_report(report, token, server=server, nonce="0102").rstrip(b"\n")

    def read(one):
        found = parse_report(one, token, server)[0]
        assert found == report
        return found

    outcomes(damaged(line, 300, seed=22), read, FileFormatError, PermissionError)
    outcomes(forged_texts(json.loads(line), 300, seed=23), read, FileFormatError, PermissionError)


def test_files_that_grow_while_they_are_read_stay_bounded(tmp_path):
    with pytest.raises(FileFormatError, match="has more than 10 bytes"):
        read_bytes("/proc/self/status", most=10)  # its size is 0
    with pytest.raises(FileFormatError, match="is a device, not a regular file"):
        read_bytes("/dev/zero")
