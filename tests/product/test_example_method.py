"""The example of a method in a package of its own, and its document: installed, run, and held against SciPy."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import optimize, special

from ifsl_bench.plugin.find_method import find_method
from ifsl_bench.plugin.method import Base, Query, Support
from ifsl_bench.plugin.rules import check_contract

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "example-method"
DOCUMENT = (ROOT / "docs" / "writing-a-method.md").read_text(encoding="utf-8")
MODULE = (EXAMPLE / "proto_imaml.py").read_text(encoding="utf-8")
E, N, SHOTS, Q, D, K = 2, 5, 3, 6, 8, 7


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.S | re.M)


def commands() -> list[list[str]]:
    """Every command line of the document."""
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return [shlex.split(line[2:]) for line in lines]


def child(arguments: Sequence[str], site: Path, folder: Path) -> str:
    """Runs Python in a process of its own that has the installed example; its standard output."""
    environment = {**os.environ, "PYTHONPATH": str(site), "IFSL_BENCH_HOME": str(folder / "home")}
    process = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder that pip has installed the example to, from a copy, since a build writes beside its sources."""
    assert ["pip", "install", "-e", "docs/example-method"] in commands()
    root = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, root / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "-q", "--target", str(root / "site")]
    command = [sys.executable, "-m", "pip", "install", *offline, str(root / "source")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return root / "site"


@pytest.fixture
def example(monkeypatch):
    """The class of the example, from its file."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module("proto_imaml").ProtoIMAML
    del sys.modules["proto_imaml"]


LOOP = """
import json, sys
from ifsl_bench.cli import main as cli
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["ifsl-bench", *arguments]
    try:
        cli.main()
    except SystemExit as stop:
        if stop.code:
            sys.exit(f"{arguments}: status {stop.code}")
    print("<end>")
"""


@pytest.mark.parametrize("name", ["nearest.py", "scaled_means.py"])
def test_the_short_methods_of_the_page_keep_all_rules(name, tmp_path):
    """The first one opens the page; the second is the example of a method that is meta-trained."""
    assert blocks("python")[0].startswith("# nearest.py")
    (code,) = [block for block in blocks("python") if block.startswith(f"# {name}")]
    (tmp_path / name).write_text(code)
    chosen, options = find_method(str(tmp_path / name))
    assert not [broken for _, broken in check_contract(chosen.name, chosen.method, options) if broken]


@pytest.mark.slow("four commands")
def test_its_commands_run_on_a_small_task(site, clusters):
    """Those of the document, in their order, with a task of seconds in place of the glyphs and fewer steps."""
    command_lines = [command[1:] for command in commands() if command[0] == "ifsl-bench"]
    assert [words[0] for words in command_lines] == ["methods", "run", "run", "compare", "run", "compare"]
    lines = [["run", "--method", "imprint", "--task", "glyphs-5shot", "-q"], *command_lines]
    for words in lines:
        words[:] = ["clusters.toml:clusters-5shot" if word == "glyphs-5shot" else word for word in words]
        if words[0] == "run":
            words += ["--device", "cpu"] + ([] if "imprint" in words else ["--train", "steps=20"])
        if words[0] == "compare":
            words[:] = [f"{word}.train.steps=20" if word.startswith("proto-imaml") else word for word in words]
    _, listed, _, ran, compared, *_ = child(["-c", LOOP, json.dumps(lines)], site, clusters).split("<end>\n")
    rows = {line.split()[0]: line.split() for line in listed.splitlines() if line.startswith("proto-")}
    assert rows.keys() >= {"proto-imaml", "proto-rbp"}
    assert {"cosine", "yes"} <= set(rows["proto-imaml"]), "its head, and that it is meta-trained"
    assert "proto-imaml.train.steps=20: provisional (1 seed)" in ran
    assert "A = proto-imaml.train.steps=20 (yours), B = imprint (yours)" in compared

    folder = clusters / "home" / "results" / "clusters-5shot"
    names = {p.name.removesuffix(".seed-0.json") for p in folder.iterdir()}
    given = ("proto-imaml", "proto-imaml.precision=1000000", "proto-rbp.precision=0.01")
    assert names == {"imprint", *(f"{label}.train.steps=20" for label in given)}
    results = {name: json.loads((folder / f"{name}.seed-0.json").read_text()) for name in names - {"imprint"}}
    for name, result in results.items():
        assert result["method"] == "proto-imaml"
        assert result["cost"]["parameters"] == 3
        assert set(result["solver"]) == {"solver_steps", "solver_unconverged", "gradient_norm"}
        assert result["solver"]["solver_steps"]["mean"] >= 1
        unconverged = result["solver"]["solver_unconverged"]
        assert (unconverged["total"], unconverged["episodes"]) == (0, 60), name
        solves = result["training"]["solves"]
        assert solves["episodes"] == solves["adjoint_episodes"] == 20, "the backward pass is reported too"
        assert result["summary"]["novel_alone"]["mean"] > 50
    assert results["proto-rbp.precision=0.01.train.steps=20"]["options"] == {"gradient": "rbp", "precision": 0.01}


@pytest.mark.slow("runs the shared tests of methods in a process of its own")
def test_it_passes_what_every_method_must(site):
    (command,) = [command for command in commands() if command[0] == "pytest"]
    output = child(["-m", *command, "-n", "0", "-q", "-p", "no:cacheprovider"], site, ROOT)
    passed = re.search(r"^(\d+) passed, \d+ deselected", output, re.M)
    assert passed, output
    assert int(passed[1]) >= 6, "the name selects the tests"


def test_the_document_shows_parts_of_the_files():
    parts = [block.split("(")[0].strip() for block in blocks("python") if block in MODULE]
    assert parts == ["def objective", "def forward"]
    (entry_point,) = blocks("toml")
    assert entry_point in (EXAMPLE / "pyproject.toml").read_text()


@pytest.mark.slow("runs programs that meta-train")
def test_the_documents_programs_print_what_it_says(site, tmp_path):
    printed = [text for text in blocks("text") if not text.startswith("method ")]
    assert len(printed) == 2
    (tmp_path / "programs.py").write_text("\n".join(block for block in blocks("python") if block not in MODULE))
    assert child([str(tmp_path / "programs.py")], site, tmp_path) == "".join(printed)


def test_stored_rows_are_the_ones_the_command_prints(call):
    (table,) = [text for text in blocks("text") if text.startswith("method ")]
    printed = [line.split() for line in call("table", "glyphs-5shot")[1].splitlines()]
    stored_rows = [line.split() for line in table.splitlines() if line.endswith("stored")]
    assert len(stored_rows) >= 3
    for row in stored_rows:
        assert row in printed


def episodes() -> tuple[Base, Support, Query]:
    """A cosine classifier as the harness gives it, and episodes with base class 2 hidden in the first."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    base = Base(draw(K, D), torch.zeros(K, dtype=torch.float64), draw(K, D), 6.0)
    x, q = draw(E, N * SHOTS, D), draw(E, Q, D)
    hidden = torch.zeros(E, K, dtype=torch.bool)
    hidden[0, 2] = True
    labels = torch.arange(N).repeat_interleave(SHOTS).expand(E, -1)
    return base, Support(x, labels, hidden, F.linear(x, base.weight)), Query(q, F.linear(q, base.weight))


PARAMETERS = {"log_precision": -4.0, "log_length": 1.5, "margin": 0.7}


def reference(parameters: dict[str, float], base: Base, support: Support, query: Query, episode: int) -> np.ndarray:
    """Joint logits [Q, K + N] from the docstring's formula: all base classes in the softmax, SciPy's BFGS."""

    def unit(x):
        x = np.asarray(x)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    x, q, w = unit(support.features[episode]), unit(query.features[episode]), unit(base.weight)
    mask = ~np.asarray(support.hidden[episode])
    labels = np.asarray(support.labels[episode])
    means = unit(np.stack([np.asarray(support.features[episode])[labels == k].mean(0) for k in range(N)]))
    precision, centres = np.exp(parameters["log_precision"]), np.exp(parameters["log_length"]) * means
    fixed = base.scale * x @ w[mask].T - parameters["margin"]
    at = mask.sum() + labels

    def loss(flat):
        v = flat.reshape(N, D)
        log = special.log_softmax(np.concatenate([fixed, x @ v.T], 1), 1)
        residual = np.exp(log)
        residual[np.arange(len(at)), at] -= 1
        slope = residual[:, -N:].T @ x / len(x) + precision * (v - centres)
        return -log[np.arange(len(at)), at].mean() + precision / 2 * ((v - centres) ** 2).sum(), slope.ravel()

    minimum = optimize.minimize(loss, centres.ravel(), jac=True, method="BFGS", options={"gtol": 1e-7})
    flat = optimize.root(lambda flat: loss(flat)[1], minimum.x, tol=1e-14).x
    # a root in float64: rounding of sums of some hundred terms
    assert np.abs(loss(flat)[1]).max() < 1e-12
    v = flat.reshape(N, D)
    return np.concatenate([base.scale * q @ w.T - parameters["margin"], q @ v.T], 1)


def filled_method(example, base: Base, **options):
    method = example(base, N, **options)
    with torch.no_grad():
        for name, value in PARAMETERS.items():
            getattr(method, name).fill_(value)
    return method


def test_logits_are_those_of_the_minimum(example):
    base, support, query = episodes()
    for gradient in ("implicit", "rbp"):
        prediction = filled_method(example, base, gradient=gradient)(support, query)
        assert not prediction.statistics["solver_unconverged"].any()
        for episode in range(E):
            expected = torch.from_numpy(reference(PARAMETERS, base, support, query, episode))
            # where the solver of the method stops
            torch.testing.assert_close(prediction.logits[episode].detach(), expected, rtol=1e-5, atol=1e-5)


def test_implicit_gradients_are_finite_differences(example):
    """Differences of SciPy's minima, so that neither our solver nor our adjoint is its own witness."""
    base, support, query = episodes()
    weights = torch.randn(E, Q, K + N, generator=torch.Generator().manual_seed(8), dtype=torch.float64)

    def loss(parameters: dict[str, float]) -> float:
        logits = [reference(parameters, base, support, query, episode) for episode in range(E)]
        return float((torch.from_numpy(np.stack(logits)) * weights).sum())

    grads = {}
    for gradient in ("implicit", "rbp"):
        method = filled_method(example, base, gradient=gradient)
        prediction = method(support, query)
        (prediction.logits * weights).sum().backward()
        assert prediction.adjoint.episodes == E
        assert prediction.adjoint.n_failed == prediction.adjoint.n_diverged == 0
        grads[gradient] = {name: float(parameter.grad) for name, parameter in method.named_parameters()}
    for name, value in PARAMETERS.items():
        ends = [loss({**PARAMETERS, name: value + step}) for step in (-1e-3, 1e-3)]
        # central differences over 1e-3 are off by its square, times a third derivative
        assert grads["implicit"][name] == pytest.approx((ends[1] - ends[0]) / 2e-3, rel=1e-4), name
    assert grads["rbp"]["log_length"] != pytest.approx(grads["implicit"]["log_length"], rel=1e-2), "truncated, damped"


def test_a_new_method_runs_in_episodes_and_sessions_and_overwrites_nothing(call, here):
    status, out, err = call("methods", "new", "near-means")
    assert (status, err) == (0, "")
    line, of_sessions = out.splitlines()
    assert of_sessions == "in sessions: ifsl-bench run --method near_means.py --task tiny-features-sessions"
    assert 10 <= len((here / "near_means.py").read_text().splitlines()) <= 30
    for command in line.partition("next: ")[2].split(" && "):
        words = ["clusters.toml:clusters-5shot" if word == "tiny-features-5shot" else word for word in command.split()]
        status, out, err = call(*words[1:])
        assert status == 0, err
    # means of clusters far apart; chance is 1 of 13 classes
    assert float(re.search(r"NearMeans +([\d.]+)", out)[1]) > 40
    status, out, err = call("run", "--method", "near_means.py", "--task", "clusters.toml:clusters-5shot", "--tune", "2")
    assert (status, "NearMeans@tuned-2" in out) == (0, True), err
    sessions = ("--task", "clusters.toml:clusters-5shot", "--sessions", "2", "--ways", "2", "--queries", "9")
    status, out, err = call("run", "--method", "near_means.py", *sessions, "--set", "bias=1")
    assert status == 0, err
    assert "NearMeans.bias=1" in out
    assert "keeps supports" not in out, "its state is the means"
    content = (here / "near_means.py").read_bytes()
    status, _, err = call("methods", "new", "near-means")
    assert (status, (here / "near_means.py").read_bytes()) == (2, content)
    assert "near_means.py is there already" in err


@pytest.mark.parametrize(
    ("name", "why"),
    [("../x", "no name"), ("class", "no name"), ("Prediction", "no name"), ("Upper-Bound", "a method"),
     ("torch", "a Python module")],
)  # fmt: skip
def test_names_that_a_new_method_cannot_have(name, why, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for package in ([], ["--package"]):
        status, _, err = call("methods", "new", name, *package)
        assert status == 2
        assert why in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow("pip installs a package")
def test_a_new_package_is_found_and_passes_its_test(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("methods", "new", "near-means", "--package")[0] == 0
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "-q", "--target", str(tmp_path / "site")]
    command = [sys.executable, "-m", "pip", "install", *offline, "-e", "./near-means"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    output = child(["-m", "pytest", "-q", "-p", "no:cacheprovider", "near-means"], tmp_path / "site", tmp_path)
    assert re.search(r"^2 passed", output, re.M), output
    assert "near-means" in child(["-m", "ifsl_bench", "methods"], tmp_path / "site", tmp_path)
    assert call("methods", "new", "near-means", "--package")[0] == 2, "it is there already"
