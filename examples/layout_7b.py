"""The layout of a 7B-parameter decoder and its AdamW state, computed without allocating anything.

meshwright rules examples/layout_7b.py:job --mesh "fsdp:32,tp:8"
"""

import jax
import jax.numpy as jnp
import optax

import meshwright as mw
from meshwright import P

VOCAB, DIM, MLP, LAYERS = 32_000, 4_096, 11_008, 32

# Rules give each dim a logical name, and one mapping assigns the names to mesh axes.
RULES = mw.logical_rules(
    [
        ("embed/table", ("vocab", "embed")),
        ("attn/(q|k|v)/kernel", ("embed", "heads")),
        ("attn/out/kernel", ("heads", "embed")),
        ("mlp/(gate|up)/kernel", ("embed", "mlp")),
        ("mlp/down/kernel", ("mlp", "embed")),
        ("head/kernel", ("embed", "vocab")),
        ("norm/scale", (None,)),
    ],
    {"embed": "fsdp", "vocab": "tp", "heads": "tp", "mlp": "tp"},
    optional_axes=("tp",),
)


def init_params(key):
    """Returns the parameters as a nested dict."""

    def dense(rows, columns):
        return {"kernel": jax.random.normal(key, (rows, columns), jnp.float32)}

    def layer():
        attention = {name: dense(DIM, DIM) for name in ("q", "k", "v", "out")}
        mlp = {"gate": dense(DIM, MLP), "up": dense(DIM, MLP), "down": dense(MLP, DIM)}
        scale = {"scale": jnp.ones(DIM)}
        return {"attn": attention, "mlp": mlp, "attn_norm": scale, "mlp_norm": scale}

    return {
        "embed": {"table": jax.random.normal(key, (VOCAB, DIM), jnp.float32)},
        "layers": [layer() for _ in range(LAYERS)],
        "final_norm": {"scale": jnp.ones(DIM)},
        "head": dense(DIM, VOCAB),
    }


def init(key):
    """Returns a train state; the rules above also apply to the optimizer's moments."""
    params = init_params(key)
    optimizer = optax.adamw(3e-4)
    return {"params": params, "opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}


job = mw.Job(init=init, rules=RULES, mesh="fsdp:32,tp:8")

if __name__ == "__main__":
    layout = mw.make_layout(job.rules, mw.abstract_init(job.init), mw.create_abstract_mesh(job.mesh))
    print(layout)
    print(layout.picture("params/layers/0/mlp/up/kernel"))
    assert layout["opt_state/0/mu/layers/0/mlp/up/kernel"].spec == P("fsdp", "tp")
