"""Real processes join one run, agree or name the rank that differs, stop at one step, and sample the same text."""

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap

import jax
import pytest

import meshwright as mw
from meshwright.distributed import LaunchError, agree, join
from meshwright.distributed.agreement import code_fingerprint, sources_of
from meshwright.generate import make_generator
from meshwright.models import Decoder

SIZES = {"vocab_size": 64, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 16}

# A small run; the command line says how ranks differ.
PROGRAM = """
    import json, os, signal, sys, time
    import jax
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    import meshwright as mw
    from meshwright.distributed import agree, join
    from meshwright.loop.safety.preemption import EXIT_PREEMPTED, Preemption
    from meshwright.generate import make_generator
    from meshwright.models import Decoder

    options = json.loads(sys.argv[1])
    told = {"join": join(*options.get("join", ()), timeout=60)}
    rank = jax.process_index()
    told["sees"] = [jax.process_count(), jax.local_device_count(), jax.device_count()]
    agree({"seed": 0, "config": {"steps": 10}})
    for name, facts, job in (
        ("config", {"config": {"steps": 10 + rank}}, None),
        ("seed", {"seed": 5 if rank == 1 else 0}, None),
        ("code", {"seed": 0}, mw.load_job(f"{options['jobs'][rank]}:job") if "jobs" in options else None),
    ):
        try:
            agree(facts, job=job)
        except ValueError as error:
            told[name] = str(error)
    if "sizes" in options:
        model = Decoder(**options["sizes"])
        layout = mw.make_layout(model.rules, jax.eval_shape(model.init, jax.random.key(0)), mw.create_mesh("dp:2,tp:2"))
        exactly = {"xla_backend_optimization_level": 0}  # as `init_state` compiles it: the same bits on every mesh
        init = jax.jit(model.init, out_shardings=layout.shardings, compiler_options=exactly)
        params = init(jax.random.key(0))
        generate = make_generator(model, length=16)
        told["sample"] = generate(generate.load(params), [[3, 14, 15]], 8)[0].tolist()
    with Preemption() as preemption:
        for step in range(1, 2000):
            time.sleep(0.005)
            if rank == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGINT if options.get("ctrl_c") else signal.SIGTERM)
            if preemption.requested(step):
                told["stopped_at"] = step
                break
    print("TOLD" + json.dumps(told), flush=True)
    sys.exit(EXIT_PREEMPTED)
"""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def told_by(text):
    return [json.loads(line[line.index("TOLD") + 4 :]) for line in text.splitlines() if "TOLD" in line]


def start(*args):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "SLURM_"))}
    return subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The reports and exit codes of two processes with two devices each."""
    folder, port, jobs = tmp_path_factory.mktemp("jobs"), free_port(), []
    for rank in range(2):
        (folder / str(rank)).mkdir()
        path = folder / str(rank) / "job.py"
        path.write_text(
            f"import meshwright as mw\ndef init(key):\n    return {rank}\njob = mw.Job(init=init, rules=[])\n"
        )
        jobs.append(str(path))
    processes = []
    for rank in range(2):
        options = {"join": [f"127.0.0.1:{port}", 2, rank], "jobs": jobs, "sizes": SIZES}
        processes.append(start(sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps(options)))
    ended = [process.communicate(timeout=180)[0] for process in processes]
    told = [found for text in ended for found in told_by(text)]
    assert len(told) == 2, "\n".join(ended)
    return told, [process.returncode for process in processes], port


def test_two_processes_form_one_run(pair):
    told, codes, port = pair
    assert [one["sees"] for one in told] == [[2, 2, 4]] * 2
    assert [one["join"] for one in told] == [
        f"rank {rank} of 2, 2 of 4 devices, at 127.0.0.1:{port}" for rank in (0, 1)
    ]
    assert codes == [75, 75]


@pytest.mark.parametrize("fact", ["config", "seed", "code"])
def test_the_rank_that_differs_is_named_on_every_rank(pair, fact):
    told, *_ = pair
    for rank, one in enumerate(told):
        assert f"the processes of this run differ in `{fact}`: rank 1 of 2 does not match the majority" in one[fact]
        assert f"On this rank ({rank}) it is " in one[fact]


def test_all_stop_at_the_same_step(pair):
    told, *_ = pair
    assert told[0]["stopped_at"] == told[1]["stopped_at"]
    assert 20 <= told[0]["stopped_at"] < 1999


def test_they_sample_the_same_text_as_one_device(pair):
    told, *_ = pair
    model = Decoder(**SIZES)
    generate = make_generator(model, length=16)
    wanted = generate(generate.load(model.init(jax.random.key(0))), [[3, 14, 15]], 8)[0].tolist()
    assert [one["sample"] for one in told] == [wanted] * 2


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_mpirun_needs_no_arguments():
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options = json.dumps({"ctrl_c": True})
    command = ["mpirun", *root, "--oversubscribe", "-n", "2", sys.executable, "-c", textwrap.dedent(PROGRAM), options]
    process = start(*command)
    text, _ = process.communicate(timeout=180)
    told = sorted(told_by(text), key=lambda one: one["join"])
    assert len(told) == 2, text
    assert [one["sees"] for one in told] == [[2, 2, 4]] * 2
    assert all(one["join"].endswith("started by mpirun") and " at 127.0.0.1:" in one["join"] for one in told)
    # Ctrl-C reached only one of them, which stopped the other.
    assert told[0]["stopped_at"] == told[1]["stopped_at"]
    assert process.returncode == 75


def test_joining_after_jax_was_used_is_an_error():
    jax.devices()
    with pytest.raises(LaunchError, match=r"JAX was used before .* started 'cpu' with 8 local.*\nhint: call join\(\)"):
        join(f"127.0.0.1:{free_port()}", 2, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("127.0.0.1:1", 2, None),
            r"not started by mpirun or srun, so it also needs process_id.\nhint: pass all three",
        ),
        ((None, 2, 1), r"it also needs coordinator\."),
        (("127.0.0.1:1", None, None), r"it also needs num_processes and process_id\."),
        (("127.0.0.1:1", 2, 2), r"process_id 2 is out of range for 2 processes.\nhint: use 0 to 1"),
        (("127.0.0.1:1", 2, -1), r"process_id -1 is out of range for 2 processes"),
    ],
)
def test_missing_or_wrong_arguments_to_join_are_errors(arguments, text):
    with pytest.raises(LaunchError, match=text):
        join(*arguments)


def test_a_single_process_joins_nothing():
    assert join() is None
    assert join("127.0.0.1:1", 1, 0) is None
    agree({"seed": 1})


def test_the_code_fingerprint_depends_on_names_and_contents(tmp_path):
    one, other = tmp_path / "a" / "job.py", tmp_path / "b" / "job.py"
    for path, text in ((one, "x = 1\n"), (other, "x = 2\n")):
        path.parent.mkdir()
        path.write_text(text)
    assert code_fingerprint([one]) != code_fingerprint([other])
    other.write_text("x = 1\n")
    assert code_fingerprint([one]) == code_fingerprint([other]) != code_fingerprint()


def test_the_sources_of_a_job_are_those_of_its_functions(tmp_path):
    path = tmp_path / "job.py"
    path.write_text("def init(key):\n    return {}\n\nclass Loss:\n    def __call__(self, *args): ...\n")
    scope = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    job = mw.Job(init=functools.partial(scope["init"]), rules=[], loss=print)
    assert sources_of(job) == [path]
    ours = mw.train.language_job(Decoder(**SIZES), batch_size=8, num_tokens=8)
    assert sources_of(ours) == []
    assert sources_of(None) == []
