"""The `meshwright plan` commands: text, JSON, searches, comparisons, and errors."""

import io
import json
import re
import shlex
import sys

import optax
import pytest
import tyro
from rich.console import Console

import meshwright as mw
from meshwright.cli.plan_command import COMMANDS, join_words
from meshwright.cli.rules import rules
from meshwright.errors import ConfigError, JobError, MeshwrightError
from meshwright.loop.settings.config import TrainConfig
from meshwright.models import Decoder
from meshwright.plan.compiled.compile import Compiled, CompileError
from meshwright.plan.compiled.verdict import CompiledCollective
from meshwright.plan.costs.failures import Failures
from meshwright.plan.output.commands import PlannedJob, plan_command, setup_arguments, train_command
from meshwright.plan.output.plan_diff import diff_plans, parse_setup, read_plan
from meshwright.plan.output.summary import plan_summary
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train import Fp8, Precision, language_job, state_layout

SMALL = ("--model", "decoder-tiny", "--num-tokens", "64")
ON_TPU = (*SMALL, "--target", "v5p:2x2x1", "--no-compile")
SOURCE = """
from meshwright.models import Decoder
from meshwright.train import language_job, state_layout

job = language_job(Decoder.named("tiny"), batch_size=16, num_tokens=32, mesh="fsdp:4")
"""


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, in a folder with a job; returns exit code, stdout and stderr."""
    (tmp_path / "planned_job.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*args):
        words = join_words(["plan", *map(str, args)])
        code = tyro.extras.subcommand_cli_from_dict({**COMMANDS, "rules": rules}, args=words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield run
    sys.modules.pop("planned_job", None)


def made_up(target="v5p:2x2x1", setup=None, peak=40 * 2**20, **collective):
    """Returns a plausible compiler result."""
    values = {
        "kind": "all-gather",
        "axes": ("fsdp",),
        "bytes_moved": 2**20,
        "wire_bytes": 3 * 2**18,
        "group_size": 4,
        "is_async": True,
        "matmuls_between": 1,
        "trips": 8,
        "source": "jit(step)/while/body/all_gather",
    }
    one = CompiledCollective(**(values | collective))
    return Compiled(target, setup or Setup(mesh="fsdp:4"), peak_bytes=peak, collectives=(one,), versions={"jax": "1.0"})


def test_a_plan_in_text(cli):
    code, out, err = cli(*ON_TPU, "--mesh", "fsdp:-1", "--remat", "full", "--price", "2")
    assert (code, err) == (0, "")
    head = "decoder-tiny on 4 x TPU v5p (torus 2x2x1)\nfsdp:4, 4 rows, 256 tokens per step, remat=full\n"
    assert out.startswith(head)
    assert " per billion tokens (assumed)" in out
    assert "fits: " in out
    for title in ("Memory per device\n", "Communication per device and step\n", "Time per step\n"):
        assert title in out
    assert "fsdp  reduce-scatter  gradients of parameters" in out
    assert re.search(r"^activations +.*\n  from [a-z -]+ +[\d.]+ KiB +[\d.]+%  computed", out, flags=re.M)
    assert "pipeline bubble" not in out
    command = "meshwright train --model decoder-tiny --num-tokens 64 --batch-size 4 --mesh fsdp:4 --remat full"
    assert f"run it: {command} --precision mixed\n" in out


def test_goodput_in_text_json_and_on_the_page(cli, tmp_path):
    failing = ("--mtbf", "2", "--restart", "30", "--storage-rate", "0.001", "--price", "2")
    planned = (*ON_TPU, "--mesh", "fsdp:4", *failing)
    code, out, _ = cli(*planned, "--html", str(tmp_path / "plan.html"))
    assert code == 0
    data = json.loads(cli(*planned, "--json")[1])
    found, save = data["goodput"], data["state_bytes"] / (0.001 * 2**30)
    assert (found["failure_every_s"], found["chips"]) == (1800.0, 4)
    assert (found["save_s"], found["restart_and_load_s"]) == (pytest.approx(save), pytest.approx(30 + save))
    failures = Failures(1 / 1800, save, 30 + save)
    assert found["goodput"] == pytest.approx(failures.goodput(failures.best_interval), rel=1e-4)
    assert found["best_interval_s"] == pytest.approx(found["best_interval_steps"] * data["time"]["step"]["value"])
    assert sum(found["shares"].values()) == pytest.approx(1)
    chips, shares = found["curve"]["chips"], found["curve"]["goodput"]
    assert (chips[-1], shares) == (16, sorted(shares, reverse=True))
    assert "--mtbf 2 --restart 30 --storage-rate 0.001" in data["plan_command"]
    assert re.search(r"^goodput +[\d.]+% ", out, flags=re.M)
    assert re.search(r", goodput [\d.]+% with failures", out)
    assert re.search(r"^price +\$[\d,]+ +per billion tokens, with failures", out, flags=re.M)
    assert re.search(r"^tokens/s +[\d,]+ +with failures, [\d,]+ to [\d,]+", out, flags=re.M)
    page = (tmp_path / "plan.html").read_text()
    assert "Goodput over the number of chips" in page
    assert re.search(r"goodput: [\d.]+% at chips 1, [\d.]+% at 16", page)
    ranked = cli("search", *ON_TPU, "--mtbf", "2", "--top", "1")[1]
    assert re.search(r"memory and links +goodput$", ranked, flags=re.M)


def test_a_machine_on_which_nothing_trains_has_a_plan(cli):
    failing = ("--mtbf", "0.01", "--restart", "100000.25", "--price", "2.3456789")
    code, out, _ = cli(*ON_TPU, "--mesh", "fsdp:4", *failing)
    assert code == 0
    assert re.search(r"^goodput +0% ", out, flags=re.M)
    assert re.search(r"^price +unlimited ", out, flags=re.M)
    data = json.loads(cli(*ON_TPU, "--mesh", "fsdp:4", *failing, "--json")[1], parse_constant=pytest.fail)
    assert "--price 2.3456789 --mtbf 0.01 --restart 100000.25 " in data["plan_command"]


def test_every_figure_of_a_plan_names_its_basis(cli):
    code, out, _ = cli(*ON_TPU, "--mesh", "fsdp:4", "--json")
    data = json.loads(out)
    bases = [part["basis"] for part in data["memory"]["parts"]] + [item["basis"] for item in data["sent"]]
    bases += [figure["basis"] for name, figure in data["time"].items() if name != "error"]
    assert code == 0
    assert set(bases) <= {"compiled", "computed", "assumed"}
    assert data["subject"] == "decoder-tiny"
    assert data["command"].startswith("meshwright train --model decoder-tiny")
    assert data["plan_command"].startswith("meshwright plan --model decoder-tiny --num-tokens 64 --target v5p:2x2x1")


def test_train_and_plan_accept_the_printed_commands(cli):
    setup = Setup(mesh="dp:2,fsdp:2", remat="dots", num_minibatches=2, sync="once", zero_axis="dp", optimizer="lion")
    job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=64)
    made = make_plan(job, "v5p:2x2x1", setup)
    subject = PlannedJob(model="decoder-tiny", model_options=("num_layers=2",), num_tokens=64)
    words = shlex.split(train_command(made, subject))[2:]
    flat = tyro.cli(tyro.conf.OmitArgPrefixes[TrainConfig], args=words).flat()
    assert tuple(flat["model_options"]) == ("num_layers=2",)
    wanted = {"mesh": "dp:2,fsdp:2", "remat": "dots", "minibatches": 2, "sync": "once", "batch_size": 8}
    assert {name: flat[name] for name in wanted} == wanted
    assert (flat["zero_axis"], flat["optimizer"], flat["precision"]) == ("dp", "lion", "mixed")
    again = shlex.split(plan_command(made, PlannedJob(model="decoder-tiny", num_tokens=64)))
    assert again[-1] == "--no-compile"
    data = json.loads(cli(*again[2:], "--json")[1])
    assert Setup.from_json(data["setup"]) == setup
    assert data["rows"] == 8


def test_the_stages_of_a_device_are_those_of_train(cli):
    chosen = ("--pipeline", "interleaved-1f1b", "--pipeline-rounds", "4")
    _, out, _ = cli(*ON_TPU, "--model-options", "num_layers=8", "--mesh", "pp:2,dp:2", "--batch-size", "8", *chosen)
    assert "devices wait 5.9% of 34 ticks" in out
    printed = next(line for line in out.splitlines() if "meshwright train" in line)
    assert "--pipeline interleaved-1f1b --pipeline-rounds 4" in printed


def test_a_plan_in_fp8_has_the_options_of_train(cli):
    chosen = ("--precision", "fp8", "--fp8-least-dim", "32", "--fp8-matmuls", "attn/k|mlp/up")
    model = (*SMALL, "--model-options", "num_kv_heads=2")
    code, out, _ = cli(*model, *chosen, "--target", "h200:1x1", "--no-compile", "--mesh", "dp:1")
    assert code == 0
    assert "fp8: the rate of matmuls is measured on one H200" in out
    assert "memory is that of bfloat16" not in out
    assert "fp8: too narrow, so not in fp8: layers/attn/k" in out
    printed = next(line for line in out.splitlines() if "meshwright train" in line)
    words = shlex.split(printed.partition("meshwright train ")[2])
    config = tyro.cli(tyro.conf.OmitArgPrefixes[TrainConfig], args=words)
    assert config.dtypes("fp8") == Precision(compute="bfloat16", fp8=Fp8(least_dim=32, matmuls="attn/k|mlp/up"))
    with pytest.raises(MeshwrightError, match="--fp8-scaling has no effect without --precision fp8"):
        cli(*ON_TPU, "--mesh", "fsdp:4", "--fp8-scaling", "current")


@pytest.mark.parametrize("target", ["a100:1x1", "cpu:1", "v6e:1x1"])
def test_a_chip_without_fp8_matmuls_is_named_once(cli, target):
    chosen = ("--precision", "fp8", "--fp8-least-dim", "16", "--mesh", "dp:1")
    _, out, _ = cli(*SMALL, *chosen, "--target", target, "--no-compile")
    assert out.count("XLA widens fp8 values before it multiplies them") == 1
    assert "upper bounds" not in out


def test_a_train_command_is_shown_only_for_its_optimizers(cli):
    _, out, _ = cli(*ON_TPU, "--mesh", "fsdp:4", "--optimizer", "adabelief")
    assert "run it with make_train_step: `meshwright train` has adamw, muon, adafactor, lion, sgd, not adabelief" in out
    assert json.loads(cli(*ON_TPU, "--mesh", "fsdp:4", "--optimizer", "adabelief", "--json")[1])["command"] is None


def test_a_job_defines_its_batch_and_mesh(cli):
    code, out, _ = cli("planned_job:job", "--target", "v5p:2x2x1", "--no-compile")
    assert code == 0
    assert "planned_job:job on 4 x TPU v5p" in out
    assert "fsdp:4, 16 rows, 512 tokens per step" in out
    assert "run it: meshwright train --job planned_job:job --mesh fsdp:4" in out
    _, out, _ = cli("planned_job:job", "--target", "v5p:2x2x1", "--no-compile", "--batch-size", "32", "--json")
    assert json.loads(out)["rows"] == 32


def test_without_a_compiler_figures_are_computed_with_an_install_hint(cli, monkeypatch, tmp_path):
    monkeypatch.setattr("meshwright.cli.plan_command.can_compile_for", lambda target: False)
    code, out, err = cli(*SMALL, "--target", "h100:1x4", "--mesh", "fsdp:4", "--html", "page.html")
    assert code == 0
    assert 'the compiler for h100 is not installed.\nhint: run `pip install "meshwright[gpu]"` to get compiled' in err
    assert "compiled  rest of" not in out
    assert "is not installed." in (tmp_path / "page.html").read_text()


def test_compiled_figures_replace_computed_ones(cli, monkeypatch):
    asked = []

    def compile_step(job, target, setup, **limits):
        asked.append((target.name, setup.mesh, limits))
        return made_up(setup=setup)

    monkeypatch.setattr("meshwright.cli.plan_command.compile_step", compile_step)
    code, out, err = cli(*SMALL, "--target", "v5p:2x2x1", "--mesh", "fsdp:4", "--python", "other", "--timeout", "9")
    assert code == 0
    assert asked == [("v5p:2x2x1", "fsdp:4", {"python": "other", "timeout_s": 9.0})]
    assert "compiling fsdp:4 for v5p:2x2x1" in err
    assert "fits: 40.0 MiB of 95.7 GiB" in out
    assert "6.0 MiB      8" in out  # the one collective, eight times
    code, _, err = cli(*ON_TPU, "--mesh", "fsdp:4", "--python", "other")
    assert (code, err, len(asked)) == (0, "", 1)  # --no-compile


def test_a_compiler_that_fails_is_a_note(cli, monkeypatch):
    def compile_step(*args, **limits):
        raise CompileError("it took longer than 180 s.", reason="timeout", hint="raise the limit.")

    monkeypatch.setattr("meshwright.cli.plan_command.compile_step", compile_step)
    code, out, err = cli(*SMALL, "--target", "v5p:2x2x1", "--mesh", "fsdp:4", "--python", "other")
    assert code == 0
    assert "compiling failed (timeout): it took longer than 180 s.\nhint: raise the limit." in err
    assert "fits: " in out


def test_a_plan_that_does_not_fit_exits_with_status_1(cli):
    arguments = ("--model", "decoder-7b", "--target", "v5e:2x2", "--mesh", "fsdp:4", "--remat", "full", "--no-compile")
    code, out, _ = cli(*arguments)
    assert code == 1
    assert "does not fit: " in out
    assert " too much; the largest part is " in out
    assert "it does not fit; to run it anyway: meshwright train --model decoder-7b" in out


def test_a_search_ranks_plans_and_counts_rejections(cli):
    arguments = ("search", *ON_TPU, "--batch-size", "8", "--constraints", "tp<=2")
    code, out, _ = cli(*arguments, "--top", "2", "--remat", "full")
    assert code == 0
    assert "  remat=full" in out
    assert "remat=dots" not in out
    assert out.count("\n1. meshwright train ") == out.count("\n2. meshwright train ") == 1
    assert "\n3. meshwright" not in out
    assert "rows not divisible" in out
    _, out, _ = cli(*arguments, "--json")
    data = json.loads(out)
    assert data["considered"] == data["fit"] + sum(data["rejected"].values())
    steps = [one["time"]["step"]["value"] for one in data["plans"]]
    assert len(steps) == 3
    assert steps == sorted(steps)


def test_a_search_compiles_the_best(cli, monkeypatch):
    def compile_step(job, target, setup, **limits):
        return made_up(setup=setup, peak=2**40 if setup.remat == "none" else 2**25)

    monkeypatch.setattr("meshwright.plan.search.compile_step", compile_step)
    arguments = ("search", *SMALL, "--target", "v5p:2x2x1", "--python", "other", "--batch-size", "8", "--top", "4")
    code, out, err = cli(*arguments)
    assert code == 0
    assert err.count("compiling ") == 4
    assert "out of memory when compiled: does not fit: 1.0 TiB of 95.7 GiB" in out
    assert " compiled" in out


def test_diff_compares_files_and_setups(cli, tmp_path):
    paths = []
    for mesh in ("fsdp:4", "dp:4"):
        paths.append(tmp_path / f"{mesh[:2]}.json")
        paths[-1].write_text(cli(*ON_TPU, "--mesh", mesh, "--json")[1])
    code, by_file, _ = cli("diff", *paths)
    assert code == 0
    _, by_name, _ = cli("diff", "fsdp:4", "dp:4", *ON_TPU)
    assert by_file == by_name
    assert "A: fsdp:4, 4 rows on 4 x TPU v5p" in by_file
    data = json.loads(cli("diff", *paths, "--json")[1])
    job = language_job(Decoder.named("tiny"), batch_size=4, num_tokens=64)
    layouts = [state_layout(job, optax.adamw(1e-3), mw.create_abstract_mesh(mesh)) for mesh in ("fsdp:4", "dp:4")]
    exact = [sum(one.bytes_per_device for one in made.leaves if "opt_state" in one.name) for made in layouts]
    kind = next(c for c in data["changes"] if c["name"] == "activations from attention")
    assert kind["before"] == read_plan(paths[0])["memory"]["parts"][5]["split"]["attention"]
    optimizer = next(c for c in data["changes"] if c["name"] == "optimizer")
    assert [optimizer["before"], optimizer["after"]] == exact
    total = next(c for c in data["changes"] if c["name"] == "total" and c["group"].startswith("Memory"))
    assert total["before"] == read_plan(paths[0])["memory"]["total"]
    assert "no figure differs" in cli("diff", paths[0], paths[0])[1]


def test_a_difference_has_the_prices_and_the_goodput(cli):
    arguments = ("diff", "fsdp:4 remat==full", "dp:4", *ON_TPU)
    out = cli(*arguments, "--price", "3", "--mtbf", "10")[1]
    assert re.search(r"^price per billion tokens +\$[\d.]+ +\$[\d.]+ +[+-]\$[\d.]+ ", out, flags=re.M)
    assert re.search(r"^goodput with failures +[\d.]+% +[\d.]+%", out, flags=re.M)
    assert "A: fsdp:4 remat=full, " in out
    assert "Price and goodput" not in cli(*arguments)[1]


def test_a_difference_is_explained_in_text_and_on_a_page(cli, tmp_path):
    page = tmp_path / "diff.html"
    code, out, err = cli("diff", *ON_TPU, "dp:4 remat=full", "fsdp:4", "--html", page)
    assert code == 0
    assert f"wrote {page}" in err
    assert "\nstep time: " in out
    assert "all-reduce over dp: devices wait for 0 s in B" in out
    assert "MiB optimizer: " in out.replace("KiB", "MiB")
    html = page.read_text()
    title = "A: dp:4 remat=full and B: fsdp:4 on v5p:2x2x1"
    for words in ("Why they differ", "Peak memory per device", "devices wait for", title):
        assert words in html
    assert "http://" not in html.replace("http://www.w3.org", "")


def test_a_search_explains_its_best_against_another(cli, tmp_path):
    search = ("search", *ON_TPU, "--batch-size", 16, "--constraints", "fsdp=4", "--top", 1)
    code, out, _ = cli(*search, "--against", "dp:4 remat=full", "--html", tmp_path / "plan.html")
    assert code == 0
    assert "Best plans" in out
    assert "A: dp:4 remat=full, 16 rows on" in out.replace(" rows=16", "")
    assert "memory per device: " in out
    assert "Why they differ" in (tmp_path / "plan.html").read_text()
    data = json.loads(cli(*search, "--against", "dp:4 remat=full", "--json")[1])
    time = data["against"]["explanations"][0]
    assert time["after"] == data["plans"][0]["time"]["step"]["value"]
    assert sum(cause["more"] for cause in time["causes"]) == pytest.approx(time["more"])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ([], ConfigError, "--target is missing"),
        (["--target", "v5p:2x2x1"], ConfigError, "neither a job nor --model given"),
        (["--target", "v5p:2x2x1", "planned_job:job", "--model", "decoder-7b"], ConfigError, "both a job and --model"),
        (["--target", "v5p:2x2x1", "planned_job:job", "--num-tokens", "8"], ConfigError, "apply only to --model"),
        ([*ON_TPU], JobError, r"no mesh given.*\nhint: .*meshwright plan search"),
        (["diff", *ON_TPU, "fsdp:4", "dp:4 remta=full"], MeshwrightError, "'remta=full' in .* is not a setup option"),
        (
            [*ON_TPU, "--mesh", "pp:4", "--pipeline-rounds", "0"],
            ConfigError,
            "--pipeline-rounds must be at least 1; got 0",
        ),
        ([*ON_TPU, "--mesh", "fsdp:4", "--pipeline-rounds", "2"], MeshwrightError, "the mesh has no axis pp"),
        ([*ON_TPU, "--mesh", "fsdp:8"], MeshwrightError, "fsdp=8 needs 8 devices, but there are 4"),
        (["diff", "missing.json", "fsdp:4"], ConfigError, "file 'missing.json' does not exist"),
        (["diff", *ON_TPU, "fsdp:4", ""], MeshwrightError, "'' is neither a file nor a setup"),
        (["diff", *ON_TPU, "fsdp:4", "dp:4 minibatches=x"], MeshwrightError, "'minibatches=x' is not a number"),
        (["diff", *ON_TPU, "fsdp:4", "dp:4 overlap=no"], MeshwrightError, "'overlap=no' is neither true nor false"),
    ],
)
def test_wrong_options(cli, arguments, error, text):
    with pytest.raises(error, match=text):
        cli(*arguments)


@pytest.mark.parametrize(
    ("arguments", "new"),
    [
        (["--search"], "meshwright plan search"),
        (["--mesh", "fsdp:4", "--top", "2"], "meshwright plan search --top"),
        (["--constraints=tp=1"], "meshwright plan search --constraints"),
        (["--mesh", "fsdp:4", "--against", "dp:4"], "meshwright plan search --against"),
        (["--diff", "fsdp:4", "dp:4"], "meshwright plan diff"),
    ],
)
def test_a_moved_option_names_its_command(cli, arguments, new):
    with pytest.raises(ConfigError, match=rf"`meshwright plan` no longer has the option --\w+.\nhint: use: {new}"):
        cli(*ON_TPU, *arguments)


@pytest.mark.parametrize("option", ["--mesh", "--view", "--zero-axis", "--pipeline-rounds"])
def test_a_search_rejects_options_of_a_single_plan(cli, capsys, option):
    with pytest.raises(SystemExit) as stopped:
        cli("search", *ON_TPU, option, "global")
    assert stopped.value.code == 2
    assert f"{option} (applied to" in capsys.readouterr().err


def test_a_search_checks_against_first(cli, monkeypatch):
    monkeypatch.setattr("meshwright.cli.plan_command.search_plans", lambda *args, **options: pytest.fail("it searched"))
    with pytest.raises(MeshwrightError, match="fsdp=8 needs 8 devices, but there are 4"):
        cli("search", *ON_TPU, "--against", "fsdp:8")


def test_files_without_a_plan(tmp_path):
    (tmp_path / "a.json").write_text('{"target": 1}')
    with pytest.raises(MeshwrightError, match=r"does not hold a plan.\nhint: "):
        read_plan(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(MeshwrightError, match=r"cannot read .* as a plan"):
        read_plan(tmp_path / "b.json")


def test_rich_draws_the_same_tables():
    job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
    plans = [make_plan(job, "v5p:2x2x1", Setup(mesh=mesh)) for mesh in ("fsdp:4", "dp:4")]
    console = Console(file=io.StringIO(), width=200)
    console.print(plan_summary(plans[0], PlannedJob(model="decoder-tiny")))
    console.print(diff_plans(*plans))
    drawn = console.file.getvalue()
    assert "Memory per device" in drawn
    assert "reduce-scatter" in drawn
    assert "B - A" in drawn


def test_setups_as_text_and_options():
    base = Setup(mesh="dp:8", rows=16)
    assert parse_setup("fsdp:8 minibatches=2 sync=once", base) == Setup(
        mesh="fsdp:8", rows=16, num_minibatches=2, sync="once"
    )
    assert parse_setup("fsdp:8 overlap=False clip=0.5", base) == Setup(mesh="fsdp:8", rows=16, overlap=False, clip=0.5)
    interleaved = Setup(mesh="pp:2", rows=16, pipeline="interleaved-1f1b", pipeline_rounds=4)
    assert parse_setup("pp:2 pipeline=interleaved-1f1b pipeline_rounds=4", base) == interleaved
    setup = Setup(mesh="fsdp:8", precision={"compute": "float16"}, view="global")
    assert setup_arguments(setup) == ["--mesh", "fsdp:8", "--remat", "none", "--view", "global"]
