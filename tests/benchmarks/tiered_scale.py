"""The import of a data set of tiered-ImageNet's size: peak memory, speed, and the speed of drawing episodes from it.

    python tests/benchmarks/tiered_scale.py                 # 779,165 images; needs 30 GB of disk and about an hour
    python tests/benchmarks/tiered_scale.py --scale 0.02
    python tests/benchmarks/tiered_scale.py --episodes      # seconds

Writes the attractor release's files (lists of PNGs as Python 2 pickled them, labels, names) with made-up images of
about the size of real ones, a thousand of them in memory at a time; imports them with the command line in a process of
its own; compares drawing episodes with doing so from a data set of mini-ImageNet's size. ``--folder`` says where the
files go (a temporary folder otherwise); everything is removed in the end.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from ifsl_bench.common.files import Home
from ifsl_bench.data.pools import open_dataset
from ifsl_bench.data.preparing.prepare import dataset_folder
from ifsl_bench.data.published_splits import held_out, rows
from ifsl_bench.data.sets.tiered import COUNTS
from ifsl_bench.protocol.episodes import Sampler
from ifsl_bench.protocol.task import EpisodeSpec

PREFIXES = {
    "base/train": "train_a_train_a_phase_train",
    "base/val": "train_a_train_a_phase_val",
    "base/test": "train_a_train_a_phase_test",
    "novel/train": "train_b",
    "novel/val": "val",
    "novel/test": "test",
}
SIDES = {"base": "train_a", "novel/train": "train_b", "novel/val": "val", "novel/test": "test"}


def class_sizes(scale: float) -> dict[str, dict[str, int]]:
    """Pool -> wnid -> number of images: the published numbers, at least 12 of a class."""
    sides = {row["wnid"]: row["split"] for row in rows("tiered-imagenet.csv")}
    sizes: dict[str, dict[str, int]] = {pool: {} for pool in COUNTS}
    listed = Counter(row["image"].split("_")[0] for row in rows("tiered-imagenet-train-a-images.csv.xz"))
    for wnid, count in listed.items():
        for pool, part in held_out(range(count), "").items():
            sizes[pool][wnid] = len(part)
    for pool in ("novel/train", "novel/val", "novel/test"):
        wnids = [wnid for wnid, side in sides.items() if side == SIDES[pool]]
        for i, wnid in enumerate(wnids):
            sizes[pool][wnid] = (COUNTS[pool].images + i) // len(wnids)  # adds up to the published number
    return {p: {w: n if scale == 1 else max(12, round(n * scale)) for w, n in of.items()} for p, of in sizes.items()}


def made_up(seed: int) -> np.ndarray:
    """An image that compresses like a photo: smooth, with some noise."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    noise = generator.integers(-12, 13, (84, 84, 3))
    return (np.asarray(small.resize((84, 84), Image.Resampling.BICUBIC)) + noise).clip(0, 255).astype(np.uint8)


def encoded(count: int, seed: int) -> Iterator[bytes]:
    """That many different PNG files."""
    kinds = [made_up(1000 * seed + i) for i in range(64)]

    def encode(index: int) -> bytes:
        image = np.roll(kinds[index % 64], (index // 64) % 84, axis=index % 2)
        image[0, 0], image[0, 1, 0] = (index & 255, index >> 8 & 255, index >> 16), seed
        out = io.BytesIO()
        Image.fromarray(image).save(out, "PNG", compress_level=1)
        return out.getvalue()

    with ThreadPoolExecutor() as pool:
        numbers = iter(range(count))
        while chunk := list(islice(numbers, 512)):
            yield from pool.map(encode, chunk)


def write_list(path: Path, contents: Iterator[bytes]) -> None:
    """Pickles arrays uint8 [L, 1] as Python 2's cPickle does in protocol 2: batches of 1,000, most things memorised."""
    memo = 4
    start = b"cnumpy.core.multiarray\n_reconstruct\nq\x00cnumpy\nndarray\nq\x01K\x00\x85U\x01bq\x02\x87R"
    later = b"h\x00h\x01K\x00\x85h\x02\x87R"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbq\x03"
    with open(path, "wb", buffering=1 << 20) as file:
        file.write(b"\x80\x02]")
        while batch := list(islice(contents, 1000)):
            file.write(b"(")
            for content in batch:
                puts = [b"r" + struct.pack("<I", memo + i) for i in range(4)]
                shape = b"J" + struct.pack("<i", len(content)) + b"K\x01\x86" + puts[1]
                raw = b"T" + struct.pack("<i", len(content)) + content + puts[2]
                file.write(b"".join((start, puts[0], b"(K\x01", shape, kind, b"\x89", raw, b"t", puts[3], b"b")))
                start, kind, memo = later, b"h\x03", memo + 4
            file.write(b"e")
        file.write(b".")


def write_files(folder: Path, scale: float) -> int:
    """All files of the release; returns the number of images."""
    wnids = sorted(row["wnid"] for row in rows("tiered-imagenet.csv"))
    (folder / "synsets.txt").write_text("\n".join(wnids))
    (folder / "class_names.txt").write_text("\n".join(f"class {wnid}" for wnid in wnids))
    total = 0
    for seed, (pool, sizes) in enumerate(class_sizes(scale).items()):
        labels = np.repeat(np.arange(len(sizes), dtype=np.int32), list(sizes.values()))
        value = {b"label_specific": labels, b"label_specific_str": [f"class {wnid}" for wnid in sizes]}
        (folder / f"{PREFIXES[pool]}_labels.pkl").write_bytes(pickle.dumps(value, 2))
        write_list(folder / f"{PREFIXES[pool]}_images_png.pkl", encoded(len(labels), seed))
        total += len(labels)
    return total


def memory(pid: int) -> int:
    """Bytes in memory of a process and of those that it started, what they share counted once (Linux)."""
    total = 0
    with suppress(OSError):  # it has ended
        total = 1024 * int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0])
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(memory, map(int, (task / "children").read_text().split())))
    return total


def run_import(folder: Path, home: Path, scale: float) -> tuple[float, float, int]:
    """Seconds, seconds of computing on all cores, and peak memory (bytes, sampled) of the command."""
    command = [sys.executable, "-m", "ifsl_bench", "data", "prepare", "tiered-imagenet", "--from", str(folder)]
    command += ["--home", str(home), *(["--allow-partial"] if scale != 1 else [])]
    before, start, peak = os.times(), time.perf_counter(), 0
    child = subprocess.Popen(command)
    while child.poll() is None:
        peak = max(peak, memory(child.pid))
        time.sleep(0.25)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    after = os.times()
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, busy, peak


def episodes_per_second(novel: np.ndarray, base: np.ndarray, count: int = 20_000) -> float:
    sampler = Sampler(("tiered scale", "test", 0), EpisodeSpec(), 5, novel, base)
    sampler.sample(0, 500)
    start = time.perf_counter()
    for first in range(0, count, 500):
        sampler.sample(first, 500)
    return count / (time.perf_counter() - start)


def compare_episodes(novel: np.ndarray, base: np.ndarray) -> None:
    large = episodes_per_second(novel, base)
    small = episodes_per_second(np.arange(21) * 600, np.arange(65) * 300)
    rates = f"{large:,.0f} a second from these, {small:,.0f} from mini-ImageNet's (ratio {large / small:.2f})"
    print(f"drawing episodes: {rates}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the images")
    parser.add_argument("--folder", type=Path, help="where the files go")
    parser.add_argument("--episodes", action="store_true", help="only draw episodes, from the sizes of the classes")
    arguments = parser.parse_args()
    if arguments.episodes:
        sizes = class_sizes(arguments.scale)
        compare_episodes(*(np.cumsum([0, *sizes[pool].values()]) for pool in ("novel/test", "base/test")))
        return
    root = Path(tempfile.mkdtemp(prefix="tiered-scale-", dir=arguments.folder))
    try:
        files, home = root / "files", root / "home"
        files.mkdir()
        start = time.perf_counter()
        total = write_files(files, arguments.scale)
        size = sum(path.stat().st_size for path in files.iterdir())
        print(f"wrote {total:,} images, {size / 1e9:.2f} GB, in {time.perf_counter() - start:.0f} s", flush=True)
        seconds, busy, peak = run_import(files, home, arguments.scale)
        written = total * 84 * 84 * 3
        print(f"import: {seconds:.1f} s ({busy:.1f} s of computing on all cores), peak memory {peak / 1e6:,.0f} MB")
        speeds = f"{size / 1e6 / seconds:.1f} MB/s read, {written / 1e6 / seconds:.1f} MB/s written"
        print(f"{total / seconds:,.0f} images/s, {speeds}")
        dataset = open_dataset(dataset_folder(Home.locate(home), "tiered-imagenet"))
        compare_episodes(dataset.pool("novel/test").starts, dataset.pool("base/test").starts)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
