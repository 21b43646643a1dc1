"""Packed arrays, and results whose counts are packed: what is read is what was written, and a stranger's is refused."""

from __future__ import annotations

import base64
import json
import time
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.analysis.comparison import compare_rows
from ifsl_bench.analysis.task_results import load_task_results
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.protocols import protocol as stored_counts
from ifsl_bench.protocols.episode_protocol import EpisodeCounts
from ifsl_bench.protocols.metrics import EPISODE_COUNT_NAMES, OPTIONAL_EPISODE_COUNT_NAMES, EpisodeHitCounts
from ifsl_bench.protocols.sampling.draws import ClassDraws
from ifsl_bench.protocols.tasks.task import EpisodeSpec
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.protocols.tasks.task_limits import MOST_EPISODES, RESULT_BYTES_BESIDE_EPISODES, max_episodes_for_shape
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.store.schema import (
    Result,
    find_first_contradiction,
    parse_result,
    read_result,
    rename_replaced_result,
    write_result,
)
from ifsl_bench.utils.errors import CorruptFile
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.limits import RESULT_FILE_BYTES
from ifsl_bench.utils.serialization import COUNT_KINDS, pack_array, read_packed_length, unpack_array
from tests.store.result_fields import listed

STORED = packaged_results_folder() / "glyphs-5shot" / "protonet.seed-0.json"


def text(kind: str, count: int, raw: bytes) -> str:
    return f"{kind} {count} {base64.b64encode(zlib.compress(raw)).decode()}"


@pytest.mark.parametrize("kind", ["u1", "u2", "u3", "u4", "i8", "f2", "f4", "f8"])
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_what_is_packed_is_read_bit_by_bit(kind, n):
    random = np.random.default_rng(n)
    if kind[0] == "u":
        values = random.integers(0, 256 ** int(kind[1]), n)
        values[:1] = 256 ** int(kind[1]) - 1
    elif kind == "i8":
        values = random.integers(-(2**62), 2**62, n)
    else:
        values = random.normal(size=n).astype(kind)
        values[: n // 2 : 7] = np.nan
        values[1 : n // 2 : 7] = -np.inf
    array_text = pack_array(values)
    assert read_packed_length(array_text) == n
    assert array_text.startswith(f"{kind if n else kind if kind[0] == 'f' else 'u1'} {n} ")
    array = unpack_array(array_text, n)
    assert array.dtype == values.dtype
    assert array.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("", "it is no packed array"),
        ("u1 3", "it is no packed array"),
        ("u1 03 eJw=", "it is no packed array"),
        ("u9 3 eJw=", "it is no packed array"),
        ("u5 3 eJw=", "kind u5"),
        (text("f4", 3, b"\0" * 12), "kind f4, where u1 or u2 or u3 or u4 was expected"),
        (text("u1", 11, b"\0" * 11), "it has 11 numbers, more than 10"),
        ("u1 9999999999 eJw=", "it has 9,999,999,999 numbers, more than 10"),
        (text("u1", 3, b"\0" * 4), "it does not hold the 3 numbers that it states"),
        (text("u1", 3, b"\0" * 2), "it does not hold the 3 numbers that it states"),
        (text("u2", 3, b"\0" * 3), "it does not hold the 3 numbers that it states"),
        ("u1 3 " + base64.b64encode(zlib.compress(b"abc") + b"x").decode(), "it does not hold"),
        ("u1 3 " + base64.b64encode(zlib.compress(b"abc")[:-2]).decode(), "it does not hold"),
        ("u1 3 " + base64.b64encode(zlib.compress(b"abc")[:-1] + b"x").decode(), "it is damaged"),
        ("u1 3 eJ", "it is damaged"),
        ("u1 3 AAAA", "it is damaged"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_array_is_refused(said, why):
    with pytest.raises(ValueError, match=why):
        unpack_array(said, 10, COUNT_KINDS)


def test_a_bomb_takes_no_memory():
    bomb = text("u1", 1000, b"\0" * 300_000_000)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(ValueError, match="it does not hold the 1,000 numbers"):
        unpack_array(bomb, MOST_EPISODES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3_000_000
    assert time.process_time() - start < 1


def drawn(n: int, shape: EpisodeSpec, classes: int = 200) -> tuple[EpisodeHitCounts, np.ndarray]:
    """Counts that need as much room as any, and classes."""
    random = np.random.default_rng(0)
    novel = shape.ways * shape.novel_queries
    base_alone, novel_alone = (random.integers(0, q + 1, n) for q in (shape.base_queries, novel))
    base_joint, novel_joint = (random.integers(0, hits + 1) for hits in (base_alone, novel_alone))
    pairs = random.integers(2 * base_joint * novel_joint, 2 * base_alone * novel_alone + 1)
    counts = EpisodeHitCounts(base_joint, base_alone, novel_joint, novel_alone, shape.base_queries, novel, pairs,
                    base_joint, novel_joint)  # fmt: skip
    return counts, np.argsort(random.random((n, classes), dtype=np.float32), 1)[:, : shape.ways]


@pytest.mark.parametrize("ways", [1, 20, 200])
def test_as_many_episodes_as_are_allowed_fit_into_a_result(ways):
    shape = EpisodeSpec(ways=ways, novel_queries=5, base_queries=25)
    most = max_episodes_for_shape(shape)
    assert most < MOST_EPISODES or ways == 1
    n = 1 + stored_counts.MOST_READABLE_NUMBERS // (ways + 7)
    size = len(json.dumps(msgspec.to_builtins(EpisodeCounts.from_hit_counts(*drawn(n, shape, 300)))))
    assert size / n * most < RESULT_FILE_BYTES.maximum - RESULT_BYTES_BESIDE_EPISODES


def as_packed(result: Result) -> Result:
    """The same result with all its columns packed."""
    entry = result.episodes
    columns = {name: pack_array(entry.read_column(name)) for name in EpisodeCounts.COLUMNS if entry.column_length(name)}
    return msgspec.structs.replace(result, episodes=msgspec.structs.replace(entry, **columns))


@pytest.fixture
def newer() -> Result:
    """A stored result with its counts as numbers."""
    return listed(read_result(STORED))


def test_a_result_that_only_counts_more_replaces_the_old_one(tmp_path):
    result = read_result(STORED.parents[1] / "glyphs-sessions" / "castle.seed-0.json")
    alone = [0] * len(result.episodes) * result.episodes.sessions
    newer, older = (
        msgspec.structs.replace(
            result,
            summary={name: value for name, value in result.summary.items() if name != "novel_alone"},
            episodes=msgspec.structs.replace(result.episodes, novel_alone=column),
        )
        for column in (alone, [])
    )
    write_result(tmp_path, older)
    assert rename_replaced_result(tmp_path, newer) is None, "nothing would be lost"
    write_result(tmp_path, newer)
    assert rename_replaced_result(tmp_path, older) is not None, "a column would be lost"


def test_a_packed_result_is_the_same_in_all_that_reads_it(newer, tmp_path):
    packed_result = as_packed(newer)
    assert not find_first_contradiction(packed_result)
    path = write_result(tmp_path, packed_result)
    stored_result = read_result(path)
    assert stored_result == packed_result
    assert path.stat().st_size < write_result(tmp_path / "plain", newer).stat().st_size / 3
    for name in (*EPISODE_COUNT_NAMES, *OPTIONAL_EPISODE_COUNT_NAMES):
        assert np.array_equal(getattr(stored_result.to_hit_counts(), name), getattr(newer.to_hit_counts(), name))
    assert np.array_equal(stored_result.drawn_novel_classes(), newer.drawn_novel_classes())
    assert rename_replaced_result(tmp_path, newer) is None, "the same hits, written otherwise"
    changed = newer.episodes.read_column("base_alone")
    changed[0] += 1
    entry = msgspec.structs.replace(newer.episodes, base_alone=pack_array(changed))
    assert rename_replaced_result(tmp_path, msgspec.structs.replace(newer, episodes=entry)) is not None
    a, b = (SeedAggregate(name, "file", (result,)) for name, result in (("plain", newer), ("packed", packed_result)))
    table = compare_rows(a, b)
    assert table.episode_differences["acc"].mean == 0
    assert table.n_classes
    write_result(tmp_path / "shown", packed_result)
    (task,) = load_tasks("glyphs-5shot")
    board = load_task_results(task, tmp_path / "shown")  # among the others, since its classes are made up
    assert "protonet" in {row.label for row in (*board.rows, *board.incomparable_rows) if row.results_origin == "yours"}


@pytest.mark.parametrize(
    ("name", "said", "why"),
    [
        ("base_joint", text("u1", 2000, b"\0" * 10**8), "episodes.base_joint: it does not hold the 2,000 numbers"),
        ("pairs", "u1 2000 ?", "episodes.pairs: it is no packed array"),
        ("classes", text("u1", 2**23 + 1, b""), "episodes.classes: it has 8,388,609 numbers, more than 8,388,608"),
        ("classes", "drawn 2000 x 5 of 4, key 1", "episodes.classes: it draws 5 different classes of 4"),
        ("classes", "drawn 99999999 x 5 of 108, key 1", "episodes.classes: it draws 5 classes in 99,999,999 episodes"),
        ("classes", "drawn 1 x 99999999 of 99999999, key 1", "episodes.classes: it draws 99999999 classes in 1"),
        ("classes", "drawn", "episodes.classes: it does not say how classes are drawn"),
        ("pairs", "drawn 2000 x 1 of 4, key 1", "episodes.pairs: it is no packed array"),
        ("novel_alone", text("u1", 1_000_001, b""), "episodes.novel_alone: it has 1,000,001 numbers, more than"),
        ("novel_alone", text("f4", 2000, b"\0" * 8000), "episodes.novel_alone: it holds numbers of kind f4"),
    ],
)  # fmt: skip
def test_a_strangers_packed_counts_are_refused_in_a_line(newer, tmp_path, name, said, why):
    value = msgspec.to_builtins(newer)
    value["episodes"][name] = said
    path = tmp_path / "glyphs-5shot" / STORED.name
    path.parent.mkdir()
    path.write_text(json.dumps(value))
    with pytest.raises(CorruptFile, match="is not a valid result: episodes") as error:
        parse_result(path)
    assert "\n" not in str(error.value)
    checked = check_file(path, home=Paths(tmp_path, tmp_path))
    assert [why in line for line in checked.failures] == [True]
    (task,) = load_tasks("glyphs-5shot")
    remarks = load_task_results(task, tmp_path).remarks
    assert sum(why in remark for remark in remarks) == 1


def test_packed_columns_of_other_lengths_are_refused(newer):
    entry = msgspec.structs.replace(newer.episodes, novel_alone=pack_array(np.ones(1999, int)))
    assert "episodes.novel_alone has 1999 entries" in find_first_contradiction(
        msgspec.structs.replace(newer, episodes=entry)
    )


def test_long_results_are_packed_and_short_ones_are_not(monkeypatch):
    shape = EpisodeSpec(ways=5, novel_queries=5, base_queries=25)
    counts, classes = drawn(50, shape)
    assert all(
        isinstance(getattr(EpisodeCounts.from_hit_counts(counts, classes), name), list)
        for name in EpisodeCounts.COLUMNS
    )
    monkeypatch.setattr(stored_counts, "MOST_READABLE_NUMBERS", 50 * 12 - 1)
    entry = EpisodeCounts.from_hit_counts(counts, classes)
    assert all(isinstance(getattr(entry, name), str) for name in EpisodeCounts.COLUMNS)
    assert EpisodeCounts.__len__(entry) == 50
    draws = ClassDraws(50, 5, 200, stream_key=7)
    entry = EpisodeCounts.from_hit_counts(counts, draws)
    assert (entry.classes, entry.column_length("classes")) == (str(draws), 250)
    assert entry.has_same_numbers(EpisodeCounts.from_hit_counts(counts, draws.to_array()), ["classes"])


def test_tables_of_many_episodes_keep_little_in_memory():
    """A ranked table of many rows and seeds holds a few bytes a count, and two rows' values at a time."""
    import scipy.special  # noqa: F401  the statistics import it late, and its modules are no table's memory

    from ifsl_bench.analysis.ranking import Ranking

    n, seeds, rows = 20_000, 3, 8
    (task,) = load_tasks("glyphs-5shot")
    template = read_result(STORED)
    counts, classes = drawn(n, task.episode)

    def result(row: int, seed: int) -> Result:
        entry = EpisodeCounts.from_hit_counts(counts, classes)
        return msgspec.structs.replace(template, label=f"row{row}", seed=seed, episodes=entry, setting="every")

    table_rows = [SeedAggregate(f"row{r}", "yours", tuple(result(r, s) for s in range(seeds))) for r in range(rows)]
    tracemalloc.start()
    places = Ranking(table_rows).ranked_rows
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(places) == rows
    kept_bytes, values = rows * seeds * n * 8, seeds * n * 8
    assert peak < kept_bytes + 10 * values
    assert peak < rows * seeds * n * 8 * 5, "all metrics of all rows would take more than twice as much"
