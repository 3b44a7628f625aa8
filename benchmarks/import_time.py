"""Time of `import meshwright` beyond `import jax`; also checks that it starts no backend.

usage: python benchmarks/import_time.py [--rounds 15] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys

from measure import machine, median, run_child, spread, table, verdict, versions

TARGET = 0.3

CHILD = """
import json, time
start = time.perf_counter()
import jax
middle = time.perf_counter()
import meshwright
for name in ("make_layout", "create_mesh", "match_rules", "with_sharding_constraint", "get_metrics"):
    getattr(meshwright, name)  # imported on first use
end = time.perf_counter()
from jax._src import xla_bridge  # no public API reports this
started = xla_bridge.backends_are_initialized()
print(json.dumps({"jax": middle - start, "meshwright": end - middle, "backend_started": started}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="number of processes after a warmup (default: 15)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    # The first import may compile bytecode and reads from disk, so it is dropped.
    runs = [run_child([sys.executable, "-c", CHILD]) for _ in range(args.rounds + 1)][1:]
    seconds = {name: [run[name] for run in runs] for name in ("jax", "meshwright")}
    started = any(run["backend_started"] for run in runs)
    met = median(seconds["meshwright"]) < TARGET and not started
    if args.json:
        print(json.dumps({"machine": machine(), "seconds": seconds, "backend_started": started, "met": met}, indent=1))
        sys.exit(0 if met else 1)
    print(", ".join(f"{name} {version}" for name, version in versions("meshwright", "jax").items()))
    print(f"machine: {machine()}\n")
    labels = {"jax": "import jax", "meshwright": "then import meshwright"}
    rows = [(labels[name], f"{median(s) * 1e3:.0f} ms", f"{spread(s)} ms") for name, s in seconds.items()]
    print(table(("import", "median", "range"), rows))
    print()
    print(verdict(f"{median(seconds['meshwright']):.2f} s beyond jax (target: under {TARGET} s)", met or started))
    print(verdict("no backend started", not started))
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
