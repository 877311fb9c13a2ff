"""The runtime is lean, and what is installed is the two packages with their types and data."""

from __future__ import annotations

import importlib.resources
import pkgutil
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import specter_runtime

REPOSITORY = Path(__file__).resolve().parent.parent.parent
HEAVY = {
    "accelerate",
    "click",
    "datasets",
    "huggingface_hub",
    "llmcompressor",
    "onnx",
    "pydantic",
    "specter_build",
    "transformers",
    "yaml",
}


def modules_after(statements: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running ``statements``."""
    code = f"import sys\n{statements}\nprint(*sys.modules)"
    path = repr([entry for entry in sys.path if entry])
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in result.stdout.split()}


def submodules() -> list[str]:
    return [info.name for info in pkgutil.walk_packages(specter_runtime.__path__)]


def test_every_module_but_the_command_line_imports_nothing_heavy() -> None:
    names = [name for name in submodules() if name != "cli"]
    assert len(names) > 20
    loaded = modules_after("\n".join(f"import specter_runtime.{name}" for name in names))
    assert loaded & HEAVY == set()
    assert {"torch", "tokenizers"} <= loaded  # what is looked at did run


def test_importing_the_package_alone_loads_neither_torch_nor_the_command_line() -> None:
    loaded = modules_after(
        "import specter_runtime\nassert 'specter_runtime.cli' not in sys.modules"
    )
    assert loaded & (HEAVY | {"torch", "numpy", "tokenizers", "jinja2"}) == set()
    assert "specter_runtime" in loaded


def test_command_lines_load_torch_only_when_they_run() -> None:
    loaded = modules_after("import specter_runtime.cli, specter_build.cli")
    assert loaded & {"torch", "transformers", "pydantic"} == set()
    assert "click" in loaded


@pytest.mark.parametrize("package", ["specter_build", "specter_runtime"])
def test_packages_ship_their_types(package: str) -> None:
    assert (importlib.resources.files(package) / "py.typed").is_file()


def test_calibration_text_ships_with_a_note_on_its_sources() -> None:
    data = importlib.resources.files("specter_build") / "data"
    assert (data / "calibration.jsonl").is_file()
    assert (data / "README.md").is_file()


@pytest.mark.skipif(find_spec("setuptools") is None, reason="needs setuptools to build a wheel")
def test_wheel_holds_the_two_packages_and_their_data_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in ("specter_build", "runtime", "tests", "recipes"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
    command = "pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir"
    subprocess.run(
        [sys.executable, "-m", *command.split(), str(tmp_path), str(source)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("specter_moe-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(root).as_posix()
        for root, package in ((source, "specter_build"), (source / "runtime", "specter_runtime"))
        for path in (root / package).rglob("*")
        if path.is_file() and path.suffix != ".so"
    }
    compiled = {name for name in found if name.startswith("specter_runtime/kernels/native.cp")}
    compiled.discard("specter_runtime/kernels/native.cpp")
    assert len(compiled) == (shutil.which("c++") is not None)
    assert found - compiled == expected
