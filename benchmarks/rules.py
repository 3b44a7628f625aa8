"""CPU time of `explain_layout` with its printed report, against fjformer's `match_partition_rules`.

usage: python benchmarks/rules.py [--json]

Both sides match the same 10,000 leaves and 40 rules, in separate processes and environments, in turns. Meshwright also
checks every spec against the mesh and prints the report. The specs must be equal. The first run creates the peer's
environment in `.cache/peers` (about a minute).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import ROOT, machine, median, run_child, spread, table, verdict, versions

PEER = "fjformer==0.0.57"
# Newest versions that it imports with: its numpy 1.26 pin ends at jax 0.7.1, and later flax removed a name it needs.
PEER_PINS = ("jax==0.7.1", "jaxlib==0.7.1", "flax==0.9.0")
PEER_PYTHONS = ((3, 11), (3, 12))
TARGET = 2.0
MESH = (("dp", 2), ("fsdp", 8), ("tp", 4))

MODULES = ("attn", "cross_attn", "mlp", "moe", "conv", "gate", "norm", "adapter")
LEAVES = ("query", "key", "value", "out", "scale")
SPECS = (["fsdp", "tp"], ["tp", "fsdp"], ["fsdp"], [None, "tp"], [["dp", "fsdp"], "tp"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=250, help="number of layers of 40 leaves (default: 250)")
    parser.add_argument("--rounds", type=int, default=5, help="processes per side (default: 5)")
    parser.add_argument("--calls", type=int, default=5, help="calls per process after the first (default: 5)")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="Python 3.11 or 3.12 for the peer (default: this one)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--side", choices=("ours", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        work = json.loads(args.work.read_text())
        print(json.dumps((measure_ours if args.side == "ours" else measure_peer)(work, args.calls)))
        return

    peer = peer_environment(args.peer_python)
    pythons = {"ours": sys.executable, "peer": str(peer)}
    results: dict[str, Any] = {}
    for case, rules in cases().items():
        work = {"leaves": make_leaves(args.layers), "rules": rules}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "work.json"
            file.write_text(json.dumps(work))
            runs: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
            for _ in range(args.rounds):  # in turns, so that a slow moment of the machine affects both
                for side in runs:
                    options = ["--side", side, "--work", str(file), "--calls", str(args.calls)]
                    runs[side].append(run_child([pythons[side], __file__, *options], keep_pythonpath=side == "ours"))
        results[case] = summarise(runs)
    failed = any(not result["met"] for result in results.values())
    if args.json:
        print(json.dumps({"machine": machine(), "cases": results}, indent=1))
    else:
        show(results)
    sys.exit(1 if failed else 0)


def make_leaves(num_layers: int) -> list[tuple[str, list[int]]]:
    """Returns paths and shapes of a model with eight modules per layer."""
    return [
        (f"model/layers/{layer}/{module}/{leaf}", [64, 256])
        for layer in range(num_layers)
        for module in MODULES
        for leaf in LEAVES
    ]


def cases() -> dict[str, list[tuple[str, list[Any]]]]:
    """Returns two sets of 40 rules: one in which all match, and one with 19 idle rules to report."""
    forms = ("{m}/{l}", "{m}/{l}$", r"layers/\d+/{m}/{l}", "(^|/){m}/{l}", "{m}/({l}|{l}_proj)")
    kinds = [(module, leaf) for module in MODULES for leaf in LEAVES]
    tidy = [
        # "attn/" also occurs in "cross_attn/", so rules for "attn" start with a slash.
        ("/" * (module == "attn" and form[0] == "{") + form.format(m=module, l=leaf), SPECS[index % len(SPECS)])
        for index, (module, leaf) in enumerate(kinds)
        for form in [forms[index % len(forms)]]
    ]
    dead = [(f"decoder/block_{n}/kernel", ["fsdp", "tp"]) for n in range(10)]
    shadowed = [(f"layers/{n}/attn/query", ["tp", "fsdp"]) for n in range(9)]
    untidy = [*tidy[:20], *dead, *shadowed, (".*", ["fsdp", "tp"])]
    assert len(tidy) == len(untidy) == 40
    return {"all rules in use": tidy, "19 idle rules": untidy}


def nested(leaves: list[tuple[str, list[int]]], make_leaf: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, shape in leaves:
        *folders, last = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = make_leaf(tuple(shape))
    return tree


def prepare(work: dict[str, Any]) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Returns the rules and the tree of abstract leaves for both sides."""
    import jax
    from jax.sharding import PartitionSpec as P

    entry = lambda axes: tuple(axes) if isinstance(axes, list) else axes  # noqa: E731
    rules = [(text, P(*map(entry, spec))) for text, spec in work["rules"]]
    return rules, nested(work["leaves"], lambda shape: jax.ShapeDtypeStruct(shape, "float32"))


def timed(call: Any, num_calls: int) -> tuple[list[float], Any]:
    """Returns CPU seconds, which other work on the machine affects less; both sides use one thread."""
    times, result = [], None
    for _ in range(1 + num_calls):
        start = time.process_time()
        result = call()
        times.append(time.process_time() - start)
    return times, result


def measure_ours(work: dict[str, Any], num_calls: int) -> dict[str, Any]:
    from meshwright import create_abstract_mesh, explain_layout  # before the clock starts, as for the peer

    rules, tree = prepare(work)
    names, sizes = zip(*MESH, strict=True)
    mesh = create_abstract_mesh(sizes, names)

    def call() -> tuple[Any, str]:
        report = explain_layout(rules, tree, mesh)
        return report, str(report)

    times, (report, text) = timed(call, num_calls)
    assert report.ok, text
    specs = {leaf.name: list(leaf.spec) for leaf in report.leaves}
    lines = len(text.splitlines())
    return {"times": times, "specs": specs, "report_lines": lines, "versions": versions("meshwright", "jax")}


def measure_peer(work: dict[str, Any], num_calls: int) -> dict[str, Any]:
    import jax
    from fjformer.partition_utils import match_partition_rules
    from jax.sharding import PartitionSpec as P

    rules, tree = prepare(work)
    times, result = timed(lambda: match_partition_rules(rules, tree), num_calls)
    flat, _ = jax.tree_util.tree_flatten_with_path(result, is_leaf=lambda node: isinstance(node, P))
    specs = {"/".join(str(key.key) for key in path): list(spec) for path, spec in flat}
    return {"times": times, "specs": specs, "versions": versions("fjformer", "jax", "flax")}


def summarise(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    ours, peer = runs["ours"][-1], runs["peer"][-1]
    wrong = [path for path in {**ours["specs"], **peer["specs"]} if ours["specs"].get(path) != peer["specs"].get(path)]
    if wrong:
        sides = [side["specs"].get(wrong[0]) for side in (ours, peer)]
        sys.exit(
            f"error: {len(wrong)} leaves get different specs, the first `{wrong[0]}`: ours {sides[0]}, peer {sides[1]}."
        )
    first = {side: [run["times"][0] for run in done] for side, done in runs.items()}
    later = {side: [seconds for run in done for seconds in run["times"][1:]] for side, done in runs.items()}
    ratios = {
        "first call": median(first["peer"]) / median(first["ours"]),
        "later calls": median(later["peer"]) / median(later["ours"]),
    }
    return {
        "num_leaves": len(ours["specs"]),
        "report_lines": ours["report_lines"],
        "seconds": {"first call": first, "later calls": later},
        "ratios": ratios,
        "met": min(ratios.values()) >= TARGET,
        "versions": {"ours": ours["versions"], "peer": peer["versions"]},
    }


def show(results: dict[str, Any]) -> None:
    rows = []
    for case, result in results.items():
        for when, sides in result["seconds"].items():
            cells = [f"{median(sides[side]) * 1e3:.0f} ms ({spread(sides[side])})" for side in ("ours", "peer")]
            rows.append((case, when, *cells, f"{result['ratios'][when]:.1f}x"))
    some = next(iter(results.values()))
    for side, found in some["versions"].items():
        print(f"{side}: " + ", ".join(f"{name} {version}" for name, version in found.items()))
    print(f"machine: {machine()}\n")
    print(table(("rules", "call", "meshwright, with report", PEER.replace("==", " "), "ratio"), rows))
    print(f"\nspecs of all {some['num_leaves']} leaves are equal.")
    for case, result in results.items():
        lowest = min(result["ratios"].values())
        print(verdict(f"{case}: {lowest:.2f}x as fast, report included (target {TARGET:g}x)", result["met"]))


def peer_environment(python: str) -> Path:
    """Returns the interpreter of the peer's environment, creating the environment if needed."""
    folder = ROOT / ".cache" / "peers" / PEER.replace("==", "-")
    ready, interpreter = folder / "ready", folder / "bin" / "python"
    pins = " ".join((PEER, *PEER_PINS))
    if ready.is_file() and ready.read_text() == pins:
        return interpreter
    version = subprocess.run(
        [python, "-c", "import sys; print(*sys.version_info[:2])"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    if tuple(map(int, version)) not in PEER_PYTHONS:
        sys.exit(
            f"error: {PEER} cannot be installed on Python {'.'.join(version)}.\nhint: pass --peer-python python3.11"
        )
    print(f"creating the peer's environment in {folder.relative_to(ROOT)} (about a minute)", file=sys.stderr)
    pip = [str(interpreter), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    subprocess.run([*pip, PEER, *PEER_PINS], stdout=sys.stderr, check=True)
    ready.write_text(pins)
    return interpreter


if __name__ == "__main__":
    main()
