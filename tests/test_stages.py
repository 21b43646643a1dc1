"""The stages of a run, and a method from a file or a class."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import ifsl_bench
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.progress import LogReporter
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.find_method import Chosen, find_method
from ifsl_bench.protocol.training import Training
from ifsl_bench.running import api, provenance
from ifsl_bench.running.dry_run import dry_run
from ifsl_bench.running.job import make_jobs
from ifsl_bench.running.stages import Evaluate, MetaTrain, Pretrain, stages_of

FILE = """
import torch
from ifsl_bench import Method, Prediction

SHIFT = 0.0

class Base(Method):
    def forward(self, support, query):
        raise AssertionError


class Means(Base):
    '''Nearest class mean, cosine.'''

    def __init__(self, base, ways, *, temperature: float = 10.0):
        super().__init__(base, ways)
        self.temperature = temperature

    def forward(self, support, query):
        E = len(query.features)
        means = torch.cat([self.base.prototypes.expand(E, -1, -1), support.class_means(self.ways)], 1)
        h, c = (torch.nn.functional.normalize(x, dim=-1) for x in (query.features, means))
        return Prediction(self.temperature * h @ c.mT + SHIFT)
"""


@pytest.fixture
def task(clusters):
    return f"{clusters / 'clusters.toml'}:clusters-5shot"


@pytest.fixture
def work(clusters):
    return api.workspace(clusters / "home", device="cpu")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


def jobs_of(methods, task, work, train=None):
    return make_jobs(methods, [task], {}, Training.parse(train or {}), [0], None, home=work.home)


def everything(job):
    data, stages, evaluation = stages_of(job)
    return [data, *stages, evaluation]


@pytest.mark.parametrize("name", ["protonet", "lwof", "lr", "mlp+a"])
def test_a_dry_run_lists_what_a_run_does_and_a_run_leaves_it_cached(name, task, work):
    (job,) = jobs_of([name], task, work, {"steps": "5"})
    stages = everything(job)
    assert [row["stage"] for row in dry_run([job], work)] == [stage.title for stage in stages]
    assert [stage.cached(work.home) for stage in stages] == [True] + [False] * (len(stages) - 1), "data are there"
    api.run_job(job, work)
    assert all(stage.cached(work.home) for stage in stages[:-1])
    rows = dry_run([job], work)
    assert [row["state"] for row in rows] == ["cached"] * (len(stages) - 1) + ["to do"]
    api.run_jobs([job], work)
    assert [row["state"] for row in dry_run([job], work)] == ["cached"], "the result is stored"


def test_every_stage_can_be_pickled_and_runs_in_another_process_to_the_same_artefact(task, work, clusters, file):
    (job,) = jobs_of(["lwof"], task, work, {"steps": "10"})
    (own,) = jobs_of([f"{file}:Means"], task, work)
    for one in (job, own):
        for stage in everything(one):
            again = pickle.loads(pickle.dumps(stage))
            assert again == stage
            assert again.key(work.home) == stage.key(work.home)
    script = (
        "import pickle, sys\nfrom ifsl_bench.running import api\n"
        "work = api.workspace(sys.argv[1], device='cpu')\n"
        "for stage in pickle.load(sys.stdin.buffer): made = stage.run(work)\n"
        "print(made.summary['acc']['mean'])"
    )
    for one in (job, own):
        command = [sys.executable, "-c", script, str(clusters / "elsewhere")]
        (clusters / "elsewhere").mkdir(exist_ok=True)
        if not (clusters / "elsewhere" / "data").exists():
            (clusters / "elsewhere" / "data").symlink_to(work.home.data)
        done = subprocess.run(
            command, input=pickle.dumps(everything(one)), capture_output=True, timeout=300, check=True
        )
        assert float(done.stdout) == api.run_job(one, work).summary["acc"]["mean"]


def test_a_job_needs_the_plain_images_too_where_its_training_has_views(glyph_home, clusters):
    work = api.workspace(glyph_home, device="cpu")
    (job,) = make_jobs(["lwof"], ["glyphs-5shot"], {}, Training(views=3), [0], None, home=work.home)
    pools = [(s.pool, s.views) for s in everything(job) if hasattr(s, "pool")]
    assert ("base/val", 3) in pools
    assert ("base/val", 1) in pools, "validation sees plain images"
    assert ("novel/train", 3) in pools
    assert ("novel/train", 1) not in pools


def test_keys_change_with_what_makes_the_artefact_and_with_nothing_else(task, work):
    def key(name, **train):
        (job,) = jobs_of([name], task, work, train)
        return MetaTrain(job, job.settings()[0]).key(work.home)

    assert key("lwof") == key("lwof", select="last"), "every state holds both models"
    assert len({key("lwof"), key("lwof", steps="7"), key("lr+s"), key("mlp+s"), key("lr+a")}) == 5
    (job,) = jobs_of(["lwof"], task, work)
    keys = {Pretrain(job.task, head, seed).key(work.home) for head in ("linear", "cosine") for seed in (0, 1)}
    assert len(keys) == 4


def test_a_file_is_enough_to_try_a_method(task, work, file):
    result = api.run(f"{file}:Means", task, options={"temperature": 5}, work=work)
    assert (result.method, result.label) == ("Means", "Means.temperature=5")
    assert result.summary["acc"]["mean"] > 50
    assert api.run(str(file) + ":Means", task, options={"temperature": 5}, work=work) == result, "stored"
    chosen, _ = find_method(f"{file}:Means")
    again = api.run(chosen.method, task, options={"temperature": 5}, work=work)
    assert again.episodes == result.episodes
    # Another content of the file is another method, though nobody left this process.
    file.write_text(FILE.replace("SHIFT = 0.0", "SHIFT = torch.arange(13.0) * 9"))
    assert api.run(f"{file}:Means", task, options={"temperature": 5}, work=work).episodes != result.episodes


def test_the_command_line_takes_a_file(call, file, clusters, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_HOME", str(clusters / "home"))
    monkeypatch.chdir(file.parent)
    where = f"{clusters / 'clusters.toml'}:clusters-5shot"
    status, out, err = call("run", "--method", "own.py:Means", "--task", where, "--device", "cpu", "-q")
    assert (status, err) == (0, "")
    assert "Means: rank 1 of 1" in out or "Means is the only measured row" in out


def test_a_registered_class_keeps_its_registered_name(task, work):
    lwof = registry.method("lwof")
    assert find_method(lwof) == (Chosen("lwof", lwof), {})
    assert ifsl_bench.run(registry.method("protonet"), task, work=work).label == "protonet"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("nowhere.py:Means", "cannot read the method in .*nowhere.py: No such file"),
        ("own.py:Meens", "unknown class 'Meens' in .*own.py; did you mean 'Means'"),
        ("own.py:torch", "torch in .*own.py is not a subclass of ifsl_bench.Method"),
        ("own.py", "own.py defines 2 methods; say which one: own.py:CLASS, one of Base, Means"),
        ("broken.py:X", r"broken.py cannot be run: line 2: ZeroDivisionError"),
        ("odd.py:X", r"odd.py cannot be run: line 3: SyntaxError"),
        ("needs.py:X", r"option 'size' of X needs an annotation and a default value"),
        (3, "a method is a name, path/to/file.py:Class or a subclass of ifsl_bench.Method, not 3"),
        (dict, "<class 'dict'> is not a subclass of ifsl_bench.Method"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(said, message, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.py").write_text("x = 1\ny = x / 0\n")
    (file.parent / "odd.py").write_text("x = 1\n\ndef :\n")
    (file.parent / "needs.py").write_text(
        "from ifsl_bench import Method\nclass X(Method):\n    def __init__(self, base, ways, *, size):\n        pass\n"
        "    def forward(self, support, query):\n        pass\n"
    )
    with pytest.raises(UserError, match=message) as found:
        find_method(said)
    assert "\n" not in str(found.value)


def test_a_class_with_the_name_of_another_method_is_refused():
    other = type("lwof", (registry.method("protonet"),), {})
    with pytest.raises(UserError, match="has the name of another, registered method; rename the class"):
        find_method(other)


def test_the_source_of_a_method_covers_the_solvers_it_uses_however_it_imports_them(tmp_path, monkeypatch):
    """A module that says ``from ifsl_bench import solve`` has a module among its names, which has no ``__module__``."""
    plain = "from ifsl_bench import Method\n{}\nclass X(Method):\n    def forward(self, support, query): ...\n"
    sources = []
    for i, line in enumerate(("", "from ifsl_bench import solve", "from ifsl_bench.solve import minimise",
                              "import ifsl_bench.learners as own")):  # fmt: skip
        path = tmp_path / f"module{i}.py"
        path.write_text(plain.format(line))
        sources.append((find_method(str(path))[0].method, provenance.method_source))
    before = [source(method) for method, source in sources]
    monkeypatch.setattr(provenance, "_code_of", lambda package: [package.encode()])
    after = [source(method) for method, source in sources]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, False]


def test_solvers_that_are_not_found_are_an_error_and_not_an_empty_hash(monkeypatch):
    assert all(len(provenance._code_of(name)) > 3 for name in provenance.SOLVERS)
    monkeypatch.setattr("ifsl_bench.solve.__path__", ["/nowhere"])
    with pytest.raises(RuntimeError, match=r"ifsl_bench.solve has no modules in \['/nowhere'\]"):
        provenance._code_of("ifsl_bench.solve")


def test_the_commit_is_that_of_the_checkout():
    root = str(provenance.Path(ifsl_bench.__file__).resolve().parents[1])
    if not (provenance.Path(root) / ".git").exists():
        pytest.skip("this is no checkout")
    head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert provenance.commit().removesuffix("+changes") == head.strip()


def test_progress_names_the_job_and_not_the_class(task, work, file, capsys):
    (job,) = jobs_of([f"{file}:Means"], task, work)
    assert Evaluate(job, {}).title == "evaluating Means on clusters-5shot, seed 0: 60 episodes"
    api.run_job(job, api.workspace(work.home.cache, device="cpu", reporter=LogReporter()))
    assert "evaluating Means on clusters-5shot" in capsys.readouterr().err
