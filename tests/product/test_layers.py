"""Imports allowed; docs/architecture.md draws them."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import ifsl_bench
from tests.house import repeated_classes

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ifsl_bench"
LIBRARY = sorted(PACKAGE.rglob("*.py"))
PLUGINS = sorted((ROOT / "methods").glob("*.py"))
STANDARD = sys.stdlib_module_names
OPTIONAL = PACKAGE / "plugin" / "learn2learn.py"  # the one place that imports the package of that name

sys.path.insert(0, str(ROOT / "docs"))
from packages import ORDER  # noqa: E402  # from the ground up: a package imports from itself and from earlier ones

AT_ROOT = {
    "__init__.py",
    "__main__.py",
    "_version.py",
    "api.py",
    "learners.py",
    "solve.py",
}  # former names: the last two


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in LIBRARY}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, at any depth, for types alone too."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parent.parts
            parts = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parts, *([node.module] if node.module else [])])
            named = {f"{module}.{alias.name}" for alias in node.names}
            names |= named if named <= MODULES.keys() else {module} | named  # modules, not what holds them
    return names


@functools.cache
def arrows() -> dict[str, set[str]]:
    return {name: (imports(path) & MODULES.keys()) - {name} for name, path in MODULES.items()}


def package(path: Path) -> str:
    """Return the longest entry of ORDER that the file lies in; "" for the files at the root."""
    folder = path.relative_to(PACKAGE).parent.as_posix()
    return max((entry for entry in ORDER if f"{folder}/".startswith(f"{entry}/")), key=len, default="")


def test_every_package_has_a_place_in_the_order():
    assert {package(path) for path in LIBRARY} == {"", *ORDER}
    assert {path.name for path in LIBRARY if not package(path)} == AT_ROOT


def test_no_package_imports_a_later_one():
    packages = {name: package(path) for name, path in MODULES.items()}
    upwards = [
        f"{name} imports {target}"
        for name, mine in packages.items()
        for target in arrows()[name]
        if mine and packages[target] and ORDER.index(packages[target]) > ORDER.index(mine)
    ]
    assert not upwards


def test_no_module_imports_itself_through_others():
    # A package's __init__ is no stop on the way: whoever imports ifsl_bench.a.b runs it, but takes nothing from it.
    visited: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"a circle of imports: {' -> '.join([*way[way.index(name) :], name])}"
        if name not in visited:
            for target in sorted(arrows()[name]):
                visit(target, (*way, name))
            visited.add(name)

    for name in sorted(MODULES.keys() - {"ifsl_bench"}):
        visit(name, ())


def test_a_class_name_stands_once():
    assert repeated_classes() == {}


def test_the_page_on_architecture_is_short_and_names_every_package():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert re.findall(r"^\| `([a-z/]+)/` \|", page, re.M) == list(ORDER)
    assert len(page.splitlines()) < 90


def test_no_document_names_a_module_that_is_not_there():
    text = "".join(path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
    for name in re.findall(r"`(?:ifsl_bench/)?((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", text):
        assert any((folder / name).exists() for folder in (ROOT, PACKAGE)), name
    for name in set(re.findall(r"\bifsl_bench((?:\.[a-z_0-9]+)+)", text)) - {".methods", ".datasets", ".backbones"}:
        parts = name.strip(".").split(".")
        inside = [PACKAGE.joinpath(*parts[:n]) for n in range(len(parts), 0, -1)][:2]
        there = any(path.is_dir() or path.with_suffix(".py").exists() for path in inside)
        assert there or parts[0] in ifsl_bench.__all__, name


def test_no_package_takes_the_name_of_a_public_function():
    """Importing ifsl_bench.run, were it a folder, would put it in the place of the function for good."""
    assert not {path.name.removesuffix(".py") for path in PACKAGE.iterdir()} & set(ifsl_bench.__all__)


def top(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - STANDARD


def test_methods_know_the_contract_and_the_solvers_only():
    allowed = ("ifsl_bench.plugin", "ifsl_bench.solvers", "ifsl_bench.protocols.tasks", "ifsl_bench.backbones.networks",
               "ifsl_bench.utils.cosine", "ifsl_bench.utils.errors")  # fmt: skip
    for path in PLUGINS:
        names = imports(path)
        assert top(names) <= {"ifsl_bench", "torch"}, path.name
        strange = {name for name in names if name.startswith("ifsl_bench") and not name.startswith(allowed)}
        assert not strange, f"{path.name} imports {strange}"


def test_mathematics_imports_torch_numpy_and_numba_only():
    for path in (PACKAGE / "solvers").glob("*.py"):
        names = imports(path)
        assert top(names) <= {"torch", "numpy", "numba", "llvmlite", "threadpoolctl", "ifsl_bench"}, path
        inner = {name.split(".")[1] for name in names if name.startswith("ifsl_bench.")}
        assert inner <= {"solvers", "utils"}, path


def test_the_library_names_no_method_and_no_task():
    words = {p.stem for p in PLUGINS} - {"__init__"}
    for path in LIBRARY:
        names = imports(path)
        assert not any(n.startswith(("ifsl_bench.methods.", "methods", "tasks")) for n in names), path
        assert ("learn2learn" in top(names)) == (path == OPTIONAL), path
        docs = {ast.get_docstring(n, clean=False) for n in nodes(path)
                if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))}  # fmt: skip
        calls = [n for n in nodes(path) if isinstance(n, ast.Call) and ast.unparse(n.func) == "format_examples"]
        commands = {n.value for call in calls for n in ast.walk(call) if isinstance(n, ast.Constant)}
        texts = {n.value for n in nodes(path) if isinstance(n, ast.Constant) and isinstance(n.value, str)} - docs
        texts -= commands
        for text in texts - {"ridge"}:  # the penalty's name too
            if not {"ifsl-bench", "--out"} & set(text.split()):  # a command in a message, or that draws a figure
                assert not words & set(text.replace("-", " ").split()), f"{path.name} names a method: {text!r}"


def test_quick_commands_do_without_torch_and_a_list_of_methods_without_optional_packages():
    heavy = {"torch", "matplotlib", "torchvision", "fontTools", "scipy.stats"}
    commands = [
        (["--help"], {*heavy, "numpy"}), (["tasks"], heavy), (["table", "mini-5shot"], heavy),
        (["table", "--rank", "mini-5shot"], heavy),
        (["methods"], {"learn2learn"}),  # which imports every method
    ]  # fmt: skip
    lines = [
        "import sys, ifsl_bench, ifsl_bench.cli.main",
        f"for arguments, unwanted in {commands}:",
        "    sys.argv = ['ifsl-bench', *arguments]",
        "    try: ifsl_bench.cli.main.main()",
        "    except SystemExit as end: assert not end.code",
        "    assert not unwanted & set(sys.modules), (arguments, unwanted & set(sys.modules))",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True)
