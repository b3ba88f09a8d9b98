"""tools/set_up.py and the Makefile, with a stand-in for pip: what they install, in which order, and what they say."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Stands for .venv/bin/python: writes down what pip is asked for, and leaves the traces that an installed torch leaves.
STAND_IN = """#!/bin/sh
here=$(dirname "$0")/..
[ "$2" = pip ] || exit 0
echo "$*" | sed "s/.*--disable-pip-version-check //" >>"$here/../pip.log"
if [ -n "$PIP_FAILS" ]; then echo "first line"; echo "ERROR: No matching distribution found"; exit 1; fi
for word in "$@"; do
  case $word in torch==*) mkdir -p "$here/lib/python3.11/site-packages/torch-${word#torch==}.dist-info" ;; esac
done
"""


@pytest.fixture
def checkout(tmp_path):
    """The files that set-up reads, and a .venv without a stamp."""
    for name in ("tools/set_up.py", "recompile/versions.py", "pyproject.toml", "Makefile"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    write_program(tmp_path / ".venv/bin/python", STAND_IN)
    return tmp_path


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def set_up(checkout, *arguments, before="", **environment):
    """Run set-up as the Makefile does; ``before`` is Python that runs first, to make another machine of this one."""
    code = f"import sys; sys.argv = {['set_up.py', *arguments]!r}\n{before}\n"
    code += f"import runpy; runpy.run_path({str(checkout / 'tools/set_up.py')!r}, run_name='__main__')"
    environment = {**os.environ, "CXX": "true", **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def asked_of_pip(checkout):
    """What pip was asked to install since the last call."""
    log = checkout / "pip.log"
    lines = log.read_text().replace(str(checkout), "CHECKOUT").splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


BUILD_NEEDS = " ".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
EVERYTHING = [f"torch==2.13.0 {BUILD_NEEDS}", "--no-build-isolation --editable CHECKOUT[demo,dev]"]


def refusal(done):
    """The one sentence that a failed set-up says."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert re.fullmatch(r"[^\n]+\.\n", done.stderr), done.stderr
    return done.stderr.strip()


def test_torch_is_installed_first_and_a_second_set_up_does_nothing(checkout):
    first = set_up(checkout, "all", "--torch", "2.13.0")
    assert first.returncode == 0, first.stderr
    assert asked_of_pip(checkout) == EVERYTHING
    second = set_up(checkout, "all", "--torch", "2.13.0")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert asked_of_pip(checkout) == []


def test_lint_installs_ruff_and_no_torch(checkout):
    assert set_up(checkout, "lint").returncode == 0
    assert [re.sub(r">=.*", "", line) for line in asked_of_pip(checkout)] == ["ruff"]
    assert set_up(checkout, "lint").returncode == 0
    assert asked_of_pip(checkout) == []
    assert set_up(checkout, "all", "--torch", "2.13.0").returncode == 0
    assert asked_of_pip(checkout) == EVERYTHING


@pytest.mark.parametrize("file", ["pyproject.toml", "tools/set_up.py", "recompile/versions.py"])
def test_a_change_of_what_the_stamp_stands_for_installs_again(checkout, file):
    set_up(checkout, "all", "--torch", "2.13.0")
    asked_of_pip(checkout)
    with (checkout / file).open("a") as text:
        text.write("\n# changed\n")
    assert set_up(checkout, "all", "--torch", "2.13.0").returncode == 0
    assert asked_of_pip(checkout) == EVERYTHING


def test_another_torch_is_installed_when_asked_for(checkout):
    set_up(checkout, "all", "--torch", "2.13.0")
    asked_of_pip(checkout)
    assert set_up(checkout, "all", "--torch", "2.14.0").returncode == 0
    assert asked_of_pip(checkout)[0].split()[0] == "torch==2.14.0"
    assert len(list((checkout / ".venv").glob(".installed-all-*"))) == 1


def test_a_venv_with_a_stamp_of_something_else_is_completed(checkout):
    (checkout / ".venv/.installed-all-0123456789abcdef").touch()
    assert set_up(checkout, "all", "--torch", "2.13.0").returncode == 0
    assert asked_of_pip(checkout) == EVERYTHING


def test_a_venv_whose_torch_was_taken_away_is_completed(checkout):
    set_up(checkout, "all", "--torch", "2.13.0")
    asked_of_pip(checkout)
    shutil.rmtree(checkout / ".venv/lib")
    assert set_up(checkout, "all", "--torch", "2.13.0").returncode == 0
    assert asked_of_pip(checkout) == EVERYTHING


def test_a_checkout_moved_with_its_venv_is_set_up_again(checkout, tmp_path_factory):
    set_up(checkout, "all", "--torch", "2.13.0")
    moved = tmp_path_factory.mktemp("elsewhere") / "checkout"
    shutil.move(checkout, moved)
    asked_of_pip(moved)
    assert set_up(moved, "all", "--torch", "2.13.0").returncode == 0
    assert asked_of_pip(moved) == EVERYTHING


def test_a_failed_pip_shows_its_last_lines_and_leaves_no_stamp(checkout):
    done = set_up(checkout, "all", "--torch", "2.13.0", PIP_FAILS="1")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "first line",
        "ERROR: No matching distribution found",
        f"pip could not install {EVERYTHING[0]}: see its last lines above, and try again.",
    ]
    assert list((checkout / ".venv").glob(".installed-*")) == []


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 14, 0)])
def test_another_python_is_refused_in_a_sentence(checkout, version):
    done = set_up(checkout, "all", "--torch", "2.13.0", before=f"sys.version_info = {version}")
    assert refusal(done) == (
        f"recompile needs Python 3.11 or newer and below 3.14, not Python {'.'.join(map(str, version))}: "
        "install Python 3.11 and say so, as in `make demo PYTHON=python3.11`."
    )
    assert asked_of_pip(checkout) == []


def test_an_old_python_can_read_set_up():
    ast.parse((ROOT / "tools/set_up.py").read_text(), feature_version=(3, 8))


def test_a_missing_compiler_is_told_in_a_sentence_though_lint_needs_none(checkout, tmp_path):
    no_programs = tmp_path / "empty"
    no_programs.mkdir()
    done = set_up(checkout, "all", "--torch", "2.13.0", CXX="", PATH=str(no_programs))
    assert refusal(done) == "A C++ compiler is missing: install g++ or clang++ (Debian, Ubuntu: `apt install g++`)."
    assert set_up(checkout, "lint", CXX="/no/such/compiler").returncode == 0


def test_a_compiler_that_does_not_run_is_told_in_a_sentence(checkout):
    done = set_up(checkout, "all", "--torch", "2.13.0", CXX="/no/such/compiler")
    assert refusal(done) == (
        "CXX names '/no/such/compiler', which does not run: install it, or set CXX to a C++ compiler that is there."
    )


def test_missing_c_headers_are_told_in_a_sentence(checkout):
    hide = "import sysconfig; sysconfig.get_path = lambda name: '/no/such/folder'"
    done = set_up(checkout, "all", "--torch", "2.13.0", before=hide)
    assert refusal(done).startswith("Python's C headers (Python.h) are missing: install them")


def test_a_missing_venv_module_is_told_in_a_sentence(checkout):
    shutil.rmtree(checkout / ".venv")
    write_program(checkout / "bare_python", "#!/bin/sh\nexit 1\n")
    done = set_up(checkout, "lint", before=f"sys.executable = {str(checkout / 'bare_python')!r}")
    assert refusal(done) == "Python's venv module is missing: install it (Debian, Ubuntu: `apt install python3-venv`)."


def test_an_old_torch_is_refused_before_anything_is_installed(checkout):
    done = set_up(checkout, "all", "--torch", "2.10.0")
    assert refusal(done) == (
        "recompile needs torch 2.11 or newer, not torch 2.10.0: ask for a newer one, or leave TORCH out."
    )
    assert asked_of_pip(checkout) == []


@pytest.mark.parametrize("asked_for", ["", "2.13.0"])
def test_an_old_torch_put_into_venv_is_refused(checkout, asked_for):
    site_packages = checkout / ".venv/lib/python3.11/site-packages"
    (site_packages / "torch-2.13.0.dist-info").mkdir(parents=True)
    assert set_up(checkout, "all", "--torch", asked_for).returncode == 0
    (site_packages / "torch-2.13.0.dist-info").rename(site_packages / "torch-2.10.0+cpu.dist-info")
    assert refusal(set_up(checkout, "all", "--torch", asked_for)) == (
        "recompile needs torch 2.11 or newer, not torch 2.10.0+cpu, which is in .venv: "
        "install one with `.venv/bin/python -m pip install 'torch>=2.11'`."
    )


def test_no_torch_asked_for_keeps_the_one_in_venv(checkout):
    assert refusal(set_up(checkout, "all")).startswith("There is no torch in .venv: install one with")
    (checkout / ".venv/lib/python3.11/site-packages/torch-2.14.0a0+git.dist-info").mkdir(parents=True)
    asked_of_pip(checkout)
    assert set_up(checkout, "all").returncode == 0
    assert asked_of_pip(checkout) == [BUILD_NEEDS, EVERYTHING[1]]


def make(checkout, *arguments, **environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *arguments]
    environment = {**inherited, "CXX": "true", **environment}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


def test_make_alone_lists_every_target_one_a_line(checkout):
    done = make(checkout)
    assert done.returncode == 0, done.stderr
    targets = ["help", "env", "demo", "test", "test-all", "lint", "tables", "gaps", "aims", "peaks", "clock", "speed"]
    targets += ["bench", "bench-full", "gpu", "clean"]
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["make", target] for target in targets]


SHOWS_ITS_CACHE = """#!/bin/sh
[ "$2" = pytest ] || exec {stand_in} "$@"
[ -d "$TORCHINDUCTOR_CACHE_DIR" ] && echo "$TORCHINDUCTOR_CACHE_DIR" && exit ${{TESTS_EXIT:-0}}
"""


def test_make_test_gives_inductor_a_new_cache_and_removes_it(checkout):
    stand_in = checkout / ".venv/bin/stand_in"
    (checkout / ".venv/bin/python").rename(stand_in)
    write_program(checkout / ".venv/bin/python", SHOWS_ITS_CACHE.format(stand_in=stand_in))
    passed, failed = make(checkout, "test"), make(checkout, "test", TESTS_EXIT="1")
    assert (passed.returncode, failed.returncode) == (0, 2)
    caches = [done.stdout.splitlines()[-1] for done in (passed, failed)]
    assert caches[0] != caches[1]
    assert all(Path(cache).is_absolute() and not Path(cache).exists() for cache in caches)


def test_make_gpu_without_a_gpu_says_so_in_a_sentence(checkout):
    program = f'#!/bin/sh\n[ "$1" = -c ] && [ "${{2#*cuda}}" != "$2" ] || exec {checkout}/.venv/bin/stand_in "$@"\n'
    (checkout / ".venv/bin/python").rename(checkout / ".venv/bin/stand_in")
    write_program(checkout / ".venv/bin/python", f'{program}exec {sys.executable} "$@"\n')
    done = make(checkout, "gpu", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "make gpu needs a CUDA GPU, and torch " in done.stderr
    assert "Traceback" not in done.stderr
