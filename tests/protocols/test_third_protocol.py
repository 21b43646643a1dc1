"""A protocol of one's own, in this file alone: episodes without base queries, of which novel hits are counted."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pytest

from ifsl_bench import api
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.protocols.episode_loader import EpisodeLoader, predict_batch
from ifsl_bench.protocols.loader import EvaluationResult
from ifsl_bench.protocols.metrics import HitCounts
from ifsl_bench.protocols.protocol import HitCount, MetricColumn, Protocol, StoredCounts
from ifsl_bench.protocols.registry import protocol_of_task, register_protocol
from ifsl_bench.protocols.tasks.task_files import load_task
from ifsl_bench.store.schema import read_result
from ifsl_bench.utils.errors import CorruptFile, UserError


@dataclass(frozen=True)
class NovelCounts(HitCounts):
    right: np.ndarray  # [n]
    novel_queries: int
    metrics: ClassVar[tuple[str, ...]] = ("acc",)  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self.right)

    def metric_by_unit(self, metric):
        return 100 * self.count_array("right") / {"acc": self.novel_queries}[metric]

    def count_arrays(self):
        return {"right": self.right}


class StoredNovelCounts(StoredCounts, frozen=True):
    COLUMNS: ClassVar = ("right", "classes")
    SHAPE_FIELDS: ClassVar = ("novel_queries",)
    MARKER_FIELD: ClassVar = "right"

    novel_queries: HitCount
    right: list[int] | str
    classes: list[int] | str

    @property
    def protocol(self):
        return NOVEL_ONLY

    def __len__(self) -> int:
        return self.column_length("right")

    def to_hit_counts(self):
        return NovelCounts(self.read_column("right"), self.novel_queries)


class NovelLoader(EpisodeLoader):
    def make_evaluator(self, method, name, bias, keep_margins):
        return partial(self._count, name)

    def _count(self, name, method, batch, asked):
        prediction = predict_batch(method, name, batch)
        answers = prediction.logits[..., self.n_base_classes :].argmax(-1) + self.n_base_classes
        right = (answers == batch.query_labels).sum(1).numpy()[asked]
        statistics = {key: value.numpy()[asked] for key, value in prediction.statistics.items()}
        return EvaluationResult(NovelCounts(right, batch.query_labels.shape[1]), statistics)


class NovelOnly(Protocol):
    name = "novel-only"
    metrics = ("acc",)
    full_table_metrics = ("acc",)
    metric_columns = (
        MetricColumn(
            "acc", "novel Acc.", r"novel Acc. $\uparrow$", is_in_short_tables=True, is_in_short_latex_tables=True
        ),
    )
    stored_counts_type = StoredNovelCounts

    def describe_drawn_items(self, task):
        return "episode", f"{task.episode.ways} novel classes and nothing else"

    def make_loader(self, task, sampler, novel, base, support):
        return NovelLoader(sampler, novel, None)

    def expected_counts_shape(self, task, count):
        return {"novel_queries": task.episode.ways * task.episode.novel_queries}, count * task.episode.ways


NOVEL_ONLY = NovelOnly()
register_protocol(NOVEL_ONLY)


@pytest.fixture
def task(here) -> str:
    text = (here / "clusters.toml").read_text()
    (here / "mine.toml").write_text(of_novel_classes(text))
    return "mine.toml:mine-5shot"


def of_novel_classes(text: str) -> str:
    """The file of tasks on clusters, with one task, of this protocol."""
    head = text.partition("[tasks.")[0].replace("[evaluation]\n", '[evaluation]\nprotocol = "novel-only"\n')
    return head + "[episode]\nbase_queries = 0\n[tasks.mine-5shot]\nshots = 5\n"


def test_a_third_protocol_is_run_stored_checked_tabled_and_compared(task, here, call):
    for method in ("imprint", "lr"):
        status, out, err = call("run", "--method", method, "--task", task, "--device", "cpu", "-q")
        assert (status, err) == (0, ""), err
    work = api.workspace(here / "home", device="cpu")
    spec = load_task(task, work.home)
    assert protocol_of_task(spec) is NOVEL_ONLY
    paths = {read_result(path).label: path for path in work.home.results.rglob("*.json")}
    result = read_result(paths["imprint"])
    assert result.protocol is NOVEL_ONLY
    assert result.episodes.shape_values == {"novel_queries": spec.episode.ways * spec.episode.novel_queries}
    assert json.loads(paths["imprint"].read_text())["episodes"].keys() == {"novel_queries", "right", "classes"}
    expected = accuracies(work, spec)
    np.testing.assert_allclose(result.to_hit_counts().metric_by_unit("acc"), expected, rtol=1e-6)
    for path in paths.values():
        assert [line for line in check_file(path, {spec.name: spec}, work.home).failures if "commit" not in line] == []

    status, out, err = call("table", task, "--format", "csv")
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(out))}
    assert status == 0
    assert rows.keys() == {"imprint", "lr"}
    assert float(rows["imprint"]["acc"]) == pytest.approx(expected.mean(), abs=1e-3)
    assert "novel Acc." in call("table", task)[1]
    assert f"{expected.mean():.2f}" in call("table", task, "--format", "latex")[1]
    assert call("leaderboard", task)[0] == 0

    status, out, err = call("compare", "imprint", "lr", "--task", task, "--format", "json")
    assert status == 0, err
    (line,) = json.loads(out)
    other = read_result(paths["lr"]).to_hit_counts().metric_by_unit("acc")
    assert line["difference"] == pytest.approx((expected - other).mean(), abs=1e-5)

    frame = result.episodes_to_pandas()
    assert frame["right"].sum() == result.to_hit_counts().right.sum()


def accuracies(work, spec) -> np.ndarray:
    """Of imprinting, [n], in percent: the class mean with the largest cosine among those of the episode."""
    loader = work.open_task(spec, "cosine", 0).loader("test")
    values = []
    for episode in range(spec.evaluation.episodes):
        batch = loader.load_batch(episode, 1)
        support = batch.support.features[0]
        means = support.view(loader.ways, -1, support.shape[1]).mean(1)
        cosines = batch.query.features[0] @ (means / means.norm(dim=1, keepdim=True)).T
        values.append(100 * float((cosines.argmax(1) + loader.n_base_classes == batch.query_labels[0]).float().mean()))
    return np.array(values)


def test_a_file_that_its_protocol_finds_damaged_is_refused(task, here, call):
    assert call("run", "--method", "imprint", "--task", task, "--device", "cpu", "-q")[0] == 0
    (path,) = (here / "home").rglob("imprint.seed-0.json")
    content = json.loads(path.read_text())
    content["episodes"]["classes"][0] = content["episodes"]["classes"][1]
    path.write_text(json.dumps(content))
    with pytest.raises(CorruptFile, match="has an episode with a class twice"):
        read_result(path)
    content["episodes"]["right"][0] = "many"
    path.write_text(json.dumps(content))
    with pytest.raises(CorruptFile, match=r"\$\.episodes\.right"):
        read_result(path)


def test_a_task_of_a_protocol_that_is_not_registered_is_refused(task, here):
    text = (here / "mine.toml").read_text()
    (here / "mine.toml").write_text(text.replace('"novel-only"', '"novel-onyl"'))
    with pytest.raises(UserError, match="novel-only"):
        protocol_of_task(load_task(task))
