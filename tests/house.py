"""Print the size of the product and of its tests, and how its names and docstrings keep to the rules of the house.

python tests/house.py            # the figures
python tests/house.py --list     # and each place that breaks a rule
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = sorted([*(ROOT / "ifsl_bench").rglob("*.py"), *(ROOT / "methods").glob("*.py")])
TESTS = sorted((ROOT / "tests").rglob("*.py"))
NO_VERB = re.compile(
    r"(an?|the|what|whether|where|how|of|in|on|as|its?|one|two|all|each|every|no|for|with|this)\b", re.I
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines(paths: list[Path]) -> int:
    """Return the number of lines of some files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def repeated_classes() -> dict[str, list[str]]:
    """Return each class name that stands in two modules or more, with the modules."""
    modules = defaultdict(set)
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                modules[node.name].add(path.relative_to(ROOT).as_posix())
    return {name: sorted(paths) for name, paths in sorted(modules.items()) if len(paths) > 1}


def public_functions() -> Iterator[tuple[str, Function]]:
    """Yield the public functions and methods of the product, each with its place."""

    def visit(node: ast.AST, place: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
                yield from visit(child, place)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
                yield f"{place}:{child.lineno} {child.name}", child

    for path in PRODUCT:
        yield from visit(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT).as_posix())


def is_command(function: Function) -> bool:
    """Return whether a function is a command or a group of commands."""
    return any(re.search(r"\b(command|group)\(", ast.unparse(d)) for d in function.decorator_list)


def without_args() -> list[str]:
    """Return the documented public functions of two or more parameters whose docstring has no ``Args``.

    A command's docstring is its ``--help``, and each of its parameters is an option with a help of its own.
    """
    places = []
    for place, function in public_functions():
        if is_command(function):
            continue
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        docstring = ast.get_docstring(function)
        if docstring and len([n for n in names if n not in ("self", "cls")]) >= 2 and "Args:" not in docstring:
            places.append(place)
    return places


def without_verb() -> list[str]:
    """Return the public functions, no properties, whose docstring begins with another word than an imperative."""
    places = []
    for place, function in public_functions():
        properties = {"property", "cached_property", "functools.cached_property"}
        is_property = bool(properties & {ast.unparse(decorator) for decorator in function.decorator_list})
        first = (ast.get_docstring(function) or " ").split(" ", maxsplit=1)[0].strip(",.:;`\"'")
        third_person = first.endswith("s") and first not in ("Pass", "Guess", "Process")  # "Returns", "Tells"
        if first and not (is_property or is_command(function)) and (third_person or NO_VERB.match(first)):
            places.append(f"{place}: {first}")
    return places


def main() -> None:
    """Print the figures."""
    print(f"product: {lines(PRODUCT):,} lines in {len(PRODUCT)} files")
    print(f"tests: {lines(TESTS):,} lines in {len(TESTS)} files")
    packages = defaultdict(list)
    for path in PRODUCT:
        packages["/".join(path.relative_to(ROOT).parts[:-1][:2])].append(path)
    for package, files in packages.items():
        print(f"  {package}: {lines(files):,} lines, {len(files)} files")
    classes, args, verbs = repeated_classes(), without_args(), without_verb()
    skips = sum(path.read_text(encoding="utf-8").count("# fmt: skip") for path in PRODUCT)
    print(f"# fmt: skip: {skips}; class names in two modules: {len(classes)}")
    print(f"public functions: {len(list(public_functions())):,}")
    print(f"  two parameters or more, a docstring, and no Args: {len(args)}; no verb: {len(verbs)}")
    if "--list" in sys.argv:
        for title, places in (("classes", [f"{k}: {v}" for k, v in classes.items()]), ("Args", args), ("verb", verbs)):
            print("", title, *places, sep="\n  ")


if __name__ == "__main__":
    main()
