"""Which results belong to their task, and to each other."""

from __future__ import annotations

import msgspec
import pytest

from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.protocols.tasks.task_files import parse_tasks as parse_tasks
from ifsl_bench.store.result_folder import find_results_of_other_episodes, packaged_results_folder, reason_not_to_pair
from ifsl_bench.store.schema import parse_result, write_result
from ifsl_bench.utils.errors import UserError
from tests.store.result_fields import altered
from tests.store.test_check import cut


def test_where_no_digest_is_pinned_most_results_say_how_many_episodes_it_has():
    (task,) = load_tasks("glyphs-5shot")
    whole = [parse_result(packaged_results_folder() / f"glyphs-5shot/lwof.seed-{seed}.json") for seed in range(3)]
    some = [msgspec.structs.replace(cut(result, n), digest="d") for result, n in zip(whole, (50, 50, 3), strict=True)]
    assert list(find_results_of_other_episodes(task, [*whole, *some])) == [id(some[2])]
    assert find_results_of_other_episodes(task, [some[2], some[0], some[1]]).keys() == {id(some[2])}, (
        "whatever their order"
    )
    assert find_results_of_other_episodes(task, [some[0], some[2]]).keys() == {id(some[2])}, (
        "of two the first is trusted"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base_queries": 1000}, "episodes.base_queries is 1000, episodes of the task have"),
        ({"novel_queries": 1000}, "episodes.novel_queries is 1000, episodes of the task have"),
        ({"classes": list(range(2000))}, "episodes.classes has 2,000 entries"),
    ],
)
def test_episodes_that_are_not_the_tasks_do_not_fit(change, reason):
    (task,) = load_tasks("glyphs-5shot")
    good = parse_result(packaged_results_folder() / "glyphs-5shot/lwof.seed-1.json")
    misfit = msgspec.structs.replace(good, episodes=msgspec.structs.replace(good.episodes, **change))
    assert find_results_of_other_episodes(task, [good, misfit])[id(misfit)].startswith(reason)
    assert find_results_of_other_episodes(task, [good]) == {}


def test_the_novel_classes_are_part_of_what_must_match():
    good = parse_result(packaged_results_folder() / "glyphs-5shot/lwof.seed-1.json")
    a, b = (msgspec.structs.replace(good, episodes=msgspec.structs.replace(good.episodes, classes=c))
            for c in ([0, 1] * 2000, [1, 2] * 2000))  # fmt: skip
    assert reason_not_to_pair(a, b) == "the novel classes of their episodes differ"
    assert reason_not_to_pair(a, a) is None


def test_a_bias_from_other_validation_episodes_does_not_fit(tmp_path):
    file = write_result(tmp_path, parse_result(packaged_results_folder() / "glyphs-5shot/lr.seed-1.json"))
    (task,) = load_tasks("glyphs-5shot")
    altered(file, lambda v: v["calibration"].update(validation_episodes=3))
    failure = f"calibration.validation_episodes is 3, the task has {len(task.evaluation.validation_halves[0])} for it"
    assert list(find_results_of_other_episodes(task, [parse_result(file)]).values()) == [failure]
    assert failure in check_file(file).failures


def test_a_task_whose_results_could_not_be_read_is_refused(minimal_task):
    text = minimal_task + "\n[episode]\nways = 1000\n[evaluation]\nepisodes = 100000\n"
    with pytest.raises(UserError, match=r"evaluation\.episodes is 100,000; of 1,000 classes a result file"):
        parse_tasks(text, "x.toml")
    parse_tasks(text.replace("1000\n", "5\n"), "x.toml")
