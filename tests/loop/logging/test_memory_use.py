"""Memory of the fullest device if the backend reports it, else of the process."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np

from meshwright.loop.logging.memory_use import Memory, MemoryMeter, peak_resident, read_memory


def device(process=0, **stats):
    return SimpleNamespace(process_index=process, memory_stats=lambda: stats or None)


def test_the_fullest_of_this_process_counts():
    gib = 2**30
    devices = [
        device(bytes_in_use=gib, peak_bytes_in_use=9 * gib, bytes_limit=80 * gib),
        device(bytes_in_use=5 * gib, peak_bytes_in_use=6 * gib, bytes_limit=80 * gib),
        device(process=1, bytes_in_use=50 * gib, peak_bytes_in_use=50 * gib),
    ]
    memory = read_memory(devices)
    assert (memory.bytes, memory.peak_bytes, memory.where, memory.limit) == (5 * gib, 9 * gib, "device", 80 * gib)
    assert memory.of_a_step == 9 * gib  # between steps the temporaries are gone, so the peak counts


def test_on_cpus_it_is_the_process():
    before = read_memory()
    block = np.ones(50 * 2**20, np.uint8)
    after = read_memory()
    assert before.where == "process"
    assert before.of_a_step == before.bytes
    assert after.bytes - before.bytes > 40 * 2**20
    assert after.peak_bytes >= after.bytes
    assert block.size
    assert read_memory([device()]).where == read_memory(jax.local_devices()).where == "process"


def test_the_peak_is_this_process_own():
    # Keep this while the child starts, because `ru_maxrss` of a child starts with its parent's peak.
    block = np.ones(400 * 2**20, np.uint8)
    held = peak_resident()
    program = "from meshwright.loop.logging.memory_use import peak_resident; print(peak_resident())"
    child = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert held > block.size
    assert 2**24 < child < 400 * 2**20


def test_the_peak_stays_after_memory_is_freed():
    block = np.ones(50 * 2**20, np.uint8)
    held = peak_resident()
    del block
    assert peak_resident() >= held > 50 * 2**20


def test_a_meter_reads_again_only_after_its_time():
    readings = iter([Memory(1, 1, "process"), Memory(2, 2, "process"), Memory(3, 3, "process")])
    rare = MemoryMeter(60.0, read=lambda: next(readings))
    assert [rare.read().bytes for _ in range(3)] == [1, 1, 1]
    always = MemoryMeter(0.0, read=lambda: next(readings))
    assert [always.read().bytes for _ in range(2)] == [2, 3]
