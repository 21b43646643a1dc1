"""``ifsl-bench methods new``: the first file of a method of one's own, or a package of it."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from string import Template

from ifsl_bench.plugin.registry import METHOD_GROUP, list_shorthands_by_name, registered_entry_points
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import translate_disk_errors

RESERVED_CLASS_NAMES = (
    "Adapting",
    "Method",
    "Prediction",
    "SessionOutput",
    *keyword.kwlist,
)  # classes that the file would not work with
METHOD_TEMPLATE = '''\
"""$name: what the method does, and whose it is. How such a file works: docs/writing-a-method.md of ifsl_bench."""

import torch
from torch.nn.functional import normalize

from ifsl_bench import Method, Prediction, Range, SessionOutput


class $kind(Method):
    """Cosines to the means of all classes met so far; ``bias`` is added for novel ones."""

    space = {"bias": Range(-2.0, 2.0)}  # where --tune looks for options

    def __init__(self, base, ways, *, bias: float = 0.0):  # keyword-only arguments are options: --set bias=0.1
        super().__init__(base, ways)
        self.bias = bias

    def base_logits(self, query):  # [E, Q, K] of E episodes with Q queries each, and K base classes
        return 10 * normalize(query.features, dim=-1) @ normalize(self.base.prototypes, dim=-1).mT

    def learn(self, support, before=None):  # from one session's supports, and the state after the session before
        means = normalize(support.class_means(self.ways), dim=-1)  # [E, N, D], of this session's N classes
        return SessionOutput(means if before is None else torch.cat([before, means], 1))

    def answer(self, state, query):  # [E, Q, K + t N] after t sessions; an episode is one session
        novel = 10 * normalize(query.features, dim=-1) @ state.mT + self.bias
        return Prediction(torch.cat([self.base_logits(query), novel], -1))
'''
IMAGE_METHOD_TEMPLATE = '''"""$kind, a method that sees images; see docs/writing-a-method.md of ifsl_bench."""

import torch
import torch.nn.functional as F

from ifsl_bench import Adapting, Range


def cosines(features, means):
    return 16 * F.normalize(features, dim=-1) @ F.normalize(means, dim=-1).mT


class $kind(Adapting):
    """The last stage learns the supports of each session; every class is the mean of its features, by angle."""

    sees = "maps:-1"  # what the last stage is given; "images" to change what lies below, too
    changes = "the last stage"
    space = {"rate": Range(1e-4, 1e-1, log=True)}  # where --tune looks for options

    def __init__(self, base, ways, *, rate: float = 0.01, steps: int = 20):  # keyword-only arguments are options
        super().__init__(base, ways)
        self.rate, self.steps = rate, steps

    def start(self):  # the state before any session
        own = self.network().state_dict()
        return {"weights": {name: own[name] for name in self.parameters_from(-1)}, "means": self.base.prototypes}

    def adapt(self, state, images, labels, session):  # [S, C, H, W], [S]; returns the state after the session
        network = self.network(state["weights"])  # a copy, free to change
        weights = {name: network.get_parameter(name) for name in state["weights"]}
        optimiser = torch.optim.SGD(weights.values(), lr=self.rate)
        for _ in range(self.steps):
            features = network(images)
            logits = cosines(features, torch.cat([state["means"], self.class_means(features, labels)]))
            logits[:, : len(session.hidden)].masked_fill_(session.hidden, -torch.inf)
            optimiser.zero_grad()
            F.cross_entropy(logits, session.first_class + labels).backward()
            optimiser.step()
        means = self.class_means(network(images), labels)
        return {"weights": weights, "means": torch.cat([state["means"], means])}

    def class_means(self, features, labels):
        return torch.stack([features[labels == label].mean(0) for label in range(self.ways)])

    def classify(self, state, images):  # [B, C, H, W]; returns the logits of all classes met so far
        return cosines(self.network(state["weights"])(images), state["means"])
'''
PYPROJECT_TEMPLATE = """\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1"
description = "$kind, a method for ifsl_bench."
requires-python = ">=3.11"
dependencies = ["ifsl_bench"]

[project.entry-points."ifsl_bench.methods"]
$name = "$module:$kind"

[tool.setuptools]
py-modules = ["$module"]
"""
TEST_TEMPLATE = '''\
"""Run by pytest once the package is installed: pip install -e ."""

import torch
from $module import $kind

from ifsl_bench import Base, Query, Support
from ifsl_bench.cli.main import cli


def test_it_keeps_the_rules_of_the_suite():
    cli(["methods", "--check", "$name"], standalone_mode=False)  # an error says which rules it breaks


def test_an_image_like_the_supports_of_a_class_is_of_that_class():
    corners = torch.eye(5)  # the features of 3 base classes, and of the 2 novel ones of an episode
    method = $kind(Base(corners[:3], torch.zeros(3), corners[:3]), ways=2)
    support = Support(corners[None, 3:], torch.tensor([[0, 1]]), torch.zeros(1, 3).bool(), torch.zeros(1, 2, 3))
    logits = method(support, Query(corners[None], torch.zeros(1, 5, 3))).logits  # [1, 5, 3 + 2]
    assert logits.argmax(-1).tolist() == [[0, 1, 2, 3, 4]]
'''


IMAGE_METHOD_TEST_TEMPLATE = '''"""Run by pytest once the package is installed: pip install -e ."""

from ifsl_bench.cli.main import cli


def test_it_keeps_the_rules_of_the_suite():
    cli(["methods", "--check", "$name"], standalone_mode=False)  # an error says which rules it breaks
'''


def write_new_method(name: str, package: bool = False, images: bool = False) -> Path:
    """Write a method that runs at once into the current folder: a file, or a package with entry point and test.

    Args:
        name: of the method.
        package: whether to write a package.
        images: whether the method sees images; of such a package the test is the contract alone.

    Returns:
        The file, or the package's folder.

    Raises:
        UserError: something of that name is there, a method or module has it, or it is no name.
    """
    module, kind = name.replace("-", "_"), "".join(word[:1].upper() + word[1:] for word in re.split("[-_]", name))
    if not re.fullmatch("[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?", name) or {module, kind} & {*RESERVED_CLASS_NAMES}:
        raise UserError(f"methods new: {name[:80]!r} is no name for a method; choose letters and digits, as my-method")
    path = Path(name if package else f"{module}.py")
    if path.exists() or path.is_symlink():
        raise UserError(f"methods new: {path} is there already; remove it, or choose another name")
    if {name.lower(), kind.lower()} & {
        taken.lower() for taken in (*registered_entry_points(METHOD_GROUP), *list_shorthands_by_name())
    }:
        raise UserError(f"methods new: there is a method {name!r} ('ifsl-bench methods'); choose another name")
    if module in sys.stdlib_module_names or find_spec(module):  # the new file would be imported in its place
        raise UserError(f"methods new: there is a Python module {module!r}; choose another name")
    files = {f"{module}.py": IMAGE_METHOD_TEMPLATE if images else METHOD_TEMPLATE}
    if package:
        tests = IMAGE_METHOD_TEST_TEMPLATE if images else TEST_TEMPLATE
        files |= {"pyproject.toml": PYPROJECT_TEMPLATE, f"test_{module}.py": tests}
    with translate_disk_errors(path, "cd"):
        if package:
            path.mkdir()
        for file, text in files.items():
            with open(path / file if package else path, "x", encoding="utf-8") as written:
                written.write(Template(text).substitute(name=name, module=module, kind=kind))
    return path
