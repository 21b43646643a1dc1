"""The identity of methods: the syntax of their own code, and `revision`; of our own methods that alone."""

from __future__ import annotations

import importlib
import sys

import pytest

from ifsl_bench import api
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method_source import hash_method_source
from ifsl_bench.protocols.tasks.task import MetaTraining
from ifsl_bench.store import result_folder
from ifsl_bench.store import schema as result_file

# --- a stranger's package of two modules


STRANGE = """
import torch
from ifsl_bench import Method, MetaTraining, Prediction
{imports}

class Strange(Method):
    schedule = MetaTraining(steps=4, validate_every=2)

    def __init__(self, base, ways):
        super().__init__(base, ways)
        self.weight = torch.nn.Parameter(torch.ones_like(base.weight[0]))

    def forward(self, support, query):
        {within}
        novel = {scale} * (query.features * self.weight) @ support.class_means(self.ways).mT
        return Prediction(torch.cat([query.base_logits, novel], -1))
"""
FORMS = {
    "a package": ("strange/method.py", "strange/helper.py", "from .helper import SCALE", "pass", "SCALE"),
    "imported late": ("strange/method.py", "strange/helper.py", "", "from strange import helper", "helper.SCALE"),
    "two modules": ("method.py", "helper.py", "import helper", "pass", "helper.SCALE"),
}


@pytest.fixture(params=FORMS)
def strange(request, tmp_path, monkeypatch):
    """Writes the package with a scale and imports it anew."""
    method, helper, imports, within, scale = FORMS[request.param]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in (method, helper):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    if "/" in method:
        (tmp_path / "strange" / "__init__.py").write_text("")

    def load(text, rename=str):
        """``rename`` changes the text of the method's module."""
        (tmp_path / helper).write_text(text)
        (tmp_path / method).write_text(rename(STRANGE.format(imports=imports, within=within, scale=scale)))
        forget()
        return importlib.import_module(method.removesuffix(".py").replace("/", ".")).Strange

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] in ("strange", "method", "helper")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    yield load
    forget()


COMMENTED = ("class Strange(Method):", 'class Strange(Method):  # a comment\n    """A docstring."""\n')


def test_comments_docstrings_and_layout_are_no_other_method(strange):
    first = hash_method_source(strange("SCALE = 1.0\n"))
    assert hash_method_source(strange('"""Of two."""\nSCALE  =  (1.0)  # a comment\n')) == first
    assert hash_method_source(strange("SCALE = 1.0\n", lambda text: text.replace(*COMMENTED))) == first
    assert hash_method_source(strange("SCALE = 1.5\n")) != first
    assert hash_method_source(strange("SCALE = 1.0\n", lambda text: text.replace("@ support", "@ -support"))) != first
    assert hash_method_source(strange("SCALE = 1.0\n")) == first


@pytest.mark.parametrize("strange", ["imported late"], indirect=True)
def test_a_second_module_that_changes_is_seen(strange, clusters, messages):
    work = api.workspace(clusters / "home", device="cpu", reporter=messages)
    task, trained = f"{clusters / 'clusters.toml'}:clusters-5shot", clusters / "home" / "trained"
    first = api.run(strange("SCALE = 1.0\n"), task, work=work)
    assert api.run(strange("SCALE = 1.0  # a comment\n"), task, work=work) == first
    assert any("done already" in line for line in messages.said)

    messages.said.clear()
    halved = api.run(strange("SCALE = 0.5\n"), task, work=work)
    assert halved.episodes != first.episodes
    assert not any("done already" in line for line in messages.said)
    assert any("out of date (changed: the method's code)" in line for line in messages.said)
    folders = sorted(path.name for path in trained.iterdir() if path.is_dir())
    assert folders[1] == f"{folders[0]}-2"
    assert halved.provenance["checkpoint"] == folders[1]

    again = api.run(strange("SCALE = 1.0\n"), task, work=work)  # the first model is still there
    assert again.provenance["checkpoint"] == folders[0]
    assert again.episodes == first.episodes


@pytest.mark.slow("a method is trained several times")
def test_a_raised_revision_trains_anew(work, task):
    kind = type("Again", (registry.get_method("lwof"),), {"schedule": MetaTraining(steps=2, validate_every=2)})
    first = api.run(kind, task, work=work)
    kind.revision = 1
    assert api.run(kind, task, work=work, rerun=True).provenance["checkpoint"] != first.provenance["checkpoint"]


# --- ours


def test_our_methods_are_known_by_their_revision():
    name, kind, _ = registry.resolve_method("lwof")
    (job,) = make_jobs(RunConfig(["lwof"], ["glyphs-5shot"]))
    provenance = result_file.read_result(
        result_folder.packaged_results_folder() / "glyphs-5shot" / "lwof.seed-0.json"
    ).provenance
    assert (name, kind.revision) == ("lwof", 0)
    assert job.is_made_by_same_code(provenance)
    assert job.is_made_by_same_code(provenance | {"method_source": "0" * 16})
    assert not job.is_made_by_same_code(provenance | {"revision": 1})
    assert not job.is_made_by_same_code(provenance | {"distribution": {}}), "a class of that name from elsewhere"
