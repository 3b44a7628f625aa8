"""Memory of plans with tensor parallelism on one host of H200s: computed beside compiled.

    python benchmarks/plan_tp.py --python PYTHON        # with the CUDA plugin; no GPU, half an hour
    python benchmarks/plan_tp.py --only fsdp:4,tp:2 --rows 16

The models are a decoder with the sizes of the 7B and 8 layers, and the 956M, in rows of 2048 tokens.
"""

from __future__ import annotations

import argparse
import sys

from measure import table, verdict, versions

from meshwright.models import Decoder
from meshwright.plan.compiled.compile import compile_step
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train import language_job

TARGET, TOKENS, LIMIT = "h200:1x8", 2048, 0.10
MODELS = {"7b": Decoder.named("7b", num_layers=8), "956m": Decoder.named("956m")}


def setup(mesh: str, rows: int, num_minibatches: int, sync: str, remat: str = "none") -> Setup:
    return Setup(mesh=mesh, rows=rows, num_minibatches=num_minibatches, sync=sync, remat=remat)


CASES = {
    "7b": [
        setup("fsdp:4,tp:2", 16, 4, "once"),
        setup("fsdp:4,tp:2", 32, 4, "every"),
        setup("fsdp:4,tp:2", 32, 1, "hybrid"),
        setup("fsdp:4,tp:2", 32, 4, "hybrid"),
        setup("fsdp:4,tp:2", 32, 1, "once"),
        setup("fsdp:4,tp:2", 32, 4, "once"),
        setup("fsdp:4,tp:2", 32, 4, "every", "full"),
        setup("fsdp:4,tp:2", 32, 1, "once", "full"),
        setup("fsdp:4,tp:2", 32, 4, "once", "full"),
        setup("fsdp:4,tp:2", 32, 1, "hybrid", "full"),
        setup("fsdp:4,tp:2", 32, 4, "hybrid", "full"),
        setup("fsdp:2,tp:4", 16, 4, "once"),
        setup("fsdp:2,tp:4", 32, 4, "once"),
        setup("fsdp:2,tp:4", 32, 1, "hybrid"),
        setup("fsdp:2,tp:4", 32, 4, "once", "full"),
        setup("fsdp:2,tp:4", 32, 1, "once", "full"),
        setup("fsdp:2,tp:4", 32, 4, "every"),
        setup("tp:8", 16, 4, "once"),
        setup("tp:8", 16, 1, "hybrid"),
        setup("tp:8", 16, 4, "hybrid", "full"),
        setup("dp:4,tp:2", 16, 4, "once"),
        setup("dp:4,tp:2", 16, 1, "hybrid", "full"),
        setup("dp:4,tp:2", 16, 4, "hybrid"),
        setup("fsdp:8", 32, 4, "once"),
        setup("fsdp:8", 32, 4, "once", "full"),
        setup("fsdp:8", 32, 1, "once"),
        setup("fsdp:8", 32, 1, "hybrid", "full"),
        setup("dp:8", 32, 4, "once"),
    ],
    "956m": [
        setup("fsdp:4,tp:2", 64, 4, "once", "dots"),
        setup("fsdp:4,tp:2", 64, 1, "once", "dots"),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter with JAX's CUDA plugin")
    parser.add_argument("--only", help="mesh of the cases to run")
    parser.add_argument("--rows", type=int, help="rows of the cases to run")
    options = parser.parse_args()
    jobs = {name: language_job(model, batch_size=32, num_tokens=TOKENS) for name, model in MODELS.items()}
    profiles = {name: profile_job(job, platform="gpu") for name, job in jobs.items()}
    lines, worst = [], 0.0
    for name, case in [(name, case) for name, cases in CASES.items() for case in cases]:
        if options.only not in (None, case.mesh) or options.rows not in (None, case.rows):
            continue
        job, profile = jobs[name], profiles[name]
        computed = make_plan(job, TARGET, case, profile=profile).memory.total
        compiled = compile_step(job, TARGET, case, python=options.python, timeout_s=600)
        ratio = computed / compiled.peak_bytes
        worst = max(worst, abs(ratio - 1))
        sizes = [f"{size / 2**30:.2f}" for size in (compiled.peak_bytes, computed)]
        shared = [name, case.mesh, str(case.rows), str(case.num_minibatches), str(case.sync), case.remat]
        lines.append([*shared, *sizes, f"{ratio:.3f}", f"{compiled.hidden_share:.0%}"])
    head = ["model", "mesh", "rows", "minibatches", "sync", "remat", "compiled, GiB", "computed", "ratio", "hidden"]
    print(table(head, lines))
    print(verdict(f"at most {worst:.1%} off the compiled peak (limit: {LIMIT:.0%})", worst <= LIMIT))
    print(versions("jax"))


if __name__ == "__main__":
    main()
