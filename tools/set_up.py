"""Make .venv, or complete it, so that `make demo`, `make test` and `make lint` can run in it.

The stamp .venv/.installed-PART-HASH says that PART ("all", or "lint": ruff alone) is installed; HASH says from what.
Runs under any Python from 3.8 on, so that an old one is told what to install; standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
VERSIONS_FILE = ROOT / "recompile" / "versions.py"
VERSIONS = runpy.run_path(str(VERSIONS_FILE))
COMPILERS = ("g++", "clang++", "c++")  # the first is what Inductor takes when CXX is not set
NUM_PIP_LINES_SHOWN = 15


class Missing(Exception):
    """Something that set-up needs is not there; the text is the one sentence that the user reads."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("all", "lint"))
    parser.add_argument("--torch", default="", help="version of torch to install; empty: keep the one in .venv")
    arguments = parser.parse_args()
    try:
        check_python()
        if arguments.part == "all":
            check_compiler()
        with one_at_a_time():
            set_up(arguments.part, arguments.torch)
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def set_up(part: str, torch: str) -> None:
    """Install what is not installed yet; quick when all is."""
    stamp = VENV / f".installed-{part}-{fingerprint(part, torch)}"
    is_there = stamp.exists() and os.access(VENV_PYTHON, os.X_OK) and (part == "lint" or torch_in_venv())
    if not is_there:
        started = time.monotonic()
        if torch:
            check_torch_asked_for(torch)
        make_venv()
        for old in VENV.glob(f".installed-{part}-*"):
            old.unlink()
        install = install_lint if part == "lint" else install_all
        install(torch)
        stamp.touch()
        say(f"done in {time.monotonic() - started:.0f} s")
    if part == "all":
        check_torch_in_venv()


def check_python() -> None:
    reason = VERSIONS["why_python_is_refused"](tuple(sys.version_info[:3]))
    if reason:
        raise Missing(f"{reason}: install Python 3.11 and say so, as in `make demo PYTHON=python3.11`.")


def check_compiler() -> None:
    """Inductor compiles C++ that includes Python.h."""
    chosen = os.environ.get("CXX")
    if chosen and not runs(chosen, "--version"):
        raise Missing(
            f"CXX names {chosen!r}, which does not run: install it, or set CXX to a C++ compiler that is there."
        )
    if not chosen and not any(runs(name, "--version") for name in COMPILERS):
        raise Missing("A C++ compiler is missing: install g++ or clang++ (Debian, Ubuntu: `apt install g++`).")
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        raise Missing(
            "Python's C headers (Python.h) are missing: install them (Debian, Ubuntu: `apt install python3-dev`)."
        )


def check_torch_asked_for(version: str) -> None:
    reason = VERSIONS["why_torch_is_refused"](version)
    if reason:
        raise Missing(f"{reason}: ask for a newer one, or leave TORCH out.")


def check_torch_in_venv() -> None:
    """It was not installed here if TORCH is empty, and somebody may have replaced it since."""
    version = torch_in_venv()
    install = (
        f"install one with `.venv/bin/python -m pip install 'torch>={VERSIONS['dotted'](VERSIONS['LEAST_TORCH'])}'`"
    )
    if version is None:
        raise Missing(f"There is no torch in .venv: {install}.")
    reason = VERSIONS["why_torch_is_refused"](version)
    if reason:
        raise Missing(f"{reason}, which is in .venv: {install}.")


def torch_in_venv() -> str | None:
    """The version of the torch in .venv, read from the file's name: importing torch takes seconds."""
    found = sorted(VENV.glob("lib/python*/site-packages/torch-*.dist-info"))
    return found[-1].name[len("torch-") : -len(".dist-info")] if found else None


def fingerprint(part: str, torch: str) -> str:
    """Changes when .venv has to be looked at again. The path is in it: an editable install points to its checkout."""
    text = hashlib.sha256()
    for file in (ROOT / "pyproject.toml", Path(__file__), VERSIONS_FILE):
        text.update(file.read_bytes())
    text.update(repr((str(ROOT), sys.version_info[:2], torch if part == "all" else None)).encode())
    return text.hexdigest()[:16]


def make_venv() -> None:
    """Make .venv, unless there is one of this Python, with a pip that works."""
    same_python = f"import sys, pip; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    if runs(str(VENV_PYTHON), "-c", same_python):
        return
    if not runs(sys.executable, "-c", "import venv, ensurepip"):
        raise Missing("Python's venv module is missing: install it (Debian, Ubuntu: `apt install python3-venv`).")
    say("making it")
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    run_quietly(command, f"Python could not make {VENV}: see the lines above, and make room or remove what is there.")


def install_lint(torch: str) -> None:
    say("installing ruff")
    pip_install(
        [need for need in read_pyproject()["project"]["optional-dependencies"]["dev"] if need.startswith("ruff")]
    )


def install_all(torch: str) -> None:
    """torch first, so that nothing else chooses its version; then the project, built with the setuptools of .venv."""
    build_needs = read_pyproject()["build-system"]["requires"]
    if torch:
        say(f"installing torch {torch}")
        pip_install([f"torch=={torch}", *build_needs])
    else:
        check_torch_in_venv()
        pip_install(build_needs)
    say("installing recompile and what its demo, tests and lint use")
    pip_install(["--no-build-isolation", "--editable", f"{ROOT}[demo,dev]"])


def read_pyproject() -> dict:
    import tomllib  # new in Python 3.11, which has been checked by now

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pip_install(arguments: list[str]) -> None:
    wanted = " ".join(argument for argument in arguments if not argument.startswith("-"))
    command = [str(VENV_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    run_quietly(command, f"pip could not install {wanted}: see its last lines above, and try again.")


def run_quietly(command: list[str], complaint: str) -> None:
    """Run a command whose output matters only when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        lines = done.stdout.decode(errors="replace").rstrip().splitlines()
        print("\n".join(lines[-NUM_PIP_LINES_SHOWN:]), file=sys.stderr)
        raise Missing(complaint)


def runs(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    try:
        return (
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0
        )
    except OSError:
        return False


@contextlib.contextmanager
def one_at_a_time():
    """`make -j lint test` starts set-up twice: the second waits for the first."""
    folder = os.open(str(ROOT), os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks: go on without
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def say(text: str) -> None:
    print(f".venv: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
