"""Plans against measured and compiled memory and time, and the basis of every figure."""

import functools
import json
import math

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshwrightError, PlacementError
from meshwright.models import XLSTM, Decoder, Execution
from meshwright.plan.compiled.compile import Compiled
from meshwright.plan.compiled.verdict import CompiledCollective
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.costs.memory import gradient_bytes
from meshwright.plan.plan import make_plan
from meshwright.plan.possible_meshes import known_to_fail
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import parse_target
from meshwright.train.jobs.language_job import language_job
from meshwright.train.state import state_layout

# Measured on one H200 with benchmarks/plan_h200.py (jax 0.11.2): rows of 2048 tokens, policy, peak bytes, seconds.
MEASURED = [
    (8, "none", 32580128000, 0.1794),
    (8, "dots", 27458640896, 0.1875),
    (8, "full", 16427351040, 0.2177),
    (16, "none", 50251074816, 0.3391),
    (16, "dots", 40033410304, 0.3554),
    (16, "full", 18988645376, 0.4182),
    (32, "none", 86427273472, 0.6714),
    (32, "dots", 66950265856, 0.7000),
    (32, "full", 24964250624, 0.8261),
]


@functools.cache
def big_job():
    return language_job(Decoder.named("956m"), batch_size=8, num_tokens=2048)


@functools.cache
def big_profile():
    return profile_job(big_job(), platform="gpu")


def test_a_956m_decoder_on_one_h200_as_measured():
    ranks = {}
    for rows, remat, peak, seconds in MEASURED:
        plan = make_plan(big_job(), "h200:1x1", Setup(mesh="dp:1", remat=remat, rows=rows), profile=big_profile())
        assert plan.memory.total == pytest.approx(peak, rel=0.05), (rows, remat)
        assert plan.time.step.value == pytest.approx(seconds, rel=0.05), (rows, remat)
        assert plan.flops.model == pytest.approx(rows * 11.751e12, rel=1e-4)  # 188.0 TFLOP for 16 rows
        ranks.setdefault(rows, []).append((plan.time.step.value, remat))
    assert all([name for _, name in sorted(found)] == ["none", "dots", "full"] for found in ranks.values())


@pytest.mark.parametrize("kernels", [None, False])
def test_an_813m_xlstm_on_one_h200_as_compiled(kernels):
    model = XLSTM(vocab_size=50304, num_layers=12, d_model=2048, num_heads=4, d_ff=5504)
    job = language_job(model, batch_size=4, num_tokens=8192, run=Execution(kernels=kernels))
    has_kernels = kernels is None and jax.__version_info__ >= (0, 11)
    plan = make_plan(job, "h200:1x1", Setup(mesh="dp:1"))
    assert plan.memory.total / 2**30 == pytest.approx(39.10 if has_kernels else 39.58, rel=0.05)


# Peaks in GiB of decoders compiled with libtpu 0.0.42 and jax-cuda12-plugin 0.10.2.
COMPILED = [
    ("7b", "h100:32x8", 8192, Setup(mesh="dp:32,fsdp:8", remat="full", rows=512), 23.5),
    ("7b", "h100:32x8", 8192, Setup(mesh="fsdp:256", rows=512), 72.0),
    ("7b", "h100:32x8", 8192, Setup(mesh="fsdp:256", rows=512, num_minibatches=2, sync="once"), 75.0),
    ("7b", "h200:8x8", 4096, Setup(mesh="fsdp:64", remat="full", rows=64), 5.38),
    ("70b", "h200:8x8", 4096, Setup(mesh="fsdp:64", remat="full", rows=64), 39.3),
    ("7b", "v5p:4x4x8", 4096, Setup(mesh="fsdp:128", remat="full", rows=128), 3.64),
    ("7b", "v5e:16x16", 4096, Setup(mesh="fsdp:256", remat="full", rows=256), 3.37),
    ("7b", "v5p:16x16x16", 4096, Setup(mesh="dp:16,fsdp:256", remat="full", rows=4096), 3.21),
]


@pytest.mark.slow
def test_computed_peaks_of_large_decoders_match_the_compiled_ones():
    profiles = {}
    for size, target, tokens, setup, gib in COMPILED:
        job = language_job(Decoder.named(size), batch_size=512, num_tokens=tokens)
        key = (size, "tpu" if target.startswith("v") else "gpu", tokens)
        if key not in profiles:
            profiles[key] = profile_job(job, platform=key[1], remats=("none", "full"))
        plan = make_plan(job, target, setup, profile=profiles[key])
        assert plan.memory.total / 2**30 == pytest.approx(gib, rel=0.1), (size, target, setup)


@functools.cache
def small(rows=16, tokens=64):
    job = language_job(Decoder.named("tiny"), batch_size=rows, num_tokens=tokens)
    return job, profile_job(job, platform="tpu")


def plan_of(mesh, target="v5p:2x2x2", **options):
    job, profile = small()
    return make_plan(job, target, Setup(mesh=mesh, **options), profile=profile)


@pytest.mark.parametrize("mesh", ["dp:8", "fsdp:8", "dp:2,fsdp:2,tp:2"])
def test_the_state_is_exact(mesh):
    job, _ = small()
    layout = state_layout(job, optax.adamw(1e-4), mw.create_abstract_mesh(mesh))
    parts = {part.name: part for part in plan_of(mesh).memory.parts}
    kinds = {"parameters": "params/", "optimizer": "opt_state/"}
    for name, prefix in kinds.items():
        exact = sum(leaf.bytes_per_device for leaf in layout.leaves if leaf.name.startswith(prefix))
        assert (parts[name].bytes, parts[name].basis) == (exact, "computed")
    assert sum(part.bytes for part in parts.values()) == plan_of(mesh).memory.total


def test_gradients_are_held_in_the_right_dtype():
    job, profile = small()
    params = Decoder.named("tiny").num_params
    norms = 5 * 64
    wide = {
        "dp:8": (Setup(mesh="dp:8"), 2 * (params - norms) + 4 * norms),  # compute dtype
        "minibatches": (Setup(mesh="dp:8", num_minibatches=2), 4 * params),  # accumulated
        "fsdp:8": (Setup(mesh="fsdp:8"), 4 * (params - norms) / 8 + 4 * norms),  # reduction dtype
        "once": (Setup(mesh="fsdp:8", num_minibatches=2, sync="once"), 4 * params),  # full until the last minibatch
    }
    for name, (setup, expected) in wide.items():
        layout = state_layout(job, optax.adamw(1e-4), mw.create_abstract_mesh(setup.mesh))
        assert gradient_bytes(profile, layout, setup) == expected, name


def test_minibatches_and_remat_reduce_activations():
    def activations(**options):
        return next(p.bytes for p in plan_of("fsdp:8", **options).memory.parts if p.name == "activations")

    fixed = math.fsum(small()[1].needs["none"].fixed.values())
    assert activations(num_minibatches=2) - fixed == pytest.approx((activations() - fixed) / 2)
    assert activations(remat="full") < activations(remat="dots") < activations()


@pytest.mark.parametrize("options", [{}, {"remat": "dots"}, {"target": "h200:1x8", "mesh": "dp:8"}], ids=str)
def test_kinds_of_layers_add_up_to_the_activations(options):
    plan = plan_of(options.pop("mesh", "fsdp:8"), **options)
    part = next(part for part in plan.memory.parts if part.name == "activations")
    assert math.fsum(part.split.values()) == pytest.approx(part.bytes)
    assert list(part.split.values()) == sorted(part.split.values(), reverse=True)
    assert {"attention", "feed-forward", "norms", "loss"} <= {*part.split}
    without = part.without(part.bytes / 4, "less")
    assert math.fsum(without.split.values()) == pytest.approx(part.bytes * 3 / 4)
    assert plan.to_json()["memory"]["parts"][plan.memory.parts.index(part)]["split"] == part.split


def test_verdicts_on_memory():
    fine = plan_of("fsdp:8").memory
    assert (fine.fits, fine.capacity) == (True, int(95.74 * 2**30))
    assert fine.verdict.startswith("fits: ")
    assert plan_of("fsdp:8", target="cpu:8").memory.fits is None
    job = language_job(Decoder.named("70b"), batch_size=8, num_tokens=64)
    much = make_plan(job, "v5e:2x4", Setup(mesh="fsdp:8", remat="full")).memory
    assert much.fits is False
    assert "does not fit" in much.verdict
    assert "the largest part is optimizer" in much.verdict


def test_time_is_the_sum_of_its_parts_and_names_its_basis():
    plan = plan_of("fsdp:4,tp:2", remat="full")
    time = plan.time
    parts = (time.matmul, time.memory, time.exposed, time.bubble, time.optimizer, time.fixed)
    assert time.step.value == pytest.approx(math.fsum(part.value for part in parts))
    assert (time.fixed.value, time.fixed.basis) == (0.6e-3, "assumed")
    assert {time.matmul.basis, time.exposed.basis, time.step.basis} == {"assumed"}
    assert time.communication.basis == "computed"
    assert time.exposed.value <= time.communication.value
    assert plan.tokens_per_second == pytest.approx(16 * 64 / time.step.value)
    assert plan.mfu == pytest.approx(plan.flops.model / (8 * 459e12 * time.step.value))


def test_known_behavior_of_compilers():
    # On v5e, gathers are synchronous; over a square slice a reduce-scatter becomes an all-reduce.
    square, v5e, v5p = plan_of("fsdp:16", target="v5e:4x4"), plan_of("fsdp:8", target="v5e:2x4"), plan_of("fsdp:8")
    plans = (square, v5e, v5p, plan_of("dp:2,fsdp:8", target="v5e:4x4"))
    scatters = [next(i for i in p.sent if i.what == "gradients of parameters") for p in plans]
    assert [item.kind for item in scatters] == ["all-reduce", *["reduce-scatter"] * 3]
    assert scatters[0].wire_bytes / 2 / (15 / 16) == pytest.approx(scatters[1].wire_bytes / (7 / 8))
    assert scatters[1].wire_bytes == scatters[2].wire_bytes
    assert v5e.hidden_share < 0.3 < 0.8 < v5p.hidden_share


def test_less_is_hidden_over_part_of_a_torus():
    # A compiled 7B decoder has 91% and 79% (benchmarks/results/scatter_forms.md).
    whole, part = plan_of("fsdp:64", target="v5p:4x4x4", rows=64), plan_of("dp:4,fsdp:16", target="v5p:4x4x4", rows=64)
    shares = [{item.hidden for item in plan.sent if item.kind == "all-gather"} for plan in (whole, part)]
    assert shares == [{0.9}, {0.8}]


def test_rings_hide_at_most_the_time_of_their_matmuls():
    """With tp:16 hops take longer than their matmuls, with tp:4 they do not."""
    job = big_job()
    profile = profile_job(job, platform="tpu", remats=("none",))

    def rings(mesh, target):
        plan = make_plan(job, target, Setup(mesh=mesh, rows=64), profile=profile)
        hidden = [(item.seconds * item.hidden, item.hidden) for item in plan.sent if item.axis == "tp"]
        matmuls = (
            (plan.flops.matmul - plan.flops.attention) / plan.target.num_devices / plan.target.matmul_rate("bfloat16")
        )
        return sum(seconds for seconds, _ in hidden) / matmuls, {round(share, 6) for _, share in hidden if share}

    full, shares = rings("dp:16,tp:16", "v5e:16x16")
    assert full == pytest.approx(1)
    assert max(shares) < 0.9
    less, shares = rings("dp:16,tp:4", "v5p:4x4x4")
    assert less < 1
    assert shares == {0.9}
    assert rings("dp:64,tp:4", "v5e:16x16") == (0, set())  # not a closed ring, so hops are synchronous


def test_a_pipeline_has_a_bubble():
    plan = plan_of("dp:4,pp:2")
    # Two stages and four microbatches: one of five ticks is idle. Only the last stage has the head's four matmuls.
    busy = plan.time.matmul.value + plan.time.memory.value + plan.time.exposed.value
    head = 4 * 2 * 256 * 64 * (16 * 64) / 8 / parse_target("v5p:2x2x2").matmul_rate("bfloat16")
    assert plan.time.bubble.value == pytest.approx((busy + head) * 5 / 4 - busy)
    # Each minibatch fills and empties the pipeline again.
    twice = plan_of("dp:2,pp:2", target="v5p:2x2x1", num_minibatches=2)
    assert twice.time.bubble.value > 0.25 * (twice.time.matmul.value + twice.time.memory.value)
    for mesh in ("dp:8", "fsdp:8", "fsdp:4,tp:2"):
        assert plan_of(mesh).time.bubble.value == 0


def test_a_pipeline_recomputes_every_tick():
    whole, piped = plan_of("dp:8"), plan_of("dp:4,pp:2")
    assert piped.flops.model == whole.flops.model
    assert piped.flops.recomputed - whole.flops.recomputed == whole.flops.matmul // 3  # a forward pass


def test_rows_of_a_pipeline_that_do_not_divide():
    with pytest.raises(PlacementError, match=r"4 devices and 2 minibatches of 4 microbatches"):
        plan_of("dp:4,pp:2", num_minibatches=2)


def test_prices():
    job, profile = small()
    plan = make_plan(job, "v5p:2x2x2", Setup(mesh="fsdp:8"), profile=profile, price=4.5)
    assert plan.dollars_per_billion_tokens == pytest.approx(8 * 4.5 / 3600 * 1e9 / plan.tokens_per_second)
    assert plan_of("fsdp:8").dollars_per_billion_tokens is None


def test_kernels_take_a_fixed_time():
    """A step of so few rows takes as long as its kernels: three for each of the matmuls, in every minibatch."""
    job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=8)
    profile = profile_job(job, platform="gpu", remats=("none", "full"))
    # Two layers of seven weights, and the head, each with two gradients; attention is a kernel each way.
    assert profile.needs["none"].num_matmuls == 3 * (2 * 7 + 1) + 2 * 2
    assert profile.needs["full"].num_matmuls > profile.needs["none"].num_matmuls
    for minibatches in (1, 2, 4):
        plan = make_plan(job, "h200:1x2", Setup(mesh="dp:2", num_minibatches=minibatches), profile=profile)
        kernels = minibatches * 3 * 49 * 1.5e-6
        assert kernels < plan.time.memory.value < kernels + 1e-5
    assert "about 588 kernels, 1.5 us each" in plan.time.memory.note
    piped = make_plan(job, "h200:1x2", Setup(mesh="pp:2", num_microbatches=4), profile=profile)
    # Gpipe computes the forward pass again: 15 matmuls, and attention in both layers.
    assert piped.time.memory.value == pytest.approx(4 / 2 * 3 * (49 + 17) * 1.5e-6, abs=1e-5)


def test_cpus_have_no_step_time():
    plan = plan_of("fsdp:8", target="cpu:8")
    assert (plan.time, plan.mfu, plan.tokens_per_second) == (None, None, None)
    assert all(item.seconds is None for item in plan.sent)


def test_policies_that_were_not_profiled():
    with pytest.raises(MeshwrightError, match=r"remat='offload' was not profiled.\nhint: use one of none"):
        plan_of("fsdp:8", remat="offload")
    with pytest.raises(MeshwrightError, match=r"remat='ful' cannot be planned\.\nhint: did you mean 'full'"):
        profile_job(small()[0], remats=("ful",))


# Measured on one H200 with benchmarks/plan_h200.py (jax 0.11.2): rows, form of the layers, peak bytes, seconds. The
# host link's rates were fitted to these four, so this checks the fit and predicts nothing.
OFFLOADED = [
    (8, "scan", 17976089088, 0.5750),
    (16, "scan", 20689951488, 1.1283),
    (8, "auto", 28527696128, 0.4485),
    (16, "auto", 38625720320, 0.8354),
]


@pytest.mark.parametrize(("rows", "form", "peak", "seconds"), OFFLOADED)
def test_offloaded_activations_as_measured(rows, form, peak, seconds):
    job = language_job(Decoder.named("956m"), batch_size=rows, num_tokens=2048, run=Execution(layers=form))
    plan = make_plan(job, "h200:1x1", Setup(mesh="dp:1", remat="offload"))
    assert plan.memory.total == pytest.approx(peak, rel=0.1)
    assert plan.time.step.value == pytest.approx(seconds, rel=0.05)


def test_offload_moves_the_residuals_of_dots_over_the_host_link_twice():
    job, _ = small()
    profile = profile_job(job, remats=("none", "dots", "full", "offload"))
    needs = profile.needs
    assert needs["offload"].kept_per_row == needs["full"].kept_per_row
    assert needs["offload"].hosted_per_row == needs["dots"].kept_per_row - needs["full"].kept_per_row
    plan = make_plan(job, "v5p:2x2x2", Setup(mesh="fsdp:4,tp:2", remat="offload"), profile=profile)
    (host,) = (item for item in plan.sent if item.axis == "host")
    assert host.wire_bytes == pytest.approx(2 * needs["offload"].hosted_per_row * 16 / 4 / 2)
    assert (host.basis, host.link) == ("assumed", "host (speed assumed)")
    # 8 layers of the 7B decoder take 6.35 GiB when compiled for these chips with libtpu 0.0.42.
    large = language_job(Decoder.named("7b", num_layers=8), batch_size=8, num_tokens=4096, packed=True)
    peak = make_plan(large, "v5p:2x2x2", Setup(mesh="fsdp:8", remat="offload")).memory.total
    assert peak / 2**30 == pytest.approx(6.35, rel=0.1)


def test_sync_once_keeps_all_weights_gathered():
    plan = plan_of("fsdp:8", num_minibatches=2, sync="once")
    gathered = next(part for part in plan.memory.parts if part.name == "gathered weights")
    matrices = Decoder.named("tiny").num_params - 5 * 64
    assert (gathered.bytes, gathered.note[:11]) == (2 * matrices, "all weights")
    assert not any(item.hidden for item in plan.sent)  # a single exchange has no compute to overlap with


def test_known_compiler_crashes_are_noted():
    model = Decoder.named("tiny", d_model=4096, d_ff=4096, vocab_size=4096)
    job = language_job(model, batch_size=4096, num_tokens=64)
    profile = profile_job(job, remats=("none",))
    for mesh, said in (("fsdp:4096", True), ("dp:16,fsdp:256", False)):
        notes = make_plan(job, "v5p:16x16x16", Setup(mesh=mesh), profile=profile).notes
        assert any("libtpu 0.0.42 crashes" in note and "try dp:16,fsdp:256" in note for note in notes) is said
    wide = known_to_fail(parse_target("v5p:16x16x32"), {"fsdp": 4096, "tp": 2})
    assert wide[0].endswith("; try dp:16,fsdp:256,tp:2")


def test_without_overlap_only_rings_hide_on_tpus():
    asked, not_asked = (plan_of("fsdp:4,tp:2", overlap=overlap) for overlap in (True, False))
    assert {item.axis: item.hidden > 0 for item in not_asked.sent if item.wire_bytes > 2**16} == {
        "fsdp": False,
        "tp": True,
    }
    assert not_asked.time.exposed.value > asked.time.exposed.value
    kinds = [
        [item.kind for item in plan_of(mesh, target=target, overlap=overlap).sent if item.count > 1]
        for target, mesh in (("v6e:4x4", "fsdp:16"), ("v5p:2x2x2", "fsdp:8"))
        for overlap in (True, False)
    ]
    assert kinds == [["all-gather", "reduce-scatter"], ["all-gather", "all-reduce"]] * 2
    gpus = [plan_of("fsdp:8", overlap=overlap, target="h200:1x8") for overlap in (True, False)]
    assert gpus[0].sent == gpus[1].sent  # asynchronous by default


def test_communication_in_the_global_view_is_assumed():
    plan = plan_of("fsdp:8", view="global")
    assert {item.basis for item in plan.sent} == {"assumed"}
    assert any("XLA decides" in note for note in plan.notes)


def test_rows_that_do_not_divide():
    with pytest.raises(PlacementError, match=r"16 rows do not divide over 8 devices and 4 minibatches"):
        plan_of("fsdp:8", num_minibatches=4)


def test_a_large_replicated_leaf_is_noted():
    model = Decoder.named("tiny", vocab_size=65536, d_model=256)
    job = language_job(model, batch_size=16, num_tokens=64)
    rules = [(pattern, P() if "embed" in pattern else spec) for pattern, spec in job.rules]
    careless = mw.Job(
        init=job.init, rules=mw.Rules(rules, optional_axes=("fsdp", "tp", "pp")), loss=job.loss, batch=job.batch
    )
    plan = make_plan(careless, "v5p:2x2x2", Setup(mesh="fsdp:8"))
    assert any("embed/table" in note and "64.0 MiB" in note for note in plan.notes)


# --- With a compiled program ---


def compiled(peak=2**30, **options):
    setup = Setup(mesh="fsdp:8")
    gather = CompiledCollective("all-gather", ("fsdp",), 8000, 7000.0, 8, True, 2, 10, "jit(step)/all_gather")
    waits = CompiledCollective("all-reduce", ("fsdp",), 8000, 14000.0, 8, False, 0, 1, "jit(step)/psum_scatter")
    return Compiled("v5p:2x2x2", setup, peak_bytes=peak, collectives=(gather, waits), **options)


def test_a_compiled_peak_is_the_total_and_the_parts_add_up_to_it():
    job, profile = small()
    for peak in (2**30, 2**20):
        plan = make_plan(job, "v5p:2x2x2", Setup(mesh="fsdp:8"), profile=profile, compiled=compiled(peak))
        assert (plan.memory.total, plan.memory.basis) == (peak, "compiled")
        assert sum(part.bytes for part in plan.memory.parts) == pytest.approx(peak)
    trimmed = [part for part in plan.memory.parts if "less than computed" in part.note]
    assert {part.basis for part in trimmed} == {"assumed"}  # the compiler says how much fits, not which part shrank


def test_compiled_collectives_replace_computed_ones():
    job, profile = small()
    plan = make_plan(job, "v5p:2x2x2", Setup(mesh="fsdp:8"), profile=profile, compiled=compiled())
    found = {item.kind: (item.wire_bytes, item.hidden, item.count, item.basis) for item in plan.sent}
    assert found == {"all-gather": (70000, 1.0, 10, "compiled"), "all-reduce": (14000, 0.0, 1, "compiled")}
    assert plan.hidden_share == pytest.approx(70 / 84)
    assert plan.time.exposed.basis == "compiled"


def test_a_program_too_large_for_the_compiler():
    job, profile = small()
    text = "RESOURCE_EXHAUSTED: 120G exceeds available HBM (95.74G)."
    made = Compiled("v5p:2x2x2", Setup(mesh="fsdp:8"), does_not_fit=text)
    plan = make_plan(job, "v5p:2x2x2", Setup(mesh="fsdp:8"), profile=profile, compiled=made)
    assert plan.memory.fits is False
    assert "120G exceeds" in plan.memory.verdict


def test_verdicts_on_collectives():
    gather, waits = compiled().collectives
    assert gather.verdict == "hidden"
    assert "a reduce-scatter was compiled to an all-reduce" in waits.verdict


def test_plans_round_trip_through_json():
    job, profile = small()
    plan = make_plan(job, "v5p:2x2x2", Setup(mesh="fsdp:8"), profile=profile, compiled=compiled())
    data = json.loads(json.dumps(plan.to_json()))
    assert data["memory"]["parts"][0]["basis"] == "computed"
    assert data["setup"] == {"mesh": "fsdp:8"}
    assert Compiled.from_json(data["compiled"]) == compiled()
    assert "tokens/s" in str(plan)
