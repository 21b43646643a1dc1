"""Who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "ifsl_bench").rglob("*.py"))
PLUGINS = sorted((ROOT / "methods").glob("*.py"))
STANDARD = sys.stdlib_module_names
OPTIONAL = ROOT / "ifsl_bench" / "learn2learn.py"  # the one place that imports the package of that name


def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parent.parts
            parts = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parts, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def top(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - STANDARD


@pytest.mark.parametrize("path", PLUGINS, ids=lambda p: p.name)
def test_methods_know_the_contract_and_the_solvers_only(path):
    names = imports(path)
    assert top(names) <= {"ifsl_bench", "torch"}
    allowed = ("ifsl_bench.plugin.method", "ifsl_bench.solve", "ifsl_bench.protocol.task", "ifsl_bench.backbone.networks", "ifsl_bench.common.errors",
               "ifsl_bench.plugin.learn2learn")  # fmt: skip
    for name in names:
        if name.startswith("ifsl_bench"):
            assert name.startswith(allowed), f"{path.name} imports {name}"
            assert not name.startswith("ifsl_bench.methods"), f"{path.name} imports another plugin"


@pytest.mark.parametrize("path", sorted((ROOT / "ifsl_bench" / "solve").glob("*.py")), ids=lambda p: p.name)
def test_solvers_import_torch_and_numpy_only(path):
    names = imports(path)
    assert top(names) <= {"torch", "numpy", "ifsl_bench"}
    assert all(n.startswith("ifsl_bench.solve") for n in names if n.startswith("ifsl_bench"))


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_library_names_no_method_and_no_task(path):
    names = imports(path)
    assert not any(n.startswith(("ifsl_bench.methods.", "methods", "tasks")) for n in names)
    assert ("learn2learn" in top(names)) == (path == OPTIONAL)
    tree = ast.parse(path.read_text())
    docs = {ast.get_docstring(n, clean=False) for n in ast.walk(tree)
            if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))}  # fmt: skip
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)} - docs
    words = {p.stem for p in PLUGINS} - {"__init__"}
    for text in texts - {"lr"}:  # PyTorch's word for a learning rate
        if "ifsl-bench run" not in text:  # an example of a command
            assert not words & set(text.replace("-", " ").split()), f"{path.name} names a method: {text!r}"


def test_optional_packages_are_imported_when_they_are_used_and_not_before():
    """Listing the methods imports every one of them; an optional package takes seconds, and says things."""
    lines = [
        "import sys, ifsl_bench.cli, ifsl_bench.plugin.learn2learn, ifsl_bench.running.interop",
        "sys.argv = ['ifsl-bench', 'methods']",
        "try: ifsl_bench.cli.main()",
        "except SystemExit as end: assert not end.code",
        "assert 'learn2learn' not in sys.modules",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, timeout=60)
    assert not done.stderr


def test_files_are_of_a_readable_length():
    long = {p.name: n for p in (*LIBRARY, *PLUGINS) if (n := len(p.read_text().splitlines())) > 420}
    assert not long


@pytest.mark.parametrize(
    "arguments", [None, ["--help"], ["tasks"], ["table", "mini-5shot"], ["table", "--rank", "mini-5shot"]]
)
def test_quick_commands_do_without_torch(arguments):
    lines = ["import sys, ifsl_bench, ifsl_bench.cli"]
    if arguments is not None:
        lines += [f"sys.argv = {['ifsl-bench', *arguments]}", "try: ifsl_bench.cli.main()", "except SystemExit: pass"]
    lines += [
        "heavy = {'torch', 'matplotlib', 'torchvision', 'fontTools'} & set(sys.modules)",
        "assert not heavy, heavy",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, timeout=60)
