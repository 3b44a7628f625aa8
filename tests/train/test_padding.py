"""Padded states: initialized bitwise like one device, and trained like one device on every mesh and in both views."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import P
from meshwright.cli import main
from meshwright.models import Decoder
from meshwright.train import init_state, language_job, make_eval_step, make_train_step, state_layout
from meshwright.train.padding import padding_suggested, view_of_layout

RULES = mw.Rules(
    [("up", P("fsdp", "tp")), ("down", P("tp", "fsdp")), ("bias", P("fsdp"))], optional_axes=("fsdp", "tp")
)


def init(key):
    k_up, k_down = jax.random.split(key)
    up, down = jax.random.normal(k_up, (9, 13)) / 3, jax.random.normal(k_down, (13, 5)) / 4
    return {"up": up, "down": down, "bias": jnp.full(5, 0.1)}


def loss(params, batch, rng):
    assert [params[name].shape for name in ("up", "down", "bias")] == [(9, 13), (13, 5), (5,)]  # no padding
    errors = (jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"] - batch["y"]) ** 2
    return (errors.sum(), jnp.float32(errors.size)), {}


JOB = mw.Job(init=init, rules=RULES, loss=loss)
# Adafactor takes means over parameters, which padding would change; weight decay and momentum act on all elements.
OPTIMIZERS = {
    "sgd": optax.sgd(0.5, momentum=0.9),
    "adamw": optax.adamw(0.05, weight_decay=0.1, eps=1e-3),
    "adafactor": optax.adafactor(0.05, min_dim_size_to_factor=4),
}
MESHES = ("fsdp:8", "dp:2,fsdp:4", "tp:8", "dp:2,fsdp:2,tp:2")


def some_batch():
    generator = np.random.default_rng(0)
    return {"x": generator.standard_normal((16, 9), np.float32), "y": generator.standard_normal((16, 5), np.float32)}


def place(optimizer, mesh, **options):
    devices = jax.devices()[:1] if mesh == "dp:1" else None
    layout = state_layout(JOB, optimizer, mw.create_mesh(mesh, devices=devices), pad=True, **options)
    return layout, init_state(JOB, optimizer, layout, jax.random.key(0))


def train(optimizer, mesh, *, num_steps=3, zero_axis=None, **options):
    layout, state = place(optimizer, mesh, zero_axis=zero_axis)
    step = make_train_step(JOB, optimizer, layout, **options)
    losses = []
    for _ in range(num_steps):
        state, metrics = step(state, some_batch())
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    losses.append((float(make_eval_step(JOB, layout)(state, some_batch())["loss"]), 0.0))
    return step, layout, state, np.array(losses)


def assert_padding_is_zero(layout, state):
    padded = [leaf for leaf in layout.leaves if leaf.is_padded]
    assert padded
    for leaf, value in zip(layout.leaves, jax.tree.leaves(state), strict=True):
        if leaf.is_padded:
            value = np.array(value)
            value[tuple(map(slice, leaf.shape))] = 0
            assert not value.any(), leaf.name


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_padded_layouts_initialize_bitwise_equal(name):
    layout, state = place(OPTIMIZERS[name], "dp:1")
    alone = jax.tree.leaves(layout.gather(state).params)
    for mesh in MESHES:
        layout, state = place(OPTIMIZERS[name], mesh)
        assert state.params["up"].shape != (9, 13) or mesh == "dp:1"
        assert_padding_is_zero(layout, state)
        for leaf, expected in zip(jax.tree.leaves(layout.gather(state).params), alone, strict=True):
            assert leaf.tobytes() == expected.tobytes(), mesh


CASES = [
    ("sgd", "fsdp:8", {}),
    ("sgd", "dp:2,fsdp:4", {"num_minibatches": 2, "sync": "once"}),
    ("sgd", "dp:2,fsdp:4", {"view": "global", "num_minibatches": 2}),
    ("sgd", "dp:2,fsdp:2,tp:2", {}),
    ("adamw", "fsdp:8", {"clip": 0.5}),
    ("adamw", "dp:2,fsdp:4", {"zero_axis": "dp"}),
    ("adafactor", "fsdp:8", {}),
    ("adafactor", "fsdp:2,tp:4", {}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), CASES)
def test_padded_states_train_like_one_device(name, mesh, options):
    optimizer = OPTIMIZERS[name]
    same = {"clip": options["clip"]} if "clip" in options else {}
    _, layout, state, expected = train(optimizer, "dp:1", **same)
    wanted = layout.gather(state)
    step, layout, state, got = train(optimizer, mesh, **options)
    assert step.view.view == options.get("view", "global" if "tp" in mesh else "local")
    np.testing.assert_allclose(got, expected, rtol=2e-5)
    assert_padding_is_zero(layout, state)
    found = layout.gather(state)
    # Sums of at most 16 x 13 products of order 1 in float32, over three steps.
    for leaf, other in zip(jax.tree.leaves(found.params), jax.tree.leaves(wanted.params), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5)


def test_a_parameter_padded_over_a_declared_axis_needs_the_global_view():
    optimizer, job = OPTIMIZERS["sgd"], mw.Job(init=init, rules=RULES, loss=loss, local_axes=("tp",))
    layout = state_layout(job, optimizer, mw.create_mesh("tp:8"), pad=True)
    assert make_train_step(job, optimizer, layout).view == ("global", "`down` is padded")
    match = r"`down` is padded from \(13, 5\) to \(16, 5\) along 'tp'[\s\S]*hint: use view=\"global\""
    with pytest.raises(mw.LayoutError, match=match):
        make_train_step(job, optimizer, layout, view="local")


def test_a_padded_state_is_saved_and_restored_on_another_mesh(tmp_path):
    optimizer = OPTIMIZERS["adamw"]
    _, layout, state, _ = train(optimizer, "fsdp:8", num_steps=1)
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, step=1, layout=layout, facts={})
        checkpoints.wait()
        other, _ = place(optimizer, "dp:2,fsdp:4")
        restored = checkpoints.restore(other).state
    for leaf, expected in zip(
        jax.tree.leaves(other.gather(restored).params), jax.tree.leaves(layout.gather(state).params), strict=True
    ):
        assert leaf.tobytes() == expected.tobytes()


# --- On the command line ---

SOURCE = """
import jax, jax.numpy as jnp, numpy as np
import meshwright as mw
from meshwright import P
from meshwright.cli import main

def loss(params, batch, rng):
    return jnp.mean((batch["x"] @ params["w"]) ** 2), {}

rows = {"x": np.random.default_rng(0).normal(size=(16, 9)).astype(np.float32)}
job = mw.Job(
    init=lambda key: {"w": jax.random.normal(key, (9, 4))}, rules=[("w", P("fsdp"))], loss=loss, batch=rows, data=rows
)
"""


def test_train_and_verify_pad(tmp_path, capsys):
    (tmp_path / "odd.py").write_text(SOURCE)
    job, quiet = f"{tmp_path / 'odd.py'}:job", ["--no-report", "--no-tensorboard", "--hang", "0"]

    def run(*command):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in command])
        return ended.value.code or 0, capsys.readouterr()

    assert run("verify", job, "--mesh", "fsdp:4", "--steps", 1, "--no-inspect", "--pad", "w")[0] == 0
    assert run("verify", job, "--mesh", "fsdp:4", "--steps", 1, "--no-inspect")[0] == 1
    folder = ["--run", tmp_path / "run", *quiet]
    assert run("train", "--job", job, "--mesh", "fsdp:8", "--pad", "w", "--steps", 2, *folder)[0] == 0
    code, said = run("train", *folder, "--resume", "--steps", 3, "--mesh", "dp:2,fsdp:4")
    assert code == 0
    assert "repadded for this mesh" in said.err
    code, said = run("train", "--job", job, "--mesh", "fsdp:8", "--steps", 2, "--run", tmp_path / "other", *quiet)
    assert code == 1
    assert "9 % 8 = 1" in said.err


def test_errors_name_the_parameters_that_padding_would_place():
    with pytest.raises(mw.LayoutError) as caught, padding_suggested(JOB):
        state_layout(JOB, optax.sgd(0.1), mw.create_abstract_mesh("fsdp:2"))
    assert str(caught.value).endswith(" Or store them padded: --pad bias down up")
    assert str(caught.value).count("hint:") == 1
    model = language_job(Decoder.named("tiny", vocab_size=257), batch_size=8, num_tokens=8)
    with pytest.raises(mw.LayoutError) as caught, padding_suggested(model):
        state_layout(model, optax.sgd(0.1), mw.create_abstract_mesh("tp:2"))
    assert "--pad" not in str(caught.value)  # matmuls along tp do not take padding


def test_a_view_is_suggested_only_if_all_parameters_may_use_it():
    def two(key):
        return {"blocks": jnp.zeros((7, 4)), "table": jnp.zeros((6, 4))}

    rules = [("blocks", P("pp")), ("table", P("dp"))]
    both = mw.Job(init=two, rules=rules, local_axes=("pp",))
    layout = state_layout(both, optax.sgd(0.1), mw.create_abstract_mesh("dp:4,pp:2"), pad=True)
    assert "view" not in view_of_layout(both, layout, None).reason
    layout = state_layout(both, optax.sgd(0.1), mw.create_abstract_mesh("dp:2,pp:2"), pad=True)
    assert 'pass view="local"' in view_of_layout(both, layout, None).reason
