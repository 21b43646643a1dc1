"""Figures made with trained models show what the models do, as an evaluation finds it."""

from __future__ import annotations

import csv
import inspect
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from scipy import stats

import ifsl_bench
from ifsl_bench.api import run
from ifsl_bench.cli.plot import plot
from ifsl_bench.experiments.workspace import workspace
from ifsl_bench.reporting.columns import format_plus_minus
from ifsl_bench.reporting.figures import attractors, confusions, episode_pca, inner_steps
from ifsl_bench.reporting.figures.models import check_trained, make_figure_jobs, open_trained_model, predict_episode
from ifsl_bench.reporting.figures.style import MIN_FONT_SIZE_POINTS, short_names, with_figure_style
from ifsl_bench.solvers.attractor_prior import attention_weights
from ifsl_bench.utils.errors import UserError

SINGLE = 1e-4  # float32's rounding, 1e-7, of logits of some tens, sums over 64 features
TINY = Path(__file__).parents[2] / "tasks" / "tiny-tiered.csv"
STEPS = 4  # that T-BPTT unrolls here


@pytest.fixture(scope="module")
def trained(clusters_source, tmp_path_factory):
    """A home with models of LR+A by RBP and by T-BPTT and of LR+S, their results, and the task."""
    root = tmp_path_factory.mktemp("trained")
    shutil.copytree(clusters_source, root, dirs_exist_ok=True)
    work, task = workspace(root / "home", root / "results", "cpu"), f"{root / 'clusters.toml'}:clusters-5shot"
    unrolled = {"gradient": "t-bptt", "steps": STEPS}
    results = {
        "rbp": run("lr+a", task, work=work),
        "t-bptt": run("lr+a", task, options=unrolled, work=work),
        "stopped": run("lr+a", task, options=unrolled | {"converge": False}, work=work),
        "static": run("lr+s", task, work=work),
        "imprint": run("imprint", task, work=work),
    }
    return work, task, results


def opened(trained, method: str):
    work, task, _ = trained
    return open_trained_model(make_figure_jobs([method], task, work.home)[0], work)


@pytest.mark.slow("methods are trained")
def test_a_course_goes_through_the_results_of_runs(trained):
    """The same models, trained, evaluated and stored by ``run``: stopped where T-BPTT was, and converged."""
    work, task, results = trained
    step_curves = inner_steps.measure_step_curves(
        ["lr+a"], task, work, steps=(1, STEPS), unrolled=(STEPS,), episodes=60
    )
    assert [course.name for course in step_curves] == ["lr+a, RBP", f"lr+a, T-BPTT ({STEPS} steps)"]
    rbp, unrolled = step_curves

    def of(name):
        return pytest.approx(results[name].summary["acc"]["mean"], abs=1e-6)  # stored with six decimals

    assert unrolled.accuracy_by_step[STEPS].mean == of("stopped")
    assert unrolled.converged_accuracy.mean == of("t-bptt")
    assert rbp.converged_accuracy.mean == of("rbp")
    assert rbp.accuracy_by_step[1].mean != of("rbp")
    figure, _ = inner_steps.draw_inner_steps({"clusters-5shot": step_curves})
    drawn = {c.get_label(): c.lines[0].get_xydata() for c in figure.axes[0].containers}
    for course in step_curves:
        assert drawn[course.name].tolist() == [[n, value.mean] for n, value in sorted(course.accuracy_by_step.items())]


@pytest.mark.slow("a method is trained")
def test_few_steps_are_plain_gradient_steps_of_the_trained_problem(trained):
    """Against gradient descent by hand, with autograd, on the objective as the paper writes it."""
    ready = opened(trained, "lr+a")
    batch = ready.loader("test").load_batch(0, 3)
    method = inner_steps.stop_search_early(ready, 3, trained[0])
    with torch.no_grad():
        answer = method(batch.support, batch.query)
        u = ready.method.centres(batch.support)[0].double()  # [E, N, D+1]
    x = torch.nn.functional.pad(batch.support.features.double(), (0, 1), value=1.0)
    gamma = ready.method.log_gamma[0].detach().double().exp()
    v = method.start_0.double().expand(3, -1, -1).clone().requires_grad_()
    rate = answer.statistics["step_rate"].double()
    assert (rate <= 1).all()
    base = batch.support.base_logits.double()
    for _ in range(3):
        logits = torch.cat([base, x @ v.mT], -1)
        labels = batch.support.labels + base.shape[-1]
        fit = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
        pull = (gamma * (v - u) ** 2).sum((1, 2)) / v.shape[1]
        loss = fit + 0.5 * ready.method.weight_decay * v.square().sum((1, 2)) + pull
        (slope,) = torch.autograd.grad(loss.sum(), v)
        v = (v - rate[:, None, None] * slope).detach().requires_grad_()
    novel = torch.nn.functional.pad(batch.query.features.double(), (0, 1), value=1.0) @ v.mT
    assert answer.logits[..., base.shape[-1] :].double() == pytest.approx(novel.detach().numpy(), abs=SINGLE)


def test_a_model_that_is_not_trained_is_named_with_its_command(trained, call, tmp_path):
    work, task, _ = trained
    jobs = make_figure_jobs(["lr+a"], task, work.home, options={"gamma": "0.5"})
    with pytest.raises(UserError, match=r"run --method lr\+a --task clusters-5shot --set gamma=0.5 .*--train"):
        check_trained(jobs, work.home)
    out, home = tmp_path / "x.svg", ("--home", str(work.home.cache), "-q")
    arguments = ("plot", "episode-pca", task, "--method", "castle", "--out", str(out), *home)
    status, _, err = call(*arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert "--method castle" in err
    assert not out.exists()
    status, output, err = call(*arguments, "--train")
    assert (status, output) == (0, f"wrote {out}\n"), err
    first = out.read_bytes()
    assert call(*arguments)[0] == 0, "what was trained has not stayed in the home"
    assert out.read_bytes() == first


def test_an_episode_in_its_plane_is_answered_by_the_method(trained):
    _, _, results = trained
    for method, name in (("lr+a", "rbp"), ("imprint", "imprint")):
        ready = opened(trained, method)
        plane = episode_pca.project_episode(ready, 7)
        episode, base_count = plane.episode, len(plane.episode.base_class_names)
        counts = results[name].episodes
        right = counts.read_column("base_joint")[7] + counts.read_column("novel_joint")[7]
        assert int(episode.is_right.sum()) == right
        figure, _ = episode_pca.draw_episode_pca([plane])
        assert f"after: {right} of" in figure.axes[1].get_title()
        classes, marks = ([text.get_text() for text in legend.get_texts()] for legend in figure.legends)
        assert [name.split()[0] for name in classes] == [f"N{way + 1}" for way in range(len(episode.novel_class_names))]
        assert marks == ["support", "novel query", "base query", "wrong", "base classes (white: borders)"]
        assert len(plane.grid_x) / 3.1 > 150, "borders between regions are stairs"
        crosses = [line for line in figure.axes[1].lines if line.get_gid() == "wrong"]
        assert len(crosses[0].get_xdata()) == len(episode.is_right) - right
        assert plane.answers_before.max() < base_count
        assert (plane.answers_after >= base_count).any()
        # The plane by an eigendecomposition, and some of its points by hand.
        x = torch.cat([episode.batch.support.features[0], episode.batch.query.features[0]]).double()
        centred = x - x.mean(0)
        values, vectors = torch.linalg.eigh(centred.T @ centred)
        assert plane.variance_shares == pytest.approx((values[-2:].flip(0) / values.sum()).tolist())
        flat = np.concatenate([plane.support_points, plane.query_points])
        expected = (centred @ vectors[:, -2:].flip(1)).numpy()
        for i in range(2):
            assert np.abs(flat[:, i]) == pytest.approx(np.abs(expected[:, i]), abs=SINGLE)
        back = np.linalg.lstsq(flat, (centred @ vectors[:, -2:] @ vectors[:, -2:].T).numpy(), rcond=None)[0]
        some = np.arange(3, episode_pca.GRID_POINTS_PER_SIDE, 17)
        grid = np.stack(np.meshgrid(plane.grid_x[some], plane.grid_y[some]), -1).reshape(-1, 2)
        points = (torch.from_numpy(grid @ back) + x.mean(0)).float()
        base = points @ ready.method.base.weight.T + ready.method.base.bias
        with torch.no_grad():
            logits = ready.method(episode.batch.support, type(episode.batch.query)(points[None], base[None])).logits[0]
        for predicted, expected in ((plane.answers_after, logits), (plane.answers_before, logits[:, :base_count])):
            assert (predicted[np.ix_(some, some)].ravel() == expected.argmax(-1).numpy()).mean() > 0.98  # but for ties


def test_attractors_and_fast_weights_are_those_of_the_episode(trained):
    ready = opened(trained, "lr+a")
    weights, method = attractors.collect_attractor_weights(ready, 2), ready.method
    batch = ready.loader("test").load_batch(2, 1)
    with torch.no_grad():
        share = attention_weights(batch.support.class_means(5), method.base.weight, method.tau)[0]  # [N, K]
        logits = method(batch.support, batch.query).logits[0]
    assert not weights.is_static
    assert share.numpy() @ weights.attention_attractors == pytest.approx(weights.class_attractors[:, 0], abs=SINGLE)
    x = batch.query.features[0].numpy()
    base_count = len(weights.base_weights)
    differences = (x[1:] - x[:1]) @ weights.fast_weights.T  # biases cancel
    # Differences of logits, whose rounding is that of the larger ones.
    assert differences == pytest.approx((logits[1:, base_count:] - logits[:1, base_count:]).numpy(), abs=10 * SINGLE)
    static = attractors.collect_attractor_weights(opened(trained, "lr+s"), 2)
    assert static.is_static
    assert static.attention_attractors is None
    assert weights.class_attractors.shape[1] > 5, "the classes come in other episodes too"
    figure, notes = attractors.draw_attractors([weights, static])
    assert "lr+s is static" in notes[0]
    drawn = {line.get_gid(): line for axes in figure.axes for line in axes.lines}
    assert len(drawn["base weights"].get_xdata()) == len(drawn["attractors of base classes"].get_xdata()) == base_count
    assert "static centre" in drawn
    assert [axes.get_title() for axes in figure.axes] == ["lr+a: base classes", "episode 2"]
    assert [text.get_text() for text in figure.legends[1].get_texts()] == [
        "base weights", "their attractors (joined)", "attractors in this episode", "their fast weights (joined)",
        "attractors in other episodes", "static centre",
    ]  # fmt: skip
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= MIN_FONT_SIZE_POINTS
    with pytest.raises(UserError, match="has no attractors"):
        attractors.collect_attractor_weights(opened(trained, "imprint"), 2)


def test_every_command_has_a_function_with_its_defaults(trained, call, tmp_path):
    """By signature; and one is drawn as the command draws it."""
    for name, command in plot.commands.items():
        function = getattr(ifsl_bench.plot, name.replace("-", "_"))
        parameters = inspect.signature(function).parameters
        names = {
            "results_dir": "results",
            "recipes": "recipe",
            "out": None,
            "quiet": None,
            "verbose": None,
            "device": None,
        }
        expected = {names.get(str(parameter.name), str(parameter.name)) for parameter in command.params} - {None}
        if "work" in parameters:
            expected = expected - {"home"} | {"work"}
        assert set(parameters) == expected, name
    parameters = inspect.signature(ifsl_bench.plot.inner_steps).parameters
    defaults = {str(parameter.name): parameter.default for parameter in plot.commands["inner-steps"].params}
    for name in ("steps", "unrolled"):
        assert ",".join(map(str, parameters[name].default)) == defaults[name]
    work, task, _ = trained
    ifsl_bench.plot.attractors(task, work=work).save(tmp_path / "a.pdf")
    home = ("--home", str(work.home.cache), "-q")
    assert call("plot", "attractors", task, "--out", str(tmp_path / "b.pdf"), *home)[0] == 0
    assert (tmp_path / "a.pdf").read_bytes() == (tmp_path / "b.pdf").read_bytes()
    with pytest.raises(UserError, match="0 to 59"):
        ifsl_bench.plot.episode_pca(task, index=60, work=work)


def test_an_episode_has_a_number_and_mistakes_are_one_line(trained, call, tmp_path):
    work, task, _ = trained
    home = ("--home", str(work.home.cache), "--out", str(tmp_path / "x.png"), "-q")
    for arguments, words in (
        (("episode-pca", task, "--index", "60"), "0 to 59"),
        (("attractors", task, "--index", "-1"), "0 to 59"),
        (("inner-steps", task, "--method", "imprint"), "no option gradient"),
        (("inner-steps", task, "--steps", "0"), "whole numbers from 1"),
        (("inner-steps", task, "--episodes", "61"), "2 to 60"),
        (("inner-steps", task, "--set", "steps=3"), "--unrolled"),
        (("inner-steps", task, "--unrolled", "9"), "is not trained"),
    ):
        status, out, err = call("plot", *arguments, *home)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert words in err
    assert not (tmp_path / "x.png").exists()


@pytest.fixture(scope="module")
def confused(trained):
    """What two methods take for what, in all test episodes."""
    work, task, _ = trained
    return confusions.count_confusions(["imprint", "lr+s"], task, work, episodes=60)


def test_confusions_are_those_of_the_episodes_one_by_one(trained, confused):
    """And so are the intervals; all answers together are the counts that runs have stored."""
    results = trained[2]
    first, second = confused
    ready, shares = opened(trained, "imprint"), {}
    for index in range(60):
        episode = predict_episode(ready, index)
        novel = episode.indices.query_is_novel[0]
        names = [*episode.base_class_names, *episode.novel_class_names]
        for name in episode.novel_class_names:  # the queries of a class in an episode
            answers = [
                names[at]
                for at in episode.predicted_labels[[names[label] == name for label in episode.true_labels]].tolist()
            ]
            shares.setdefault(name, []).append({base: 100 * answers.count(base) / len(answers) for base in names[:8]})
        assert len(episode.true_labels[novel]) == 25
    names, base = (
        short_names(first.class_names[first.n_base_classes :]),
        short_names(first.class_names[: first.n_base_classes]),
    )
    for of, answer in ((0, 0), (3, 5), (6, 7), *zip(*np.nonzero(first.base_shares_of_novel_classes > 1), strict=True)):
        values = [share[base[answer]] for share in shares[names[of]]]
        estimate = first.answer_share(first.n_base_classes + of, answer)
        assert estimate.mean == pytest.approx(np.mean(values)) == first.base_shares_of_novel_classes[of, answer]
        assert estimate.interval == pytest.approx(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))
    for of_method, name in ((first, "imprint"), (second, "static")):
        counts = results[name].to_hit_counts()
        right, base_count = of_method.answer_sums.diagonal(), of_method.n_base_classes
        assert right[:base_count].sum() == counts.base_joint.sum()
        assert right[base_count:].sum() == counts.novel_joint.sum()
        assert of_method.query_sums.sum() == 60 * (counts.base_queries + counts.novel_queries)
        assert of_method.answer_sums.sum() == of_method.query_sums.sum() + (of_method.query_sums - right).sum(), (
            "wrong ones twice"
        )


def test_an_interval_of_a_class_with_more_queries_here_than_there_is_over_units():
    """As of a ratio of means: the same from each unit's residual, h - r q."""
    rng = np.random.default_rng(3)
    unit, truth, prediction = (rng.integers(0, top, 900) for top in (20, 4, 4))
    confusion = confusions.sum_confusions("m", "t", ["a", "b", "c", "d"], 2, unit, truth, prediction)
    for of in range(4):
        q = np.array([((unit == u) & (truth == of)).sum() for u in range(20)])
        for answer in range(6):
            like = prediction == answer if answer < 4 else (prediction != truth) & ((prediction >= 2) == (answer == 5))
            h = np.array([((unit == u) & (truth == of) & like).sum() for u in range(20)])
            share = confusion.answer_share(of, answer)
            residual = (h - h.sum() / q.sum() * q) / q.mean()
            assert share.mean == pytest.approx(100 * h.sum() / q.sum())
            assert share.interval == pytest.approx(100 * stats.t.ppf(0.975, 19) * stats.sem(residual))


SESSIONS = """
[tasks.clusters-sessions]
shots = 2
sessions = { count = 3, ways = 2, orders = 4, supports = 2, queries = 9 }
[variants.clusters-regular-5shot]
of = "clusters-5shot"
regular = true
"""


@pytest.fixture
def in_sessions(here):
    with (here / "clusters.toml").open("a") as file:
        file.write(SESSIONS)
    return workspace(here / "home", device="cpu"), f"{here / 'clusters.toml'}:clusters-sessions"


@pytest.mark.slow("models are trained in sessions")
@pytest.mark.parametrize("method", ["ncm", "subspace", "upper-bound"])
def test_confusions_in_sessions_are_counted_after_the_last_one(method, in_sessions):
    work, task = in_sessions
    options = {"memory": "supports"} if method == "subspace" else {}
    counts = run(method, task, options=options, work=work).to_hit_counts()
    (confusion,) = confusions.count_confusions([method], task, work, options=options)
    base_count, right = confusion.n_base_classes, confusion.answer_sums.diagonal()
    after = counts.hits[:, -counts.sessions - 1 :]  # of the classes of each session
    assert right[:base_count].sum() == after[:, 0].sum()
    assert right[base_count:].sum() == after[:, 1:].sum()
    assert confusion.answer_sums[base_count:, :base_count].sum() == counts.novel_as_base[:, -1].sum()
    assert confusion.answer_sums[:base_count, -1].sum() == counts.base_as_novel[:, -1].sum()
    assert confusion.query_sums.sum() == counts.queries.sum()
    assert confusion.unit_counts.max() == 4, "orders, of 8 sequences"


def test_the_figure_of_confusions_has_the_largest_shares(trained, confused, call, tmp_path):
    work, task, _ = trained
    of_methods = confused
    figure, notes = confusions.draw_confusions(of_methods)
    (axes,) = figure.axes
    mean = (of_methods[0].base_shares_of_novel_classes + of_methods[1].base_shares_of_novel_classes) / 2
    drawn = {container.get_label(): container.lines[0].get_xdata() for container in axes.containers}
    names, base = (short_names(part) for part in (of_methods[0].class_names[8:], of_methods[0].class_names[:8]))
    pairs = [tick.get_text().split(" as ") for tick in axes.get_yticklabels()]
    at = [(names.index(novel), base.index(taker)) for novel, taker in pairs]
    assert [mean[pair] for pair in at] == sorted(mean.ravel(), reverse=True)[: confusions.MAX_CLASS_PAIRS_DRAWN]
    for confusion in of_methods:
        assert drawn[confusion.label] == pytest.approx([confusion.base_shares_of_novel_classes[pair] for pair in at])
    share = of_methods[0].answer_sums[8:, :8].sum() / of_methods[0].query_sums[8:].sum()
    assert notes[0] == "models of seed 0 answer, without a bias on novel logits"
    assert notes[1].startswith(f"imprint: base classes take {100 * share:.1f}% of the queries of novel classes; ")
    assert notes[3].endswith("by imprint, lr+s:")
    for line, (novel, taker) in zip(notes[4:], at, strict=True):
        shares = ", ".join(format_plus_minus(confusion.answer_share(8 + novel, taker)) for confusion in of_methods)
        assert line == f"  {of_methods[0].class_names[8 + novel]} as {of_methods[0].class_names[taker]}: {shares}"
    with with_figure_style():
        figure.draw_without_rendering()
        whole = figure.get_tightbbox()
    assert whole.x0 >= -0.02
    assert whole.x1 <= figure.get_figwidth() + 0.02
    out, home = tmp_path / "x.pdf", ("--home", str(work.home.cache), "-q")
    before = sorted(work.home.cache.rglob("*"))
    status, output, err = call("plot", "confusions", task, "--method", "imprint,lr+s", "--out", str(out), *home)
    assert (status, output.splitlines()) == (0, [f"wrote {out}", *notes]), err
    assert sorted(work.home.cache.rglob("*")) == before, "nothing is stored"


def test_the_accuracy_of_each_class_is_a_frame(trained):
    work, task, _ = trained
    (confusion,) = confusions.count_confusions(["imprint"], task, work, episodes=30)
    frame = ifsl_bench.class_accuracy(task, "imprint", episodes=30, work=work)
    rows = frame.records()
    novel = [row for row in rows if row["novel"]]
    assert len(rows) == np.count_nonzero(confusion.unit_counts)
    assert [row["acc"] for row in novel] == sorted(row["acc"] for row in novel)
    assert rows[: len(novel)] == novel
    for row in rows:
        at = confusion.class_names.index(row["class"])
        assert row["acc"] + row["as_base"] + row["as_novel"] == pytest.approx(100, abs=2e-4), "four digits each"
        counts = {
            name: n
            for name, n in zip(confusion.class_names, confusion.answer_sums[at], strict=False)
            if name != row["class"]
        }
        assert row["taken"] == pytest.approx(100 * max(counts.values()) / confusion.query_sums[at], abs=1e-4)
        if row["taken"]:
            assert counts[row["taken_by"]] == max(counts.values())
    assert "as base" in repr(frame)
    assert len(frame.to_pandas()) == len(rows)


def test_classes_of_wordnet_ids_have_names_for_readers():
    frame = ifsl_bench.class_accuracy("tiny-features-5shot", "imprint", episodes=20)
    assert not re.search(r"\bn\d{8}\b", repr(frame) + frame._repr_html_())
    records = list(frame)
    assert all(re.fullmatch(r"n\d{8}", record["class"]) for record in records), "programs get ids"
    names = {row["wnid"]: row["name"] for row in csv.DictReader(TINY.open())}
    table = repr(frame)
    assert names[records[0]["class"]] in table
    drawing = ifsl_bench.plot.confusions("tiny-features-5shot", methods="imprint", episodes=20)
    words = [label.get_text() for label in drawing.figure.axes[0].get_yticklabels()] + [*drawing.notes]
    assert not [text for text in words if re.search(r"\bn\d{8}\b", text)]


def test_what_has_no_confusions_is_one_line(in_sessions, call):
    task = in_sessions[1]
    for arguments, words in (
        ((task.replace("sessions", "regular-5shot"),), "no base classes"),
        ((task, "--episodes", "9"), "1 to 8"),
        ((task.replace("sessions", "5shot"), "--episodes", "0"), "1 to 60"),
    ):
        status, _, err = call("plot", "confusions", *arguments, "--method", "ncm", "--out", "x.pdf", "-q")
        assert (status, err.count("\n")) == (2, 1), err
        assert words in err
