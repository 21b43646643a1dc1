"""The grid of recipes and classifiers against plain loops, other functions of the suite, and known effects."""

from __future__ import annotations

import csv
import io
import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text

from ifsl_bench.analysis import task_results
from ifsl_bench.analysis.comparison import estimate_overall_difference
from ifsl_bench.analysis.grid_variance import BOTH, CLASSIFIER, COMMON_GRID_PART, RECIPE, split_grid
from ifsl_bench.analysis.image_variance import ImageEffects, estimate_image_effects, estimate_image_variance
from ifsl_bench.analysis.recipe_grid import RECIPES, _find_maximal_cliques, make_recipe_grid
from ifsl_bench.analysis.session_variance import DESIGN_VARIANCE_SOURCES, split_variance
from ifsl_bench.analysis.task_results import ALL_RECIPES, load_results_by_name
from ifsl_bench.reporting.figures.recipes import draw_recipes
from ifsl_bench.reporting.figures.style import COLUMN, MIN_FONT_SIZE_POINTS
from ifsl_bench.reporting.frames import Frame
from ifsl_bench.reporting.leaderboard import make_task_table
from ifsl_bench.reporting.recipe_tables import make_grid_tables
from ifsl_bench.reporting.table import TABLE_FORMATTERS, render_tables
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from tests.analysis.test_image_variance import rows_of_images

TASK = "glyphs-sessions"
# Stored rows of methods stand for rows of other recipes: (recipe, classifier) -> whose counts it has.
STAND_INS = {
    ("closer", "ncm"): "protonet",
    ("closer", "teen"): "imprint",
    ("closer", "lr"): "lwof",
    ("fact", "ncm"): "subspace",
    ("fact", "teen"): "lda",
}


def relabelled(root: Path, task: str, stand_ins: dict[tuple[str, str], str], seeds: range = range(5)) -> None:
    """Write results of stored rows as those of other recipes."""
    folder = root / task
    folder.mkdir(parents=True, exist_ok=True)
    for (recipe, classifier), label in stand_ins.items():
        for seed in seeds:
            result = json.loads((packaged_results_folder() / task / f"{label}.seed-{seed}.json").read_text())
            result |= {"method": classifier, "label": f"{classifier}.recipe={recipe}", "options": {}, "tuned": {}}
            result |= {"setting": "every", "choice": None, "edge": [], "training": {}, "train": {}}
            result["pretraining"] |= {"recipe": recipe, "steps": 300, "passes": 3.0, "knows_classes": recipe == "fact"}
            (folder / f"{result['label']}.seed-{seed}.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def results(made_once) -> Path:
    return made_once("results-of-recipes", lambda root: relabelled(root, TASK, STAND_INS))


@contextmanager
def without_stored_recipes(folder: Path) -> Iterator[None]:
    """Leave out the stored rows of other recipes, which stand-ins replace; `folder` is an empty one."""
    stored = packaged_results_folder()
    for task in stored.iterdir():
        if task.name != TASK:
            (folder / task.name).symlink_to(task)
    (folder / TASK).mkdir()
    for path in (stored / TASK).glob("*.json"):
        if ".recipe=" not in path.name:
            shutil.copy(path, folder / TASK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_results, "packaged_results_folder", lambda: folder)
        yield


@pytest.fixture(scope="module", autouse=True)
def stored_rows_of_one_recipe(tmp_path_factory):
    with without_stored_recipes(tmp_path_factory.mktemp("stored")):
        yield


@pytest.fixture(scope="module")
def board(results):
    return load_results_by_name(TASK, Paths.locate(results=results)).select_recipes([ALL_RECIPES])


@pytest.fixture(scope="module")
def tables(board):
    return make_grid_tables(board)


def ones(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, sizes)))


def test_parts_are_those_of_plain_loops():
    """The mean of squares of a recipe's effects, without the variance of their errors; the mean over cells of the rest.

    Each random part is that of the textbook's analysis of variance of each cell alone.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 4, 8, 2)) + 9 * rng.normal(size=(3, 2, 1, 1, 1)) + 2 * rng.normal(size=(1, 1, 4, 1, 1))
    x += 2 * rng.normal(size=(3, 2, 1, 8, 1)) + 2 * rng.normal(size=(3, 2, 4, 8, 1)) + rng.normal(size=(3, 2, 1, 8, 2))
    shares = split_grid(x)
    cells = [split_variance(x[r, c]) for r, c in ones((3, 2))]
    for part in DESIGN_VARIANCE_SOURCES:
        assert shares[part].variance.estimated_value == pytest.approx(
            np.mean([cell[part].estimated_value for cell in cells])
        ), part
    mean = np.mean([x[i] for i in ones(x.shape)])
    recipes = [np.mean([x[r, i, j, k, m] for i, j, k, m in ones(x.shape[1:])]) - mean for r in range(3)]
    error = 0.0
    for r in range(3):
        y = np.array([[np.mean(x[r, :, s, o] - x[:, :, s, o].mean(0)) for o in range(8)] for s in range(4)])
        of_seeds, of_orders = y.mean(1), y.mean(0)
        both = [(y[s, o] - of_seeds[s] - of_orders[o] + y.mean()) ** 2 for s, o in ones((4, 8))]
        error += (of_seeds.var(ddof=1) / 4 + of_orders.var(ddof=1) / 8 - sum(both) / (3 * 7) / 32) / 3
    assert shares[RECIPE].variance.estimated_value == pytest.approx(np.mean(np.square(recipes)) - error)
    total = sum(share.variance.estimated_value for share in shares.values())
    for share in shares.values():
        assert share.percent_of_total_variance.estimated_value == pytest.approx(
            100 * share.variance.estimated_value / total
        )
        assert 0 <= share.percent_of_total_variance.lower_limit <= share.percent_of_total_variance.upper_limit <= 100


@pytest.mark.slow("a simulation")
@pytest.mark.parametrize(
    ("shape", "there"),
    [
        ((3, 2, 3, 12, 2), {RECIPE, CLASSIFIER, BOTH, *DESIGN_VARIANCE_SOURCES}),
        ((3, 1, 3, 12, 2), {RECIPE, *DESIGN_VARIANCE_SOURCES}),
        ((3, 2, 1, 12, 1), {RECIPE, CLASSIFIER, BOTH, "order"}),
        ((2, 2, 3, 12, 1), {RECIPE, CLASSIFIER, BOTH, "order", "seed", "seed by order"}),
    ],
)
def test_estimates_are_unbiased_and_intervals_hold_the_truth(shape, there):
    """Over 200 cases: means within four standard errors; nine in ten intervals hold, where 95% would.

    Each random effect is drawn alike for all cells, by recipe and by cell. Of one seed, what it does is a cell's.
    """
    rng = np.random.default_rng(1)
    recipes, classifiers, seeds, orders, supports = shape
    fixed = rng.normal(size=(recipes, classifiers))
    deviations = dict(zip(DESIGN_VARIANCE_SOURCES, (0.8, 0.7, 0.0 if seeds == 1 else 0.6, 0.5, 0.4), strict=True))
    effects = dict(
        zip(
            DESIGN_VARIANCE_SOURCES,
            [(1, orders, 1), (1, orders, supports), (seeds, 1, 1), (seeds, orders, 1), (seeds, orders, supports)],
            strict=True,
        )
    )
    truth = {part: 3 * deviation**2 for part, deviation in deviations.items()}
    if supports == 1:
        truth["order"] += truth.pop("support")
        truth["seed by order"] += truth.pop("rest")
    if seeds == 1:
        truth["order"] += truth.pop("seed by order")
    rows, columns = fixed.mean(1), fixed.mean(0)
    truth |= {
        RECIPE: rows.var(),
        CLASSIFIER: columns.var(),
        BOTH: (fixed - rows[:, None] - columns + fixed.mean()).var(),
    }
    total = sum(truth[part] for part in there)
    values, held = {part: [] for part in there}, dict.fromkeys(there, 0)
    for _ in range(200):
        x = np.broadcast_to(fixed[:, :, None, None, None], shape).copy()
        for part, of_draws in effects.items():
            for of_cells in ((1, 1), (recipes, 1), (recipes, classifiers)):
                x += deviations[part] * rng.normal(size=(*of_cells, *of_draws))
        shares = split_grid(x, draws=400)
        assert set(shares) == there
        for part, share in shares.items():
            values[part].append(share.variance.estimated_value)
            held[part] += (
                share.percent_of_total_variance.lower_limit
                <= 100 * truth[part] / total
                <= share.percent_of_total_variance.upper_limit
            )
    for part in there:
        error = np.std(values[part], ddof=1) / len(values[part]) ** 0.5
        if truth[part] > 0.1 * total:  # an estimate below 0 counts as 0
            assert abs(np.mean(values[part]) - truth[part]) < 4 * error, part
        assert held[part] > 178, (part, held[part])


def test_what_is_alike_in_all_cells_is_told_from_what_differs_by_recipe():
    rng = np.random.default_rng(2)
    order, of_recipe = rng.normal(size=(1, 1, 1, 400, 1)), rng.normal(size=(4, 1, 1, 400, 1))
    shares = split_grid(np.broadcast_to(2 * order + of_recipe, (4, 3, 1, 400, 1)).copy(), draws=100)
    by_part = shares["order"].percent_by_grid_part
    assert by_part[COMMON_GRID_PART] == pytest.approx(100 * (4 + 1 / 4) / 5, abs=5)
    assert by_part[RECIPE] == pytest.approx(100 * (3 / 4) / 5, abs=5)
    assert [by_part[CLASSIFIER], by_part[BOTH]] == pytest.approx([0, 0], abs=1e-9)


def test_a_grid_in_which_nothing_varies_has_no_shares():
    assert {
        share.percent_of_total_variance.estimated_value
        for share in split_grid(np.ones((2, 2, 2, 3, 2)), draws=10).values()
    } == {0}


@pytest.mark.parametrize("models_fixed", [True, False])
@pytest.mark.parametrize("step", [1, 4])
def test_covariances_over_images_are_those_of_pairs(step, models_fixed):
    """Var(a - b) = Var a + Var b - 2 Cov(a, b), where it is not below 0; the coarser groups of images count."""
    rows, seeds = rows_of_images(step), (0, 1, 2)
    effects = estimate_image_effects(rows, "acc", seeds, models_fixed)
    covariance = effects.estimate_covariance()
    apart = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    expected = estimate_image_variance(*rows, "acc", seeds, models_fixed)
    assert max(0.0, apart) == pytest.approx(expected.variance)
    contrast = effects.effects_on_weighted_sums(np.array([[1.0, -1.0]])).estimate_mean_variance()
    assert (contrast.variance, contrast.degrees_of_freedom) == pytest.approx(
        (expected.variance, expected.degrees_of_freedom)
    )


def test_test_images_have_the_mean_of_their_variances_over_cells():
    """The errors that they give the effects of recipes are taken off these."""
    rng = np.random.default_rng(4)
    effects = rng.normal(size=(1, 6, 50))
    x = np.broadcast_to(30 * np.arange(6.0).reshape(3, 2, 1, 1, 1), (3, 2, 1, 9, 1)) + rng.normal(size=(3, 2, 1, 9, 1))
    held, drawn = split_grid(x), split_grid(x, ImageEffects(effects, effects, np.arange(50) // 5, True))
    assert drawn["test images"].variance.estimated_value == pytest.approx(
        np.mean([(effects[0, k] ** 2).sum() for k in range(6)])
    )
    of_recipes = [effects[0, [2 * r, 2 * r + 1]].mean(0) - effects[0].mean(0) for r in range(3)]
    less = held["recipe"].variance.estimated_value - np.mean([(effect**2).sum() for effect in of_recipes])
    assert drawn["recipe"].variance.estimated_value == pytest.approx(less)


def test_cliques_are_those_of_all_subsets():
    rng = np.random.default_rng(3)
    for size in (1, 2, 6, 7):
        alike = rng.random((size, size)) < 0.6
        alike = alike | alike.T | np.eye(size, dtype=bool)
        subsets = [s for n in range(1, size + 1) for s in itertools.combinations(range(size), n)]
        cliques = {s for s in subsets if all(alike[i, j] for i, j in itertools.combinations(s, 2))}
        expected = sorted(s for s in cliques if not any(set(s) < set(other) for other in cliques))
        assert _find_maximal_cliques(alike) == expected
    assert _find_maximal_cliques(np.ones((25, 25), dtype=bool)) == [tuple(range(25))], "without trying all subsets"


def test_cells_are_rows_of_the_table(board, tables):
    """Every number of a cell is that of its row in `table`; a cell that is not there is named."""
    cells = tables[1].records()
    assert {(cell["recipe"], cell["classifier"]) for cell in cells} == {
        *STAND_INS, *(("ce", classifier) for classifier in ("ncm", "teen", "lr"))
    }  # fmt: skip
    rows = {row["method"]: row for row in make_task_table(board, full=True).records()}
    for cell in cells:
        row = rows[cell["method"]]
        for metric in ("acc", "acc_interval", "first", "base", "novel", "novel_as_base", "harmonic", "gacc"):
            assert cell[metric] == row[metric], (cell["method"], metric)
        assert cell["seeds"] == [0, 1, 2, 3, 4]
        assert (cell["passes"], cell["knows_classes"]) == (row["passes"], row["knows_classes"])
        assert cell["passes_at_test"] == 1
    notes = "\n".join(tables[0].notes)
    assert "Not measured: lr | fact." in notes
    assert "Given the number of novel classes to come: fact." in notes
    assert "Measured under one recipe alone, and left out: " in notes
    assert not any("Not measured" in note for note in make_grid_tables(board.select_labels(["ncm", "teen"]))[0].notes)


def test_the_order_of_recipes_is_that_of_paired_comparisons(board):
    """Of each pair that is told apart the difference is significant by itself, too; names are by their means."""
    grid = make_recipe_grid(board)
    assert [(order.ordered_factor, order.fixed_name) for order in grid.cell_orders] == [
        *((RECIPES, name) for name in grid.classifiers), *(("classifiers", name) for name in grid.recipes)
    ]  # fmt: skip
    for order in grid.cell_orders:
        means = [float(row.metric_by_seed("acc").mean()) for row in order.ordered_rows]
        assert means == sorted(means, reverse=True)
        for (i, a), (j, b) in itertools.combinations(enumerate(order.ordered_rows), 2):
            gap = estimate_overall_difference(a, b, order.ordered_rows, "acc")
            together = any(
                order.ordered_names[i] in group and order.ordered_names[j] in group
                for group in order.indistinguishable_groups
            )
            if not together:
                assert gap.p_value < 0.05
                assert (
                    order.rank_intervals[i].best_rank < order.rank_intervals[j].best_rank
                    or order.rank_intervals[i].worst_rank < order.rank_intervals[j].worst_rank
                )
            if abs(gap.mean) < 0.5 * gap.interval:
                assert together


def test_shares_are_of_the_largest_complete_part(board):
    (whole,) = make_recipe_grid(board).variance_splits
    assert (set(whole.recipes), set(whole.classifiers)) == ({"ce", "closer", "fact"}, {"ncm", "teen"})
    assert whole.seeds == (0, 1, 2, 3, 4)
    rows = {cell: make_recipe_grid(board).cells[cell] for cell in itertools.product(whole.recipes, whole.classifiers)}
    x = np.stack([row.metric_by_sequence("acc", range(5)) for row in rows.values()])
    images = estimate_image_effects(list(rows.values()), "acc", range(5), models_fixed=False)
    assert (
        whole.share_by_source["recipe"].percent_of_total_variance
        == split_grid(x.reshape(3, 2, *x.shape[1:]), images)["recipe"].percent_of_total_variance
    )
    assert ("test images" in whole.share_by_source) == (images is not None)


def test_recipes_with_several_seeds_are_split_too(tmp_path):
    """Where all cells share one seed alone, a second split_variance is of those with more."""
    relabelled(tmp_path, TASK, {cell: label for cell, label in STAND_INS.items() if cell[0] == "closer"})
    relabelled(tmp_path, TASK, {cell: label for cell, label in STAND_INS.items() if cell[0] == "fact"}, range(1))
    of_task = (
        load_results_by_name(TASK, Paths.locate(results=tmp_path))
        .select_recipes([ALL_RECIPES])
        .select_labels(["ncm", "teen"])
    )
    whole, several = make_recipe_grid(of_task).variance_splits
    assert (set(whole.recipes), whole.seeds) == ({"ce", "closer", "fact"}, (0,))
    assert "seed" not in whole.share_by_source
    assert (set(several.recipes), several.seeds) == ({"ce", "closer"}, (0, 1, 2, 3, 4))
    assert several.share_by_source["seed"].variance.estimated_value > 0


def test_the_command_and_every_format_have_the_same_numbers(tables, results, call):
    status, out, err = call("grid", TASK, "--results", str(results), "--format", "csv")
    assert status == 0, err
    records = list(csv.DictReader(io.StringIO(out)))
    assert {record["table"] for record in records} == {"cells", "orders", "shares"}
    frame = Frame(tables).to_pandas()
    assert len(frame) == len(records)
    cell = frame[(frame.recipe == "closer") & (frame.classifier == "ncm") & (frame.table == "cells")].iloc[0]
    (of_csv,) = (record for record in records if record["method"] == "ncm.recipe=closer")
    assert float(of_csv["acc"]) == pytest.approx(cell.acc)
    share = frame[(frame.table == "shares") & (frame.source == "recipe")].iloc[0]
    for style in TABLE_FORMATTERS:
        text, sign = render_tables(tables, style), r" $\pm$ " if style == "latex" else " ± "
        assert text.count(f"{cell.acc:.2f}{sign}{cell.acc_interval:.2f}") == 2, "in the grid and among cells"
        assert f"{share.percent:.1f}" in text


def test_the_figure_fits_its_column_and_leaves_missing_cells_out(board):
    figure, notes = draw_recipes(board)
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= MIN_FONT_SIZE_POINTS
    whole = figure.get_tightbbox()
    assert (whole.x0, whole.y0) >= (-0.02, -0.02)
    assert (whole.x1, whole.y1) <= (COLUMN + 0.02, figure.get_figheight() + 0.02)
    marks = {line.get_gid() for line in figure.axes[0].get_lines()}
    assert {f"mean of {c} | {r}" for r, c in (*STAND_INS, ("ce", "lr"))} <= marks
    assert "mean of lr | fact" not in marks
    assert "not measured: lr | fact" in notes


def test_in_episodes_the_units_are_episodes(tmp_path, call):
    stand_ins = {("closer", "imprint"): "protonet", ("closer", "lr"): "lwof"}
    relabelled(tmp_path, "glyphs-5shot", stand_ins, range(3))
    status, out, err = call("grid", "glyphs-5shot", "--results", str(tmp_path), "--format", "json")
    assert status == 0, err
    records = json.loads(out)
    sources = {record["source"] for record in records if record["table"] == "shares"}
    assert {"recipe", "classifier", "episode", "seed", "seed by episode"} <= sources
    cell = next(record for record in records if record["table"] == "cells" and record["recipe"] == "closer")
    assert cell["novel_joint"] == pytest.approx(cell["novel_alone"] + cell["delta_b"], abs=1e-3)


def test_what_is_no_grid_is_one_line(board, results, call):
    with pytest.raises(UserError, match="did you mean 'gacc' or"):
        make_recipe_grid(board, "gac")
    with pytest.raises(UserError, match="features, and recipes train on images"):
        make_recipe_grid(load_results_by_name("tiny-features-sessions", Paths.locate(results=results)))
    status, _, err = call("grid", TASK, "--results", str(results), "--recipe", "ce")
    assert (status, err.count("\n")) == (2, 1)
    assert "no classifier of glyphs-sessions is measured under two recipes (there are: ce); make rows with" in err


def test_one_order_has_a_grid_without_shares(tmp_path, call):
    relabelled(tmp_path, "mini-sessions-published", {("closer", "ncm"): "teen", ("closer", "lr"): "imprint"}, range(1))
    status, out, err = call("grid", "mini-sessions-published", "--results", str(tmp_path))
    assert status == 0, err
    assert "share of variance" not in out
