"""Campaign files: what they expand to, how they are refused, and what stands for several names."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ifsl_bench.experiments import campaign_file
from ifsl_bench.experiments.campaign_file import load_configs, parse_campaign
from ifsl_bench.experiments.job import expand_configs, with_recipe
from ifsl_bench.experiments.run_config import RunConfig, expand_method_names, expand_task_names, find_tasks
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task_files import load_tasks as task_of
from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.protocols.tasks.variants import TaskChanges
from ifsl_bench.store.published import read_published_sets
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.store.schema import read_result
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter

NINE = ["protonet", "imprint", "lwof", "lr", "lr+s", "lr+a", "mlp", "mlp+s", "mlp+a"]
ISSUE = """
results = "results"
[[run]]
methods = ["protonet", "imprint", "lwof", "lr", "lr+s", "lr+a", "mlp", "mlp+s", "mlp+a"]
tasks = ["glyphs-1shot", "glyphs-5shot", "glyphs-shared-1shot", "glyphs-shared-5shot"]
seeds = 10
[[run]]
methods = ["lr+a"]
tasks = ["glyphs-1shot", "glyphs-5shot"]
seeds = 5
set = { gradient = ["rbp", "implicit", "t-bptt"] }
"""


def nobody(text: str) -> None:
    raise AssertionError(text)


class Strict(Reporter):
    """No warning is expected."""

    def warn(self, text: str) -> None:
        raise AssertionError(text)


def jobs(configs, only=None, reporter=None):
    only = only or RunConfig()
    configs, _ = find_tasks(configs, only.tasks)
    return expand_configs(configs, reporter or Strict(), only.methods)[0]


def expanded(text: str, config: RunConfig | None = None, folder: Path = Path("/there")) -> list[str]:
    configs = parse_campaign(text, "c.toml", folder)
    if config is not None:
        configs = [config.override_config(run) for run in configs]
    return [str(job) for job in jobs(configs, config)]


def refused(text: str) -> str:
    with pytest.raises(UserError) as caught:
        expanded(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run(**keys: str) -> str:
    return "[[run]]\n" + "".join(f"{key.replace('_', '-')} = {value}\n" for key, value in keys.items())


ONE = {"methods": '"lr+a"', "tasks": '"glyphs-5shot"'}


def test_the_first_example_has_each_job_of_two_overlapping_runs_once():
    labels = expanded(ISSUE)
    tasks = [f"glyphs-{kind}{shots}shot" for kind in ("", "shared-") for shots in (1, 5)]
    first = {f"{m} on {t}, seed {s}" for m in NINE for t in tasks for s in range(10)}
    more = {f"lr+a.gradient={g} on {t}, seed {s}" for g in ("implicit", "t-bptt") for t in tasks[:2] for s in range(5)}
    assert len(labels) == len(set(labels)) == 9 * 4 * 10 + 2 * 2 * 5, "gradient=rbp is the default, and there already"
    assert set(labels) == first | more
    assert {config.results_dir for config in parse_campaign(ISSUE, "c.toml", Path("/there"))} == {
        Path("/there/results")
    }


def test_lists_multiply_and_the_seeds_are_a_number_or_a_list():
    text = run(**ONE, seeds="[3, 7]", set="{ gamma = [0.5, 0.25], hidden = 3 }", train="{ steps = [5, 6] }",
               shots="[1, 2]", episodes="[10, 20]", calibrate="[false, true]")  # fmt: skip
    labels = expanded(text)
    assert len(labels) == len(set(labels)) == 2 * 2 * 2 * 2 * 2 * 2
    assert "lr+a+cal.hidden=3.gamma=0.25.train.steps=6.episodes=20 on glyphs-5shot+shots=2, seed 7" in labels
    assert expanded(run(**ONE, seed="4", seeds="2")) == [f"lr+a on glyphs-5shot, seed {s}" for s in (4, 5)]
    tuned = expanded(run(methods='["lr", "protonet"]', tasks='"glyphs-5shot"', tune="4").replace("4", "[0, 4]"))
    assert [name.split()[0] for name in tuned] == ["lr", "protonet", "lr@tuned-4"]


def test_globs_and_sets_stand_for_names_on_the_command_line_too(here, call):
    home = Paths.locate()
    assert expand_method_names(["paper"], nobody) == NINE
    assert set(expand_method_names(["lr*"], nobody)) == {"lr", "lr+s", "lr+a"}
    assert expand_task_names(["paper"], home) == ["mini-1shot", "mini-5shot", "tiered-1shot", "tiered-5shot"]
    assert set(expand_task_names(["glyphs-?shot"], home)) == {"glyphs-1shot", "glyphs-5shot"}
    assert expand_task_names(["glyphs-?shot+ways=3"], home) == [
        f"{n}+ways=3" for n in expand_task_names(["glyphs-?shot"], home)
    ]
    assert set(expand_task_names(["clusters.toml:clusters-?shot"], home)) == {
        f"clusters.toml:clusters-{shots}shot" for shots in (1, 5)
    }
    every = expand_task_names(["all"], home)
    assert "glyphs-5shot" in every
    assert "mini-5shot" not in every, "its images are not here"
    arguments = ("--method", "im*,prot*", "--task", "clusters.toml:clusters-?shot", "--device", "cpu", "-q")
    status, _, err = call("run", *arguments)
    assert (status, err) == (0, "")
    assert len(list(Path("home/results").glob("clusters-?shot/*.json"))) == 4


def test_all_methods_are_those_that_can_be_used_and_the_others_are_named(monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(registry, "is_installed", lambda module: False)
    names = expand_method_names(["all"], warnings.append)
    assert set(NINE) <= set(names)
    assert len(names) == len(set(names))
    assert not {"ridge", "attractor"} & set(names), "their shorthands are their rows"
    assert "anil" not in names
    assert len(warnings) == 1
    assert "anil" in warnings[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (run(**ONE).replace("methods", "method"), "c.toml: it contains unknown field `method`; did you mean"),
        ("result = 'x'\n" + run(**ONE), "did you mean 'results'"),
        (run(**ONE, seeds="true"), "got `bool` - at `run 1.seeds`"),
        (run(**ONE, set="{ gama = 1 }"), "c.toml: run 1: unknown option 'gama' of method 'lr+a'; did you"),
        (run(**ONE, train="{ step = 1 }"), "c.toml: run 1: unknown training option 'step'; did you mean 'steps'"),
        (run(**ONE) + run(methods='"protonte"', tasks='"glyphs-5shot"'), "run 2: unknown method 'protonte'; did you"),
        (run(methods='"lr"', tasks='"glyphs-6shot"'), "run 1: unknown task 'glyphs-6shot'; did you"),
        (run(methods='"zz*"', tasks='"glyphs-5shot"'), "run 1: no method fits 'zz*'; all "),
        (run(**ONE, set="{ gamma = [] }"), "run 1: set.gamma is empty"),
        (run(methods='"lr"', tasks='"glyphs-5shot"', set="{ weight_decay = [] }"), "run 1: set.weight_decay is empty"),
        (run(**ONE, ways="0"), "run 1: ways must be a whole number from 1"),
        (run(**ONE, seeds="0"), "run 1: seeds is empty, so nothing would be run"),
        (run(**ONE, seeds="[1, 2]", seed="1"), "run 1: seeds lists them all, so leave seed out"),
        (run(**ONE, episodes="1"), "run 1: --episodes must be 2 to 1,000,000"),
        (run(methods='"lr"', tasks='"\\u001b[2J"'), "run 1: tasks: "),
        (run(**ONE, seeds=str(2**63)), r"seeds is 9,223,372,036,854,775,808, 1,000 at most"),
        (run(**ONE, seeds="1000", train=f"{{ rate = {[0.1 + i for i in range(11)]} }}"), "11,000 jobs or more"),
        (run(**ONE, set="{ gamma = [" + "1," * 9999 + "1], hidden = [1, 2] }"), "20,000 jobs or more"),
        ("results = 'r'", "missing required field `run`"),
        ("run = []", "it runs nothing"),
        ("[[run]", "c.toml is not valid TOML"),
        ("#" * 300_000, "has more than 262,144 characters"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_in_one_line_that_names_file_and_key(text, message):
    error = refused(text)
    assert message in error
    assert error.startswith("c.toml")


def test_a_glob_can_make_too_many_jobs_too(monkeypatch):
    monkeypatch.setattr(campaign_file, "MAX_JOBS", 10)
    monkeypatch.setattr("ifsl_bench.experiments.job.MAX_JOBS", 10)
    assert "18 jobs, 10 at most" in refused(run(methods='"paper"', tasks='["glyphs-1shot", "glyphs-5shot"]'))


def test_paths_are_relative_to_the_file_and_results_go_where_it_says(clusters, call, monkeypatch, tmp_path):
    (clusters / "own").mkdir()
    (clusters / "own" / "mine.py").write_text(
        "from ifsl_bench.methods.imprint import Imprint\n\nclass Mine(Imprint):\n    pass\n"
    )
    text = 'results = "../out"\n' + run(methods='["mine.py:Mine"]', tasks='["../clusters.toml:clusters-5shot"]')
    (clusters / "own" / "c.toml").write_text(text)
    monkeypatch.setenv("IFSL_BENCH_HOME", str(clusters / "home"))
    monkeypatch.chdir(tmp_path)
    status, _, err = call("run", str(clusters / "own" / "c.toml"), "--device", "cpu", "-q")
    assert (status, err) == (0, "")
    (result,) = (clusters / "out").glob("*/*.json")
    assert result.name == "Mine.seed-0.json"
    status, _, err = call("run", str(clusters / "own" / "c.toml"), "--results", "elsewhere", "--device", "cpu", "-q")
    assert (status, err) == (0, "")
    assert (tmp_path / "elsewhere" / "clusters-5shot" / result.name).exists(), "the command line has the last word"


def test_two_tasks_of_one_name_are_refused(clusters):
    text = (clusters / "clusters.toml").read_text()
    (clusters / "other.toml").write_text(text.replace("steps = 60", "steps = 61"))
    twice = "".join(run(methods='"lr"', tasks=f'"{name}.toml:clusters-5shot"') for name in ("clusters", "other"))
    with pytest.raises(UserError, match="two different tasks are called 'clusters-5shot'"):
        expanded(twice, folder=clusters)


def test_the_command_line_chooses_from_a_file_and_speaks_over_it():
    text = run(methods='["lr+a", "lr+s"]', tasks='"glyphs-?shot"', seeds="3", set="{ gamma = [0.5, 0.25] }",
               train="{ steps = 5, views = 2 }")  # fmt: skip
    config = RunConfig(methods=("lr+a",), tasks=("glyphs-5shot",), seeds=1, options={"gamma": "0.125"},
                   train={"steps": "7"}, change=TaskChanges(ways=4))  # fmt: skip
    assert expanded(text, config) == ["lr+a.gamma=0.125.train.views=2.train.steps=7 on glyphs-5shot+ways=4, seed 0"]
    with pytest.raises(UserError, match="unknown method 'mlp' in the campaign; available: lr"):
        expanded(text, RunConfig(methods=("mlp",)))
    with pytest.raises(UserError, match="unknown task 'mini-5shot' in the campaign"):
        expanded(text, RunConfig(tasks=("mini-5shot",)))
    with pytest.raises(UserError, match=r"unknown campaign 'papre' .*did you mean 'paper'"):
        load_configs("papre", RunConfig())


def test_a_set_is_what_a_file_of_published_rows_calls_itself(tmp_path, monkeypatch):
    (tmp_path / "published").mkdir()
    content = {"title": "t", "source": "s", "columns": ["acc"], "rows": {"glyphs-5shot": {"lr": [1], "anil": [2]}}}
    for name, more in (("a", {"set": "mine"}), ("b", {})):
        (tmp_path / "published" / f"{name}.json").write_text(json.dumps({**content, **more, "interval": "unknown"}))
    monkeypatch.setattr("ifsl_bench.store.published.packaged_results_folder", lambda: tmp_path)
    assert read_published_sets() == {"mine": (["lr", "anil"], ["glyphs-5shot"])}
    assert expand_method_names(["mine"], nobody) == ["lr", "anil"]
    assert expand_task_names(["mine+ways=3"], Paths.locate()) == ["glyphs-5shot+ways=3"]


@pytest.mark.slow("all stored results are looked up")
def test_the_leaderboards_campaign_makes_every_stored_number_and_no_other():
    home = replace(Paths.locate(), results=packaged_results_folder())
    stored_paths = set(packaged_results_folder().glob("*/*.seed-*.json"))
    configs, _ = find_tasks(load_configs("leaderboard", RunConfig()))
    paths = set()
    jobs, lacking = expand_configs(configs, Strict())
    for job in jobs:
        task = task_of(job.task.name)[0]
        assert job.task == (task if job.task.recipe is None else with_recipe(task, job.task.recipe))
        paths.add(job.result_path(home))
    assert len(paths) == len(jobs)
    assert paths <= stored_paths
    assert len(stored_paths - paths) == sum(lacking.values()), "the others need what is not installed here"


def test_the_band_of_each_printed_row_is_what_seeds_and_episodes_of_the_letters_give():
    """1.96 standard deviations of the difference between one training and the mean of three, up to the next half."""
    printed = json.loads((packaged_results_folder() / "published" / "ren2019.json").read_text())
    bands, plus_minus = printed["bands"], printed["columns"].index("plus_minus_as_printed")
    # the widest interval that the paper prints for 2,000 episodes, taken as one of 95%
    error = max(row[plus_minus] for rows in printed["rows"].values() for row in rows.values()) / 1.96
    for shots in ("1shot", "5shot"):
        variances = []
        for task in (f"glyphs-{shots}", f"glyphs-shared-{shots}"):
            for label in NINE:
                accuracies = [
                    read_result(p).summary["acc"] for p in packaged_results_folder().glob(f"{task}/{label}.seed-*.json")
                ]
                mean = sum(entry["mean"] for entry in accuracies) / len(accuracies)
                variances.append(sum((entry["mean"] - mean) ** 2 for entry in accuracies) / (len(accuracies) - 1))
        deviation = math.sqrt(sum(variances) / len(variances) * (1 + 1 / 3) + 2 * error**2)
        band = math.ceil(2 * 1.96 * deviation) / 2
        for task in (f"mini-{shots}", f"tiered-{shots}"):
            assert bands[task] == dict.fromkeys(NINE, band)


def test_fewer_steps_of_pretraining_stretch_its_schedule_and_its_running_averages():
    whole, (few,) = packaged_tasks()["mini-5shot"], task_of("mini-5shot+pretraining-steps=300")
    assert (few.name, few.variant_of) == ("mini-5shot+pretraining-steps=300", "mini-5shot")
    assert (few.pretraining.steps, few.pretraining.schedule.drops) == (300, (200, 250))
    assert few.pretraining.schedule.rate == whole.pretraining.schedule.rate
    assert (1 - few.pretraining.norm_momentum) ** 300 <= 0.05, "the first values of running averages are forgotten"
    assert task_of("mini-5shot+pretraining-steps=30000")[0] == whole
    assert task_of("mini-5shot+pretraining-steps=1")[0].pretraining.norm_momentum == 1
    assert len({whole.hash, few.hash}) == 2
    assert few.evaluation == whole.evaluation
