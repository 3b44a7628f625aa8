"""The folder of compiled programs: private, bounded, optional; JAX's own settings win."""

import os
import stat

import jax
import pytest

from meshwright.loop import compile_cache
from meshwright.loop.compile_cache import use_compile_cache


@pytest.fixture
def unset():
    """No cache, as in a new process."""
    before = jax.config.jax_compilation_cache_dir
    undo = compile_cache._set(jax_compilation_cache_dir=None)
    yield
    undo()
    assert jax.config.jax_compilation_cache_dir == before


@pytest.fixture
def use(tmp_path):
    said = []

    def run(wanted="auto", is_safe=True):
        undo = use_compile_cache(wanted, folder=tmp_path, is_safe=is_safe, tell=said.append)
        found = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
        undo()
        return *found, said

    return run


@pytest.mark.usefixtures("unset")
def test_the_default_is_a_private_folder_per_processor(use, tmp_path):
    path, is_on, said = use()
    assert path == str(tmp_path / "compiled" / compile_cache._host())
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert (is_on, said) == (True, [])
    assert jax.config.jax_compilation_cache_dir is None  # undone


@pytest.mark.usefixtures("unset")
def test_another_folder_or_none(use, tmp_path):
    assert use(str(tmp_path / "mine"))[0] == str(tmp_path / "mine")
    assert use("off")[1] is False
    assert use(is_safe=False)[1:] == (False, [])
    assert use(str(tmp_path / "mine"), is_safe=False)[2] == [
        "the compile cache is off: XLA:CPU cannot run pipelines from a cache"
    ]


def test_a_cache_that_is_already_set_up_stays(use):
    assert use()[0] == jax.config.jax_compilation_cache_dir


@pytest.mark.usefixtures("unset")
def test_a_folder_that_others_can_write_is_not_used(use, tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    path, _, said = use(str(open_to_all))
    assert path is None
    assert said == [f"the compile cache is off: cannot use {open_to_all}: every user can write into it"]
    (tmp_path / "file").touch()
    assert "cannot use" in use(str(tmp_path / "file"))[2][-1]


def test_old_programs_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 250)
    for number in range(4):
        path = tmp_path / f"program-{number}"
        path.write_bytes(b"x" * 100)
        os.utime(path, (number, number))
    compile_cache._shrink(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["program-2", "program-3"]


@pytest.mark.usefixtures("unset")
def test_a_damaged_program_is_compiled_again(tmp_path):
    """A process that is killed while JAX writes a program can leave part of it."""
    slow = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_raise_persistent_cache_errors": False}
    undo = compile_cache._set(**slow)
    uncache = use_compile_cache(str(tmp_path), folder=tmp_path, is_safe=True, tell=print)
    try:
        assert jax.jit(lambda x: x * 3 + 1)(2.0) == 7.0
        jax.clear_caches()
        programs = [path for path in tmp_path.iterdir() if path.name.endswith("-cache")]
        assert programs
        for path in programs:
            path.write_bytes(path.read_bytes()[:50])
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
            assert jax.jit(lambda x: x * 3 + 1)(2.0) == 7.0
    finally:
        uncache()
        undo()
