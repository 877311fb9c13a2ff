"""A model family is one data file: no code in it, and no code elsewhere that knows its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TypeGuard

import pytest

import specter_build
import specter_runtime
from specter_build import architectures
from specter_build.architectures import ARCHITECTURES, family
from specter_build.architectures.family import Architecture, Field, FusedLayout

FOLDER = Path(architectures.__path__[0])
DATA = (
    ast.Call,
    ast.Constant,
    ast.Dict,
    ast.Tuple,
    ast.Starred,
    ast.Name,
    ast.Subscript,  # another family's name: COMMON_NAMES["router"]
    ast.BinOp,  # LAYER + "mlp.gate.weight"
    ast.UnaryOp,  # a negative number
    ast.keyword,
    ast.expr_context,
    ast.operator,
    ast.unaryop,
)
"""What the value of a family may be made of."""

CALLED = {"Architecture", "Field", "FusedLayout", "kv_heads", "norm_eps", "grouped_routing"}


def is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_family_is_imports_and_one_architecture(model_type: str) -> None:
    tree = ast.parse((FOLDER / f"{model_type}.py").read_text("utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        assert isinstance(node, ast.ImportFrom)
        assert node.module == family.__name__
    (assignment,) = (node for node in tree.body if node not in imports and not is_docstring(node))
    assert isinstance(assignment, ast.Assign)
    (name,) = assignment.targets
    assert isinstance(name, ast.Name)
    assert isinstance(assignment.value, ast.Call)
    assert ast.unparse(assignment.value.func) == Architecture.__name__
    for part in ast.walk(assignment.value):
        assert isinstance(part, DATA), ast.dump(part)
        if isinstance(part, ast.Call):
            assert ast.unparse(part.func) in CALLED
    module = import_module(f"{architectures.__name__}.{model_type}")
    assert getattr(module, name.id) is ARCHITECTURES[model_type]


def leaves(value: object) -> Iterator[object]:
    """What records, mappings and tuples are made of in the end."""
    if isinstance(value, Architecture | Field | FusedLayout):
        value = asdict(value)
    if isinstance(value, Mapping):
        value = (*value, *value.values())
    if isinstance(value, tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_what_a_family_is_made_of_has_no_behaviour(architecture: Architecture) -> None:
    """A function handed to a record would be code after all."""
    for value in leaves(architecture):
        assert value in (int, float, bool, str, None) or isinstance(value, str | int | float), value


def code_files() -> list[Path]:
    files = []
    for package in (specter_build, specter_runtime):
        files += Path(package.__path__[0]).rglob("*.py")
    return sorted(path for path in files if FOLDER not in path.parents)


def strings(tree: ast.Module) -> Iterator[str]:
    """All texts of a module but docstrings, which are for people."""
    docstrings = [node.value for node in ast.walk(tree) if is_docstring(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in docstrings:
            yield str(node.value)


def test_no_code_knows_a_family_by_name() -> None:
    named = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in ARCHITECTURES))
    files = code_files()
    assert len(files) > 40
    for path in files:
        tree = ast.parse(path.read_text("utf-8"))
        found = [text for text in strings(tree) if named.search(text)]
        assert not found, (path, found)
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare | ast.Match):  # nor asks for the family at all
                assert "model_type" not in ast.unparse(node), (path, node.lineno)
