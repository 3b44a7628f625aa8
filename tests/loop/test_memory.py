"""Memory of the fullest device where the backend counts it, of the process elsewhere."""

import resource
from types import SimpleNamespace

import jax
import numpy as np

from meshwright.loop.memory import read_memory


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
    assert memory.of_a_step == 9 * gib  # when it is asked, the step is over and its temporaries are gone


def test_on_cpus_it_is_the_process():
    before = read_memory()
    block = np.ones(50 * 2**20, np.uint8)
    after = read_memory()
    assert before.where == "process"
    assert before.of_a_step == before.bytes
    assert after.bytes - before.bytes > 40 * 2**20
    assert after.peak_bytes >= after.bytes
    assert abs(after.peak_bytes - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024) < 2**26
    assert block.size
    assert read_memory([device()]).where == read_memory(jax.local_devices()).where == "process"
