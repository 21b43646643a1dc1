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


def main() -> None:
    """Prints the table."""
    root, rows = Path(sys.argv[1]), []
    for shots in ("1shot", "5shot"):
        for path in sorted((root / f"tiny-features-{shots}").glob("*.seed-0.json")):
            other = root / f"tiny-pack-{shots}" / path.name
            if not other.exists():
                continue
            ours, theirs = accuracy(path), accuracy(other)
            mean, interval = ours.mean() - theirs.mean(), 1.96 * float(np.hypot(stats.sem(ours), stats.sem(theirs)))
            label, difference = path.name.removesuffix(".seed-0.json"), f"{mean:+.2f} ± {interval:.2f}"
            theirs_shown, ours_shown = (f"{x.mean():.2f} ± {1.96 * stats.sem(x):.2f}" for x in (theirs, ours))
            rows.append([label, shots, theirs_shown, ours_shown, difference])
    heads = ["method", "", "tiny-pack", "tiny-features", "difference"]
    print(tabulate(rows, heads, "github", disable_numparse=True))


if __name__ == "__main__":
    main()
