import ast
import tomllib
from pathlib import Path

import pytest

from recompile import versions

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.11", "2.13.0+cpu", "2.14.0a0+git", "2.11.0.dev20260101+cu130", "3.0.0", "10.0"]
)
def test_a_torch_that_is_new_enough_passes(version):
    versions.check_torch(version)


@pytest.mark.parametrize("version", ["2.10.2", "2.9.1+cu128", "2.2.0a0+git", "1.13.1"])
def test_an_old_torch_is_refused_with_what_to_install(version):
    with pytest.raises(ImportError) as refusal:
        versions.check_torch(version)
    assert str(refusal.value) == (
        f"recompile needs torch 2.11 or newer, not torch {version}: install one with `pip install 'torch>=2.11'`."
    )


@pytest.mark.parametrize("version", ["", "unknown", "git-1a2b3c"])
def test_a_torch_version_that_cannot_be_read_is_refused(version):
    with pytest.raises(ImportError, match=r"needs torch 2\.11 or newer, not torch .+: install one"):
        versions.check_torch(version)


def test_the_installed_torch_passes():
    import torch

    versions.check_torch(torch.__version__)


@pytest.mark.parametrize(
    ("version", "fits"), [((3, 10, 13), False), ((3, 11, 0), True), ((3, 13, 9), True), ((3, 14, 0), False)]
)
def test_only_the_pythons_that_the_project_names_pass(version, fits):
    if fits:
        versions.check_python(version)
        return
    with pytest.raises(
        ImportError, match=rf"not Python {version[0]}\.{version[1]}\.{version[2]}: install Python 3\.11"
    ):
        versions.check_python(version)


def test_pyproject_asks_for_the_same_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = f">={versions.dotted(versions.LEAST_PYTHON)},<{versions.dotted(versions.FIRST_PYTHON_TOO_NEW)}"
    assert project["requires-python"] == pythons
    assert f"torch>={versions.dotted(versions.LEAST_TORCH)}" in project["dependencies"]


def test_an_old_python_can_read_the_file_that_refuses_it():
    ast.parse(Path(versions.__file__).read_text(), feature_version=(3, 8))
