"""Values and times of the mLSTM's kernels on one Hopper GPU for heads of many sizes, beside the XLA form.

    PYTHONPATH=src python3 benchmarks/mlstm_sizes.py                        # about three minutes on 16 cores
    PYTHONPATH=src python3 benchmarks/mlstm_sizes.py --sizes 320,640 128,192
    PYTHONPATH=src python3 benchmarks/mlstm_sizes.py --tiny                 # on a CPU, with the XLA form alone

Each size has a process. All compile at once and compare h and the five gradients with float32, without and with
documents (see `mlstm_h200.py`). When all of them are done, they time their programs, one process after another: medians
over rounds in a drawn order, against the XLA form at its default chunk size. Exits with 1 if a size fails or differs.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from measure import table

SIZES = [(64, 64), (192, 384), (320, 640), (384, 768), (448, 448), (512, 640), (512, 1024)]
SHAPE, TINY_SHAPE = (4, 4096, 4), (1, 64, 1)  # B, S, H
HEADINGS = ["K, V", "XLA, forward", "kernels", "of XLA", "XLA, with backward", "kernels", "of XLA", "values"]


def measure(size: tuple[int, int], args: Any, barrier: Any, lock: Any, results: Any) -> None:
    try:
        import mlstm_h200

        shape = (*(TINY_SHAPE if args.tiny else SHAPE), *size)
        programs = mlstm_h200.compile_shape(shape, [None, "kernels"], args)
        values = mlstm_h200.check_values(shape, programs, exactly=False)
    finally:
        with contextlib.suppress(threading.BrokenBarrierError):  # a process that failed does not stop the others
            barrier.wait(args.seconds)
    with lock:
        timed = mlstm_h200.time_shape(shape, [None, "kernels"], programs, args)
        print(" | ".join(row(size, values, timed)), flush=True)
        results.put((size, values, timed))


def main() -> None:
    args = arguments()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # as many processes share one GPU
    context = multiprocessing.get_context("spawn")
    barrier, lock, results = context.Barrier(len(args.sizes)), context.Lock(), context.Queue()
    given = SimpleNamespace(**vars(args), values=True, threads=3)
    running = [context.Process(target=measure, args=(size, given, barrier, lock, results)) for size in args.sizes]
    for process in running:
        process.start()
    found: dict[Any, Any] = {}
    failed = 0
    for process in running:
        process.join(args.seconds)
        while not results.empty():
            size, *rest = results.get()
            found[size] = rest
        if process.exitcode != 0:
            failed += 1
            process.kill()
    print(f"B, S, H = {TINY_SHAPE if args.tiny else SHAPE}; milliseconds, medians of {args.rounds} rounds")
    print(table(HEADINGS, [row(size, *found[size]) for size in args.sizes if size in found]))
    met = all(value.get("met") for values, _ in found.values() for value in values)
    sys.exit(1 if failed or not met or len(found) < len(args.sizes) else 0)


def row(size: tuple[int, int], values: list[dict[str, Any]], timed: list[dict[str, Any]]) -> list[str]:
    cells = [", ".join(map(str, size))]
    errors = [result["error"] for result in (*timed, *values) if "error" in result]
    if errors:
        return [*cells, errors[0], "", "", "", "", "", ""]
    xla, kernels = timed
    for direction in ("forward", "both"):
        for result in (xla, kernels):
            low, high = result[f"{direction}_range"]
            cells.append(f"{result[direction]:.2f} ({low:.2f}-{high:.2f})")
        cells.append(f"{kernels[direction] / xla[direction]:.3f}")
    return [*cells, f"{max(max(result['float32']) for result in values):.1e}"]


def size_of(text: str) -> tuple[int, int]:
    keys, values = map(int, text.split(","))
    return keys, values


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=size_of, nargs="+", help="K,V of heads (default: a table of 7; more take longer to compile)"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--inner", type=int, default=3, help="calls per synchronization (default: 3)")
    parser.add_argument("--seconds", type=float, default=200, help="limit for compiling and comparing (default: 200)")
    parser.add_argument("--tiny", action="store_true", help="short rows and two small sizes")
    args = parser.parse_args()
    args.sizes = args.sizes or ([(16, 32), (32, 32)] if args.tiny else SIZES)
    return args


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
