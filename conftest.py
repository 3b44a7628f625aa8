"""What every test sees, whether it is a test file, a docstring example or a code block in the docs."""

import datetime
import zlib
from pathlib import Path

import jax
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parent

# Eight simulated devices: enough for three mesh axes of size two. jax must learn of them before it starts.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# Most of a test's time is compilation, so every program is kept, however small or quick to compile.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# ```python blocks run, top to bottom, in one namespace per file. Anything else is only shown.
pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/**/*.md"],
).pytest()

collect_ignore = ["dev.py", "docs/conf.py", "docs/_build"]

# All slow tests together take longer than a run of the whole suite should. Each is run every tenth day.
DAYS = 10
SLOW = ("some", "all", "none")


def pytest_addoption(parser):
    parser.addoption(
        "--slow", choices=SLOW, default="some", help="which slow tests to run: those of today (some), all, or none"
    )


def pytest_collection_modifyitems(config, items):
    # Tests that are named on the command line are wanted, whatever day it is.
    named = any("::" in argument for argument in config.invocation_params.args)
    wanted = "all" if named else config.getoption("--slow")
    today = datetime.date.today().toordinal() % DAYS
    left_out = [
        item
        for item in items
        if item.get_closest_marker("slow")
        and (wanted == "none" or (wanted == "some" and zlib.crc32(item.nodeid.encode()) % DAYS != today))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
