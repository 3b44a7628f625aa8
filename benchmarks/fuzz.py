"""Fuzzes the shipped models and the foreign examples: random meshes and options, each compared with one device.

JAX_PLATFORMS=cpu nice python benchmarks/fuzz.py --cases 150                 # all jobs, about 19 cases each
JAX_PLATFORMS=cpu nice python benchmarks/fuzz.py --jobs decoder xlstm --cases 40 --seed 1

Prints one row per case, as it ends, and a summary per job. Exits with 1 if a case differs or fails.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import meshwright as mw
from meshwright.models import Decoder
from meshwright.models.xlstm import XLSTM
from meshwright.train import language_job
from meshwright.verify.fuzz import fuzz

EXAMPLES = Path(__file__).parents[1] / "examples"
VOCAB, ROWS, TOKENS = 64, 16, 16


def shipped(model):
    job = language_job(model, batch_size=ROWS, num_tokens=TOKENS)

    def make_batch(seed):
        generator = np.random.default_rng(seed)
        tokens = {name: generator.integers(0, VOCAB, (ROWS, TOKENS), dtype=np.int32) for name in ("inputs", "targets")}
        return tokens | {"weights": (generator.random((ROWS, TOKENS)) < 0.8).astype(np.float32)}

    return job, make_batch(0)


def decoder():
    return shipped(Decoder.named("tiny", vocab_size=VOCAB, num_layers=2, d_model=32, d_ff=64, dropout=0.1))


def xlstm():
    return shipped(XLSTM.named("tiny", vocab_size=VOCAB, num_layers=2, d_model=32))


def example(path):
    def load():
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module.job, None

    return load


def known_jobs():
    jobs = {"decoder": decoder, "xlstm": xlstm}
    for path in sorted(EXAMPLES.glob("*.py")):
        if "\njob = " in path.read_text() and path.stem != "layout_7b":  # too large to compute
            jobs[path.stem] = example(path)
    return jobs


def main():
    jobs = known_jobs()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=150, help="number of cases over all jobs (default: 150)")
    parser.add_argument("--jobs", nargs="*", default=list(jobs), choices=list(jobs), help="jobs (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first job's cases; each next job adds 1")
    parser.add_argument("--seconds", type=float, default=None, help="time limit per job, in seconds (default: none)")
    options = parser.parse_args()
    mw.simulate_cpu_devices()
    # Compilation takes most of the time, and LLVM's optimizations half of that.
    jax.config.update("jax_disable_most_optimizations", True)
    # Cases share programs: references that differ in their batch only, and initializations.
    cache = tempfile.TemporaryDirectory()
    jax.config.update("jax_compilation_cache_dir", cache.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    summaries, good = [], True
    for number, name in enumerate(options.jobs):
        count = options.cases // len(options.jobs) + (number < options.cases % len(options.jobs))
        began = time.monotonic()
        job, batch = jobs[name]()
        report = fuzz(
            job,
            count,
            seconds=options.seconds,
            seed=options.seed + number,  # so that jobs get different cases
            batch=batch,
            name=name,
            progress=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
        )
        print(f"\n{name}\n{report.table()}\n{report}", flush=True)
        summaries.append(f"{name:24} {time.monotonic() - began:6.0f} s  {report.summary()}")
        good = good and report.ok
    print("\n" + "\n".join(summaries))
    sys.exit(not good)


if __name__ == "__main__":
    main()
