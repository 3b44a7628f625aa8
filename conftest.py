"""What every test sees, whether it is a test file, a docstring example or a code block in the docs."""

import functools
import gc
import os
import signal
from collections import Counter
from pathlib import Path

import jax
from jax._src import compilation_cache as cache_of_programs
from jax.experimental.compilation_cache import compilation_cache
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from meshwright.parallel.pipeline import flow

ROOT = Path(__file__).parent

# Eight simulated devices: enough for three mesh axes of size two. jax must learn of them before it starts.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# A shell starts background jobs with Ctrl-C ignored, which the processes that tests interrupt would inherit.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# ```python blocks run, top to bottom, in one namespace per file. Anything else is only shown.
pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/**/*.md"],
).pytest()

collect_ignore = ["dev.py", "docs/conf.py", "docs/_build"]


# --- Most of a test's time is compilation ---

# Every program is kept for its other uses in this process, however small or quick to compile: in memory, because to
# serialize it can take as long as to compile it. With MESHWRIGHT_KEEP_PROGRAMS=1, also on disk for the next run.
CACHE = str(ROOT / ".cache" / "jax")
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

programs = {}  # the last used last
_read, _write = cache_of_programs.get_executable_and_time, cache_of_programs.put_executable_and_time


def read_program(key, options, backend, devices, *callbacks):
    # Newer versions of jax give a program its host callbacks only when they load it.
    if jax.config.jax_compilation_cache_dir != CACHE or key not in programs or any(callbacks):
        return _read(key, options, backend, devices, *callbacks)
    programs[key] = programs.pop(key)
    return programs[key]


def keep_program(key, name, executable, backend, seconds):
    is_ours = jax.config.jax_compilation_cache_dir == CACHE
    if is_ours:
        programs[key] = executable, seconds
        if len(programs) > 256:
            del programs[next(iter(programs))]
    if not is_ours or "MESHWRIGHT_KEEP_PROGRAMS" in os.environ:
        _write(key, name, executable, backend, seconds)


cache_of_programs.get_executable_and_time, cache_of_programs.put_executable_and_time = read_program, keep_program

# Tests call tiny programs a few times, so they are compiled without LLVM's optimizations, in one piece, and with XLA's
# old code generator for fusions, which needs a third of the time of the new one. Newer versions have only the new one.
# Subprocesses inherit this; a flag that is set already stays as it is.
FLAGS = {"--xla_cpu_parallel_codegen_split_count": "1"}
if jax.__version_info__[:2] == (0, 10):
    FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
present = os.environ.get("XLA_FLAGS", "")
added = [f"{name}={value}" for name, value in FLAGS.items() if name not in present]
os.environ["XLA_FLAGS"] = " ".join([present, *added]).strip()
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
jax.config.update("jax_disable_most_optimizations", True)

# Programs for other hardware are compiled by hand, and read: they are what a user's compiler makes. On a CPU, the
# collectives, schedule and memory of a program come from before code generation, so it stays fast there too.
AS_FOR_USERS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}  # XLA's defaults
_compile = jax.stages.Lowered.compile


@functools.wraps(_compile)
def compile_to_read(lowered, compiler_options=None, **arguments):
    """Compile, with XLA's defaults if not for a CPU."""
    defaults = {} if lowered._lowering._platforms == ("cpu",) else AS_FOR_USERS
    return _compile(lowered, defaults | dict(compiler_options or {}), **arguments)


jax.stages.Lowered.compile = compile_to_read

# Tracing makes many objects that live until the test ends, so dead ones are looked for more seldom, and never among the
# modules and collected tests.
gc.set_threshold(50_000, 10, 10)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


# --- Pipelines stay out of the cache ---

# Read from there, XLA:CPU runs a pipeline's collectives in another order, and hangs. Tracing a pipeline turns the cache
# off until the test ends, so no test has to ask for it.
_branch = flow.branch


def use_cache(wanted):
    if jax.config.jax_enable_compilation_cache != wanted:
        jax.config.update("jax_enable_compilation_cache", wanted)
        compilation_cache.reset_cache()


def branch_without_cache():
    use_cache(False)
    return _branch()


flow.branch = branch_without_cache


def pytest_runtest_setup(item):
    use_cache(True)


# --- Order ---


def pytest_collection_modifyitems(items):
    """Files that hold slow tests come first, so that no worker starts one while the others are already done."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])  # stable: a file's tests stay together and in order
