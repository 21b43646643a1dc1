"""Imports allowed; docs/architecture.md draws them."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ifsl_bench

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ifsl_bench"
LIBRARY = sorted(PACKAGE.rglob("*.py"))
PLUGINS = sorted((ROOT / "methods").glob("*.py"))
STANDARD = sys.stdlib_module_names
OPTIONAL = PACKAGE / "plugin" / "learn2learn.py"  # the one place that imports the package of that name

# From the ground up: a room imports from itself and from rooms above it in this list, that is, from lower floors.
FLOORS = [
    "utils",
    "solvers",
    "protocols/tasks",
    "plugin",
    "data/read",
    "data",
    "data/sets",
    "data/preparing",
    "backbones",
    "protocols",
    "store",
    "experiments",
    "analysis",
    "reporting",
    "reporting/page",
    "reporting/figures",
    "cli",
]


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


def room(path: Path) -> str:
    """The longest entry of FLOORS that the file lies in; "" for the three files at the root."""
    folder = path.relative_to(PACKAGE).parent.as_posix()
    return max((floor for floor in FLOORS if f"{folder}/".startswith(f"{floor}/")), key=len, default="")


def test_every_room_has_a_floor_and_every_floor_a_room():
    assert {room(path) for path in LIBRARY} == {"", *FLOORS}
    assert {path.name for path in LIBRARY if not room(path)} == {"__init__.py", "__main__.py", "_version.py"}
    at_root = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert len(at_root) <= 21, sorted(at_root)


def test_no_arrow_runs_upwards():
    rooms = {name: room(path) for name, path in MODULES.items()}  # none for what hands out all, and for the command
    upwards = [f"{name} imports {target}" for name, mine in rooms.items() if mine for target in arrows()[name]
               if rooms[target] and FLOORS.index(rooms[target]) > FLOORS.index(mine)]  # fmt: skip
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


def test_the_architecture_page_maps_the_rooms_in_their_order_and_names_files_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `([a-z/]+)/` \|", text, re.M)
    assert listed == FLOORS
    for room_name, modules in re.findall(r"^\| `([a-z/]+)/` \|(.*)\|$", text, re.M):
        for name in re.findall(r"`([a-z_0-9]+)`", modules):
            assert (PACKAGE / room_name / f"{name}.py").exists(), f"{room_name}/{name}"


def test_no_document_names_a_module_that_is_not_there():
    text = "".join(path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
    for name in re.findall(r"`(?:ifsl_bench/)?((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", text):
        assert any((folder / name).exists() for folder in (ROOT, PACKAGE)), name
    for name in set(re.findall(r"\bifsl_bench((?:\.[a-z_0-9]+)+)", text)) - {".methods", ".datasets", ".backbones"}:
        parts = name.strip(".").split(".")
        inside = [PACKAGE.joinpath(*parts[:n]) for n in range(len(parts), 0, -1)][:2]
        there = any(path.is_dir() or path.with_suffix(".py").exists() for path in inside)
        assert there or parts[0] in ifsl_bench.__all__, name


def test_no_room_takes_the_name_of_a_public_function():
    """Importing ifsl_bench.run, were it a folder, would put it in the place of the function for good."""
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert not rooms & set(ifsl_bench.__all__)


def top(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - STANDARD


def test_methods_know_the_contract_and_the_solvers_only():
    allowed = ("ifsl_bench.plugin", "ifsl_bench.solvers", "ifsl_bench.solvers", "ifsl_bench.protocols.tasks.task",
               "ifsl_bench.backbones.networks", "ifsl_bench.utils.cosine", "ifsl_bench.utils.errors")  # fmt: skip
    for path in PLUGINS:
        names = imports(path)
        assert top(names) <= {"ifsl_bench", "torch"}, path.name
        strange = {name for name in names if name.startswith("ifsl_bench") and not name.startswith(allowed)}
        assert not strange, f"{path.name} imports {strange}"


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [("solve", ("solve",)), ("learners", ("kernels", "solve", "learners", "plugin", "protocol", "common"))],
)
def test_mathematics_imports_torch_and_numpy_only(folder, allowed):
    for path in (PACKAGE / folder).glob("*.py"):
        names = imports(path)
        assert top(names) <= {"torch", "numpy", "ifsl_bench"}, path
        assert all(name.split(".")[1] in allowed for name in names if name.startswith("ifsl_bench.")), path


def test_the_library_names_no_method_and_no_task():
    words = {p.stem for p in PLUGINS} - {"__init__"}
    for path in LIBRARY:
        names = imports(path)
        assert not any(n.startswith(("ifsl_bench.methods.", "methods", "tasks")) for n in names), path
        assert ("learn2learn" in top(names)) == (path == OPTIONAL), path
        docs = {ast.get_docstring(n, clean=False) for n in nodes(path)
                if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))}  # fmt: skip
        calls = [n for n in nodes(path) if isinstance(n, ast.Call) and ast.unparse(n.func) == "examples"]
        commands = {n.value for call in calls for n in ast.walk(call) if isinstance(n, ast.Constant)}
        texts = {n.value for n in nodes(path) if isinstance(n, ast.Constant) and isinstance(n.value, str)} - docs
        texts -= commands
        for text in texts - {"ridge"}:  # the penalty's name too
            if not {"ifsl-bench", "--out"} & set(text.split()):  # a command in a message, or that draws a figure
                assert not words & set(text.replace("-", " ").split()), f"{path.name} names a method: {text!r}"


# What `run --rerun --method lr+a --task glyphs-5shot` asks for while it runs, beside what each of these imports.
ON_THE_WAY = ("board.beside", "board.leaderboard", "campaigns.run", "campaigns.expansion", "cli.main", "cli.running",
              "jobs.job", "kernels.counting", "kernels.gathering", "kernels.regression", "kernels.threads",
              "methods.attractor", "results", "tasks")  # fmt: skip


def test_a_row_is_run_again_without_what_it_does_not_need():
    """No trainer, no files of weights, no training loop, no search, no sessions, no network's learner, no source of the
    data; and little in all."""
    idle = ("backbone.trainer", "backbone.weights", "episodic.meta_training", "protocol.sequences", "jobs.searching",
            "protocol.session_metrics", "backbone.second_head", "learners.network", "learners.dual", "solve.lbfgs",
            "plugin.rules", "data.source", "data.preparing.prepare", "data.read.archive")  # fmt: skip
    lines = [
        f"import sys, {', '.join(f'ifsl_bench.{name}' for name in ON_THE_WAY)}",
        f"loaded = {{f'ifsl_bench.{{name}}' for name in {idle}}} & set(sys.modules)",
        "assert not loaded, loaded",
        "modules = [module for name, module in sys.modules.items() if name.startswith('ifsl_bench')]",
        "files = {module.__file__ for module in modules if getattr(module, '__file__', None)}",
        "print(len(files), sum(len(open(file).readlines()) for file in files))",
    ]
    process = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, timeout=60)
    modules, count = map(int, process.stdout.split())
    assert modules <= 140, modules
    assert count <= 20_000, count


def test_the_way_of_one_command_is_as_short_as_its_page_says():
    """The files that docs/architecture.md names in its points, from the words of a command to the stored result."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    points = page.partition("## The way of one command")[2].partition("Roads that branch off")[0]
    files = {PACKAGE / name for name in re.findall(r"`([a-z]+/[a-z_]+\.py)`", points)}
    assert len(files) == 25
    assert sum(len(path.read_text().splitlines()) for path in files) <= 5_500


def test_files_are_of_a_readable_length():
    long = {p.name: n for p in (*LIBRARY, *PLUGINS) if (n := len(p.read_text().splitlines())) > 420}
    assert not long


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
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, timeout=60)
