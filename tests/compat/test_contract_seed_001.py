"""Every name of seed document 001, with its documented signature."""

import importlib
import inspect

import pytest

# The documented signatures, one line per name.
DOCUMENTED = """
create_mesh(axis_dims=(1, -1, 1, 1), axis_names=('dp', 'fsdp', 'tp', 'sp'), backend='')
flatten_tree(xs, is_leaf=None, sep=None)
get_jax_mesh(axis_dims, names)
get_metrics(metrics, unreplicate=False, stack=False)
get_names_from_partition_spec(partition_specs)
get_weight_decay_mask(exclusions)
make_shard_and_gather_fns(partition_specs, dtype_specs=None)
match_partition_rules(rules, params)
named_tree_map(f, tree, *rest, is_leaf=None, sep=None)
names_in_current_mesh(*names)
tree_apply(fns, tree)
tree_path_to_string(path, sep=None)
with_sharding_constraint(x, partition_specs)
wrap_function_with_rng(rng)
""".strip().splitlines()

# With no names the document promises x, y and z, so the drop-in function also works without this argument.
ALSO_OPTIONAL = {"get_jax_mesh": ("names",)}

HOMES = (
    "meshwright",
    "meshwright.compat.fjformer",
    "meshwright.compat.fjformer.partition_utils",
    "meshwright.compat.fjformer.partition_utils.mesh_utils",
)


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def documented(line):
    scope = {}
    exec(f"def {line}: ...", scope)
    return parameters(scope[line.partition("(")[0]])


def differences(ours, theirs):
    """Returns the differences that callers could notice: all but new keyword-only arguments with defaults."""
    extra = [p for p in ours if p not in theirs]
    kept = [p for p in ours if p in theirs]
    found = [p for p in extra if p[1] is not inspect.Parameter.KEYWORD_ONLY or p[2] is inspect.Parameter.empty]
    return found if kept == theirs else [*found, ("order or missing", kept, theirs)]


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("line", DOCUMENTED, ids=lambda line: line.partition("(")[0])
def test_signature(line, home):
    name = line.partition("(")[0]
    module = importlib.import_module(home)
    assert name in module.__all__
    ours = parameters(getattr(module, name))
    if "compat" in home:
        optional = ALSO_OPTIONAL.get(name, ())
        assert [default for p, _, default in ours if p in optional] == [None] * len(optional)
        ours = [(p, kind, inspect.Parameter.empty if p in optional else default) for p, kind, default in ours]
    assert differences(ours, documented(line)) == []


@pytest.mark.parametrize(
    ("ours", "fits"),
    [
        ("f(x, partition_specs)", True),
        ("f(x, partition_specs, *, mesh=None)", True),
        ("f(x, partition_specs, *, mesh)", False),
        ("f(x, partition_specs, mesh=None)", False),
        ("f(partition_specs, x)", False),
        ("f(x)", False),
        ("f(x, partition_specs=None)", False),
    ],
)
def test_the_comparison_itself_sees_every_difference(ours, fits):
    assert (differences(documented(ours), documented("f(x, partition_specs)")) == []) is fits


def test_drop_in_modules_have_exactly_these_names():
    names = sorted(line.partition("(")[0] for line in DOCUMENTED)
    for home in HOMES[1:]:
        assert sorted(importlib.import_module(home).__all__) == names


def test_every_public_name_exists():
    module = importlib.import_module("meshwright")
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
