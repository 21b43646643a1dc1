"""What a method computes, as numbers: equal for other code that computes the same, told apart where it does not."""

from __future__ import annotations

import importlib
import math
import sys

import msgspec
import pytest
import torch

from ifsl_bench.board import result_file, result_folder
from ifsl_bench.board.measured import rows_of
from ifsl_bench.campaigns import api
from ifsl_bench.common.progress import Reporter
from ifsl_bench.plugin import probe as probing
from ifsl_bench.plugin import probe_cache, registry
from ifsl_bench.plugin.behaviour import Numbers, Probe, bounded, comparable, differs, malformed
from ifsl_bench.plugin.method import Method, Prediction
from ifsl_bench.plugin.method_source import method_source
from ifsl_bench.plugin.probe import probe
from ifsl_bench.protocol.task import MetaTraining


class Means(Method):
    """Class means by their inner products, with one parameter."""

    scale, first = 1.0, 0.5

    def __init__(self, base, ways):
        super().__init__(base, ways)
        self.weight = torch.nn.Parameter(torch.full_like(base.weight[0], self.first))

    def forward(self, support, query):
        novel = self.scale * (query.features * self.weight) @ support.class_means(self.ways).mT
        return Prediction(torch.cat([query.base_logits, novel], -1))


def of(kind, options=None):
    found = probe("x", kind, options or {}, 5)
    assert found is not None
    return found


def of_name(said, **options):
    name, kind, meant = registry.resolve(said)
    found = probe(name, kind, {**meant, **options}, 5)
    assert found is not None
    return found


def test_a_probe_agrees_with_itself_after_a_way_through_a_file():
    first = of(Means)
    assert msgspec.json.decode(msgspec.json.encode(first), type=Probe) == first
    assert not differs(first, of(Means))
    assert not malformed(first)
    assert len(msgspec.json.encode(first)) < 4000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale": 1 + 1e-5}, "logits of 1-shot joint episodes, float64, many at once: by "),
        ({"first": 0.501}, "initial values of the parameters: by "),
        ({"schedule": MetaTraining(steps=7)}, "the schedule"),
        ({"head": "cosine"}, "the head"),
    ],
)
def test_what_differs_is_said(change, said):
    assert differs(of(Means), of(type("Other", (Means,), change))).startswith(said)


def test_another_order_of_the_same_operations_is_no_difference():
    class Other(Means):
        def forward(self, support, query):
            rows = query.features.flip(-1) * self.weight.flip(-1)
            novel = torch.einsum("eqd,end->eqn", rows, support.class_means(self.ways).flip(-1))
            shifted = query.base_logits - 3.0, self.scale * novel - 3.0  # one number added to all logits of a query
            return Prediction(torch.cat(shifted, -1))

    assert not differs(of(Means), of(Other))


def test_what_is_said_is_how_far_logits_are_apart():
    class Other(Means):
        def forward(self, support, query):
            found = super().forward(support, query)
            return Prediction(found.logits + 0.03 * torch.tensor([1.0, -1.0] * 6, dtype=found.logits.dtype))

    by = float(differs(of(Means), of(Other)).rpartition("by ")[2])
    assert 0.001 < by < 0.03 * math.sqrt(4 * 12)


def test_what_no_search_hides_is_seen_at_given_fast_weights():
    lr = of_name("lr+a")
    assert not differs(lr, of_name("lr+a"))
    said = differs(lr, of_name("lr+a", damping=0.1 + 1e-4))
    assert said.startswith("hypergradient at given fast weights of 1-shot joint episodes, float64: by")
    said = differs(lr, of_name("lr+a", weight_decay=1.3e-5))
    assert said.startswith("gradient of the objective at given fast weights of 1-shot joint episodes, float64: by")


def test_a_method_whose_gradient_alone_is_another_differs():
    class Other(Means):
        def forward(self, support, query):
            found = super().forward(support, query).logits
            return Prediction(0.5 * found + 0.5 * found.detach())

    said = differs(of(Means), of(Other))
    assert said.startswith("meta-gradient of 5-shot joint episodes, float64, many at once: by")


def test_a_batch_of_many_that_is_solved_otherwise_than_one_episode_differs():
    class Other(Means):
        def forward(self, support, query):
            factor = 1.001 if len(query.features) == 1 else 1.0
            found = super().forward(support, query).logits
            return Prediction(found * factor)

    assert "5-shot joint episodes, float64, one alone: by" in differs(of(Means), of(Other))


@pytest.mark.parametrize("said", ["imprint", "lwof", "lr+a"])
def test_another_machines_rounding_is_no_difference(said, monkeypatch):
    first, plain = of_name(said), probing._noise
    monkeypatch.setattr(probing, "_noise", lambda what, *shape: plain(what, *shape) * (1 + 1e-13))
    assert not differs(first, of_name(said))


def test_a_quarter_of_the_episodes_may_be_at_another_minimum_and_no_more():
    many = Numbers([float(i) for i in range(8)], [0.1] * 8, 2)

    def moved(count):
        return Numbers([i + (i < count) for i in range(8)], [0.1] * 8, 2)

    a, b, c = (Probe(1, {}, {"logits": numbers}) for numbers in (many, moved(2), moved(3)))
    assert not differs(a, b)
    assert differs(a, c) == "logits: by 1"


def test_a_method_that_cannot_work_on_such_episodes_has_no_probe_and_one_without_double_precision_has_half():
    class Picky(Means):
        def forward(self, support, query):
            raise RuntimeError("no")

    class Deaf(Means):
        def forward(self, support, query):
            return Prediction(super().forward(support, query).logits.detach())

    class Single(Means):
        def forward(self, support, query):
            if query.features.dtype == torch.float64:
                raise RuntimeError("no")
            return super().forward(support, query)

    assert probe("x", Picky, {}, 5) is None
    assert differs(of(Means), of(Deaf)).startswith("meta-gradient")
    assert {name.split(", ")[1] for name in of(Single).numbers if "," in name} == {"float32"}


def test_probes_of_other_versions_say_nothing_of_each_other():
    a, b = Probe(1, {}, {}), Probe(2, {}, {})
    assert not comparable(a, b)
    assert not comparable(a, None)
    with pytest.raises(ValueError, match="version 1 and 2"):
        differs(a, b)


def test_random_numbers_of_the_caller_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    of_name("lwof")
    assert torch.equal(torch.rand(3), expected)


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
    (tmp_path / method).write_text(STRANGE.format(imports=imports, within=within, scale=scale))

    def load(text):
        (tmp_path / helper).write_text(text)
        forget()
        return importlib.import_module(method.removesuffix(".py").replace("/", ".")).Strange

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] in ("strange", "method", "helper")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    yield load
    forget()


def test_a_second_module_that_changes_the_numbers_is_seen(strange, clusters, recorded):
    work = api.workspace(clusters / "home", device="cpu", reporter=recorded)
    task, trained = f"{clusters / 'clusters.toml'}:clusters-5shot", clusters / "home" / "trained"
    first = api.run(strange("SCALE = 1.0\n"), task, work=work)
    kind = strange("SCALE = 1.0  # a comment\n")
    assert api.run(kind, task, work=work) == first
    assert any("done already" in line for line in recorded.said)

    recorded.said.clear()
    other = strange("SCALE = 0.5\n")
    assert method_source(other) == method_source(kind)  # which is why the source is not enough
    found = api.run(other, task, work=work)
    assert found.episodes != first.episodes
    assert not any("done already" in line for line in recorded.said)
    assert any("out of date (changed: the method: logits" in line for line in recorded.said)
    folders = sorted(path.name for path in trained.iterdir() if path.is_dir())
    assert folders[1] == f"{folders[0]}-2"
    assert found.provenance["checkpoint"] == folders[1]

    again = api.run(strange("SCALE = 1.0\n"), task, work=work)  # the first model is still there
    assert again.provenance["checkpoint"] == folders[0]
    assert again.episodes == first.episodes


def test_new_code_on_an_old_checkpoint_is_said(strange, clusters, recorded):
    work = api.workspace(clusters / "home", device="cpu", reporter=recorded)
    task = f"{clusters / 'clusters.toml'}:clusters-5shot"
    found = api.run(strange("SCALE = 1.0\n"), task, work=work)
    (folder,) = (path for path in (clusters / "home" / "trained").iterdir() if path.is_dir())
    (job,) = api.make_jobs([strange("SCALE = 0.5\n")], [task], {}, api.Training(), [0], None)
    info = api.trained_facts(folder)
    assert job.other_method(work.home, info).startswith("logits of 1-shot joint episodes, float64")
    assert found.probe is not None


# --- source and probe


@pytest.fixture
def recorded():
    class Recorded(Reporter):
        def __init__(self):
            super().__init__()
            self.said, self.warned = [], []

        def say(self, text):
            self.said.append(text)

        def warn(self, text):
            self.warned.append(text)

    return Recorded()


def test_a_comment_makes_nothing_out_of_date(clusters, recorded, monkeypatch):
    work = api.workspace(clusters / "home", device="cpu", reporter=recorded)
    task = f"{clusters / 'clusters.toml'}:clusters-5shot"
    kind = type("Short", (Means,), {"schedule": MetaTraining(steps=4, validate_every=2)})
    first = api.run(kind, task, work=work)
    monkeypatch.setattr("ifsl_bench.running.job.method_source", lambda kind: "0" * 16)
    recorded.said.clear()
    assert api.run(kind, task, work=work) == first
    said = [line for line in recorded.said if "the code of Short has changed since, and computes the same" in line]
    assert len(said) == 1
    assert api.run(kind, task, work=work, rerun=True).provenance["checkpoint"] == first.provenance["checkpoint"]
    # A result without a probe is known by its source, as before.
    path = clusters / "home" / "results" / "clusters-5shot" / "Short.seed-0.json"
    older = msgspec.json.decode(path.read_bytes())
    del older["probe"]
    older["provenance"]["method_source"] = "1" * 16
    path.write_bytes(msgspec.json.encode(older))
    recorded.said.clear()
    api.run(kind, task, work=work)
    assert any("its code, which was recorded without what it computes" in line for line in recorded.said)


def test_a_raised_revision_trains_anew(clusters):
    work = api.workspace(clusters / "home", device="cpu")
    task = f"{clusters / 'clusters.toml'}:clusters-5shot"
    kind = type("Again", (Means,), {"schedule": MetaTraining(steps=2, validate_every=2)})
    first = api.run(kind, task, work=work)
    kind.revision = 1
    assert api.run(kind, task, work=work, rerun=True).provenance["checkpoint"] != first.provenance["checkpoint"]


def test_a_probe_is_made_once(tmp_path, monkeypatch):
    name, kind, meant = registry.resolve("lwof")
    first = probe_cache.probe_of(tmp_path, name, kind, meant, 5)
    monkeypatch.setattr(probe_cache, "probe", lambda *_: pytest.fail("made again"))
    assert probe_cache.probe_of(tmp_path, name, kind, meant, 5) == first
    with pytest.raises(pytest.fail.Exception):
        probe_cache.probe_of(tmp_path, name, kind, {"normalise": True}, 5)


# --- rows


def test_seeds_of_methods_that_compute_other_things_are_rows_of_their_own():
    stored = result_file.read(result_folder.packaged_root() / "glyphs-5shot" / "imprint.seed-0.json")

    def one(seed, value, source="s", version=1):
        numbers = {"logits of 5-shot joint episodes": Numbers([value or 0.0], [0.01])}
        made, provenance = Probe(version, {}, numbers), {"method_source": source, "time": str(seed)}
        return msgspec.structs.replace(
            stored, label="x", seed=seed, probe=None if value is None else made, provenance=provenance
        )

    rows, remarks = rows_of([one(0, 0.5), one(1, 0.53, "t"), one(2, 0.531, "u")], "yours")
    assert [(row.label, row.seeds, row.superseded) for row in rows] == [("x", (1, 2), False), ("x~2", (0,), True)]
    assert len(remarks) == 1
    assert "differ in logits of 5-shot joint episodes: by 0.031" in remarks[0]
    # Without a probe on both sides the source decides, and so it does between versions.
    for other in (one(0, None, "t"), one(0, 0.5, "t", version=2)):
        rows, remarks = rows_of([one(1, 0.5), other], "yours")
        assert [row.seeds for row in rows] == [(1,)]
        assert "the method's code differs" in remarks[0]
    rows, _ = rows_of([one(1, 0.5), one(0, None)], "yours")
    assert [row.seeds for row in rows] == [(0, 1)]


def test_ridge_rows_share_a_probe_whatever_their_seeds_chose(clusters):
    home = api.workspace(clusters / "home", device="cpu").home
    task = f"{clusters / 'clusters.toml'}:clusters-5shot"
    job, other = api.make_jobs(["lr"], [task], {}, api.Training(), [0, 1], None)
    assert job.probe(home) == other.probe(home)
    probes = [one.job.probe(home) for one in job.rounds()[0] if one.point["weight_decay"] in (1e-6, 1e-3, 1e-1)]
    assert probes[1] == job.probe(home), "a row is asked with the default of what it searches"
    assert differs(probes[0], probes[1])
    assert differs(probes[2], probes[1]), "and a candidate with its own value"


def test_a_file_cannot_widen_its_tolerances_beyond_what_ones_own_code_could_have():
    own, other = of(Means), of(type("Other", (Means,), {"scale": 1.5}))
    wide = {name: Numbers(n.values, [1e300] * len(n.within), len(n.within)) for name, n in other.numbers.items()}
    theirs = msgspec.structs.replace(other, numbers=wide)
    assert not differs(theirs, own), "taken as written it would be the same method"
    assert differs(bounded(theirs, own), own) == differs(bounded(other, own), own) != ""
    assert bounded(own, own) == own
    scaled = {name: Numbers(n.values, [9 * one for one in n.within], n.elsewhere) for name, n in own.numbers.items()}
    honest = msgspec.structs.replace(own, numbers=scaled)
    assert not differs(bounded(honest, own), own), "another machine's are somewhat wider"


@pytest.mark.parametrize(("elsewhere", "good"), [(-1, False), (0, True), (1, True), (2, False), (10**30, False)])
def test_no_more_than_a_quarter_of_the_runs_may_be_elsewhere(elsewhere, good):
    found = Probe(1, {}, {"x": Numbers([1.0] * 8, [0.1] * 4, elsewhere)})
    assert (malformed(found) == "") == good
    if not good:
        assert malformed(found) == f"x: {elsewhere} of 4 runs elsewhere, where at most a quarter may be"
