"""Figures from results: the numbers that are drawn are those of the tables, and files are as a paper needs them."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import msgspec
import numpy as np
import pytest
from matplotlib.text import Text

import ifsl_bench
from ifsl_bench.analysis import session_variance
from ifsl_bench.analysis.aggregate import mean_bias_curve
from ifsl_bench.analysis.comparison import compare_rows
from ifsl_bench.analysis.session_variance import split_variance_of_rows
from ifsl_bench.analysis.task_results import TaskResults, load_task_results
from ifsl_bench.api import run
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.figures import base_classes, pairs, ranks, seeds, sessions, tradeoff
from ifsl_bench.reporting.figures.style import (
    COLUMN,
    MIN_FONT_SIZE_POINTS,
    PAGE,
    render_figure,
    save_figure,
    select_rows_to_draw,
    short_names,
)
from ifsl_bench.reporting.plot_styles import style_of_label
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.store.schema import write_result
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths

ROUNDING = 1e-10  # of percents, which are sums over thousands of episodes
METHODS = ("imprint", "protonet", "castle", "acastle")
KINDS = {
    "tradeoff": tradeoff.draw_tradeoff, "ranks": ranks.draw_ranks, "pairs": pairs.draw_pairs, "seeds": seeds.draw_seeds,
    "validation": seeds.draw_validation,
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(clusters_source, tmp_path_factory):
    """A folder with results of four rows on three seeds, and of two rows with fewer base classes."""
    from ifsl_bench.experiments.workspace import workspace

    root = tmp_path_factory.mktemp("measured")
    shutil.copytree(clusters_source, root, dirs_exist_ok=True)
    work = workspace(root / "home", root / "results", "cpu")
    task = f"{root / 'clusters.toml'}:clusters-5shot"
    for seed in range(3):
        for method in METHODS:
            run(method, task, seed=seed, work=work)
    for method in ("imprint", "protonet"):
        run(method, task, change={"base-classes": 5}, work=work)
    return root


@pytest.fixture
def task(measured):
    return load_tasks(f"{measured / 'clusters.toml'}:clusters-5shot")[0]


@pytest.fixture
def board(measured, task) -> TaskResults:
    return load_task_results(task, measured / "results")


def drawing(kind: str, board: TaskResults, wide: bool = False):
    return KINDS[kind]([board] if kind == "ranks" else board, wide=wide)


def lines(figure) -> dict[str, np.ndarray]:
    """The points of every line that has a name, [n, 2]."""
    return {line.get_gid(): np.asarray(line.get_xydata()) for axes in figure.axes for line in axes.lines
            if line.get_gid()}  # fmt: skip


@pytest.mark.slow("models are trained")
def test_argmax_points_are_those_of_the_table_and_lie_on_their_curves(board):
    figure, notes = tradeoff.draw_tradeoff(board)
    assert not notes
    coordinates = lines(figure)
    axes = figure.axes[0]
    curves = {line.get_label(): np.asarray(line.get_xydata()) for line in axes.lines}
    for row in board.rows:
        values = row.summarise_metrics()
        point = coordinates[f"argmax of {row.label}"][0]
        assert point == pytest.approx((values["base_joint"].mean, values["novel_joint"].mean), abs=ROUNDING)
        assert np.abs(curves[row.label] - point).max(1).min() < ROUNDING, "the curve misses its argmax"
        assert axes.lines[0].get_color() in {style_of_label(candidate.label).colour for candidate in board.rows}


def test_a_curve_holds_the_calibrated_accuracy_and_falls_in_one_and_rises_in_the_other(board):
    for row in board.rows:
        single_seed = type(row)(row.label, row.results_origin, row.results[:1])
        curve = mean_bias_curve(single_seed)
        calibration = row.results[0].calibration
        at = curve[curve[:, 0] == calibration.bias][0]
        # Stored with six decimals.
        assert at[1:].mean() == pytest.approx(row.results[0].summary["calibrated_acc"]["mean"], abs=1e-6)
        assert (np.diff(curve[:, 1]) <= 0).all()
        assert (np.diff(curve[:, 2]) >= 0).all()


def test_lines_of_equal_accuracy_weigh_by_queries(board):
    figure, _ = tradeoff.draw_tradeoff(board)
    counts = board.rows[0].results[0].episodes
    levels = {gid: points for gid, points in lines(figure).items() if gid.startswith("Acc. ")}
    assert levels
    for gid, points in levels.items():
        acc = (points @ [counts.base_queries, counts.novel_queries]) / (counts.base_queries + counts.novel_queries)
        assert acc == pytest.approx([float(gid.removeprefix("Acc. "))] * 2)


def test_rows_without_validation_episodes_have_no_curves(board):
    def without(row):
        nothing = {"calibrated_base": [], "calibrated_novel": []}
        bare = [msgspec.structs.replace(r, calibration=None, episodes=msgspec.structs.replace(r.episodes, **nothing))
                for r in row.results]  # fmt: skip
        return type(row)(row.label, row.results_origin, tuple(bare))

    with pytest.raises(UserError, match="its rows have no base-novel curves, since no validation episodes"):
        tradeoff.draw_tradeoff(of_rows(board, tuple(map(without, board.rows))))


def of_rows(board: TaskResults, rows) -> TaskResults:
    return replace(board, rows=rows, comparable_rows=rows)


def test_bars_are_the_rank_intervals(board):
    figure, _ = ranks.draw_ranks([board])
    coordinates = lines(figure)
    for at, place in enumerate(board.ranking.ranked_rows):
        assert coordinates[f"ranks of {place.row.label}"][:, 0].tolist() == [
            place.rank_interval.best_rank,
            place.rank_interval.worst_rank,
        ]
        assert coordinates[f"place of {place.row.label}"][0].tolist() == [at + 1, at]
    assert [text.get_text().split()[0] for text in figure.axes[0].get_yticklabels()] == [
        place.row.label for place in board.ranking.ranked_rows
    ]
    assert "Acc. (%)" in [text.get_text() for text in figure.axes[0].texts], "numbers have no heading"


def test_the_heat_map_has_the_numbers_of_compare_and_the_significance_of_the_ranks(board):
    figure, _ = pairs.draw_pairs(board, wide=True)
    axes = figure.axes[0]
    names = [text.get_text() for text in axes.get_yticklabels()]
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    hatched = {patch.get_gid() for patch in axes.patches if patch.get_hatch()}
    places = {place.row.label: place for place in board.ranking.ranked_rows}
    values = axes.collections[0].get_array().reshape(len(names), -1)
    assert len(texts) == len(names) * (len(names) - 1)
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            if i == j:
                continue
            overall = compare_rows(board.find_row(a), board.find_row(b), board.comparable_rows).overall_differences[
                "acc"
            ]
            assert values[i, j] == pytest.approx(overall.mean, abs=ROUNDING)
            number = float(texts[j + 0.5, i + 0.5].replace("\N{MINUS SIGN}", "-"))
            assert number == pytest.approx(overall.mean, abs=0.0501)  # printed with one decimal
    for i, a in enumerate(names):
        columns = [j for j in range(len(names)) if j != i and f"not significant {i} {j}" not in hatched]
        better = sum(values[i, j] < 0 for j in columns)
        worse = sum(values[i, j] > 0 for j in columns)
        assert (1 + better, len(names) - worse) == (
            places[a].rank_interval.best_rank,
            places[a].rank_interval.worst_rank,
        )


def test_dots_are_the_seeds_and_bars_the_interval_of_the_table(board):
    figure, _ = seeds.draw_seeds(board)
    coordinates = lines(figure)
    bars = {patch.get_gid(): patch for patch in figure.axes[0].patches}
    for row in board.rows:
        means = [result.summary["acc"]["mean"] for result in row.results]
        assert coordinates[f"seeds of {row.label}"][:, 0] == pytest.approx(means)
        acc, bar = row.summarise_metrics()["acc"], bars[f"interval of {row.label}"]
        assert (bar.get_x(), bar.get_width()) == pytest.approx((acc.mean - acc.interval, 2 * acc.interval))


def test_validation_draws_what_training_recorded(board):
    figure, _ = seeds.draw_validation(board)
    coordinates = lines(figure)
    trained = [row for row in board.rows if row.results[0].training]
    assert {row.label for row in trained} == {"castle", "acastle"}
    for row in trained:
        history = [result.training["validation"] for result in row.results]
        for i, seed in enumerate(row.seeds):
            drawn = {str(int(x)): y for x, y in coordinates[f"seed {seed} of {row.label}"]}
            assert drawn == pytest.approx(history[i])
        mean = {str(int(x)): y for x, y in coordinates[f"mean of {row.label}"]}
        assert mean == pytest.approx({step: np.mean([values[step] for values in history]) for step in history[0]})
    with pytest.raises(UserError, match="no row of these is meta-trained"):
        seeds.draw_validation(board.select_labels(["imprint"]))


def test_base_classes_draws_all_numbers_of_them_the_full_one_too(measured, task):
    home = Paths.locate(measured / "home", measured / "results")
    boards = base_classes.load_results_by_base_class_count(task, home)
    assert list(boards) == [5, 8]
    figure, notes = base_classes.draw_base_classes(boards)
    assert notes == ["training seeds differ by the number of base classes (1 at 5, 3 at 8): protonet, imprint"]
    assert "only one number" in base_classes.draw_base_classes(boards, ["imprint", "acastle"])[1][0]
    drawn = {c.get_label(): c.lines[0].get_xydata() for c in figure.axes[0].containers}
    assert set(drawn) == {"imprint", "protonet"}
    for label, points in drawn.items():
        for count, acc in points:
            assert acc == pytest.approx(boards[int(count)].find_row(label).summarise_metrics()["acc"].mean)
    with pytest.raises(UserError, match="--base-classes 20"):
        base_classes.load_results_by_base_class_count(
            load_tasks("glyphs-shared-1shot")[0], Paths.locate(measured / "home", measured / "home")
        )


def test_pairs_leaves_out_rows_of_few_seeds_unless_they_are_named(board):
    row = replace(board.find_row("imprint"), label="one", results=board.find_row("imprint").results[:1])
    more = of_rows(board, (*board.rows, row))
    figure, notes = pairs.draw_pairs(more)
    shown_names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert "one" not in shown_names
    assert len(shown_names) == len(board.rows)
    assert "left out, having fewer than 3 seeds (--method names them): one (yours)" in notes
    figure, notes = pairs.draw_pairs(more, named=True)
    assert "one" in [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert "says little about the method: one" in notes[0]


def test_hollow_points_are_the_calibrated_accuracies_and_dashed_lines_an_equal_harmonic_mean(board):
    figure, _ = tradeoff.draw_tradeoff(board)
    coordinates = lines(figure)
    for row in board.rows:
        base, novel = coordinates[f"calibrated of {row.label}"][0]
        assert (base + novel) / 2 == pytest.approx(row.summarise_metrics()["calibrated_acc"].mean), "as many of each"
    equal = {gid: points for gid, points in coordinates.items() if gid.startswith("harmonic ")}
    assert equal
    for gid, points in equal.items():
        x, y = points.T
        assert 2 * x * y / (x + y) == pytest.approx(np.full(len(x), float(gid.removeprefix("harmonic "))))


@pytest.mark.parametrize(("kind", "wide"), [*((kind, False) for kind in KINDS), ("pairs", True)])
def test_no_text_is_too_small_or_cut_off_and_widths_are_those_of_columns(kind, wide, board):
    figure, _ = drawing(kind, board, wide)
    assert figure.get_figwidth() == (PAGE if wide else COLUMN)
    svg = render_figure(figure, "svg").decode()
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= MIN_FONT_SIZE_POINTS
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: *(?:[a-z]+ )*([\d.]+)px", svg)]
    assert len(sizes) > 5, "text is no text"
    assert min(sizes) >= MIN_FONT_SIZE_POINTS
    assert f'width="{72 * (PAGE if wide else COLUMN):g}pt"' in svg
    pdf = render_figure(figure, "pdf")
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf
    whole = figure.get_tightbbox()
    assert whole.x0 >= -0.02
    assert whole.y0 >= -0.02
    assert whole.x1 <= figure.get_figwidth() + 0.02
    assert whole.y1 <= figure.get_figheight() + 0.02


@pytest.mark.parametrize("suffix", ["pdf", "svg", "png"])
def test_same_input_same_bytes_whatever_the_users_settings(suffix, board, tmp_path, monkeypatch):
    for name in ("a", "b"):
        save_figure(drawing("tradeoff", board)[0], tmp_path / f"{name}.{suffix}")
        monkeypatch.setitem(mpl.rcParams, "figure.facecolor", "red")
        monkeypatch.setitem(mpl.rcParams, "xtick.direction", "in")
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    assert mpl.rcParams["figure.facecolor"] == "red", "the user's settings are gone"


def test_names_of_strangers_are_text(board, tmp_path, task):
    row = board.find_row("imprint")
    name = "_$x^2$<b>&\\frac"
    for result in row.results:
        write_result(tmp_path, msgspec.structs.replace(result, label=name))
    own_board = load_task_results(task, tmp_path)
    for kind in ("tradeoff", "seeds"):
        svg = render_figure(drawing(kind, own_board)[0], "svg").decode()
        assert "_$x^2$&lt;b&gt;&amp;\\frac" in svg
        assert "<b>" not in svg


def test_names_are_short_and_different():
    names = ["GREEK LETTER XI (U+039E)", "GREEK LETTER MU (U+03BC)", "LAO LETTER SO TAM (U+1)",
             "LAO LETTER KHO TAM (U+2)", "n01", "LAO LETTER SO SUNG (U+3)"]  # fmt: skip
    assert short_names(names) == ["XI", "MU", "TAM", "KHO TAM", "n01", "SUNG"]
    animals = ["sea slug", "sea cucumber", "black widow", "black stork", "dam"]
    assert short_names(animals) == animals
    assert short_names(["class 1", "class 2"]) == ["1", "2"]
    assert short_names(["a (1)", "a (2)"]) == ["a (1)", "a (2)"]
    assert short_names(["same", "same"]) == ["same", "same"]


def error_of(call, *arguments: str) -> str:
    """The one line of an error."""
    status, out, err = call("plot", *arguments)
    assert status == 2, err
    assert not out
    assert err.count("\n") == 1, err
    return err


def test_mistakes_are_told_in_a_line(call, measured, tmp_path):
    x = str(tmp_path / "x.pdf")
    options = ("--results", str(measured / "results"), "--home", str(measured / "home"))
    task = f"{measured / 'clusters.toml'}:clusters-5shot"
    assert "did you mean 'tradeoff'" in error_of(call, "tradeof", task, "--out", x)
    assert "'.jpg'" in error_of(call, "seeds", task, "--out", str(tmp_path / "x.jpg"))
    (tmp_path / "file").write_text("")
    assert "is a file, not a folder" in error_of(call, "seeds", task, "--out", str(tmp_path / "file" / "x.pdf"))
    assert "--out" in error_of(call, "seeds", task)
    assert "no comparable result is stored" in error_of(call, "pairs", "mini-5shot", "--out", x, *options)
    assert "unknown row 'castel'" in error_of(call, "pairs", task, "--method", "castel", "--out", x, *options)
    assert "unknown setting" in error_of(call, "pairs", task, "--setting", "tuned-3", "--out", x, *options)
    few = ("--method", "castle", "--setting", "tuned-12")
    assert "unknown setting 'tuned-12'" in error_of(call, "seeds", task, *few, "--out", x, *options)
    assert "at least two rows" in error_of(call, "pairs", task, "--method", "imprint", "--out", x, *options)
    assert "several tasks" in error_of(call, "pairs", str(measured / "clusters.toml"), "--out", x, *options)
    assert not Path(x).exists()
    status, out, err = call("plot", "ranks", task, "--out", x, *options)
    assert (status, out, err) == (0, f"wrote {x}\n", "")
    assert Path(x).read_bytes().startswith(b"%PDF")


@pytest.mark.slow("figures are drawn twice")
@pytest.mark.parametrize("kind", ["pairs", "ranks", "base-classes"])
def test_notebooks_draw_what_the_command_draws(kind, call, measured, tmp_path):
    task = f"{measured / 'clusters.toml'}:clusters-5shot"
    folders = {"home": measured / "home", "results": measured / "results"}
    chosen = ["imprint (yours)", "protonet (yours)"] if kind == "base-classes" else ["castle", "imprint"]
    drawing = getattr(ifsl_bench.plot, kind.replace("-", "_"))(task, methods=chosen, wide=True, **folders)
    options = [word for name, path in folders.items() for word in (f"--{name}", str(path))]
    options += ["--method", ",".join(chosen)] if chosen else []
    assert call("plot", kind, task, "--wide", "--out", str(tmp_path / "command.svg"), *options)[0] == 0
    drawing.save(tmp_path / "notebook.svg")
    assert (tmp_path / "command.svg").read_bytes() == (tmp_path / "notebook.svg").read_bytes()
    content, size = drawing._repr_png_()
    assert content.startswith(b"\x89PNG")
    assert size["width"] == 979
    assert repr(drawing).splitlines()[0].startswith("a figure of 6.8 x ")
    assert repr(drawing).splitlines()[1:] == list(drawing.notes)
    drawing.save(tmp_path / "no" / "x.pdf")
    assert (tmp_path / "no" / "x.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(UserError, match="is a file, not a folder"):
        drawing.save(tmp_path / "notebook.svg" / "x.pdf")


@pytest.mark.slow("figures are drawn in processes of their own")
def test_no_display_and_no_pyplot_is_needed(measured, tmp_path):
    arguments = ["ifsl-bench", "plot", "seeds", f"{measured / 'clusters.toml'}:clusters-5shot", "--out",
                 str(tmp_path / "x.svg"), "--results", str(measured / "results")]  # fmt: skip
    code = "\n".join(
        [
            "import sys, ifsl_bench.cli.main",
            f"sys.argv = {arguments!r}",
            "try: ifsl_bench.cli.main.main()",
            "except SystemExit as end: assert not end.code, end.code",
            "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules",
        ]
    )
    nothing = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=nothing)


@pytest.fixture(scope="module")
def letters() -> TaskResults:
    """The stored rows of letters in sessions."""
    return select_rows_to_draw(load_task_results(load_tasks("glyphs-sessions")[0], Path("none")), ("ncm", "lr"))


def test_curves_of_sessions_are_those_of_the_table(letters, call):
    figure, _ = sessions.draw_sessions(letters)
    records = json.loads(call("table", "glyphs-sessions", "--method", "ncm,lr", "--format", "json")[1])
    table = {record["method"]: [record[f"a_{t}"] for t in range(11)] for record in records}
    drawn_lines = lines(figure)
    for name in ("ncm", "lr"):
        assert drawn_lines[f"mean of {name}"][:, 1] == pytest.approx(table[name], abs=1e-4)
        (row,) = (row for row in letters.rows if row.label == name)
        band = next(b for b in figure.axes[0].collections if b.get_gid() == f"orders of {name}").get_paths()[0].vertices
        last = np.mean(
            [r.to_hit_counts().metric_after_sessions("acc")[:, -1].reshape(100, 4).mean(1) for r in row.results], axis=0
        )
        assert band[band[:, 0] == 10, 1].max() == pytest.approx(np.percentile(last, 97.5))
    dotted = [line.get_ydata() for line in figure.axes[0].lines if line.get_gid() == "lazy"]
    assert sorted(line[0] for line in dotted) == pytest.approx(sorted(t[0] for n, t in table.items() if " " not in n))


def test_triangles_are_counts_over_queries(letters):
    figure, _ = sessions.draw_forgetting(letters)
    for axes, row in zip(figure.axes, [place.row for place in letters.ranked_rows], strict=False):
        assert axes.get_title() == row.label
        mesh = axes.collections[0].get_array()
        hits = np.mean([result.to_hit_counts().hits.mean(0) for result in row.results], axis=0)
        queries = row.results[0].to_hit_counts().queries[0]
        for t, g, at in ((0, 0, 0), (1, 1, 2), (10, 0, 55), (10, 10, 65)):
            assert mesh[t, g] == pytest.approx(100 * hits[at] / queries[g])
        assert mesh.mask[0, 1]


def test_bars_of_variance_are_shares_of_the_command(letters, call):
    figure, notes = sessions.draw_variance(letters)
    assert "wrong sign" in notes[0]
    out = call("variance", "glyphs-sessions", "--method", "ncm,lr", "--format", "json")[1]
    for at, record in zip((0, 1, 3), json.loads(out), strict=True):
        names = ("order", "support", "seed", "seed by order", "rest", "test images")
        parts = {name: record[f"sd_{name.replace(' ', '_')}"] ** 2 for name in names}
        bars = {bar.get_gid(): bar.get_width() for bar in figure.axes[0].patches}
        for name, part in parts.items():
            assert bars[f"{name} {at}"] == pytest.approx(100 * part / sum(parts.values()), abs=0.1)
        (text,) = (text.get_text() for text in figure.axes[0].texts if text.get_gid() == f"said {at}")
        assert text.startswith(f"sd {record['sd_single']:.2f}")


def test_bars_of_variance_are_of_one_kind_of_variance(letters, monkeypatch):
    """Where only some rows have the variance over test images, all bars are without it."""
    counted = split_variance_of_rows(letters, "acc")[0]
    monkeypatch.setattr(session_variance, "estimate_image_variance", lambda *_: None)
    without, _ = sessions.draw_variance(letters)
    others = split_variance_of_rows(letters, "acc")[1:]
    monkeypatch.setattr(sessions, "split_variance_of_rows", lambda *_: [counted, *others])
    figure, notes = sessions.draw_variance(letters)
    assert any("test images are held fixed" in note for note in notes)
    for of in ("patches", "texts"):
        old, new = ([str(artist) for artist in getattr(drawn.axes[0], of)] for drawn in (without, figure))
        assert old == new


@pytest.fixture(scope="module")
def with_own_rows(tmp_path_factory) -> Path:
    """Results of a user's own whose labels stored rows have, the best stored row among them."""
    folder = tmp_path_factory.mktemp("own") / "glyphs-sessions"
    folder.mkdir()
    for path in (packaged_results_folder() / "glyphs-sessions").glob("*.seed-*.json"):
        if path.name.split(".seed-")[0] in ("upper-bound", "lwof"):
            shutil.copy(path, folder)
    return folder.parent


def drawn_of(kind: str, figure) -> list[str]:
    """The names of the rows in a figure of sessions."""
    if kind == "sessions":
        return [name.removeprefix("mean of ") for name in lines(figure) if name.startswith("mean of ")]
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


@pytest.mark.slow("figures are drawn")
@pytest.mark.parametrize("kind", ["sessions", "forgetting"])
def test_a_figure_of_many_rows_draws_those_that_can_be_told_apart(kind, with_own_rows):
    drawing = getattr(ifsl_bench.plot, kind)("glyphs-sessions", results=with_own_rows)
    drawn = drawn_of(kind, drawing.figure)
    assert len(drawn) == len(set(drawn)) == 9
    assert {"upper-bound", "lwof"} <= {*drawn}, "the user's own, the last of all rows too, and no row twice"
    (note,) = (note for note in drawing.notes if note.startswith("left out"))
    assert all(f"{label} (stored)" in note for label in ("upper-bound", "lwof"))
    assert "ranpac" in note
    named = getattr(ifsl_bench.plot, kind)("glyphs-sessions", results=with_own_rows, methods="lwof")
    assert len(drawn_of(kind, named.figure)) == 2, "rows that are named are drawn"
    assert not any(note.startswith("left out") for note in named.notes)


def test_validation_counts_rows_that_were_trained_alone(tmp_path):
    drawing = ifsl_bench.plot.validation("glyphs-5shot", results=tmp_path)
    stored = load_task_results(load_tasks("glyphs-5shot")[0], tmp_path).rows
    trained = {row.label for row in stored if row.results[0].training and not row.has_changed_options}
    assert {"castle", "anil"} <= trained, "which are not among the nine best of all rows"
    assert {name.removeprefix("mean of ") for name in lines(drawing.figure) if name.startswith("mean of ")} == trained
    assert drawing.notes == ()


def test_few_lazy_models_are_drawn_and_no_panel_stands_alone():
    rows = ("upper-bound", "ncm", "castle", "imprint", "anil", "cec", "lwof")  # each with an A_0 of its own
    board = select_rows_to_draw(load_task_results(load_tasks("glyphs-sessions")[0], Path("none")), rows)
    figure, (note,) = sessions.draw_sessions(board)
    (lazy,) = (line for line in figure.axes[0].lines if line.get_gid() == "lazy")
    assert lazy.get_ydata()[0] == pytest.approx(max(row.metric_after_sessions()[0].mean for row in board.rows))
    assert note.startswith("lazy: the model with the highest A_0")
    figure, _ = sessions.draw_forgetting(board, wide=True)
    tops = [axes.get_subplotspec().rowspan.start for axes in figure.axes if axes.get_title()]
    assert (len(tops), tops.count(max(tops))) == (7, 3)


def test_the_figure_of_variance_compares_neighbours(letters):
    board = select_rows_to_draw(
        load_task_results(load_tasks("glyphs-sessions")[0], Path("none")), ("teen", "lda", "protonet", "upper-bound")
    )
    figure, _ = sessions.draw_variance(board)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    best_first = [place.row.label for place in board.ranked_rows]
    assert names == [*best_first, *(f"{a} \N{MINUS SIGN} {b}" for a, b in itertools.pairwise(best_first))]
    chances = [text.get_text() for text in figure.axes[0].texts if "wrong" in text.get_text()]
    assert any(int(text.split("wrong ")[1].rstrip("%")) > 10 for text in chances), "an order may be a matter of chance"


@pytest.mark.parametrize("kind", ["sessions", "forgetting", "variance"])
def test_figures_of_sessions_refuse_episodes_and_are_written(kind, call, tmp_path):
    status, _, err = call("plot", kind, "glyphs-5shot", "--out", str(tmp_path / "x.pdf"))
    assert (status, err.count("\n")) == (2, 1)
    assert "is in episodes" in err
    out = tmp_path / "x.svg"
    assert call("plot", kind, "tiny-features-sessions", "--method", "ncm,teen", "--wide", "--out", str(out))[0] == 0
    assert "<svg" in out.read_text()


def test_published_rows_are_dashed(tmp_path):
    task = load_tasks("tiny-features-sessions")[0]
    shape = msgspec.structs.replace(task.sessions, count=8)
    listed = load_task_results(msgspec.structs.replace(task, name="mini-sessions", sessions=shape), tmp_path)
    figure, _ = sessions.draw_sessions(select_rows_to_draw(listed, ["CEC"], papers=True), named=True)
    (line,), (legend,) = figure.axes[0].lines, figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["CEC, published"]
    assert list(line.get_ydata()) == [72.0, 66.83, 62.97, 59.43, 56.7, 53.73, 51.19, 49.24, 47.63]
    assert line.get_linestyle() == "--"
    assert len(sessions.draw_sessions(select_rows_to_draw(listed, papers=True))[0].axes[0].lines) == 50


def test_the_command_that_makes_rows_with_fewer_base_classes_can_be_run(call, here):
    def refusal(task: str) -> str:
        return call("plot", "base-classes", task, "--out", "x.pdf")[2]

    command = refusal("clusters.toml:clusters-5shot").partition("make some with ifsl-bench ")[2].split()
    task = command.index("--task") + 1
    assert command[-2] == "--base-classes"
    assert call(*command[:task], f"clusters.toml:{command[task]}", *command[task + 1 :], "--dry-run")[0] == 0
    assert refusal("tiny-features-5shot").endswith("are stored; its features allow of none\n")
