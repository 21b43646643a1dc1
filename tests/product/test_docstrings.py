"""Docstrings describe the parameters and attributes that there are."""

import ast
import re
from pathlib import Path

import pytest

import ifsl_bench

PACKAGE = Path(ifsl_bench.__file__).parent
ENTRY = re.compile(r"    (\w+(?:, \w+)*): ")  # of a section; its further lines are indented by more


def described_names(docstring: str) -> list[str]:
    names, inside = [], False
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            inside = line in ("Args:", "Attributes:")
        elif inside and (entry := ENTRY.match(line)):
            names += entry[1].split(", ")
    return names


def unknown_names(code: str) -> list[str]:
    unknown = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = [*ast.walk(node.args if isinstance(node, ast.FunctionDef) else node)]
            known = {
                getattr(part, key) for part in inner for key in ("arg", "id", "attr", "name") if hasattr(part, key)
            }
            described = described_names(ast.get_docstring(node) or "")
            unknown += [f"{node.name}: {name}" for name in described if name not in known]
    return unknown


@pytest.mark.parametrize("package", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda path: path.name)
def test_described_names_exist(package):
    assert {path.name: unknown for path in package.glob("*.py") if (unknown := unknown_names(path.read_text()))} == {}


def test_an_old_name_is_found():
    code = 'class Pool:\n    """P.\n\n    Attributes:\n        {}: of each image.\n    """\n\n    n_views: int\n'
    assert unknown_names(code.format("n_views")) == []
    assert unknown_names(code.format("views")) == ["Pool: views"]
    args = "Args:\n        x, y: numbers,\n            as: many.\n        z: another."
    function = f'def f(x, *y):\n    """F.\n\n    {args}\n    """\n'
    assert unknown_names(function) == ["f: z"]
