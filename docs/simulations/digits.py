"""Writes scikit-learn's digits as frozen features, as they are and centred.

    pip install scikit-learn
    python docs/simulations/digits.py FOLDER

The 64 pixels of 1,797 digits, turned by quarters to make 40 classes: 20 base classes, 8 for validation, 12 for the
test. FOLDER/plain and FOLDER/centred are folders for ``ifsl-bench data prepare``; docs/data.md has what came of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def main(folder: Path) -> None:
    digits = load_digits()
    turned = [np.rot90(digits.images, quarter, (1, 2)).reshape(-1, 64) for quarter in range(4)]
    features = np.concatenate(turned).astype(np.float32)  # [7188, 64]
    labels = np.concatenate([digits.target + 10 * quarter for quarter in range(4)])
    generator = np.random.default_rng(0)
    order, classes = generator.permutation(len(labels)), generator.permutation(40)
    features, labels = features[order], labels[order]
    base, val, test = (np.flatnonzero(np.isin(labels, some)) for some in np.split(classes, [20, 28]))
    cuts = np.split(base, [int(0.8 * len(base)), int(0.9 * len(base))])
    rows = dict(zip(("base-train", "base-val", "base-test"), cuts, strict=True)) | {
        "novel-val": val,
        "novel-test": test,
    }
    for name, mean in (("plain", 0.0), ("centred", features[rows["base-train"]].mean(0))):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for pool, some in rows.items():
            np.savez(folder / name / f"{pool}.npz", features=features[some] - mean, labels=labels[some])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
