"""The ledger: rows are neither lost nor repeated over restarts, and every violation is detected."""

import json

import jax
import numpy as np
import pytest

from meshwright.cli.ledger import ledger as ledger_command
from meshwright.data import Batches, Ledger, check_ledger
from meshwright.data import local_rows as rows_of_devices
from meshwright.data import place_rows as placed
from meshwright.errors import DataError, MeshwrightWarning

NUM_ROWS = 20


@pytest.fixture
def train(desk, tmp_path, monkeypatch):
    """Simulates one start of a run: its processes, one after the other, each with some of the eight devices."""
    from meshwright.data import batches as module

    starts = []

    def play(
        num_steps, *, first_step=1, processes=1, mesh="dp:8", killed_after=None, skip=None, batch_size=8, **options
    ):
        starts.append(processes)
        devices = np.array(jax.devices()).reshape(processes, -1)
        for rank, mine in enumerate(devices):
            # A kill stops processes at different steps.
            steps = num_steps if killed_after is None else killed_after[rank]
            ledger = Ledger(tmp_path, rank, num_ranks=processes, start=len(starts))
            if skip:
                ledger.skip(*skip, why="the loss rose")
            with monkeypatch.context() as patch, ledger:
                patch.setattr(module, "local_rows", lambda *args, mine=mine: rows_of_devices(*args, devices=mine))
                patch.setattr(module, "place_rows", placed if processes == 1 else lambda values, *_: values)
                with Batches(
                    desk.CountedRows(NUM_ROWS), batch_size=batch_size, shardings=desk.meshes[mesh], ledger=ledger,
                    first_step=first_step, **({"seed": 0} | options),
                ) as batches:  # fmt: skip
                    for _ in range(steps):
                        next(batches)

    return play


def lines_of(folder, start=1, rank=0):
    path = folder / f"start-{start:04}.rank-{rank:05}.jsonl"
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_uninterrupted_run(train, tmp_path):
    train(10)
    report = check_ledger(tmp_path, rows_per_epoch=NUM_ROWS, upto_step=10).require()
    assert (report.num_steps, report.num_rows, report.num_starts, report.num_redone) == (10, 80, 1, 0)
    assert report.epochs == [20, 20, 20, 20]
    assert check_ledger(tmp_path, upto_step=7).epochs == [20, 20, 16]
    assert str(report).splitlines() == [
        "ok: 10 steps, 1 start, 80 rows (20 per epoch)",
        *(f"epoch {n}: 20 of 20 rows, each once" for n in range(4)),
    ]


def test_restarts_with_other_numbers_of_processes_meshes_and_batch_sizes(train, tmp_path):
    train(9, processes=2, killed_after=[9, 8])
    # Restart from the checkpoint of step 6, with eight processes, of which four each hold the same rows.
    train(4, first_step=7, start_row=48, processes=8, mesh="dp:2,tp:4", killed_after=[4, 4, 3, 4, 4, 4, 4, 4])
    train(2, first_step=9, start_row=64, batch_size=16)
    train(5, first_step=11, start_row=96, processes=4, mesh="fsdp:8")
    report = check_ledger(tmp_path).require()
    assert (report.num_steps, report.num_starts, report.num_redone, report.notes) == (15, 4, 4, [])
    assert report.num_rows == 8 * 8 + 2 * 16 + 5 * 8
    assert report.epochs == [20] * 6 + [16]


def test_a_start_that_discards_more_steps_than_it_redoes(train, tmp_path):
    train(9)
    train(2, first_step=4, start_row=24)
    report = check_ledger(tmp_path).require()
    assert (report.num_steps, report.num_rows, report.num_redone) == (5, 40, 2)
    with pytest.raises(DataError, match="the ledger ends at step 5, before step 9"):
        check_ledger(tmp_path, upto_step=9).require()


def test_steps_left_unfinished_by_a_kill_are_noted(train, tmp_path):
    train(6, processes=2, killed_after=[6, 4])
    report = check_ledger(tmp_path).require()
    assert report.num_steps == 4
    assert report.notes == [f"step {step} is unfinished: 1 of 2 processes recorded it" for step in (6, 5)]
    # With `upto_step`, they must be complete.
    with pytest.raises(DataError, match="step 5: no process recorded the rows at positions 36, 37, 38, 39"):
        check_ledger(tmp_path, upto_step=6).require()


def test_a_line_cut_off_by_a_kill_is_noted(train, tmp_path):
    train(5)
    path, _ = lines_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    report = check_ledger(tmp_path).require()
    assert report.num_steps == 4
    assert "start 1, rank 0: the last line is incomplete, as after a kill" in report.notes
    train(3, first_step=5, start_row=32)
    assert check_ledger(tmp_path).require().num_steps == 7


def test_rows_skipped_on_purpose_are_noted(train, tmp_path):
    train(6)
    # Roll back to step 4, and continue with the data after step 6.
    train(4, first_step=5, start_row=48, skip=(32, 16))
    report = check_ledger(tmp_path).require()
    assert report.notes == ["skipped 16 rows from row 32: the loss rose"]
    assert (report.num_steps, report.epochs) == (8, [20, 12, 12, 20])
    train(2, first_step=9, start_row=80)
    assert check_ledger(tmp_path).require().epochs == [20, 12, 12, 20, 16]


def test_rows_skipped_silently_are_lost(train, tmp_path):
    train(6)
    train(4, first_step=7, start_row=56)
    report = check_ledger(tmp_path)
    assert not report.ok
    assert report.problems == ["step 7 begins at row 56: rows 48 to 55 were lost"]
    with pytest.raises(DataError, match=r"FAILED: 10 steps, 2 starts(.|\n)*problem: step 7 begins at row 56"):
        report.require()


def test_rows_used_again(train, tmp_path):
    train(6)
    train(4, first_step=7, start_row=40)
    assert check_ledger(tmp_path).problems == ["step 7 begins at row 40: rows up to 47 were used before"]


def test_a_run_that_does_not_begin_at_row_0(train, tmp_path):
    train(3, start_row=8)
    assert check_ledger(tmp_path).problems == ["step 1 begins at row 8: rows 0 to 7 were lost"]


def test_a_ledger_that_was_enabled_later(train, tmp_path):
    train(3, first_step=6, start_row=40)
    report = check_ledger(tmp_path).require()
    assert report.notes == ["the ledger begins with step 6, at row 40; earlier steps are not recorded"]
    assert report.epochs == [0, 0, 20, 4]


def test_missing_steps(train, tmp_path):
    train(6)
    path, lines = lines_of(tmp_path)
    write(path, lines[:3] + lines[5:])
    assert check_ledger(tmp_path).problems == [
        "steps 3 to 4 are missing",
        "step 5 begins at row 32: rows 16 to 31 were lost",
    ]


def test_a_removed_row(train, tmp_path):
    train(6, processes=2)
    path, lines = lines_of(tmp_path, rank=1)
    lines[3]["rows"].pop()
    write(path, lines)
    assert check_ledger(tmp_path).problems == [
        "step 3 of start 1, rank 1: 3 rows at 4 positions",
        "step 3: no process recorded the rows at positions 23",
    ]
    lines[3]["positions"][0][1] -= 1
    write(path, lines)
    assert check_ledger(tmp_path).problems == ["step 3: no process recorded the rows at positions 23"]


def test_a_removed_process(train, tmp_path):
    train(6, processes=2)
    lines_of(tmp_path, rank=1)[0].unlink()
    assert (
        "step 1: no process recorded the rows at positions 4, 5, 6, 7" in check_ledger(tmp_path, upto_step=6).problems
    )
    assert check_ledger(tmp_path).num_steps == 0


def test_a_repeated_row(train, tmp_path):
    train(5)
    path, lines = lines_of(tmp_path)
    first, last = lines[1]["rows"][0], lines[2]["rows"][7]
    lines[2]["rows"][7] = first
    write(path, lines)
    assert check_ledger(tmp_path).problems == [
        f"epoch 0: rows {first} were used more than once",
        f"epoch 0: rows {last} were never used",
    ]


def test_a_step_redone_with_other_rows(train, tmp_path):
    train(5)
    train(3, first_step=4, start_row=24)
    path, lines = lines_of(tmp_path, start=2)
    lines[1]["rows"][:2] = lines[1]["rows"][1::-1]
    write(path, lines)
    problems = check_ledger(tmp_path).problems
    assert len(problems) == 2
    assert "position 24 had row" in problems[0]
    assert "(step 4 of start 1)" in problems[0]
    assert "when it was redone (step 4 of start 2)" in problems[0]


def test_another_seed_after_a_restart(train, tmp_path):
    train(5)
    train(3, first_step=4, start_row=24, seed=1)
    problems = check_ledger(tmp_path).problems
    assert problems[0] == "starts differ in seed: 0, 1"
    assert any("were used more than once" in problem for problem in problems)
    assert len(problems) <= 21


def test_processes_that_differ(train, tmp_path):
    train(2, processes=2, mesh="dp:2,tp:4")
    train(2, first_step=3, start_row=16, processes=8, mesh="dp:2,tp:4")
    path, lines = lines_of(tmp_path, start=2, rank=1)
    lines[1]["rows"][0] += 1
    lines[2]["first_row"] += 8
    write(path, lines)
    problems = check_ledger(tmp_path).problems
    assert "step 4 of start 2, rank 1: different rows than on rank 0" in problems
    assert any("step 3 of start 2, rank 1: row" in told and "but rank 0 has another" in told for told in problems)


def test_other_data_than_the_ledger_says(train, tmp_path):
    train(5)
    report = check_ledger(tmp_path, rows_per_epoch=16)
    assert report.problems[0] == "starts differ in the number of rows: 16, 20"
    assert any("do not exist: the data has 16" in problem for problem in report.problems)


def test_invalid_ledgers_are_errors(tmp_path, train):
    with pytest.raises(DataError, match="there is no ledger in"):
        check_ledger(tmp_path / "nothing")
    with pytest.raises(DataError, match="the ledger has not begun a start"):
        Ledger(tmp_path).append(1, None)
    train(3)
    path, _ = lines_of(tmp_path)
    path.write_text(path.read_text().replace('"step":2', '"step:2'))
    with pytest.raises(DataError, match=r"line 3 of .*start-0001.rank-00000.jsonl is damaged"):
        check_ledger(tmp_path)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"\x80\xff\x00", "it is not UTF-8 text"),
        (b"[]", r"not an object\."),
        (b"{}", r"rows or positions are missing\."),
        (b'{"step":2,"first_row":8,"num_rows":8,"positions":[1],"rows":[]}', "positions are not pairs"),
        (b'{"step":2,"first_row":8,"num_rows":"8","positions":[],"rows":[]}', "a number is not an integer"),
    ],
)
def test_damage_is_reported_with_its_line(tmp_path, train, line, text):
    train(3)
    path, _ = lines_of(tmp_path)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(DataError, match=rf"line 3 of .*start-0001\.rank-00000\.jsonl is damaged: {text}"):
        check_ledger(tmp_path)


@pytest.mark.parametrize(
    ("left", "why"),
    [
        (0, "start 1 left no records"),
        (1, "start 1 began at row 0"),
        (None, "start 1 left no records"),
    ],
)
def test_a_lost_beginning(train, tmp_path, left, why):
    train(5)
    train(3, first_step=6, start_row=40)
    path, lines = lines_of(tmp_path)
    path.unlink() if left is None else write(path, lines[:left])
    report = check_ledger(tmp_path)
    assert report.problems == [
        f"steps 1 to 5 are not recorded: {why}, but the first recorded step is 6",
    ]
    assert str(report).startswith("FAILED: 3 steps")


def test_a_discarded_beginning_is_not_lost(train, tmp_path):
    # The ledger was enabled at step 6, and the run rolled back to it.
    train(4, first_step=6, start_row=40)
    train(4, first_step=6, start_row=72, skip=(40, 32))
    assert check_ledger(tmp_path).ok
    # Roll back to a checkpoint from before the ledger, and die before the first step.
    train(0, first_step=4, start_row=24)
    assert check_ledger(tmp_path).ok


def test_a_ledger_without_a_complete_line(train, tmp_path):
    train(5)
    write(lines_of(tmp_path)[0], [])
    report = check_ledger(tmp_path)
    assert report.problems == ["no file of this ledger has a complete first line, so nothing can be checked"]
    assert report.notes == ["start 1, rank 0: its first line is incomplete"]


@pytest.mark.parametrize("upto_step", [0, -1])
def test_invalid_steps_are_errors(tmp_path, upto_step):
    with pytest.raises(DataError, match=rf"upto_step must be at least 1; got {upto_step}\.\nhint: count steps from 1"):
        check_ledger(tmp_path, upto_step=upto_step)


def test_steps_before_the_ledger(train, tmp_path):
    train(3, first_step=6, start_row=40)
    assert check_ledger(tmp_path, upto_step=5).problems == ["the ledger has no step up to 5"]


def test_steps_in_the_metrics_must_be_in_the_ledger(train, tmp_path, capsys):
    folder = tmp_path / "ledger"
    folder.mkdir()
    train(6, processes=2)
    for path in tmp_path.glob("*.jsonl"):
        path.rename(folder / path.name)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 7)) + '{"st')
    assert ledger_command(str(tmp_path)) == 0
    # Cut the file of one process: without the metrics, these steps would count as unfinished.
    path, lines = lines_of(folder, rank=1)
    write(path, lines[:4])
    assert check_ledger(folder).ok
    assert ledger_command(str(tmp_path)) == 1
    assert "problem: step 4: no process recorded the rows at positions 28, 29, 30, 31" in capsys.readouterr().out
    other, others = lines_of(folder, rank=0)
    write(other, others[:4])
    assert ledger_command(str(tmp_path)) == 1
    assert "the run did steps that are not in its ledger: 4, 5, 6" in capsys.readouterr().out
    assert ledger_command(str(tmp_path), upto_step=3) == 0


def test_discarded_steps_need_not_be_recorded(train, tmp_path):
    train(9)
    train(2, first_step=4, start_row=24)
    assert check_ledger(tmp_path, done=range(1, 10)).ok


def test_a_ledger_is_never_overwritten(desk, tmp_path):
    ledger = Ledger(tmp_path)
    for _ in range(3):  # also by a process that rolls back to a checkpoint
        with Batches(
            desk.CountedRows(8), batch_size=8, shardings=desk.meshes["dp:8"], seed=0, ledger=ledger
        ) as batches:
            next(batches)
    ledger.close()
    assert len(list(tmp_path.iterdir())) == 3
    assert check_ledger(tmp_path).require().num_redone == 1
    with pytest.raises(DataError, match=r"start-0003.rank-00000.jsonl already exists; a ledger is never overwritten"):
        Ledger(tmp_path, start=3).begin({})


def test_records_are_written_at_once(desk, tmp_path):
    with Batches(
        desk.CountedRows(8), batch_size=8, shardings=desk.meshes["dp:8"], seed=0, ledger=Ledger(tmp_path)
    ) as batches:
        batch = next(batches)
        _, lines = lines_of(tmp_path)
        assert lines[0]["next_row"] == 0
        assert lines[1]["rows"] == batch.row_ids.tolist()
    batches._ledger.close()


def test_a_full_disk_stops_nothing_and_loses_nothing(desk, tmp_path):
    """Writes fail for some steps, once in the middle of a line, until there is space again."""

    class Disk:
        room, name = 10**6, "file"

        def __init__(self, file):
            self.file = file

        def write(self, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            written = self.file.write(data[: self.room])
            self.room -= written
            return written

        def close(self):
            self.file.close()

    told = []
    ledger = Ledger(tmp_path, tell=told.append)
    with Batches(desk.CountedRows(8), batch_size=8, shardings=desk.meshes["dp:8"], seed=0, ledger=ledger) as batches:
        ledger._file = disk = Disk(ledger._file)
        next(batches)
        disk.room = 20
        for _ in range(3):
            next(batches)
        assert told == ["cannot write the ledger file now: No space left on device"]
        assert check_ledger(tmp_path).num_steps == 1
        disk.room = 10**6
        next(batches)
        assert check_ledger(tmp_path).require().num_steps == 5
        disk.room = 0
        ledger._tell = None
        with pytest.warns(MeshwrightWarning, match="cannot write the ledger file now"):
            next(batches)
        disk.room = 10**6
    ledger.close()
    assert check_ledger(tmp_path).require().num_steps == 6


def test_the_command(train, tmp_path, capsys):
    train(5)
    assert ledger_command(str(tmp_path)) == 0
    assert capsys.readouterr().out.startswith("ok: 5 steps, 1 start, 40 rows (20 per epoch)\nepoch 0: 20 of 20")
    train(3, first_step=6, start_row=48)
    run = tmp_path / "run"
    run.mkdir()
    (run / "ledger").mkdir()
    for path in tmp_path.glob("*.jsonl"):
        path.rename(run / "ledger" / path.name)
    assert ledger_command(str(run)) == 1
    assert "problem: step 6 begins at row 48: rows 40 to 47 were lost" in capsys.readouterr().out
    assert ledger_command(str(run), upto_step=5) == 0
