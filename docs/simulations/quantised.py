"""What bytes and lost images cost: rows on tiny-features beside the same rows on the images, in a Markdown table.

``python docs/simulations/quantised.py RESULTS`` reads the results of tiny-features and tiny-pack with seed 0 below a
folder: the same images under the same backbones. Episodes are drawn anew for each data set, so the interval of a
difference is that of two independent means.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from scipy import stats
from tabulate import tabulate

from ifsl_bench.store import schema as result_file


def accuracy(path: Path) -> np.ndarray:
    """[episodes], in percent."""
    counts = result_file.read_result(path).to_hit_counts()
    hits = np.add(counts.base_joint, counts.novel_joint)
    return 100 * hits / (counts.base_queries + counts.novel_queries)


def compared(root: Path, shots: str, name: str) -> list[str]:
    """The accuracies of a result on tiny-pack and on tiny-features, and their difference, with intervals."""
    theirs, ours = (accuracy(root / f"{task}-{shots}" / name) for task in ("tiny-pack", "tiny-features"))
    mean, interval = ours.mean() - theirs.mean(), 1.96 * float(np.hypot(stats.sem(ours), stats.sem(theirs)))
    shown = [f"{x.mean():.2f} ± {1.96 * stats.sem(x):.2f}" for x in (theirs, ours)]
    return [*shown, f"{mean:+.2f} ± {interval:.2f}"]


def main() -> None:
    """Prints the table."""
    root, shots = Path(sys.argv[1]), ("1shot", "5shot")
    names = sorted(path.name for path in (root / "tiny-pack-1shot").glob("*.seed-0.json"))
    rows = [
        [name.removesuffix(".seed-0.json"), *(cell for s in shots for cell in compared(root, s, name))]
        for name in names
    ]
    heads = [f"{head}, {s}" for s in ("1 shot", "5 shots") for head in ("tiny-pack", "tiny-features", "difference")]
    print(tabulate(rows, ["method", *heads], "github", disable_numparse=True))


if __name__ == "__main__":
    main()
