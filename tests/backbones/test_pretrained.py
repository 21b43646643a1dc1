"""A base classifier that has learned nothing is told."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from ifsl_bench.backbones.pretrained import make_chance_warning
from ifsl_bench.data.pools import Dataset, Pool


class Counted(Dataset):
    """Pools of so many images of each class."""

    shape = (2, 2, 3)

    def pool(self, name: str) -> Pool:
        counts = self.manifest[name]
        labels = np.repeat(np.arange(len(counts)), counts)
        names = tuple(map(str, range(len(counts))))
        return Pool(name, labels, labels, names, np.append(0, np.cumsum(counts)))


def counted(*counts: int) -> Dataset:
    base = {"base/train": {"classes": [str(i) for i in range(len(counts))]}}
    return Counted("d", None, {"base/val": counts, "base/test": counts, "pools": base})


@pytest.mark.parametrize("counts", [(100,) * 20, (300, 100, 100, 50), (4,) * 5])
def test_chance_ends_where_a_binomial_test_rejects_it(counts):
    dataset, total = counted(*counts), 2 * sum(counts)
    chance = max(counts) / sum(counts)
    for hits in range(0, total, 2):
        share = hits / total
        message = make_chance_warning({"base/val": share, "base/test": share}, dataset)
        p = stats.binomtest(hits, total, chance, alternative="greater").pvalue
        if p < 0.01:
            assert not message, hits
        elif p > 0.06:
            assert "is at chance" in message, hits
            assert f"of {len(counts)} classes" in message
            assert "ifsl-bench data show d" in message


def test_a_run_says_so_each_time(here, call):
    text = (here / "clusters.toml").read_text().replace("steps = 60", "steps = 0")
    (here / "clusters.toml").write_text(text)
    for _ in range(2):
        status, _, err = call("run", "--method", "imprint", "--task", "clusters.toml:clusters-5shot", "--episodes", "5",
                              "--rerun", "-q")  # fmt: skip
        assert status == 0, err
        assert "warning: the base classifier is at chance (base/val" in err
        assert "Look at steps and rate of [pretraining]" in err
