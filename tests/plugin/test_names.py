"""One name for one method: two packages that register a name, a shorthand or a label are refused with both named."""

from __future__ import annotations

import importlib
import sys
from importlib import resources

import pytest

from ifsl_bench import api
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.utils.errors import UserError

SOURCE = """
import torch
from ifsl_bench import Method, Prediction

class Theirs(Method):
    shorthands = {shorthands}

    def __init__(self, base, ways, *, power: float = 1.0) -> None:
        super().__init__(base, ways)
        self.power = power

    def forward(self, support, query):
        novel = {scale} * query.features @ support.class_means(self.ways).mT
        return Prediction(torch.cat([query.base_logits, novel], -1))

    @classmethod
    def label(cls, name, options):
        {label}
"""
PLAIN = "return super().label(name, options)"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a distribution that registers one method, as pip would lay it out."""
    modules = []

    def install(package, name, scale=0.5, shorthands=(), label=PLAIN):
        site, module = tmp_path / f"site-{package}", f"{package}_module"
        info = site / f"{package}-0.3.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.3\n")
        (info / "entry_points.txt").write_text(f"[ifsl_bench.methods]\n{name} = {module}:Theirs\n")
        named = {shorthand: {"power": 2.0} for shorthand in shorthands}
        (site / f"{module}.py").write_text(SOURCE.format(scale=scale, shorthands=named, label=label))
        monkeypatch.syspath_prepend(str(site))
        modules.append(module)
        importlib.invalidate_caches()

    yield install
    for module in modules:
        sys.modules.pop(module, None)


def refused(name):
    with pytest.raises(UserError) as caught:
        registry.resolve_method(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_name_of_two_packages_is_refused_with_both_named(installed):
    for name, packages in (("protonet", ("ifsl_bench", "alien")), ("new", ("other", "third"))):
        for package in packages:
            if package != "ifsl_bench":
                installed(package, name)
        message = refused(name)
        assert all(package in message for package in packages)
        assert "uninstall all but one" in message
    assert registry.resolve_method("imprint")[0] == "imprint"


@pytest.mark.parametrize(
    ("name", "shorthands", "label", "asked", "said"),
    [
        ("new", ["imprint"], PLAIN, "new", "shorthand 'imprint' of method new (package alien) is also method imprint"),
        ("new", ["lr+a"], PLAIN, "new", "shorthand 'lr+a' of method new (package alien) is also a shorthand of method"),
        ("new", ["lr+a"], PLAIN, "lr+a", "'lr+a' is a shorthand of several methods"),
        ("lr+a", [], PLAIN, "lr+a", "method 'lr+a' (package alien) is also a shorthand of method attractor"),
    ],
)
def test_shorthands_that_are_anothers_are_refused_with_both_owners(name, shorthands, label, asked, said, installed):
    installed("alien", name, shorthands=shorthands, label=label)
    message = refused(asked)
    assert said in message
    assert "alien" in message
    assert "ifsl_bench" in message


def test_a_label_that_is_anothers_is_refused(installed, task, work):
    installed("alien", "new", label="return 'imprint', set()")
    with pytest.raises(UserError, match=r"label 'imprint' of method new \(package alien\) is also method imprint"):
        api.run("new", task, work=work)


def test_a_task_of_ones_own_may_not_have_a_packaged_tasks_name(minimal_task, tmp_path):
    (name,) = (task.name for task in find_in(minimal_task, tmp_path / "first.toml"))
    with pytest.raises(UserError, match=r"second.toml: task 'mini-5shot' is also one that comes with ifsl_bench"):
        find_in(minimal_task.replace(name, "mini-5shot"), tmp_path / "second.toml")


def find_in(text, path):
    path.write_text(text)
    return load_tasks(str(path))


def test_a_packaged_file_by_its_path_is_the_packaged_task():
    file = resources.files("ifsl_bench.tasks") / "glyphs.toml"
    assert load_tasks(f"{file}:glyphs-5shot") == load_tasks("glyphs-5shot")
