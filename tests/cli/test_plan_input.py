"""Invalid input to `meshwright plan`: numbers, meshes, interpreters and files."""

import json

import pytest
import tyro

from meshwright.cli.plan_command import COMMANDS, join_words
from meshwright.cli.rules import rules
from meshwright.errors import ConfigError, MeshError, MeshwrightError
from meshwright.plan.output.plan_diff import read_plan

TINY = ("--model", "decoder-tiny", "--num-tokens", "64", "--target", "h200:1x8")
QUICK = (*TINY, "--no-compile")
SLICES = ("search", "--model", "decoder-tiny", "--num-tokens", "64", "--target", "v5p:2x2x1*2", "--no-compile")


def command_first(arguments, shared):
    """Inserts shared arguments after the subcommand, if there is one."""
    split = int(arguments[0] in ("search", "diff"))
    return (*arguments[:split], *shared, *arguments[split:])


@pytest.fixture
def cli(capsys):
    """Runs the command in this process; returns exit code, stdout and stderr."""

    def run(*args):
        words = join_words(["plan", *map(str, args)])
        code = tyro.extras.subcommand_cli_from_dict({**COMMANDS, "rules": rules}, args=words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mesh", "fsdp:8", "--batch-size", "-64"], "--batch-size must be .*; got -64.\nhint: .* --batch-size 8"),
        (["--mesh", "fsdp:8", "--batch-size", "0"], "--batch-size must be at least 1; got 0"),
        (["--mesh", "fsdp:8", "--num-tokens", "0"], "--num-tokens must be at least 1; got 0"),
        (["--mesh", "fsdp:8", "--minibatches", "0"], "--minibatches must be at least 1; got 0"),
        (["--mesh", "fsdp:8", "--price", "-1"], "--price must be .* at least 0; got -1.\nhint: .* --price 2.5"),
        (["--mesh", "fsdp:8", "--price", "nan"], "--price must be finite .*; got nan"),
        (["--mesh", "fsdp:8", "--price", "inf"], "--price must be finite .*; got inf"),
        (["--mesh", "fsdp:8", "--timeout", "-1"], "--timeout must be greater than 0; got -1.\nhint: .* seconds"),
        (["--mesh", "fsdp:8", "--timeout", "nan"], "--timeout must be greater than 0; got nan"),
        (["--mesh", "fsdp:8", "--mtbf", "0"], "--mtbf must be from 0.01 to 1e\\+09 hours; got 0"),
        (["--mesh", "fsdp:8", "--mtbf", "1e300"], "--mtbf must be .*; got 1e\\+300"),
        (["--mesh", "fsdp:8", "--mtbf", "9", "--storage-rate", "-1"], "--storage-rate must be .*GiB/s; got -1"),
        (["--mesh", "fsdp:8", "--mtbf", "9", "--storage-rate", "1e-300"], "--storage-rate must be .*; got 1e-300"),
        (["--mesh", "fsdp:8", "--mtbf", "9", "--restart", "nan"], "--restart must be from 0 .* seconds; got nan"),
        (["--mesh", "fsdp:8", "--mtbf", "9", "--restart", "1e200"], "--restart must be .*; got 1e\\+200"),
        (["--mesh", "fsdp:8", "--restart", "60"], "--restart has no effect without --mtbf"),
        (["search", "--top", "0"], "--top must be at least 1; got 0.\nhint: pass a positive whole number"),
        (["search", "--top", "-1"], "--top must be at least 1; got -1"),
        (["search", "--constraints", "batch=0 rows"], "'batch=0 rows' is an empty batch"),
        (["search", "--constraints", "batch=0.4 tokens"], "'batch=0.4 tokens' is an empty batch"),
        (["search", "--constraints", "batch=8 rows", "--batch-size", "8"], "both --batch-size and a batch"),
        (["search", "pp=1"], "'pp=1' looks like a constraint: pass all of them as one text"),
        (["search", "--constraints", "tp=3"], "tp=3 matches no mesh of 8 devices.\nhint: set tp to 1, 2, 4 or 8"),
        (["search", "--constraints", "tp>4, tp<8"], "tp>4, tp<8 matches no mesh of 8 devices"),
        (["search", "--constraints", "tp=4, fsdp=4"], "fsdp=4, tp=4 together match no mesh of 8 devices"),
        (["search", "--minibatches", "3"], "minibatches=3 matches none .*\nhint: allow 1, 2, 4"),
        (["diff", "fsdp:8", "dp:8 minibatches=0"], "'minibatches=0' is less than 1"),
        (["diff", "fsdp:8", "dp:8 rows=-8"], "'rows=-8' is less than 1"),
    ],
)
def test_numbers_out_of_range(cli, arguments, says):
    with pytest.raises(ConfigError, match=says):
        cli(*command_first(arguments, QUICK))


@pytest.mark.parametrize(("plans", "says"), [(["fsdp:8"], "Second plan"), (["fsdp:8", "dp:8", "tp:8"], "tp:8")])
def test_diff_takes_exactly_two_plans(cli, capsys, plans, says):
    with pytest.raises(SystemExit) as stopped:
        cli("diff", *plans, *QUICK)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_a_search_on_slices_suggests_valid_sizes(cli):
    with pytest.raises(ConfigError, match=r"dp=1 matches no mesh of 8 devices in 2 slices.\nhint: set dp to 2, 4 or 8"):
        cli(*SLICES, "--constraints", "dp=1")
    with pytest.raises(ConfigError, match=r"tp=8 matches no mesh of 8 devices in 2 slices.\nhint: set tp to 1, 2 or 4"):
        cli(*SLICES, "--constraints", "tp=8")


def test_numbers_at_their_limits(cli):
    code, out, _ = cli(*QUICK, "--mesh", "tp:8", "--batch-size", "1", "--minibatches", "1", "--price", "0", "--json")
    data = json.loads(out)
    assert (code, data["rows"], data["tokens_per_step"], data["dollars_per_billion_tokens"]) == (0, 1, 64, 0)


@pytest.mark.parametrize(
    "arguments",
    [("--mesh", "tp:8"), ("diff", "fsdp:8", "tp:8"), ("diff", "tp:8", "fsdp:8"), ("search", "--against", "tp:8")],
)
def test_a_mesh_that_training_rejects(cli, arguments):
    with pytest.raises(MeshError, match=r"tp=8 does not divide 4 heads.*\nhint: set tp to 1, 2 or 4"):
        cli(*command_first(arguments, (*QUICK, "--batch-size", "8", "--model-options", "num_heads=4")))


@pytest.mark.parametrize("arguments", [("--mesh", "fdsp:8"), ("diff", "fsdp:8", "fdsp:8")])
def test_a_misspelt_axis(cli, arguments):
    with pytest.raises(MeshError, match=r"does not use mesh axis 'fdsp'.\nhint: did you mean 'fsdp'"):
        cli(*command_first(arguments, QUICK))


@pytest.mark.parametrize("python", ["/nope", "/"])
def test_an_interpreter_that_cannot_be_run_is_a_note(cli, python):
    code, out, err = cli(*TINY, "--mesh", "fsdp:8", "--python", python)
    assert code == 0
    assert f"compiling failed (missing): cannot run {python!r}: " in err
    assert "hint: pass the path of a Python interpreter" in err
    assert "fits: " in out
    code, out, err = cli("search", *TINY, "--constraints", "fsdp=8", "--top", "1", "--python", python)
    assert code == 0
    assert "none of the best plans could be compiled; the plans shown are computed." in err
    assert f"dropped: fsdp:8 rows=8: not compiled: missing: cannot run {python!r}" in out


def whole(cli):
    return json.loads(cli(*QUICK, "--mesh", "fsdp:8", "--json")[1])


def test_malformed_plan_files(cli, tmp_path):
    data = whole(cli)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert read_plan(path) == data
    hint = r"\nhint: write one with: meshwright plan ... --json > FILE"
    for made, says in (
        ("{", "cannot read .* as a plan: .* is not JSON: Expecting"),
        ("\udcff", "cannot read .* as a plan: "),
        ("[]", "does not hold a plan."),
        ('{"plans": []}', "holds a search that found no plan."),
        ('{"plans": [1]}', "does not hold a plan."),
        (json.dumps(data | {"memory": {}}), "the plan in .* has no 'parts'."),
        (json.dumps(data | {"setup": {"mesh": "fsdp"}}), "the plan in .* is malformed: "),
        (json.dumps(data | {"sent": [1]}), "the plan in .* is malformed: "),
        (json.dumps({name: value for name, value in data.items() if name != "time"}), "the plan in .* has no 'time'."),
    ):
        path.write_bytes(made.encode(errors="surrogateescape"))
        with pytest.raises(MeshwrightError, match=f"{says}.*{hint}"):
            cli("diff", path, path)


def test_both_sides_are_checked_before_one_is_compiled(cli, monkeypatch, tmp_path):
    monkeypatch.setattr("meshwright.cli.plan_command.compile_step", lambda *args, **limits: pytest.fail("it compiled"))
    monkeypatch.setattr("meshwright.cli.plan_command.search_plans", lambda *args, **limits: pytest.fail("it searched"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(MeshError, match="does not use mesh axis 'fdsp'"):
        cli("diff", "fsdp:8", "fdsp:8", *TINY, "--python", "other")
    for arguments in (["diff", "fsdp:8", tmp_path / "bad.json"], ["search", "--against", tmp_path / "bad.json"]):
        with pytest.raises(MeshwrightError, match=r"cannot read .* as a plan.*\nhint: "):
            cli(*arguments, *TINY, "--python", "other")
