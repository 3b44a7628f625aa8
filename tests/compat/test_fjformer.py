import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

import meshwright as mw
from meshwright import P, compat
from meshwright.compat.fjformer import partition_utils
from meshwright.compat.fjformer.partition_utils import mesh_utils


def test_all_drop_in_functions_but_two_are_meshwright_s():
    for name in mesh_utils.__all__:
        assert getattr(partition_utils, name) is getattr(mesh_utils, name)
        is_own = name in ("get_jax_mesh", "with_sharding_constraint")
        assert (getattr(mesh_utils, name) is getattr(mw, name)) is not is_own


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("2,4", {"x": 2, "y": 4, "z": 1}),
        ("-1", {"x": 8, "y": 1, "z": 1}),
        ("!2,-1", {"x": 2, "y": 4, "z": 1}),
        ("2,2,2", {"x": 2, "y": 2, "z": 2}),
        ("y:4,x:-1", {"x": 2, "y": 4, "z": 1}),
        ("tp:2,dp:-1", {"tp": 2, "dp": 4}),  # these names have no third, so there is nothing to fill
    ],
)
def test_a_mesh_without_names_has_the_axes_x_y_z(text, shape):
    mesh = mesh_utils.get_jax_mesh(text)
    assert list(mesh.shape.items()) == list(shape.items())
    assert list(mesh_utils.get_jax_mesh(text, None).shape.items()) == list(shape.items())
    if text.startswith("!"):
        assert mesh.devices.flatten().tolist() == jax.devices()


def test_a_mesh_with_names_has_exactly_these():
    assert list(mesh_utils.get_jax_mesh("2,4", ("dp", "tp")).shape.items()) == [("dp", 2), ("tp", 4)]
    assert list(mesh_utils.get_jax_mesh("tp:4,dp:2", ("dp", "tp")).shape.items()) == [("dp", 2), ("tp", 4)]
    with pytest.raises(mw.MeshError, match=r"got 2 axis sizes for 3 axis names \(dp, fsdp, tp\)"):
        mesh_utils.get_jax_mesh("2,4", ("dp", "fsdp", "tp"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2,2,2,1", r"got 4 axis sizes for 3 axis names \(x, y, z\)"),
        ("3", r"x=3 x y=1 x z=1 needs 3 devices, but there are 8"),
        ("", r"mesh '': cannot parse ''"),
        ("x:2,x:4", r"axis 'x' appears more than once"),
    ],
)
def test_a_mesh_without_names_that_cannot_be_built(text, message):
    with pytest.raises(mw.MeshError, match=message):
        mesh_utils.get_jax_mesh(text)


def test_the_native_function_needs_names():
    with pytest.raises(TypeError, match="names"):
        mw.get_jax_mesh("2,4")


def test_without_a_mesh_a_constraint_does_nothing():
    x = jnp.ones((4, 4))
    assert mesh_utils.with_sharding_constraint(x, P("dp", "tp")) is x
    assert jax.jit(lambda x: mesh_utils.with_sharding_constraint(x, P("dp")))(x).shape == (4, 4)


def test_with_all_axes_it_constrains_and_checks(assert_placed):
    mesh, x = mw.create_mesh("dp:4,tp:2"), jnp.ones((8, 4))
    with jax.set_mesh(mesh):
        result = jax.jit(lambda x: mesh_utils.with_sharding_constraint(x, P("dp", "tp")))(x)
        with pytest.raises(mw.PlacementError, match=r"dim 0 has size 6; `dp` has 4 devices"):
            mesh_utils.with_sharding_constraint(jnp.ones((6, 4)), P("dp"))
    assert_placed(result, mesh, P("dp", "tp"), x)
    # A NamedSharding has its own mesh.
    assert_placed(mesh_utils.with_sharding_constraint(x, NamedSharding(mesh, P("tp"))), mesh, P("tp"), x)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (P("dp", "pt"), r"lacks axis 'pt'; it has axes: dp, tp\.\nhint: did you mean 'tp'\?$"),
        (P("dp", "sequence"), r"lacks axis 'sequence'; it has axes: dp, tp\.\nhint: add the axis to the mesh"),
        (P(("dp", "ddp"), P.UNCONSTRAINED), r"lacks axis 'ddp'.*\nhint: did you mean 'dp'\?$"),
        (
            {"a": P("dp"), "b": {"c": P("pt", "data"), "d": None}},
            r"lacks axes 'pt', 'data'; it has axes: dp, tp\.\nhint: for 'pt', did you mean 'tp'\?$",
        ),
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_without_one_of_the_axes_it_returns_its_argument_with_one_warning(specs, message, traced):
    """The constraint applies to all leaves or to none, so one missing axis turns off the others too."""
    leaf = jnp.ones((8, 4))
    x = leaf if isinstance(specs, P) else {"a": leaf, "b": {"c": leaf, "d": leaf}}

    def constrain(x):
        y = mesh_utils.with_sharding_constraint(x, specs)
        assert y is x
        return y

    with (
        jax.set_mesh(mw.create_mesh("dp:4,tp:2")),
        pytest.warns(
            mw.MeshwrightWarning, match=rf"with_sharding_constraint had no effect: the mesh {message}"
        ) as seen,
    ):
        (jax.jit(constrain) if traced else constrain)(x)
    assert len(seen) == 1
    assert seen[0].filename == __file__  # the warning points to the caller


def test_the_native_function_raises_for_a_missing_axis():
    with (
        jax.set_mesh(mw.create_mesh("dp:4,tp:2")),
        pytest.raises(mw.MeshError, match=r"'dpp'.*\nhint: did you mean 'dp'"),
    ):
        mw.with_sharding_constraint(jnp.ones((8, 4)), P("dpp"))


def test_alias(run_python):
    code = """
    import sys
    from meshwright import compat
    compat.alias("fjformer")
    compat.alias("fjformer")  # a second call does nothing

    import fjformer
    import fjformer.partition_utils.mesh_utils as mesh_utils
    from fjformer import partition_utils
    from fjformer.partition_utils import match_partition_rules
    from fjformer.partition_utils.mesh_utils import create_mesh
    import meshwright, meshwright.compat.fjformer

    assert fjformer is meshwright.compat.fjformer
    assert match_partition_rules is meshwright.match_partition_rules
    assert create_mesh is mesh_utils.create_mesh is meshwright.create_mesh
    assert fjformer.with_sharding_constraint is partition_utils.with_sharding_constraint
    print("ok")
    """
    result = run_python(code)
    assert result.stdout.strip() == "ok", result.stderr


def test_alias_refuses_to_hide_the_original(run_python, tmp_path):
    (tmp_path / "fjformer").mkdir()
    (tmp_path / "fjformer" / "__init__.py").write_text("original = True")
    code = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import meshwright as mw
    from meshwright import compat

    for _ in range(2):  # before and after importing the original
        try:
            compat.alias("fjformer")
        except mw.MeshwrightError as error:
            print(error)
        import fjformer
        assert fjformer.original
    """
    result = run_python(code, str(tmp_path))
    assert result.returncode == 0, result.stderr
    message = "the original 'fjformer' is installed, and an alias would hide it."
    hint = "hint: uninstall it, or import from meshwright.compat.fjformer."
    assert result.stdout.splitlines() == [message, hint] * 2


def test_alias_of_an_unknown_package():
    with pytest.raises(mw.MeshwrightError, match=r"no drop-in modules for 'fjforme'\.\nhint: did you mean 'fjformer'"):
        compat.alias("fjforme")
