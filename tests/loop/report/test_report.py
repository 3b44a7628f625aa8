import json
import math
import re
import time

import pytest
import tyro

from meshwright.cli.report import report
from meshwright.errors import MeshwrightError
from meshwright.loop.report import build_report
from meshwright.loop.report.run_page import render
from meshwright.loop.report.run_record import read_run
from meshwright.loop.report.story import ending, loss_sentences


def words(html):
    """The text of a page as a reader sees it, without style, data and tags."""
    html = re.sub(r"(?s)<(script|style)\b.*?</\1>", " ", html)
    html = re.sub(r"(?s)<title>.*?</title>", " ", html)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "\x01", html).replace("\x01", " ")).replace(" .", ".")


def append(path, *entries):
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def edit_facts(folder, **changes):
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- The whole page ---


def test_the_page_tells_the_run(fake_run):
    folder = fake_run(restarts=(100,))
    path = build_report(folder)
    assert path == folder / "report.html"
    html = path.read_text(encoding="utf-8")
    told = words(html)
    for part in (
        "decoder-small-001 ✓ finished",
        "Loss fell from 5.517 to 1.968 in 300 steps over 1.2M tokens.",
        "Held-out loss was 2.038 at step 300, after a low of 1.947 at step 200.",
        "A step took 413 ms (median; 90% between 400 ms and 427 ms).",
        "MFU is unknown, because the peak FLOP/s of this kind of device is unknown.",
        "meshwright train --run runs/decoder-small-001 --resume",
        "The run used 8 devices (cpu) as dp:2 x fsdp:2 x tp:2, in one process.",
        "Reason for this mesh: 16 rows and the state over 4 devices, features over 2",
        "Its state takes 49.5 MiB in total and 12.4 MiB per device, so each byte is stored 2.0 times on average.",
        "There was 1 restart, 3 checkpoints.",
        "resumed from step 100",
        "learning_rate 0.001 default 0.003",
        "3 options differ from their defaults",
        "params/layers/mlp/down",
        "meshwright 0.1.0",
    ):
        assert part in told, part
    assert html.count('class="mark"') == 2  # the restart, over loss and over throughput
    assert html.count('class="mark short"') == 3  # the checkpoints


def test_samples_stand_side_by_side_and_stay_text(fake_run):
    html = build_report(fake_run()).read_text(encoding="utf-8")
    assert "Before training" in html
    assert "After 300 steps" in html
    assert "Z&lt;b&gt;2&lt;/b&gt;\t&amp;amp;&lt;/script&gt;\n·!!vv" in html
    assert "<b>def </b>get_parser(self, name, default=None):\n    if name is None:" in html


def test_every_leaf_is_in_the_table_as_the_layout_shows_it(fake_run):
    html = build_report(fake_run()).read_text(encoding="utf-8")
    row = "params/layers/mlp/down", "4x1024x256", "float32"
    assert "".join(f'<td class="code whole">{cell}</td>' for cell in row) in html
    assert html.count('<tr><td class="code whole">') == 41
    assert "4x1024x256, P(None, &#x27;tp&#x27;, &#x27;fsdp&#x27;): 4 tiles of 4x512x128, each on 2 devices." in html


def test_everything_in_the_folder_is_escaped(fake_run):
    folder = fake_run(name="r<i>un")
    nasty = "<script>alert(1)</script>"
    edit_facts(folder, name=nasty, mesh_reason=nasty, resume_command=nasty, device_kind=nasty, versions={nasty: nasty})
    edit_facts(folder, config={"steps": nasty, nasty: [nasty]}, mesh={nasty: 2, "b": 4}, devices=[nasty] * 8)
    append(
        folder / "events.jsonl",
        {"kind": nasty, "text": nasty, "step": 3, "time": 1e9},
        {"kind": "error", "text": nasty},
    )
    append(folder / "metrics.jsonl", {"step": 301, "loss": 2.0, nasty: 1.0, "seconds": {nasty: 1.0}})
    html = build_report(folder).read_text(encoding="utf-8")
    assert "alert(1)" in html
    assert nasty not in html
    assert html.count("<script>") == 1


# --- How it ended ---


@pytest.mark.parametrize(
    ("last", "quiet", "word", "kind"),
    [
        ({"kind": "finish"}, 1e6, "finished", "good"),
        ({"kind": "preempted"}, 1e6, "stopped at step 300", "warn"),
        ({"kind": "error", "text": "TrainingError: too many"}, 1e6, "failed at step 300", "bad"),
        (None, 5, "running, step 300", "busy"),
        (None, 1e6, "stopped at step 300", "warn"),
        ({"kind": "resume", "step": 300}, 1e6, "stopped at step 300", "warn"),
    ],
)
def test_the_state_of_a_run_is_read_from_its_folder(fake_run, last, quiet, word, kind):
    folder = fake_run(finished=False)
    now = read_run(folder).last_time
    if last:
        append(folder / "events.jsonl", {"time": now, "step": 300, **last})
    end = ending(read_run(folder), now=now + quiet)
    assert (end.word, end.kind) == (word, kind)


def test_an_error_that_a_run_survived_is_not_its_end(fake_run):
    folder = fake_run(finished=False)
    now = read_run(folder).last_time
    append(folder / "events.jsonl", {"time": now - 60, "kind": "error", "step": 250, "text": "a line was dropped"})
    assert ending(read_run(folder), now=now + 2).word == "running, step 300"


def test_a_resumed_run_is_not_taken_for_finished(fake_run):
    folder = fake_run()
    now = read_run(folder).last_time
    append(folder / "events.jsonl", {"time": now + 1, "kind": "resume", "step": 300, "text": "further"})
    assert ending(read_run(folder), now=now + 2).kind == "busy"


@pytest.mark.parametrize(
    ("losses", "said"),
    [([1.0, 2.0], "rose from 1 to 2"), ([2.0, 2.0], "stayed at 2"), ([3.0], "stayed at 3 in one step")],
)
def test_the_sentence_says_which_way_the_loss_went(tmp_path, losses, said):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {i}, "loss": {loss}}}\n' for i, loss in enumerate(losses))
    )
    assert said in loss_sentences(read_run(tmp_path))[0]


# --- Missing and damaged data ---


@pytest.mark.parametrize(
    "missing",
    [["run.json"], ["metrics.jsonl"], ["events.jsonl"], ["run.json", "events.jsonl"], ["run.json", "metrics.jsonl"]],
)
def test_missing_files_leave_a_page_that_says_so(fake_run, missing):
    folder = fake_run()
    for name in missing:
        (folder / name).unlink()
    told = words(build_report(folder).read_text(encoding="utf-8"))
    for name in missing:
        assert f"{name} is missing" in told
    assert ("No loss is recorded yet." in told) == ("metrics.jsonl" in missing)
    assert ("The layout was not recorded." in told) == ("run.json" in missing)


def test_a_run_before_its_first_step(fake_run):
    told = words(render(read_run(fake_run(steps=0, finished=False)), now=time.time()))
    assert "stopped before its first step" in told
    assert "No loss is recorded yet." in told


def test_non_finite_losses_are_counted(fake_run):
    folder = fake_run(steps=40)
    append(
        folder / "metrics.jsonl",
        {"step": 41, "loss": math.nan},
        {"step": 42, "loss": math.inf},
        {"step": 43, "loss": 2.0},
    )
    told = words(build_report(folder).read_text(encoding="utf-8"))
    assert "2 steps have a non-finite loss, shown as gaps." in told


def test_a_spike_does_not_flatten_the_curve(fake_run):
    folder = fake_run()
    append(folder / "metrics.jsonl", {"step": 301, "loss": 5000.0})
    told = words(build_report(folder).read_text(encoding="utf-8"))
    assert "One point lies above the frame (▲), the highest at 5,000." in told


@pytest.mark.parametrize(
    "layout", [{"version": 99}, {"mesh": []}, {"version": 1, "mesh": [["a", 2, "Auto"]], "leaves": [{}]}]
)
def test_an_unreadable_layout_is_reported(fake_run, layout):
    folder = fake_run(steps=3)
    edit_facts(folder, layout=layout)
    assert "The recorded layout cannot be read" in words(build_report(folder).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("options", "calm"), [({}, True), ({"restarts": (9,)}, False), ({"finished": False}, False)])
def test_nothing_went_wrong_only_in_an_uninterrupted_run(fake_run, options, calm):
    told = words(build_report(fake_run(steps=30, **options)).read_text(encoding="utf-8"))
    assert ("Nothing went wrong." in told) == calm


def test_problems_are_counted_and_listed(fake_run):
    folder = fake_run(steps=30)
    kinds = ["skipped", "skipped", "rollback", "hang", "checkpoint_failed", "preempted"]
    append(
        folder / "events.jsonl",
        *({"kind": kind, "step": 9, "time": 1.79e9 + 5, "text": f"about {kind}"} for kind in kinds),
    )
    told = words(build_report(folder).read_text(encoding="utf-8"))
    assert "1 failed checkpoint, 2 skipped steps, 1 rollback, 1 stop request, 1 hang." in told
    assert "Nothing went wrong" not in told
    assert all(f"about {kind}" in told for kind in kinds)


def test_a_huge_run_stays_a_small_page(tmp_path):
    folder = tmp_path / "huge"
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 50_001):
            loss = 77.5 if step == 43_210 else 2.0 + 1 / step
            rest = '"tokens_per_second": 1e5, "seconds": {"step": 1.0}'
            file.write(f'{{"step": {step}, "time": {1e9 + step}, "loss": {loss!r}, {rest}}}\n')
    with (folder / "events.jsonl").open("w") as file:
        for step in range(0, 100_000, 10):
            file.write(f'{{"step": {step}, "time": {1e9 + step}, "kind": "checkpoint", "text": "saved"}}\n')
        file.write('{"step": 5, "time": 1e9, "kind": "hang", "text": "a step hung"}\n')
    path = build_report(folder)
    assert path.stat().st_size < 1_500_000
    told = words(path.read_text(encoding="utf-8"))
    assert "the highest at 77.5" in told  # one step of fifty thousand
    assert "Curves show about 2,000 of 50,000 steps" in told
    assert "200 of 10,001 events" in told
    assert "a step hung" in told


@pytest.mark.parametrize("value", [None, 3, -1.5, "x", [], ["x"], {}, {"a": "x"}, {"a": {"b": 1}}, True])
def test_facts_of_any_kind_give_a_page(fake_run, value):
    folder = fake_run(steps=3)
    known = json.loads((folder / "run.json").read_text())
    for name in known:
        (folder / "run.json").write_text(json.dumps(known | {name: value}))
        html = build_report(folder).read_text(encoding="utf-8")
        assert "Loss fell" in html, name
        assert (
            value is not True
            or name in ("flops_per_token", "peak_flops", "tokens_per_step", "started")
            or (f"Ignored invalid values in run.json: {name}." in html)
        )


@pytest.mark.parametrize("value", [None, "x", [], {}, math.inf, -1, 10**30, True])
def test_events_and_metrics_of_any_kind_give_a_page(fake_run, value):
    folder = fake_run(steps=3)
    entry = {
        "kind": "sample",
        "step": 1,
        "time": 1.79e9,
        "text": "t",
        "prompt": "p",
        "loss": 1.0,
        "seconds": {"a": 1.0},
    }
    for name in entry:
        for kind in ("sample", "checkpoint", "resume", "error", "else"):
            append(folder / "events.jsonl", {**entry, "kind": kind, name: value})
        append(folder / "metrics.jsonl", {**entry, "step": 5, name: value}, {"step": 5, "eval/loss": value})
    assert "3 steps" in words(build_report(folder).read_text(encoding="utf-8"))


def test_no_backend_is_started(fake_run, run_python):
    """Reports are also built on machines with busy or missing accelerators."""
    code = "import sys; from meshwright.loop.report import build_report; print(build_report(sys.argv[1]))"
    done = run_python(code, str(fake_run(steps=3)), JAX_PLATFORMS="tpu")
    assert (done.returncode, done.stderr) == (0, "")


# --- The output file ---


def test_the_command_prints_the_path_of_the_page(fake_run, tmp_path, capsys):
    folder = fake_run(steps=3)
    out = tmp_path / "deep" / "page.html"
    code = tyro.cli(report, args=[str(folder), "--out", str(out)])
    assert code == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not (folder / "report.html").exists()
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]  # nothing half-written is left


def test_out_may_be_a_folder(fake_run, tmp_path):
    assert build_report(fake_run(steps=3), out=tmp_path) == tmp_path / "report.html"


def test_an_unwritable_path_is_an_error(fake_run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MeshwrightError, match=r"(?s)hint: choose another file with --out"):
        build_report(fake_run(steps=3), out=tmp_path / "file" / "page.html")


def test_the_seconds_of_each_step_leave_out_compiling(fake_run):
    folder = fake_run()
    append(folder / "metrics.jsonl", {"step": 301, "loss": 2.0, "seconds": {"step": 0.4, "compile": 30.0}})
    html = render(read_run(folder), now=0.0)
    whole, each = (
        html[html.index(f"<b>{title}</b>") :].partition("</figure>")[0] for title in ("All steps", "Per step")
    )
    assert "compile 30 s" in whole
    assert "without compiling" in each
    names = [one["name"] for one in json.loads(re.search(r"json\">(.*?)</script>", each)[1])["series"]]
    assert "step" in names
    assert "compile" not in names
