"""Print pip constraints that pin each requirement of the package and its extras to its lowest version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path


def main() -> None:
    """Print a line ``name==version`` for each requirement with a lower bound."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ("backbones", "cluster", "pandas", "tensorboard")
    requirements = [*project["dependencies"], *(r for e in extras for r in project["optional-dependencies"][e])]
    for requirement in requirements:
        if match := re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)", requirement):
            print(f"{match[1]}=={match[2]}")


if __name__ == "__main__":
    main()
