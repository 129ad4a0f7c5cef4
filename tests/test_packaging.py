"""What is installed is what the tree holds: every package, every data file, one version."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from pageturner import __version__

ROOT = Path(__file__).resolve().parents[1]
LINKS = {path.name: path.resolve() for path in (ROOT / "src" / "pageturner").iterdir() if path.is_symlink()}
SHIPPED = {
    ".py",
    ".pyi",
    ".proto",
    ".typed",
    ".cpp",
    ".cu",
    ".cuh",
    ".h",
    ".txt",
    ".json",
    ".html",
    ".css",
    ".js",
    ".svg",
}


def shipped_files() -> set[str]:
    """Every source and data file, under the name it is imported by."""
    linked = {
        f"pageturner/{package}/{path.relative_to(folder)}"
        for package, folder in LINKS.items()
        for path in folder.rglob("*")
        if path.suffix in SHIPPED and not {"__pycache__", "deploy"} & set(path.parts)
    }
    return linked | {"pageturner/__init__.py"}


def test_each_top_level_folder_is_linked() -> None:
    assert {name: str(path.relative_to(ROOT)) for name, path in LINKS.items()} == {
        "policies": "policies",
        "kernels": "kernels",
        "service": "service",
        "loadtest": "loadtest",
        "v1": "protos/pageturner/v1",
    }


def test_constraints_meet_the_declared_bounds() -> None:
    """Each direct dependency of the service is pinned, to a release that pyproject.toml allows."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines if line and not line.startswith("#"))
    }
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        Requirement(text) for text in [*document["dependencies"], *document["optional-dependencies"]["serve"]]
    ]
    for requirement in requirements:
        assert canonicalize_name(requirement.name) in pins, requirement
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: a wheel built in the tree would pick up whatever lies in build/."""
    copy = tmp_path_factory.mktemp("wheel") / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for folder in ("policies", "kernels", "service", "loadtest", "protos", "src"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        ".",
    ]
    subprocess.run([*command, "."], cwd=copy, check=True, capture_output=True, text=True)
    return zipfile.ZipFile(next(copy.glob("pageturner-*.whl")))


def test_the_wheel_holds_every_file(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == shipped_files()


def test_nothing_in_the_wheel_is_importable_by_a_bare_name(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"pageturner", f"pageturner-{__version__}.dist-info"}


def test_the_version_of_the_wheel_is_the_one_of_the_package(wheel: zipfile.ZipFile) -> None:
    assert (
        f"\nVersion: {__version__}\n" in wheel.read(f"pageturner-{__version__}.dist-info/METADATA").decode()
    )


def test_the_wheel_has_the_program(wheel: zipfile.ZipFile) -> None:
    entry_points = wheel.read(f"pageturner-{__version__}.dist-info/entry_points.txt").decode()
    assert "pageturner = pageturner.service.cli:main" in entry_points
