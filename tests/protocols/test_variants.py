"""Tasks made from other tasks: names, identity, what changes, and what must not."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from ifsl_bench import api
from ifsl_bench.backbones.pretrained import make_features_key, make_pretraining_key
from ifsl_bench.data.dataset_views import choose_kept_base_classes, with_fewer_base_classes
from ifsl_bench.data.pools import open_dataset
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.experiments.workspace import PreparedTask
from ifsl_bench.protocols.episode_protocol import EPISODES_PROTOCOL as JOINT
from ifsl_bench.protocols.episode_protocol import REGULAR_PROTOCOL
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.protocols.tasks.contamination import ROW_NOTE_OF_SEEN_LEVEL
from ifsl_bench.protocols.tasks.task_files import load_tasks, packaged_tasks, parse_tasks
from ifsl_bench.protocols.tasks.variants import TaskChanges, apply_task_changes
from ifsl_bench.reporting.task_sheet import describe_task
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("glyphs-5shot+way=10", "unknown change of a task 'way' in 'glyphs-5shot\\+way=10'; did you mean 'ways'"),
        ("glyphs-5shot+ways", "ways takes a whole number from 1"),
        ("glyphs-5shot+ways=ten", "ways takes a whole number from 1, as in \\+ways=10, not 'ten'"),
        ("glyphs-5shot+shots=0", "shots must be a whole number from 1, not 0"),
        (f"glyphs-5shot+ways={'9' * 5000}", "ways must be 1,000,000 at most"),
        ("glyphs-5shot+ways=2+ways=3", "ways is there twice"),
        ("glyphs-5shot+base-classes=1", "base_classes must be at least 2"),
        *(
            (f"{name}+base-order=1", f"'{name}' is no such task")
            for name in ("glyphs-sessions", "tiny-features-sessions", "mini-5shot", "mini-sessions-published")
        ),
        ("glyphs-5sht+ways=2", "did you mean 'glyphs-5shot'"),
        ("glyphs-5shot+ways=1001", r"episode\.ways must be at most 1,000"),
    ],
)
def test_mistakes_in_names(name, message):
    with pytest.raises(UserError, match=message):
        load_tasks(name)


def test_a_change_is_in_the_name_the_hash_and_the_episodes():
    (plain,) = load_tasks("glyphs-5shot")
    (wide,) = load_tasks("glyphs-5shot+shots=3+ways=10")
    assert wide.name == "glyphs-5shot+ways=10+shots=3", "one order, whatever was typed"
    assert load_tasks("glyphs-5shot", TaskChanges(ways=10, shots=3)) == [wide]
    assert (wide.shots, wide.episode.ways, wide.variant_of) == (3, 10, "glyphs-5shot")
    assert (wide.episode.novel_queries, wide.episode.base_queries) == (5, 50), "as many base queries as novel ones"
    assert plain.digest is not None
    assert wide.digest is None, "the pinned digest is of other episodes"
    assert "ways=10, shots=3" in wide.title
    names = [f"glyphs-5shot{rest}" for rest in ("", "+ways=6", "+shots=6", "+queries=6", "+base-classes=6")]
    assert len({load_tasks(name)[0].hash for name in names}) == len(names)
    assert msgspec.structs.replace(wide, title="", variant_of="").hash == wide.hash


def test_shares_of_base_and_novel_queries_stay():
    (task,) = load_tasks("glyphs-5shot")
    uneven = msgspec.structs.replace(task, episode=msgspec.structs.replace(task.episode, base_queries=10))
    variant = apply_task_changes(uneven, TaskChanges(ways=2, queries=3))  # 6 novel queries in place of 25
    assert variant.episode.base_queries == round(10 * 6 / 25)
    assert apply_task_changes(uneven, TaskChanges(ways=1, queries=1)).episode.base_queries == 1, (
        "never none: that is another protocol"
    )
    regular = packaged_tasks()["glyphs-regular-5shot"]
    assert apply_task_changes(regular, TaskChanges(ways=10)).episode.base_queries == 0
    assert apply_task_changes(regular, TaskChanges(ways=10)).name == "glyphs-regular-5shot+ways=10"


def test_task_files_derive_tasks(minimal_task):
    text = minimal_task + 'digest = "x"\n[variants.d-regular]\nof = "d-1shot"\nregular = true\n'
    text += '[variants.d-wide]\nof = "d-1shot"\nways = 9\n'
    plain, regular, wide = parse_tasks(text, "x.toml")
    assert (regular.name, protocol_of_task(regular), regular.digest) == ("d-regular", REGULAR_PROTOCOL, None)
    assert plain.episode.base_queries == 25
    assert protocol_of_task(plain) is JOINT
    assert (wide.name, wide.episode.ways, wide.episode.base_queries) == ("d-wide", 9, 45)
    assert len({plain.hash, regular.hash, wide.hash}) == 3
    (mini,) = parse_tasks('[variants.mine]\nof = "mini-5shot"\nshots = 2\n', "y.toml")
    assert (mini.shots, mini.pretraining) == (2, packaged_tasks()["mini-5shot"].pretraining)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[variants.a]\nof = "d-2shot"\n', "unknown task 'd-2shot' that 'a' of x.toml is a variant of"),
        ('[variants.d-1shot]\nof = "d-1shot"\n', "task 'd-1shot' is defined twice"),
        ('[variants.a]\nof = "d-1shot"\nways = 0\n', "task 'a': ways must be a whole number from 1, not 0"),
        ('[variants.a]\nof = "d-1shot"\nregulr = true\n', "did you mean 'regular'"),
        ('[variants."a+ways=3"]\nof = "d-1shot"\n', "a name is lower-case"),
    ],
)
def test_mistakes_in_derived_tasks(minimal_task, text, message):
    with pytest.raises(UserError, match=r"x\.toml") as error:
        parse_tasks(minimal_task + text, "x.toml")
    assert message in str(error.value)


def test_the_variant_in_the_docs_is_read():
    docs = Path(__file__).parents[2] / "docs"
    pages = "".join((docs / name).read_text(encoding="utf-8") for name in ("data.md", "tasks.md"))
    blocks = re.findall(r"```toml\n(.*?)```", pages, re.S)
    (own,) = (block for block in blocks if "[tasks.mine-5shot]" in block)
    (more,) = (block for block in blocks if "[variants." in block)
    assert [(t.name, not t.has_base) for t in parse_tasks(own + more, "mine.toml")] == [
        ("mine-5shot", False), ("mine-regular-5shot", True),
    ]  # fmt: skip


def test_chosen_classes_are_nested_and_not_the_first():
    small, large = choose_kept_base_classes(50, 200), choose_kept_base_classes(150, 200)
    assert set(small) < set(large)
    assert len(set(small)) == 50
    assert small.tolist() == sorted(small)
    assert small.tolist() != list(range(50))
    assert choose_kept_base_classes(5, 100).tolist() == [7, 10, 31, 44, 51], "never changes: results rest on it"


def dataset_of(folder: Path):
    return open_dataset(folder / "home" / "data" / "clusters")


def test_other_base_classes_have_a_backbone_of_their_own_and_weights_for_the_lists_are_not_taken_for_theirs(tmp_path):
    suffix = "+backbone=resnet10+weights=0123456789abcdef+pretrained-on=base"
    for rest in ("", suffix):
        tasks = [load_tasks(f"mini-sessions{order}{rest}")[0] for order in ("", "+base-order=1", "+base-order=2")]
        for key in (make_pretraining_key, make_features_key):
            assert len({key(task, "0" * 64, "linear", 0) for task in tasks}) == 3
    assert [describe_task(task, Paths.locate(tmp_path)).get("seen") for task in tasks] == [
        None,
        ROW_NOTE_OF_SEEN_LEVEL["may"],
        ROW_NOTE_OF_SEEN_LEVEL["may"],
    ]


@pytest.mark.parametrize(
    ("count", "message"), [(8, "that is the task without"), (9, "has 8 base classes: a task of 9")]
)
def test_too_many_base_classes(clusters, count, message):
    with pytest.raises(UserError, match=message):
        with_fewer_base_classes(dataset_of(clusters), count)


@pytest.mark.parametrize("task", ["clusters-5shot", "clusters-shared-5shot"])
def test_a_run_with_fewer_base_classes(clusters, task, work):
    """Another pretraining, another base classifier, and queries of the chosen classes alone."""
    name = f"{clusters / 'clusters.toml'}:{task}"
    result = api.run("lwof", name, train={"steps": 10}, change={"base-classes": 6, "ways": 4}, work=work)
    assert result.task == f"{task}+base-classes=6+ways=4"
    assert (work.home.results / result.task / "lwof.train.steps=10.seed-0.json").exists()
    assert result.fingerprint == dataset_of(clusters).fingerprint
    whole, cut = load_tasks(name)[0], load_tasks(f"{name}+base-classes=6+ways=4")[0]
    keys = [make_pretraining_key(t, result.fingerprint, "cosine", 0) for t in (whole, cut)]
    assert len(set(keys)) == 2
    assert result.pretraining["key"] == keys[1]
    bench = PreparedTask(cut, "cosine", 0, work)
    assert bench.base_classifier.weight.shape[0] == bench.base_classifier.prototypes.shape[0] == 6
    batch = bench.loader("test").load_batch(0, 20)
    assert batch.query_labels.max() == 9
    assert batch.support.hidden.shape == (20, 6)
    rows = bench.sampler("test").sample(0, 20)
    queries = rows.query[~rows.query_is_novel]
    pool, classes = dataset_of(clusters).pool("base/test"), choose_kept_base_classes(6, 8)
    names = {pool.class_names[k] for k in classes}
    cut_pool = bench.dataset.pool("base/test")
    assert {cut_pool.class_names[cut_pool.labels[q]] for q in queries.tolist()} <= names
    features = bench.feature_pool("base/test").features[queries]
    assert np.array_equal(features.numpy(), pool.images[np.isin(pool.labels, classes)][queries.numpy()])


def test_the_command_line(here, call):
    """Options and names say the same, and every command takes the name."""
    task, name = "clusters.toml:clusters-5shot", "clusters-5shot+base-classes=6+ways=3+shots=2+queries=4"
    options = ["--ways", "3", "--shots", "2", "--queries", "4", "--base-classes", "6", "--device", "cpu"]
    status, out, err = call("run", "--method", "protonet,imprint", "--task", task, *options, "--dry-run")
    assert status == 0, err
    assert f"protonet on {name}, seed 0" in out
    status, out, err = call("run", "--method", "protonet,imprint", "--task", task, *options)
    assert status == 0, err
    assert f"\n{name}\n" in out
    assert len(list((here / "home" / "results" / name).glob("*.json"))) == 2
    whole = task.replace("clusters-5shot", name)
    status, _, err = call("run", "--method", "protonet", "--task", whole, "--device", "cpu")
    assert "done already" in err
    for command in (["table", "--rank", whole], ["compare", "protonet", "imprint", "--task", whole]):
        status, out, err = call(*command)
        assert status == 0, err
        assert name in out
    status, out, _ = call("table", "--rank", task)
    assert f"{name}, a variant of clusters-5shot" in out
    for arguments, message in (
        (["--ways", "100"], "need 100 novel classes, novel/test has 7"),
        (["--base-classes", "8"], "that is the task without base-classes"),
    ):
        status, out, err = call("run", "--method", "protonet", "--task", task, *arguments, "-q")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_episodes_that_cannot_be_drawn_cost_no_pretraining(here, call):
    """With all base classes hidden in training nothing is left for base queries: said before anything is trained."""
    shared = ("--task", "clusters.toml:clusters-shared-5shot", "--base-classes", "5", "--queries", "1")
    for options in (("--dry-run",), ()):
        status, out, err = call("run", "--method", "lwof", *shared, "--device", "cpu", "-q", *options)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "need 5 base queries, " in err
    assert not (here / "home" / "pretrained").exists()
    assert call("run", "--method", "protonet", *shared, "--device", "cpu", "-q")[0] == 0, "draws no such episodes"
    # Where the data are not made yet, their published counts tell.
    options = ("--task", "glyphs-shared-5shot", "--base-classes", "5", "--queries", "1", "--dry-run")
    status, _, err = call("run", "--method", "lwof", *options)
    assert status == 2
    assert "need 5 base queries, base/train has 0 images for them" in err
    assert call("run", "--method", "protonet", *options)[0] == 0


def test_classes_of_unequal_size_keep_their_images(tmp_path):
    """Each row of a view is an image of the class that it is labelled with."""
    sizes, folder = [5, 9, 7, 12, 6], tmp_path / "uneven"
    folder.mkdir()
    for pool in ("base-train", "base-val", "base-test", "novel-train", "novel-val", "novel-test"):
        labels = np.repeat(np.arange(5) if pool.startswith("base") else np.arange(5) + 10 * len(pool), sizes)
        features = np.c_[labels, np.arange(len(labels))].astype(np.float32)  # says which class and image it is
        np.savez(folder / f"{pool}.npz", features=features, labels=labels)
    whole = prepare_dataset(Paths.locate(tmp_path / "home"), "uneven", folder, False, Reporter(), allow_partial=True)
    classes = choose_kept_base_classes(3, 5)
    pool = with_fewer_base_classes(whole, 3).pool("base/test")
    assert [pool.images[a, 0] for a in pool.class_starts[:-1]] == classes.tolist()
    assert np.array_equal(pool.images[:, 0], classes[pool.labels])
    assert np.diff(pool.class_starts).tolist() == [sizes[k] for k in classes]
    assert len(np.unique(pool.images[:, 1])) == len(pool) == sum(sizes[k] for k in classes)


@pytest.mark.slow("a network is trained")
def test_the_backbone_is_trained_on_the_chosen_classes_alone(glyph_home):
    """From images: the view goes through pretraining and features like a data set of its own."""
    (task,) = load_tasks(f"{glyph_home.parent / 'few.toml'}:few-1shot+base-classes=10")
    bench = PreparedTask(task, "linear", 0, api.workspace(glyph_home, device="cpu"))
    assert bench.pretrained_backbone.base_classifier.weight.shape[0] == 10
    assert "+base-classes=10" in bench.pretrained_backbone.pretraining_key
    features = bench.feature_pool("base/test").features
    whole = open_dataset(glyph_home / "data" / "glyphs").pool("base/test")
    images = np.array(whole.images[np.isin(whole.labels, choose_kept_base_classes(10, 100))])
    assert len(features) == len(images)
    rows = slice(len(images) - 40, None)
    with torch.inference_mode():
        by_hand = bench.pretrained_backbone.network(
            bench.pretrained_backbone.normalise_images(torch.from_numpy(images[rows]))
        )
    # float32 through a network: sums of up to 1,728 terms in each of seven layers, in batches of other sizes
    torch.testing.assert_close(features[rows], by_hand, rtol=1e-3, atol=1e-3)
