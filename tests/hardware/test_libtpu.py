"""libtpu stays quiet on machines without TPUs, and is left alone on machines with them."""

import importlib.util
import os
import subprocess
import sys

import pytest

from meshwright.hardware import libtpu


def add_device(folder, name, vendor, kind):
    (folder / name).mkdir()
    (folder / name / "vendor").write_text(f"{vendor}\n")
    (folder / name / "class").write_text(f"{kind}\n")


def test_tpus_are_pci_devices_of_google_that_are_not_disks_or_network_cards(tmp_path):
    assert not libtpu.has_tpu(tmp_path / "absent")
    add_device(tmp_path, "0000:00:03.0", "0x8086", "0xff0000")
    add_device(tmp_path, "0000:00:04.0", "0x1ae0", "0x020000")  # a network card
    add_device(tmp_path, "0000:00:05.0", "0x1ae0", "0x010802")  # a disk
    (tmp_path / "no_files").mkdir()
    assert not libtpu.has_tpu(tmp_path)
    add_device(tmp_path, "0000:00:06.0", "0x1ae0", "0xff0000")
    assert libtpu.has_tpu(tmp_path)


@pytest.mark.parametrize(
    ("installed", "tpu", "quiet"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_variables_are_set_only_without_tpus(monkeypatch, installed, tpu, quiet):
    monkeypatch.setattr(os, "environ", {"TPU_WORKER_ID": "3"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(libtpu, "has_tpu", lambda: tpu)
    libtpu.quiet_libtpu()
    assert os.environ == ({**libtpu.TPU_ENVIRONMENT, "TPU_WORKER_ID": "3"} if quiet else {"TPU_WORKER_ID": "3"})


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None or libtpu.has_tpu(), reason="needs libtpu without TPUs")
def test_a_command_that_starts_jax_prints_nothing_of_libtpu():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "JAX_PLATFORMS"))}
    command = [sys.executable, "-m", "meshwright", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "cpu" in done.stdout.lower()
    assert "TPU" not in done.stderr


@pytest.mark.parametrize(
    ("installed", "tpu", "gpu", "given", "platforms"),
    [
        (True, False, False, None, "cpu"),
        (True, False, True, None, "cuda,cpu"),
        (True, False, False, "cuda", "cuda"),
        (True, True, False, None, None),
        (False, False, False, None, None),
    ],
)
def test_platforms_without_libtpu(monkeypatch, tmp_path, installed, tpu, gpu, given, platforms):
    monkeypatch.setattr(os, "environ", {} if given is None else {"JAX_PLATFORMS": given})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(libtpu, "has_tpu", lambda: tpu)
    monkeypatch.setattr(libtpu, "_DEVICES", tmp_path)
    monkeypatch.delitem(sys.modules, "jax")
    if gpu:
        (tmp_path / "nvidia0").touch()
    libtpu.skip_libtpu()
    assert os.environ.get("JAX_PLATFORMS") == platforms


PLAN = """
from meshwright.cli import main
plan = "plan --model decoder-tiny --num-tokens 64 --batch-size 8 --target h200:1x8 --mesh fsdp:8 --no-compile"
try:
    main(plan.split())
except SystemExit as ended:
    assert ended.code == 0
print("libtpu.so" in open("/proc/self/maps").read())
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None or libtpu.has_tpu(), reason="needs libtpu without TPUs")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_plan_does_not_start_libtpu():
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", PLAN], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr
