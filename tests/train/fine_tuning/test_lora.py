"""LoRA adapters of a job: gradients against float64 and one device, bytes sent, storage of the base, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.errors import ConfigError, JobError, MeshwrightError
from meshwright.models import XLSTM
from meshwright.parallel.lora.block_quantize import NF4_LEVELS, dequantize_blocks, quantize_blocks
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.train import LoraSettings, language_job, lora, make_gradients, merged
from meshwright.train.fine_tuning.adapting import with_fields
from meshwright.tree import named_leaves

WIDTH, HIDDEN, RANK, ROWS = 16, 32, 2, 16
RULES = [("up", P(None, "fsdp", "tp")), ("down", P(None, "tp", "fsdp")), ("bias", P())]
MESHES = [("dp:8", "local"), ("dp:8", "global"), ("fsdp:8", "local"), ("fsdp:8", "global")]
MESHES += [("dp:2,fsdp:2,tp:2", "global")]


def init(key):
    k_up, k_down = jax.random.split(key)
    up, down = jax.random.normal(k_up, (2, WIDTH, HIDDEN)), jax.random.normal(k_down, (2, HIDDEN, WIDTH))
    return {"up": up / WIDTH**0.5, "bias": jnp.full(WIDTH, 0.1), "down": down / HIDDEN**0.5}


def loss(params, batch, rng):
    h = batch["x"]
    for layer in range(2):
        h = h + jnp.tanh(h @ params["up"][layer]) @ params["down"][layer] + params["bias"]
    return ((h - batch["y"]) ** 2).mean(), {}


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}


PLAIN = mw.Job(init=init, rules=mw.Rules(RULES, optional_axes=("fsdp", "tp")), loss=loss, batch=make_batch())
ADAPTED = lora(PLAIN, rank=RANK, alpha=4, targets="up|down")


def moved_init(init, key):
    """Parameters as after some training, when B is no longer zero."""

    def move(name, leaf):
        return leaf + 0.3 * jax.random.normal(jax.random.key(len(name)), leaf.shape) if "lora_b" in name else leaf

    params = init(key)
    return jax.tree.unflatten(
        jax.tree.structure(params), [move(leaf.name, leaf.value) for leaf in named_leaves(params)]
    )


def moved(job):
    return with_fields(job, init=functools.partial(moved_init, job.init))


def on(mesh):
    return mw.create_mesh(mesh, devices=1 if mesh == "dp:1" else None)


def gradients(job, mesh, view, batch):
    layout = mw.state_layout(job, optax.sgd(0.1), on(mesh))
    state = mw.init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
    result, _ = jax.jit(make_gradients(job, layout, view=view))(state.params, batch, None)
    return jax.device_get(state.params), jax.device_get(result.grads)


def dense_gradients(params, batch, scale):
    """Gradients of the adapters in float64: those of merged matrices by hand, then the chain rule."""
    x, y = (batch[name].astype(np.float64) for name in "xy")
    wide = {
        name: {part: np.asarray(leaf, np.float64) for part, leaf in params[name].items()} for name in ("up", "down")
    }
    whole = {name: node["base"] + scale * node["lora_a"] @ node["lora_b"] for name, node in wide.items()}
    inputs, hidden, h = [], [], x
    for layer in range(2):
        inputs.append(h)
        hidden.append(np.tanh(h @ whole["up"][layer]))
        h = h + hidden[-1] @ whole["down"][layer] + np.asarray(params["bias"], np.float64)
    dh = 2 * (h - y) / h.size
    d_whole = {"up": np.zeros_like(whole["up"]), "down": np.zeros_like(whole["down"])}
    for layer in (1, 0):
        d_whole["down"][layer] = hidden[layer].T @ dh
        before_tanh = (dh @ whole["down"][layer].T) * (1 - hidden[layer] ** 2)
        d_whole["up"][layer] = inputs[layer].T @ before_tanh
        dh = dh + before_tanh @ whole["up"][layer].T
    return {
        name: {
            "lora_a": scale * d_whole[name] @ wide[name]["lora_b"].swapaxes(-1, -2),
            "lora_b": scale * wide[name]["lora_a"].swapaxes(-1, -2) @ d_whole[name],
        }
        for name in wide
    }


def close(got, wanted, tolerance=2e-6):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


# --- Gradients ---


@pytest.mark.parametrize(("mesh", "view"), [("dp:1", "local"), *MESHES])
def test_gradients_of_adapters_equal_dense_ones_in_float64(mesh, view):
    params, grads = gradients(moved(ADAPTED), mesh, view, make_batch())
    wanted = dense_gradients(params, make_batch(), scale=2.0)
    for name in ("up", "down"):
        assert grads[name]["base"] is None
        for part in ("lora_a", "lora_b"):
            close(grads[name][part], wanted[name][part])
    assert grads["bias"] is None


SETTINGS = {"rank": 4, "alpha": 8, "targets": r"attn/|mlp/|head"}


@functools.cache
def whole_decoder(model=None, base=None):
    """Adapter gradients on one device from those of the merged decoder."""
    job = moved(lora(decoder(model), base=base, block=4, **SETTINGS))
    params = jax.jit(job.init)(jax.random.split(jax.random.key(0))[0])
    whole = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), merged(params, job.lora))
    d_whole = jax.jit(jax.grad(lambda p: ratio(decoder(model).loss(p, tokens(), None)[0])))(whole)
    return {
        name: (
            job.lora.scale * d @ jnp.swapaxes(node["lora_b"], -1, -2),
            job.lora.scale * jnp.swapaxes(node["lora_a"], -1, -2) @ d,
        )
        for name, node, d in adapted_nodes(params, d_whole)
    }


def ratio(pair):
    return pair[0] / pair[1]


def adapted_nodes(params, others):
    nodes = jax.tree.leaves_with_path(params, is_leaf=mw.parallel.lora.low_rank.is_adapted)
    for (path, node), other in zip(nodes, jax.tree.leaves(others), strict=True):
        if isinstance(node, dict):
            yield jax.tree_util.keystr(path), node, other


def decoder(model=None):
    sizes = {"vocab_size": 64, "num_layers": 2, "d_model": 32, "num_heads": 8, "d_ff": 64}
    model = model(**sizes, chunk_size=8) if model else mw.models.Decoder(**sizes, num_kv_heads=4)
    return language_job(model, batch_size=ROWS, num_tokens=16)


def tokens(seed=0):
    rng = np.random.default_rng(seed)
    batch = {name: rng.integers(0, 64, (ROWS, 16)).astype(np.int32) for name in ("inputs", "targets")}
    return batch | {"weights": (rng.random((ROWS, 16)) < 0.7).astype(np.float32)}


@pytest.mark.parametrize(
    ("mesh", "view", "base"),
    [
        ("dp:1", "local", None),
        ("dp:2,fsdp:2,tp:2", "local", "int8"),
        pytest.param("dp:2,fsdp:2,tp:2", "local", None, marks=pytest.mark.slow),
        pytest.param("dp:2,fsdp:2,tp:2", "global", "nf4", marks=pytest.mark.slow),
        pytest.param("fsdp:8", "local", None, marks=pytest.mark.slow),
        pytest.param("fsdp:4,pp:2", "local", "nf4", marks=pytest.mark.slow),
        pytest.param("fsdp:2,tp:2,pp:2", "local", "int8", marks=pytest.mark.slow),
        pytest.param("dp:8", "global", None, marks=pytest.mark.slow),
    ],
)
def test_matmuls_of_a_decoder_with_adapters_equal_merged_ones(mesh, view, base):
    job = moved(lora(decoder(), base=base, block=4, **SETTINGS))
    _, grads = gradients(job, mesh, view, tokens())
    wanted = whole_decoder(None, base)
    seen = 0
    for name, node, _ in adapted_nodes(with_names(grads), with_names(grads, flat=True)):
        for got, want in zip((node["lora_a"], node["lora_b"]), wanted[name], strict=True):
            close(got, want, 1e-5)
        seen += 1
    assert seen == 8
    assert grads["embed"]["table"] is None


def with_names(grads, *, flat=False):
    """Gradients with zeros in place of None; or with one leaf per adapted node."""
    filled = jax.tree.map(lambda leaf: np.zeros(1) if leaf is None else leaf, grads, is_leaf=lambda leaf: leaf is None)
    return jax.tree.map(lambda _: 0, filled, is_leaf=mw.parallel.lora.low_rank.is_adapted) if flat else filled


@pytest.mark.slow
def test_an_xlstm_has_adapters_too():
    job = moved(lora(decoder(XLSTM), **SETTINGS | {"targets": "mlstm/(q|out|i_gate)$|mlp/"}))
    _, grads = gradients(job, "dp:2,tp:4", "local", tokens())
    _, alone = gradients(job, "dp:1", "global", tokens())
    jax.tree.map(lambda got, want: close(got, want, 1e-5), grads, alone)


@pytest.mark.slow
def test_dropout_of_adapters_does_not_depend_on_the_mesh():
    job = moved(lora(decoder(), **SETTINGS | {"targets": "attn/(q|o)$", "dropout": 0.5}))

    def loss_on(mesh, key):
        layout = mw.state_layout(job, optax.sgd(0.1), on(mesh))
        state = mw.init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
        return float(jax.jit(make_gradients(job, layout, with_gradients=False))(state.params, tokens(), key)[0].loss)

    dropped = loss_on("dp:1", jax.random.key(1))
    assert abs(dropped - loss_on("dp:1", None)) > 1e-4
    np.testing.assert_allclose(loss_on("dp:2,tp:4", jax.random.key(1)), dropped, rtol=1e-5)
    with pytest.raises(JobError, match="dropout cannot apply to the input of `head/kernel`"):
        lora(decoder(), rank=2, targets="head", dropout=0.1)
    with pytest.raises(JobError, match=r"`down`, which belongs to a loss that gets merged matrices(.|\n)*dropout=0"):
        lora(PLAIN, rank=2, targets="down", dropout=0.1)


def test_a_loss_that_gathers_its_parameters_gets_leaves_as_it_knows_them():
    def gathers(params, batch, rng, *, gather=None):
        return loss(params if gather is None else gather(params), batch, rng)

    job = lora(with_fields(PLAIN, loss=gathers), rank=RANK, alpha=4, targets="up|down")
    params, grads = gradients(moved(job), "dp:2,fsdp:4", "local", make_batch())
    wanted = dense_gradients(params, make_batch(), scale=2.0)
    close(grads["up"]["lora_a"], wanted["up"]["lora_a"])
    close(grads["down"]["lora_b"], wanted["down"]["lora_b"])


# --- Steps ---


def steps(job, mesh, num_steps=1, **options):
    optimizer = optax.adam(0.01)
    layout = mw.state_layout(job, optimizer, on(mesh), ema=options.get("ema"))
    state = mw.init_state(job, optimizer, layout, jax.random.key(0))
    step = mw.make_train_step(job, optimizer, layout, donate=False, **options)
    for number in range(num_steps):
        state, metrics = step(state, make_batch(number))
    return state, step, metrics


def test_the_first_loss_is_that_of_the_base_bit_for_bit():
    job = decoder()
    key = jax.random.split(jax.random.key(0))[0]
    plain = jax.jit(job.loss)(job.init(key), tokens(), None)
    adapted = lora(job, **SETTINGS)
    assert ratio(plain[0]) == ratio(jax.jit(adapted.loss)(adapted.init(key), tokens(), None)[0])


def collectives(job, mesh, batch):
    layout = mw.state_layout(job, optax.sgd(0.1), on(mesh))
    step = mw.make_train_step(job, optax.sgd(0.1), layout, view="local")
    return read_schedule(step.lower(batch).compile().as_text()).collectives


def test_nothing_is_sent_for_the_gradients_of_the_base():
    def sent(found, *kinds):
        return sum(one.trips * one.bytes_moved for one in found if one.kind in kinds)

    matrices, adapters = 4 * 4 * WIDTH * HIDDEN, 4 * 4 * RANK * (WIDTH + HIDDEN)
    plain, some = (collectives(job, "dp:8", make_batch()) for job in (PLAIN, ADAPTED))
    assert sent(plain, "all-reduce") - sent(some, "all-reduce") == matrices + 4 * WIDTH - adapters
    # Layer by layer, with prefetch: each layer scatters the gradients of its adapters, and nothing else.
    found = collectives(lora(decoder(), rank=1, targets="attn/(q|o)$"), "fsdp:8", tokens())
    assert sent(found, "reduce-scatter", "all-to-all") == 2 * 4 * (32 + 32)
    served = [one.serves for one in found if "gradient of" in one.serves]
    assert served
    assert all("lora_" in text for text in served)


def test_the_base_has_no_optimizer_state_and_does_not_count_in_the_norm():
    state, _, metrics = steps(moved(ADAPTED), "dp:2,fsdp:4", clip=0.01, ema=0.5)
    _, grads = gradients(moved(ADAPTED), "dp:1", "global", make_batch())
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    for tree in (state.opt_state[0].mu, state.opt_state[0].nu, state.ema):
        assert tree["up"]["base"] is None
        assert tree["bias"] is None
        assert tree["up"]["lora_a"].shape == (2, WIDTH, RANK)
    assert state.opt_state[0].mu["up"]["lora_b"].sharding.is_fully_replicated
    assert state.opt_state[0].mu["up"]["lora_a"].sharding.shard_shape((2, WIDTH, RANK)) == (2, WIDTH // 4, RANK)


def test_a_resumed_run_is_the_same_to_the_bit_with_a_stored_base_and_an_average(tmp_path):
    job = lora(PLAIN, rank=RANK, targets="up|down", base="nf4", block=2)
    whole, step, _ = steps(job, "dp:2,fsdp:4", 3, ema=0.9)
    half, _, _ = steps(job, "dp:2,fsdp:4", 2, ema=0.9)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(half, step=2, layout=step.layout, facts={})
    with Checkpoints(tmp_path) as checkpoints:
        state, _ = step(checkpoints.restore(step.layout).state, make_batch(2))
    assert state.params["up"]["base"].dtype == jnp.uint8
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        assert jnp.array_equal(got, want)


# --- Storage of the base ---


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_blocks_are_restored_within_half_a_step(kind):
    w = np.random.default_rng(0).normal(size=(3, 64, 5)).astype(np.float32)
    w[0, :16, 0] = 0  # a block of zeros
    stored, scales = quantize_blocks(w, kind, block=16)
    largest = np.abs(w.reshape(3, 4, 16, 5)).max(axis=2)
    np.testing.assert_array_equal(scales, largest)
    half = 0.5 / 127 if kind == "int8" else np.diff(NF4_LEVELS).max() / 2
    errors = np.abs(np.asarray(dequantize_blocks(stored, scales)) - w).reshape(3, 4, 16, 5)
    assert (errors <= largest[:, :, None] * half * (1 + 1e-5)).all()
    assert stored.shape == ((3, 64, 5) if kind == "int8" else (3, 32, 5))
    # A slice of whole blocks is restored alone, as on a device of a mesh.
    rows = 2 * stored.shape[1] // 4
    part = dequantize_blocks(stored[:, rows:], scales[:, 2:])
    np.testing.assert_array_equal(part, dequantize_blocks(stored, scales)[:, 32:])


def test_a_base_is_stored_as_asked_in_any_precision():
    names = ("embed/table", "layers/attn/q/base", "layers/attn/q/lora_a", "layers/mlp/up", "layers/attn_norm")

    def dtypes(**settings):
        job = lora(decoder(), rank=2, targets="attn/q$", **settings)
        shapes = mw.train.state.abstract_params(job, "mixed")
        found = {leaf.name: leaf.value.dtype.name for leaf in named_leaves(shapes)}
        return [found[name] for name in names]

    assert dtypes() == ["float32"] * 5
    assert dtypes(base="bfloat16") == ["bfloat16", "bfloat16", "float32", "bfloat16", "float32"]
    assert dtypes(base="int8", block=8) == ["bfloat16", "int8", "float32", "bfloat16", "float32"]


def test_other_parameters_can_be_trained_besides():
    job = lora(mw.train.adapt(PLAIN, train=["bias"]), rank=2, targets="up", base="bfloat16")
    shapes = mw.train.state.abstract_params(job)
    learns = mw.train.state.trainable_leaves(job, shapes)
    names = [leaf.name for leaf, learn in zip(named_leaves(shapes), learns, strict=True) if learn]
    assert names == ["bias", "up/lora_a", "up/lora_b"]
    assert lora(mw.train.adapt(PLAIN, freeze=["up$"]), rank=2, targets="up").frozen == ()


# --- Errors ---


def test_wrong_settings_are_explained():
    for text, words in {
        "rank=0": "rank must be a positive whole number",
        "rank=x": "rank='x' is not a number",
        "alpha=-1": "alpha must be above 0",
        "dropout=1": "dropout must be at least 0 and below 1",
        "base=int4": r"unknown base 'int4'(.|\n)*did you mean 'int8'",
        "rank=2,rank=3": "sets rank twice",
        "ranks=2": r"no setting 'ranks'(.|\n)*did you mean 'rank'",
        "rank=2,block=0": "block must be a positive whole number",
    }.items():
        with pytest.raises(ConfigError, match=words):
            LoraSettings.parse(text)
    assert LoraSettings.parse("targets=(q|v){1,2}$, rank=2").targets == "(q|v){1,2}$"
    with pytest.raises(JobError, match=r"targets 'upp' matches no parameter(.|\n)*did you mean 'up'"):
        lora(PLAIN, rank=2, targets="upp")
    with pytest.raises(JobError, match="matches only `bias`, which is not a matrix"):
        lora(PLAIN, rank=2, targets="bias")
    with pytest.raises(JobError, match=r"rank 64 is larger than the smaller side of `down` \(2, 32, 16\)"):
        lora(PLAIN, rank=64, targets="down")
    with pytest.raises(JobError, match="already has adapters"):
        lora(ADAPTED, rank=2, targets="up")
    with pytest.raises(MeshwrightError, match=r"`up` of shape \(2, 16, 32\) cannot be stored(.|\n)*use block=16"):
        lora(PLAIN, rank=2, targets="up", base="int8")
