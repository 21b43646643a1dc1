"""Rows on backbones of several recipes: how they are named, shown, ranked and compared."""

from __future__ import annotations

import csv
import json
import shutil
from io import StringIO
from pathlib import Path

import pytest

import ifsl_bench
from ifsl_bench.analysis.task_results import load_task_results
from ifsl_bench.backbones.find_recipe import find_recipe
from ifsl_bench.backbones.recipe_rules import passes_at_test
from ifsl_bench.backbones.weights import read_metadata_and_tensors, write_weights
from ifsl_bench.plugin.bibliography import display_label_in_paper
from ifsl_bench.plugin.display_names import display_name_of_label
from ifsl_bench.protocols.tasks.task_files import load_tasks

TASK = "hues.toml"
MADE = {f"{method}{recipe}" for method in ("ncm", "imprint")
        for recipe in ("", ".recipe=closer.recipe.beta=1", ".recipe=etf")}  # fmt: skip
PLAIN = ["ncm", "imprint"]


@pytest.fixture
def rows(hues, made_once, call):
    """Make rows of two methods on backbones of three recipes, with three seeds."""

    def fill(root: Path) -> None:
        how = ("--recipe", "ce,closer.beta=1,etf", "--seeds", "3", "-q")
        assert call("run", "--method", "ncm,imprint", "--task", TASK, *how)[0] == 0
        shutil.copytree(hues / "home" / "results", root / "results")

    made = made_once("rows-of-recipes", fill)
    shutil.copytree(made / "results", hues / "home" / "results", dirs_exist_ok=True)
    return hues


def labels(call, *arguments: str) -> list[str]:
    status, out, err = call(*arguments, "--format", "json")
    assert status == 0, err
    return [record["method"] for record in json.loads(out)]


@pytest.mark.parametrize(
    ("label", "shown", "in_print"),
    [
        ("ncm", "ncm", "NCM"),
        ("ncm.recipe=closer", "ncm | closer", "NCM | closer"),
        ("ncm.recipe=closer.recipe.beta=1", "ncm | closer, beta 1", "NCM | closer, beta 1"),
        (
            "lr+a+cal.gamma=1e-05.train.steps=40.recipe=alice.recipe.mix_times=2",
            "lr+a+cal.gamma=1e-05.train.steps=40 | alice, mix times 2",
            "LR+A, calibrated (gamma = 1e-05, training steps = 40) | alice, mix times 2",
        ),
    ],
)
def test_a_name_has_its_recipe_behind_a_bar(label, shown, in_print):
    assert display_name_of_label(label) == shown
    assert display_label_in_paper(label) == in_print


@pytest.mark.slow("rows of recipes are made")
def test_every_format_names_the_recipe(rows, call):
    command = ("table", TASK, "--recipe", "all")
    text, markdown, latex = (call(*command, "--format", form)[1] for form in ("text", "markdown", "latex"))
    assert "\nncm | closer, beta 1  " in text
    assert "Behind a bar is the recipe that trained the backbone; of the other rows, ce." in text
    assert "| ncm \\| closer, beta 1 " in markdown
    assert "\nNCM \\textbar{} closer, beta 1 & " in latex
    records = json.loads(call(*command, "--format", "json")[1])
    assert {record["method"] for record in records} == MADE
    assert next(csv.reader(StringIO(call(*command, "--format", "csv")[1]))) == list(records[0])
    by_label = {record["method"]: record for record in records}
    facts = ("recipe", "pretraining_steps", "passes", "knows_classes")
    assert [by_label["ncm"][name] for name in facts] == ["ce", 2, 1.0, False]
    assert [by_label["ncm.recipe=closer.recipe.beta=1"][name] for name in facts] == ["closer.beta=1", 1, 3.0, False]
    assert [by_label["ncm.recipe=etf"][name] for name in facts] == ["etf", 2, 1.0, True]


@pytest.mark.slow("recipes are trained")
@pytest.mark.parametrize("command", ["table", "leaderboard"])
def test_a_table_shows_the_tasks_own_recipe_unless_asked(rows, call, command):
    def shown(*arguments: str) -> set[str]:
        return set(labels(call, command, TASK, *arguments))

    assert shown() == set(PLAIN)
    assert shown("--recipe", "ce") == set(PLAIN)
    assert shown("--recipe", "ETF") == {"ncm.recipe=etf", "imprint.recipe=etf"}
    assert shown("--recipe", "ce,closer.beta=1") == {label for label in MADE if "etf" not in label}
    assert shown("--recipe", "all") == MADE
    assert shown("--recipe", "all", "--method", "ncm") == {label for label in MADE if label.startswith("ncm")}
    assert shown("--method", "ncm") == {"ncm"}
    assert shown("--method", "imprint,ncm.recipe=etf") == {"imprint", "ncm.recipe=etf"}
    assert shown("--method", "ncm | etf") == {"ncm.recipe=etf"}
    status, _, err = call(command, TASK, "--recipe", "closer")
    assert (status, len(err.splitlines())) == (2, 1)
    assert "unknown recipe 'closer' in the rows of hues-1shot; did you mean 'closer.beta=1'" in err


def test_a_note_says_that_there_are_rows_of_other_recipes(rows, call):
    note = "`ifsl-bench table hues-1shot --recipe all` has {} on backbones of other recipes ({})."
    assert note.format("4 more rows", "closer.beta=1, etf") in call("table", TASK)[1]
    assert note.format("4 more rows", "closer.beta=1, etf") in call("leaderboard", TASK)[1]
    assert note.format("2 more rows", "closer.beta=1, etf") in call("table", TASK, "--method", "ncm")[1]
    assert note.format("2 more rows", "ce") in call("table", TASK, "--recipe", "etf,closer.beta=1")[1]
    assert "other recipes" not in call("table", TASK, "--recipe", "all")[1]


def test_ranks_are_among_the_recipes_that_are_asked_for(rows):
    board = load_task_results(load_tasks(TASK)[0], rows / "home" / "results")
    assert {row.label for row in board.ranking.family} == set(PLAIN)
    assert [place.n_ranked_together for place in board.ranked_rows] == [2, 2]
    both = board.select_recipes(["ce", "etf"])
    assert {row.label for row in both.ranking.family} == {"ncm", "imprint", "ncm.recipe=etf", "imprint.recipe=etf"}
    assert both.select_recipes(()).comparable_rows == board.comparable_rows
    named = board.select_labels(["ncm", "ncm.recipe=etf"])
    assert {row.label for row in named.comparable_rows} == {"ncm", "imprint", "ncm.recipe=etf"}


def test_a_run_prints_the_rows_of_the_recipes_that_it_made(rows, call):
    status, out, err = call("run", "--method", "ncm", "--task", TASK, "--recipe", "ce,etf", "-q")
    assert status == 0, err
    assert "\nncm | etf  " in out
    assert "\nncm  " in out
    assert "closer, beta 1" not in out
    assert "\nncm | etf: " in out  # where it stands
    out = call("run", "--method", "ncm", "--task", TASK, "--recipe", "etf", "-q")[1]
    assert "\nncm  " not in out
    assert "\nncm | etf  " in out


def test_what_a_recipe_knows_and_costs_is_shown(rows, call):
    out = call("table", TASK, "--recipe", "all", "--full")[1]
    line = next(line for line in out.splitlines() if line.startswith("ncm | etf"))
    assert "2 x 1" in line
    assert "knows the number of classes" in line
    assert "1 x 3" in next(line for line in out.splitlines() if line.startswith("ncm | closer"))
    assert "2 x 1" in next(line for line in out.splitlines() if line.startswith("ncm  "))
    assert "given the number of novel classes to come: " in out
    latex = call("table", TASK, "--recipe", "all", "--full", "--format", "latex")[1]
    assert r"steps $\times$ passes" in latex
    assert r"NCM \textbar{} etf, knows the number of classes &" in latex
    assert "steps x passes" not in call("table", TASK, "--full")[1]


def test_rows_of_two_recipes_are_compared_on_the_same_episodes(rows, call):
    pair = ("compare", "imprint.recipe=etf", "imprint", "--task", TASK)
    records = json.loads(call(*pair, "--format", "json")[1])
    board = load_task_results(load_tasks(TASK)[0], rows / "home" / "results")
    a, b = board.find_row("imprint.recipe=etf"), board.find_row("imprint")
    difference = (a.metric_by_seed("base_alone") - b.metric_by_seed("base_alone")).mean()
    assert abs(difference) > 1  # in percent
    record = next(record for record in records if record["metric"] == "base_alone")
    assert record["difference"] == pytest.approx(difference, abs=1e-6)  # digits that are printed
    assert (record["a"], record["b"]) == ("imprint.recipe=etf (yours)", "imprint (yours)")
    assert record["seeds"] == [0, 1, 2]
    out = call(*pair)[1]
    assert "A = imprint | etf (yours), B = imprint (yours), task hues-1shot" in out
    assert "imprint | etf (yours) on one trained by etf, imprint (yours) on one trained by ce" in out
    out = call("compare", "imprint", "ncm", "--task", TASK, "--recipe", "etf")[1]
    assert "A = imprint | etf (yours), B = ncm | etf (yours)" in out
    status, _, err = call("compare", "imprint", "ncm", "--task", TASK, "--recipe", "all")
    assert (status, len(err.splitlines())) == (2, 1)


def test_show_has_a_row_of_any_recipe(rows, call):
    status, out, err = call("show", "ncm.recipe=etf", TASK)
    assert status == 0, err
    assert "ncm | etf on hues-1shot (yours), 3 seeds" in out
    assert "etf, given the number of novel classes to come: 2 steps of 1 passes of the backbone for each image" in out
    assert call("show", "ncm | closer, beta 1", TASK)[1].startswith("ncm | closer, beta 1 on hues-1shot (yours)")
    assert "unknown row 'ncm.recipe=eft'" in call("show", "ncm.recipe=eft", TASK)[2]


def test_rows_of_other_recipes_alone_are_found(rows, call):
    for method in PLAIN:
        for file in (rows / "home" / "results").rglob(f"{method}.seed-*.json"):
            file.unlink()
    status, _, err = call("table", TASK)
    assert status == 2
    assert "has rows of other recipes alone (closer.beta=1, etf): add --recipe all" in err
    assert len(labels(call, "table", TASK, "--recipe", "all")) == 4


def test_variance_is_of_the_recipes_that_are_asked_for(rows, call, tmp_path):
    task = Path(TASK).read_text().replace("hues-1shot", "hues-sessions") + "[tasks.hues-sessions.sessions]\n"
    Path("sessions.toml").write_text(task + "orders = 6\nsupports = 2\ncount = 2\nways = 2\n")
    how = ("--task", "sessions.toml", "--recipe", "ce,closer", "-q")
    status, _, err = call("run", "--method", "ncm", *how)
    assert status == 0, err
    assert labels(call, "variance", "sessions.toml") == ["ncm"]
    records = json.loads(call("variance", "sessions.toml", "--recipe", "all", "--format", "json")[1])
    assert {record["method"] for record in records[:2]} == {"ncm", "ncm.recipe=closer"}
    assert "ncm | closer" in call("variance", "sessions.toml", "--recipe", "closer")[1]


@pytest.mark.slow("rows of recipes are made")
def test_figures_draw_the_recipes_that_are_asked_for(rows, call):
    def drawn(**how) -> set[str]:
        (axes,) = ifsl_bench.plot.ranks(TASK, **how).figure.axes
        return {text.get_text().rpartition("  ")[0] for text in axes.get_yticklabels()}  # with the accuracy behind it

    assert drawn() == set(PLAIN)
    assert drawn(recipe="all") == set(map(display_name_of_label, MADE))
    assert drawn(methods="ncm,ncm.recipe=etf") == {"ncm", "ncm | etf"}
    status, out, err = call("plot", "seeds", TASK, "--recipe", "etf", "--out", "seeds.svg")
    assert status == 0, err
    assert "has 4 more rows on backbones of other recipes (ce, closer.beta=1)" in out
    assert "recipe" not in call("plot", "seeds", TASK, "--recipe", "all", "--out", "seeds.svg")[1]


@pytest.mark.parametrize(
    ("recipe", "passes"),
    [("ce", 1), ("rotation", 4), ("rotation.angles=2", 2), ("rotation.turns=false", 1), ("savc", 2), ("etf", 1)],
)
def test_passes_at_test_are_the_turns_that_an_image_is_seen_in(recipe, passes):
    assert passes_at_test(find_recipe(recipe)) == passes


def test_the_grid_is_drawn_and_named_in_the_page(rows, call):
    """Marks are the cells' means, in a line for each recipe from the best; the page has the same tables."""
    cells = [record for record in ifsl_bench.grid(TASK) if record["table"] == "cells"]
    assert {record["method"] for record in cells} == MADE
    assert {(record["recipe"], record["passes"]) for record in cells} == {("ce", 1), ("closer.beta=1", 3), ("etf", 1)}
    drawing = ifsl_bench.plot.recipes(TASK)
    (axes,) = drawing.figure.axes
    lines = {line.get_gid(): line for line in axes.get_lines()}
    names = [text.get_text() for text in axes.get_yticklabels()]
    for record in cells:
        mean = lines[f"mean of {record['classifier']} | {record['recipe']}"]
        assert mean.get_xdata()[0] == pytest.approx(record["acc"], abs=1e-4)
        assert names[round(float(mean.get_ydata()[0]))] == record["recipe"].replace(".beta=1", ", beta 1")
        assert len(lines[f"seeds of {record['classifier']} | {record['recipe']}"].get_xdata()) == 3
    assert call("report", TASK, "--out", "page.html")[0] == 0
    text = Path("page.html").read_text()
    assert "Recipes and classifiers" in text
    assert all(f"{record['acc']:.2f} ± {record['acc_interval']:.2f}" in text for record in cells)
    assert call("report", TASK, "--recipe", "ce", "--out", "page.html")[0] == 0
    assert "Recipes and classifiers" not in Path("page.html").read_text()


def test_the_page_has_the_recipes_that_are_asked_for(rows, call):
    def page(*arguments: str) -> str:
        assert call("report", TASK, "--out", "page.html", *arguments)[0] == 0
        return Path("page.html").read_text()

    assert "ncm | etf" not in page()
    assert "has 4 more rows on backbones of other recipes (closer.beta=1, etf)" in page()
    text = page("--recipe", "all")
    assert all(f">{display_name_of_label(label)}<" in text for label in MADE)
    assert '"name": "ncm | closer, beta 1"' in text or '"name":"ncm | closer, beta 1"' in text


def test_data_frames_have_what_trained_the_backbone(rows):
    columns = ["recipe", "passes", "knows_classes"]
    for frame in (ifsl_bench.table(TASK, recipe="all"), ifsl_bench.leaderboard(TASK, recipe="all")):
        frame = frame.to_pandas().set_index("method")
        assert frame.loc["ncm", columns].tolist() == ["ce", 1.0, False]
        assert frame.loc["ncm.recipe=closer.recipe.beta=1", columns].tolist() == ["closer.beta=1", 3.0, False]
    assert len(ifsl_bench.table(TASK)) == 2
    frame = ifsl_bench.load("ncm.recipe=etf", TASK).to_pandas()
    assert frame[columns].drop_duplicates().values.tolist() == [["etf", 1.0, True]]
    assert ifsl_bench.load("ncm", TASK).to_pandas()[columns].iloc[0].tolist() == ["ce", 1.0, False]
    assert ifsl_bench.load("imprint", "tiny-features-5shot").to_pandas()["recipe"].isna().all()  # trained elsewhere
    title = str(ifsl_bench.compare("imprint", "ncm", TASK, recipe="etf")).splitlines()[0]
    assert title.startswith("A = imprint | etf (yours), B = ncm | etf (yours)")


def test_a_pretraining_is_named_by_its_recipe(hues, call):
    how = ("--task", TASK, "--recipe", "closer.beta=1")
    planned = "pretraining resnet-small, recipe closer.beta=1, linear head, seed 0"

    def missing() -> list[str]:
        (job,) = json.loads(call("run", "--method", "ncm", *how, "--dry-run", "--format", "json")[1])["jobs"]
        return [stage["stage"] for stage in job["missing"]]

    assert planned in missing()
    status, out, err = call("pretrain", *how, "-q")
    assert status == 0, err
    key = out.partition(":")[0]
    assert key.startswith("hues-resnet-small+closer-linear-seed0-")
    assert planned not in missing()
    listed = json.loads(call("weights", "list", "--format", "json")[1])
    assert [row["recipe"] for row in listed if row["pretraining"] == key] == ["closer.beta=1"]
    assert not any("+" not in row["pretraining"] and row["recipe"] for row in listed)


def test_weights_of_a_recipe_are_of_no_use_to_another(hues, call, monkeypatch):
    task = ("--task", TASK)
    key = call("pretrain", *task, "--recipe", "closer.beta=1", "-q")[1].partition(":")[0]
    other = call("pretrain", *task, "--recipe", "closer", "-q")[1].partition(":")[0]
    shutil.rmtree(hues / "home" / "pretrained" / other)
    status, _, err = call("weights", "export", *task, "--recipe", "closer", "--to", "w.safetensors")
    assert status == 2
    assert f"{other} is not here" in err
    assert call("weights", "export", *task, "--recipe", "closer.beta=1", "--to", "w.safetensors")[0] == 0
    weights, content = read_metadata_and_tensors(Path("w.safetensors"))
    write_weights(
        Path("other.safetensors"), content, weights.pretraining_definition, {**weights.training_record, "key": other}
    )
    status, out, err = call("weights", "import", "other.safetensors")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert f"its definition does not make '{other}'" in err

    shutil.copytree(hues / "home" / "data", hues / "second" / "data")
    monkeypatch.setenv("IFSL_BENCH_HOME", str(hues / "second"))
    status, out, err = call("weights", "import", "w.safetensors")
    assert status == 0, err
    assert key in out
    listed = json.loads(call("weights", "list", "--format", "json")[1])
    assert [(row["pretraining"], row["recipe"]) for row in listed if row["where"] == "home"] == [(key, "closer.beta=1")]
    assert call("run", "--method", "ncm", *task, "--recipe", "closer.beta=1", "-q")[0] == 0
    (file,) = (hues / "second" / "results").rglob("*.json")
    assert json.loads(file.read_text())["pretraining"]["sha256"] in out

    folder = hues / "second" / "pretrained"
    shutil.copytree(folder / key, folder / other)
    status, _, err = call("run", "--method", "ncm", *task, "--recipe", "closer", "-q")
    assert "is of another pretraining" in err
    assert status == 0, err  # it was trained again
    weights = {json.loads(path.read_text())["pretraining"]["sha256"] for path in (hues / "second").rglob("ncm*.json")}
    assert len(weights) == 2


def test_a_row_of_a_recipe_is_reproduced(hues, call):
    assert call("run", "--method", "ncm", "--task", TASK, "--recipe", "closer.beta=1", "-q")[0] == 0
    (file,) = (hues / "home" / "results").rglob("*.json")
    status, out, err = call("reproduce", str(file), "--task", TASK, "-q")
    assert status == 0, err
    assert "identical" in out
    text = file.read_text().replace('"ncm.recipe=closer.recipe.beta=1"', '"ncm.recipe=/x/evil.py:Evil"')
    odd = hues / "odd.json"
    odd.write_text(text)
    status, _, err = call("reproduce", str(odd), "--task", TASK, "-q")
    assert status == 2
    assert "its recipe is a file, not a name" in err
