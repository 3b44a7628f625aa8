import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import P, compat
from meshwright.compat.fjformer import partition_utils
from meshwright.compat.fjformer.partition_utils import mesh_utils


def test_all_drop_in_functions_but_one_are_meshwright_s():
    for name in mesh_utils.__all__:
        assert getattr(partition_utils, name) is getattr(mesh_utils, name)
        assert (getattr(mesh_utils, name) is getattr(mw, name)) is (name != "with_sharding_constraint")


def test_without_a_mesh_a_constraint_does_nothing():
    x = jnp.ones((4, 4))
    assert mesh_utils.with_sharding_constraint(x, P("dp", "tp")) is x
    assert jax.jit(lambda x: mesh_utils.with_sharding_constraint(x, P("dp")))(x).shape == (4, 4)


def test_with_a_mesh_it_constrains_and_checks(assert_placed):
    mesh = mw.create_mesh("dp:4,tp:2")
    with jax.set_mesh(mesh):
        result = jax.jit(lambda x: mesh_utils.with_sharding_constraint(x, P("dp", "tp")))(jnp.ones((8, 4)))
        with pytest.raises(mw.MeshError, match=r"'dpp'.*\nhint: did you mean 'dp'"):
            mesh_utils.with_sharding_constraint(jnp.ones((8, 4)), P("dpp"))
    assert_placed(result, mesh, P("dp", "tp"), jnp.ones((8, 4)))


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
