"""Two real processes with four devices each read the rows of one process with eight, half of them each."""

import json
import socket
import subprocess
import sys
import textwrap

import pytest

from meshwright.data import Batches, Ledger, MixedBatches, check_ledger

PROGRAM = textwrap.dedent(
    """
    import json, sys
    import jax
    import numpy as np

    rank, port, folder, mesh = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(
        f"127.0.0.1:{port}", 2, rank, coordinator_bind_address=f"127.0.0.1:{port}" if rank == 0 else None
    )
    import meshwright as mw
    from meshwright.data import Batches, Ledger

    class Rows:
        fingerprint, reads = "counted", []
        def __len__(self):
            return 20
        def __getitem__(self, index):
            self.reads.append(int(index))
            return {"inputs": np.full(4, index, np.int32), "weights": np.ones(4, np.float32)}

    rows, ledger = Rows(), Ledger(folder)
    mesh = mw.create_mesh(mesh)
    split = lambda batch: jax.tree.map(lambda leaf: jax.NamedSharding(mesh, mw.P("dp")), batch)
    total = jax.jit(lambda batch: (batch["inputs"][:, 0] * 32.0 ** -np.arange(8)).sum())
    told = []
    with ledger, Batches(rows, batch_size=8, shardings=split, seed=0, ledger=ledger, prefetch=0) as batches:
        for _ in range(5):
            rows.reads.clear()
            batch = next(batches)
            held = sorted({int(shard.data[n, 0]) for shard in batch.arrays["inputs"].addressable_shards
                           for n in range(len(shard.data))})
            # Both compute this together; it depends on the rows and their order.
            told.append({"reads": len(rows.reads), "held": held, "ids": batch.row_ids.tolist(),
                         "total": float(total(batch.arrays))})
    print(json.dumps(told))
    """
)


def run_two(program, *arguments):
    """Returns what each of two processes printed last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-c", program]
    processes = [
        subprocess.Popen([*command, str(rank), port, *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    return [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes]


def test_two_processes_read_disjoint_rows_of_a_mixture(desk, tmp_path):
    program = PROGRAM.replace("import Batches, Ledger", "import Ledger, MixedBatches")
    program = program.replace("Batches(rows,", "MixedBatches({'a': rows, 'b': rows}, {'a': 3, 'b': 1},")
    assert "MixedBatches({" in program
    told = run_two(program, str(tmp_path), "dp:8")
    assert all(step["reads"] == 4 for rank in told for step in rank)
    lines = [
        [json.loads(line) for line in (tmp_path / f"start-0001.rank-{rank:05}.jsonl").read_text().splitlines()[1:]]
        for rank in range(2)
    ]
    for here, there in zip(*lines, strict=True):
        rows = [set(zip(line["sources"], line["source_positions"], strict=True)) for line in (here, there)]
        assert not rows[0] & rows[1]
        assert len(rows[0] | rows[1]) == 8
    rows = {name: desk.CountedRows(20) for name in "ab"}
    shardings = desk.meshes["dp:1"]
    with MixedBatches(rows, {"a": 3, "b": 1}, batch_size=8, shardings=shardings, seed=0) as batches:
        for step in range(5):
            assert desk.rows_of(next(batches)) == told[0][step]["ids"] + told[1][step]["ids"]
    report = check_ledger(tmp_path, upto_step=5).require()
    assert report.sources == {"a": [20, 10], "b": [10]}


@pytest.mark.parametrize(("mesh", "num_reads"), [("dp:8", 4), ("dp:2,tp:4", 4), ("tp:2,dp:4", 8)])
def test_two_processes(desk, tmp_path, mesh, num_reads):
    told = run_two(PROGRAM, str(tmp_path), mesh)
    with Batches(desk.CountedRows(20), batch_size=8, shardings=desk.meshes["dp:8"], seed=0) as batches:
        for step in range(5):
            rows = desk.rows_of(next(batches))
            total = sum(row * 32.0**-place for place, row in enumerate(rows))
            for rank in range(2):
                assert told[rank][step]["reads"] == num_reads
                assert sorted(set(told[rank][step]["ids"])) == told[rank][step]["held"]
                assert told[rank][step]["total"] == pytest.approx(total, rel=1e-6)
            assert {*told[0][step]["held"], *told[1][step]["held"]} == set(rows)

    report = check_ledger(tmp_path, rows_per_epoch=20, upto_step=5).require()
    assert (report.num_rows, report.epochs) == (40, [20, 20])
    # One process resumes from step 4.
    with (
        Ledger(tmp_path) as ledger,
        Batches(
            desk.CountedRows(20), batch_size=8, shardings=desk.meshes["dp:2,tp:4"], seed=0, ledger=ledger,
            start_row=32, first_step=5,
        ) as batches,
    ):  # fmt: skip
        for _ in range(4):
            next(batches)
    report = check_ledger(tmp_path, upto_step=8).require()
    assert (report.num_starts, report.num_redone, report.epochs) == (2, 1, [20, 20, 20, 4])
