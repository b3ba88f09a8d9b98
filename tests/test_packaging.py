"""The wheel that people install: everything is in it, and nothing of theirs gets in the way."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from recompile.versions import parse_release

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "recompile", "passes")
NOT_SOURCES = shutil.ignore_patterns("__pycache__")
FIRST_SETUPTOOLS = (77, 0)  # what pyproject.toml asks for


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=NOT_SOURCES)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    """The wheel, built with the setuptools of this Python if it is new enough, else with one that pip gets."""
    folder = tmp_path_factory.mktemp("wheel")
    has_setuptools = any(
        parse_release(found.version) >= FIRST_SETUPTOOLS
        for found in importlib.metadata.distributions(name="setuptools")
    )
    pip("wheel", str(sources), "--wheel-dir", str(folder), *(["--no-build-isolation"] if has_setuptools else []))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the wheel in it and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", str(wheel), "--target", str(folder))
    return folder


def pip(command, *arguments):
    command = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--no-deps", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def run_python(code, folder, first_on_path=None):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if first_on_path is not None:
        environment["PYTHONPATH"] = str(first_on_path)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_users_own_folder_called_passes_does_not_hide_ours(installed, tmp_path):
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes/__init__.py").write_text("")
    code = "import passes, recompile.passes; print(passes.__file__); print(recompile.passes.__file__)"
    assert run_python(code, tmp_path, installed) == [
        str(tmp_path / "passes/__init__.py"),
        str(installed / "recompile/passes/__init__.py"),
    ]


def test_the_wheel_tells_dynamo_where_the_backend_is(wheel):
    entry_points = ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        entry_points.read_string(archive.read(name).decode())
    assert {section: dict(entry_points[section]) for section in entry_points.sections()} == {
        "torch_dynamo_backends": {"recompile": "recompile.backend:recompile"}
    }


def test_the_wheel_holds_every_file_of_the_two_packages_and_no_other(wheel, sources):
    expected = {str(file.relative_to(sources)) for file in (sources / "recompile").rglob("*") if file.is_file()}
    expected |= {f"recompile/{file.relative_to(sources)}" for file in (sources / "passes").rglob("*") if file.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    assert held == expected


def test_importing_recompile_is_cheap(tmp_path):
    code = "import sys, recompile; print([name for name in ('torch', 'numpy', 'networkx') if name in sys.modules])"
    assert run_python(code, tmp_path) == ["[]"]


def test_the_backend_is_found_by_name_where_the_package_is_installed():
    found = importlib.metadata.entry_points(group="torch_dynamo_backends")
    assert "recompile.backend:recompile" in {entry_point.value for entry_point in found}
