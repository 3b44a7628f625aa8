#!/usr/bin/env python3
"""Everything a newcomer needs, from a fresh clone, with Python alone.

usage: python3 dev.py [--venv DIR] COMMAND [ARGUMENTS]

  test [PYTEST ARGUMENTS]   run every test, docstring example and code block of the docs
  check [NAME ...]          run ruff, format, mypy, imports, docs and prose, or only those named
  docs                      build the documentation into docs/_build/html
  lock [UV ARGUMENTS]       rewrite constraints/ (add --upgrade to move to the newest versions)
  anything else             is a meshwright command: `python3 dev.py train` runs `meshwright train`

The first use creates a virtual environment, .venv/3.11 for Python 3.11 and so on, and installs the versions
pinned in constraints/ into it. Another folder: --venv DIR, or the variable MESHWRIGHT_VENV.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints"
PYTHON = "{}.{}".format(*sys.version_info)
OLDEST = (3, 11)
LOCKED = ("3.11", "3.12", "3.13")

# Two sets of packages, each with the extra of pyproject.toml that names it: `run` is enough for the
# meshwright command; `dev` adds the tools around it, everything shared at the same version.
EXTRAS = {"run": "build", "dev": "dev"}

DOCS = ["sphinx-build", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html"]
CHECKS = {
    "ruff": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy", "--python-version", PYTHON],  # as the stubs of this environment are written for it
    "imports": ["lint-imports", "--no-logo"],
    "docs": DOCS,
    "prose": ["python", "tools/prose.py"],  # a report: it never fails
}


def main(args: list[str]) -> int:
    """Run one command; its exit status is ours."""
    if sys.version_info < OLDEST:
        fail(f"this is Python {PYTHON}.", "Meshwright needs Python {}.{} or newer".format(*OLDEST))
    venv = os.environ.get("MESHWRIGHT_VENV") or str(ROOT / ".venv" / PYTHON)
    if args[:1] == ["--venv"] and len(args) > 1:
        venv, args = args[1], args[2:]
    if not args or args[0] in ("-h", "--help"):
        print(__doc__.strip() if __doc__ else "")
        return 0 if args else 2
    if args[0].startswith("-"):
        fail(f"`{args[0]}` is not an option of dev.py, or lacks its value.", "see `python3 dev.py --help`")

    command, rest = args[0], args[1:]
    env = Environment(Path(venv).expanduser().absolute())
    if command == "lock":
        return lock(rest)
    if command == "check":
        return check(env, rest)
    if command == "docs":
        env.install("dev")
        status = env.run(DOCS)
        note(f"open {ROOT / 'docs' / '_build' / 'html' / 'index.html'}" if not status else "the build failed")
        return status
    if command == "test":
        env.install("dev")
        # By file, because the code blocks of one page share their names; in the order of conftest.py, slow ones first.
        workers = ["-n", str(num_workers()), "--dist", "loadfile", "--no-loadscope-reorder"]
        return env.run(["pytest", *workers, *rest])
    env.install("run")
    program = str(env.program("meshwright"))
    if os.name == "posix":  # become the command, so that signals reach it without a go-between
        # Its first lines let a Ctrl-C through again; before them, Python would answer with a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        os.execv(program, [program, *args])
    return subprocess.run([program, *args]).returncode


class Environment:
    """A virtual environment with one of the two sets, and the project itself in editable form."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stamp = folder / "meshwright-stamp"

    def program(self, name: str) -> Path:
        """Where a command of this environment lies."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin") / name

    def run(self, command: list[str]) -> int:
        """Run a tool of this environment in the repository root."""
        return subprocess.run([self.program(command[0]), *command[1:]], cwd=ROOT).returncode

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a tool of this environment in the repository root; it writes all its output to one pipe."""
        words = [str(self.program(command[0])), *command[1:]]
        return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def install(self, wanted: str) -> None:
        """Create the environment and install the set `wanted`, unless the stamp says it is there already."""
        enough = {fingerprint("dev"), fingerprint(wanted)}
        if self.stamp.is_file() and self.stamp.read_text() in enough:
            return
        if self.folder.is_dir() and any(self.folder.iterdir()):
            self.check_reusable()
        else:
            create_venv(self.folder)
        self.stamp.unlink(missing_ok=True)

        pins = constraints_file(PYTHON, wanted)
        if pins.is_file():
            note(f"installing the pinned `{wanted}` packages into {self.folder} (once; a minute or two)")
            # The pins are complete. Resolving them again would fail whenever a package that another one requires with
            # an extra (`etils[epath]`) has a newer release than its pin, because that release has no hash here.
            self.pip("--no-deps", "--require-hashes", "-r", str(pins))
            self.pip("--no-deps", "--no-build-isolation", "-e", str(ROOT))
        else:
            note(f"constraints/ has no pins for Python {PYTHON}; installing the newest versions, UNPINNED")
            note(f"hint: there are pins for Python {', '.join(LOCKED)}")
            self.pip("-e", f"{ROOT}[{EXTRAS[wanted]}]")
        self.stamp.write_text(fingerprint(wanted))

    def check_reusable(self) -> None:
        """Refuse a folder that is not a virtual environment of this Python; never empty it for the user."""
        config = self.folder / "pyvenv.cfg"
        if not config.is_file():
            fail(f"{self.folder} is not a virtual environment.", "name a new or empty folder with --venv")
        version = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", config.read_text(), re.MULTILINE)
        if version is None or version[1] != PYTHON or not self.program("python").exists():
            fail(f"{self.folder} does not belong to Python {PYTHON}.", "delete it, or use another --venv")

    def pip(self, *arguments: str) -> None:
        """Install with pip, its chatter on stderr: stdout belongs to the command that follows."""
        # A user's PIP_REQUIRE_HASHES would refuse the project itself, which has no hash.
        variables = {name: value for name, value in os.environ.items() if name != "PIP_REQUIRE_HASHES"}
        pip = [str(self.program("python")), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
        if subprocess.run([*pip, *arguments], stdout=sys.stderr, env=variables).returncode:
            fail(
                f"pip could not install `{' '.join(arguments)}`.",
                "its message is above; check the network and the package index, then run this again",
            )


def check(env: Environment, names: list[str]) -> int:
    """Run the checks named, or all, at the same time; show everything, also after a failure."""
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        fail(f"there is no check called `{unknown[0]}`.", f"the checks are {', '.join(CHECKS)}")
    env.install("dev")
    failed = []
    running = {name: env.start(CHECKS[name]) for name in names or CHECKS}
    for name, process in running.items():
        output, _ = process.communicate()
        note(f"{name}: {' '.join(CHECKS[name])}")
        print(output, end="", flush=True)
        if process.returncode:
            failed.append(name)
    note(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


def lock(uv_arguments: list[str]) -> int:
    """Rewrite the constraints. Pins that still fit do not change without `--upgrade`."""
    CONSTRAINTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        env, work = Environment(Path(folder) / "venv"), Path(folder) / "work"
        create_venv(env.folder)
        env.pip("uv>=0.13")
        # uv works on a copy, with names relative to it, so that no path of this machine enters the files.
        shutil.copytree(CONSTRAINTS, work)
        uv = [str(env.program("uv")), "pip", "compile", "pyproject.toml", "--quiet", "--universal"]
        uv += ["--generate-hashes", "--no-emit-index-url", "--no-emit-find-links", *uv_arguments]
        uv += ["--custom-compile-command", "python3 dev.py lock"]
        for python in LOCKED:
            # Without this, a file for 3.11 would also hold the pins of later Pythons.
            only = f"\n[tool.uv]\nenvironments = [\"python_version == '{python}'\"]\n"
            (work / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + only)
            for wanted in ("dev", "run"):  # in this order: run takes its versions from dev
                name = constraints_file(python, wanted).name
                command = [*uv, "--python-version", python, "--extra", EXTRAS[wanted], "--output-file", name]
                if wanted == "run":
                    command += ["--constraint", constraints_file(python, "dev").name]
                variables = os.environ | {"UV_PYTHON_DOWNLOADS": "never"}
                if subprocess.run(command, cwd=work, env=variables).returncode:
                    fail(f"uv found no versions for Python {python}.", "its message is above")
                shutil.copy(work / name, CONSTRAINTS / name)
                note(f"wrote constraints/{name}")
    return 0


def create_venv(folder: Path) -> None:
    """Create a virtual environment with the Python that runs this script."""
    if subprocess.run([sys.executable, "-m", "venv", folder], stdout=sys.stderr).returncode:
        shutil.rmtree(folder, ignore_errors=True)
        fail(f"Python's venv module could not create {folder}.", "on Debian: apt install python3-venv")


def constraints_file(python: str, wanted: str) -> Path:
    """The pins of one set for one Python version."""
    return CONSTRAINTS / f"py{python.replace('.', '')}-{wanted}.txt"


def fingerprint(wanted: str) -> str:
    """A hash of everything that `install` depends on."""
    digest = hashlib.sha256(f"{wanted} {PYTHON} {ROOT}".encode())
    for file in (ROOT / "pyproject.toml", constraints_file(PYTHON, wanted)):
        digest.update(file.read_bytes() if file.is_file() else b"none")
    return digest.hexdigest()


def num_workers() -> int:
    """One per core, within reason: each worker holds its own copy of jax."""
    return max(2, min(8, os.cpu_count() or 2))


def note(message: str) -> None:
    """Say something on stderr."""
    print(f"dev.py: {message}", file=sys.stderr, flush=True)


def fail(problem: str, hint: str) -> NoReturn:
    """Stop, saying what is wrong and what to do about it."""
    sys.exit(f"dev.py: error: {problem}\nhint: {hint}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
