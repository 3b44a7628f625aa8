"""`meshwright plan` with numbers, meshes, interpreters and files that it cannot use: errors say what it takes."""

import json

import pytest
import tyro

from meshwright.cli.plan import COMMANDS, join_words
from meshwright.cli.rules import rules
from meshwright.errors import ConfigError, MeshError, MeshwrightError
from meshwright.plan.output.plan_diff import read_plan

TINY = ("--model", "decoder-tiny", "--num-tokens", "64", "--target", "h200:1x8")
QUICK = (*TINY, "--no-compile")
SLICES = ("search", "--model", "decoder-tiny", "--num-tokens", "64", "--target", "v5p:2x2x1*2", "--no-compile")


def command_first(arguments, shared):
    """Returns arguments with those that many tests share behind the command, if they name one."""
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
        (["--mesh", "fsdp:8", "--batch-size", "-64"], "--batch-size -64 .*\nhint: --batch-size takes .* 1 or more"),
        (["--mesh", "fsdp:8", "--batch-size", "0"], "--batch-size 0 is not possible"),
        (["--mesh", "fsdp:8", "--num-tokens", "0"], "--num-tokens 0 is not possible"),
        (["--mesh", "fsdp:8", "--minibatches", "0"], "--minibatches 0 is not possible"),
        (["--mesh", "fsdp:8", "--price", "-1"], "--price -1 is no price.\nhint: --price takes dollars"),
        (["--mesh", "fsdp:8", "--price", "nan"], "--price nan is no price"),
        (["--mesh", "fsdp:8", "--price", "inf"], "--price inf is no price"),
        (["--mesh", "fsdp:8", "--timeout", "-1"], "--timeout -1 leaves no time.\nhint: --timeout takes seconds"),
        (["--mesh", "fsdp:8", "--timeout", "nan"], "--timeout nan leaves no time"),
        (["search", "--top", "0"], "--top 0 is not possible.\nhint: --top takes a whole number, 1 or more"),
        (["search", "--top", "-1"], "--top -1 is not possible"),
        (["search", "--constraints", "batch=0 rows"], "'batch=0 rows' is an empty batch"),
        (["search", "--constraints", "batch=0.4 tokens"], "'batch=0.4 tokens' is an empty batch"),
        (["search", "--constraints", "tp=3"], "tp=3 leaves no mesh of 8 devices.\nhint: tp may be 1, 2, 4 or 8"),
        (["search", "--constraints", "tp>4, tp<8"], "tp>4, tp<8 leaves no mesh of 8 devices"),
        (["search", "--constraints", "tp=4, fsdp=4"], "fsdp=4, tp=4 together leave no mesh of 8 devices"),
        (["search", "--minibatches", "3"], "minibatches=3 leaves no number .*\nhint: minibatches may be 1, 2, 4"),
        (["diff", "fsdp:8", "dp:8 minibatches=0"], "'minibatches=0' is less than 1"),
        (["diff", "fsdp:8", "dp:8 rows=-8"], "'rows=-8' is less than 1"),
    ],
)
def test_numbers_that_mean_nothing(cli, arguments, says):
    with pytest.raises(ConfigError, match=says):
        cli(*command_first(arguments, QUICK))


@pytest.mark.parametrize(("plans", "says"), [(["fsdp:8"], "Second plan"), (["fsdp:8", "dp:8", "tp:8"], "tp:8")])
def test_a_difference_is_of_two_plans(cli, capsys, plans, says):
    with pytest.raises(SystemExit) as stopped:
        cli("diff", *plans, *QUICK)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_a_search_on_slices_says_which_sizes_there_are(cli):
    with pytest.raises(ConfigError, match=r"dp=1 leaves no mesh of 8 devices in 2 slices.\nhint: dp may be 2, 4 or 8"):
        cli(*SLICES, "--constraints", "dp=1")
    with pytest.raises(ConfigError, match=r"tp=8 leaves no mesh of 8 devices in 2 slices.\nhint: tp may be 1, 2 or 4"):
        cli(*SLICES, "--constraints", "tp=8")


def test_numbers_at_their_limits(cli):
    code, out, _ = cli(*QUICK, "--mesh", "tp:8", "--batch-size", "1", "--minibatches", "1", "--price", "0", "--json")
    data = json.loads(out)
    assert (code, data["rows"], data["tokens_per_step"], data["dollars_per_billion_tokens"]) == (0, 1, 64, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--mesh", "tp:8"),
        ("diff", "fsdp:8", "tp:8"),
        ("diff", "tp:8", "fsdp:8"),
        ("search", "--against", "tp:8"),
    ],
)
def test_a_mesh_that_training_refuses(cli, arguments):
    with pytest.raises(MeshError, match=r"tp=8 does not divide 4 heads.*\nhint: tp may be 1, 2 or 4"):
        cli(*command_first(arguments, (*QUICK, "--batch-size", "8", "--model-options", "num_heads=4")))


@pytest.mark.parametrize("arguments", [("--mesh", "fdsp:8"), ("diff", "fsdp:8", "fdsp:8")])
def test_a_misspelt_axis(cli, arguments):
    with pytest.raises(MeshError, match=r"does not use mesh axis 'fdsp'.\nhint: did you mean 'fsdp'"):
        cli(*command_first(arguments, QUICK))


@pytest.mark.parametrize("python", ["/nope", "/"])
def test_an_interpreter_that_cannot_be_run_is_a_note(cli, python):
    code, out, err = cli(*TINY, "--mesh", "fsdp:8", "--python", python)
    assert code == 0
    assert f"could not be compiled (missing): {python!r} cannot be run: " in err
    assert "hint: --python takes the path of an interpreter" in err
    assert "fits: " in out
    code, out, err = cli("search", *TINY, "--constraints", "fsdp=8", "--top", "1", "--python", python)
    assert code == 0
    assert "none of the best could be compiled; what is shown is computed." in err
    assert f"not kept: fsdp:8 rows=8: not compiled: missing: {python!r} cannot be run" in out


def whole(cli):
    return json.loads(cli(*QUICK, "--mesh", "fsdp:8", "--json")[1])


def test_files_that_hold_no_plan(cli, tmp_path):
    data = whole(cli)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert read_plan(path) == data
    hint = r"\nhint: write one with: meshwright plan ... --json > FILE"
    for made, says in (
        ("{", "cannot be read as a plan: Expecting"),
        ("\udcff", "cannot be read as a plan: "),
        ("[]", "does not hold a plan."),
        ('{"plans": []}', "is of a search that found no plan."),
        ('{"plans": [1]}', "does not hold a plan."),
        (json.dumps(data | {"memory": {}}), "holds a plan without 'parts'."),
        (json.dumps(data | {"setup": {"mesh": "fsdp"}}), "holds a plan that cannot be read: "),
        (json.dumps(data | {"sent": [1]}), "holds a plan that cannot be read: "),
        (json.dumps({name: value for name, value in data.items() if name != "time"}), "holds a plan without 'time'."),
    ):
        path.write_bytes(made.encode(errors="surrogateescape"))
        with pytest.raises(MeshwrightError, match=f"{says}.*{hint}"):
            cli("diff", path, path)


def test_both_sides_are_checked_before_one_is_compiled(cli, monkeypatch, tmp_path):
    monkeypatch.setattr("meshwright.cli.plan.compile_step", lambda *args, **limits: pytest.fail("it compiled"))
    monkeypatch.setattr("meshwright.cli.plan.search_plans", lambda *args, **limits: pytest.fail("it searched"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(MeshError, match="does not use mesh axis 'fdsp'"):
        cli("diff", "fsdp:8", "fdsp:8", *TINY, "--python", "other")
    for arguments in (["diff", "fsdp:8", tmp_path / "bad.json"], ["search", "--against", tmp_path / "bad.json"]):
        with pytest.raises(MeshwrightError, match=r"cannot be read as a plan.*\nhint: "):
            cli(*arguments, *TINY, "--python", "other")
