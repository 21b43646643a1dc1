"""Print the packages of ifsl_bench, each with the summary of its docstring, as a Markdown table."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ifsl_bench"
# From the ground up: a package imports from itself and from packages above it in this list.
ORDER = [
    "utils",
    "solvers",
    "protocols/tasks",
    "plugin",
    "protocols/sampling",
    "data/read",
    "data",
    "data/sets",
    "data/preparing",
    "backbones",
    "recipes",
    "protocols",
    "store",
    "experiments",
    "analysis",
    "reporting",
    "reporting/page",
    "reporting/figures",
    "cli",
]


def main() -> None:
    """Print the table."""
    print("| package | contents |\n|---|---|")
    for package in ORDER:
        docstring = ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text(encoding="utf-8"))) or ""
        print(f"| `{package}/` | {docstring.partition(chr(10) * 2)[0].replace(chr(10), ' ')} |")


if __name__ == "__main__":
    main()
