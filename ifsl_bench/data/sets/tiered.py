"""tiered-ImageNet (Ren et al. 2018) with base classes (Ren et al. 2019): 608 classes of ILSVRC-2012, 84x84.

The 351 training classes are divided into 200 base classes (Train-A, whose images have three phases) and 151 for
meta-training (Train-B). ``tiered-imagenet`` is that split exactly. The files of 2018, from before it was made, have
neither phases nor file names: ``tiered-imagenet-2018`` draws the images of the phases and has therefore its own name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from ifsl_bench.data.image_pools import import_images
from ifsl_bench.data.pickle_pools import (
    IMAGE_SHAPE,
    IMAGE_SIZE,
    find_required_entry,
    group_rows_by_class,
    load_pickled_dict,
    read_list_items,
    to_class_names,
    to_integer_array,
    to_list_items,
)
from ifsl_bench.data.published_splits import (
    IlsvrcLayout,
    PublishedData,
    check_pool_counts,
    read_mapping_of_columns,
    split_base_class_images,
)
from ifsl_bench.data.read.archive import Entry, FileTree
from ifsl_bench.data.read.images import ImageSpec
from ifsl_bench.data.source import BuildContext, Layout, PoolSize
from ifsl_bench.utils.errors import UserError

NAMES_FILE, SYNSETS_FILE = "class_names.txt", "synsets.txt"
CLASSES_FILE, PHASES_FILE = "tiered-imagenet.csv", "tiered-imagenet-train-a-images.csv.xz"
POOL_COUNTS = {  # Ren et al. (2019), appendix, "Dataset Statistics"
    "base/train": PoolSize(200, 203_751),
    "base/val": PoolSize(200, 25_460),
    "base/test": PoolSize(200, 25_488),
    "novel/train": PoolSize(151, 193_996),
    "novel/val": PoolSize(97, 124_261),
    "novel/test": PoolSize(160, 206_209),
}
_POOL_OF_SIDE = {"train_b": "novel/train", "val": "novel/val", "test": "novel/test"}
read_side_of_wnid = partial(
    read_mapping_of_columns, CLASSES_FILE, "wnid", "split"
)  # wnid -> train_a, train_b, val or test


class IlsvrcFolder(IlsvrcLayout):
    """The photographs of ILSVRC-2012, divided as by Ren et al. (2019)."""

    def build(self, context: BuildContext) -> None:
        phases = read_mapping_of_columns(PHASES_FILE, "image", "phase")
        pools: dict[str, dict[str, Sequence[str]]] = {pool: {} for pool in POOL_COUNTS}
        for wnid, images in self.images(context.file_tree).items():
            if wnid not in read_side_of_wnid():
                continue
            if read_side_of_wnid()[wnid] != "train_a":
                pools[_POOL_OF_SIDE[read_side_of_wnid()[wnid]]][wnid] = list(images.values())
                continue
            for phase in ("train", "val", "test"):
                pools[f"base/{phase}"][wnid] = [path for name, path in images.items() if phases.get(name) == phase]
        check_pool_counts(context, "tiered-ImageNet", POOL_COUNTS, pools)
        # As the authors' preparation resized them.
        import_images(context, pools, ImageSpec(IMAGE_SIZE, fit_mode="stretch", resampling_filter="cubic-opencv"))


def read_wnid_by_name(tree: FileTree, wanted: Mapping[str, str], what: str) -> dict[str, str]:
    """Return class name -> wnid, from two lists of the release.

    Args:
        tree: Folder or archive.
        wanted: The wnids of the data set; a name may belong to two classes of ILSVRC-2012, but to one of these.
        what: Name of the release in messages.

    Raises:
        UserError: A list is missing, or they do not fit each other.
    """
    lists = []
    for name in (NAMES_FILE, SYNSETS_FILE):
        entry = find_required_entry(tree, name, f"{what}, with the names of its classes")
        lists.append([line.strip() for line in tree.read_bytes(entry).decode("utf-8", "replace").rstrip().splitlines()])
    names, wnids = lists
    if len(names) != len(wnids):
        raise UserError(
            f"{tree.path}: {NAMES_FILE} has {len(names):,} lines, {SYNSETS_FILE} has {len(wnids):,}; get both again"
        )
    wnid_of: dict[str, str] = {}
    for name, wnid in zip(names, wnids, strict=True):
        if wnid in wanted and wnid_of.setdefault(name, wnid) != wnid:
            raise UserError(f"{tree.path}: {NAMES_FILE} calls two classes {name!r}, {wnid_of[name]} and {wnid}")
    return wnid_of


def read_label_rows(tree: FileTree, entry: Entry, names: Mapping[str, str]) -> tuple[int, dict[str, list[int]]]:
    """Return the number of images in a file of labels, and wnid -> rows of its images.

    Args:
        tree: Folder or archive.
        entry: The file of labels.
        names: Class name -> wnid.

    Raises:
        UserError: The file is not as it should be, or has an unknown class.
    """
    where = tree.format_location(entry)
    value = load_pickled_dict(tree, entry, ("label_specific", "label_specific_str"))
    labels = to_integer_array(value["label_specific"], "'label_specific'", where)
    called = to_class_names(value["label_specific_str"], "'label_specific_str'", where)
    groups = group_rows_by_class(labels, dict(enumerate(called)), where)
    if strange := [name for name in groups if name not in names]:
        raise UserError(f"{where} has a class {strange[0]!r}, which is none of tiered-ImageNet's in {NAMES_FILE}")
    return len(labels), {names[name]: rows for name, rows in groups.items()}


class _PngPickles(Layout):
    """Pairs of files, ``<prefix>_labels.pkl`` with classes by name and ``<prefix>_images_png.pkl``, a list of PNGs.

    Attributes:
        sides_of_prefix: prefix of a pair -> the sides that its classes may be on.
        own_file_prefixes: beginnings of file names that only this form has.
    """

    sides_of_prefix: ClassVar[Mapping[str, Sequence[str]]]
    own_file_prefixes: ClassVar[tuple[str, ...]]

    def matches(self, tree: FileTree) -> bool:
        return any(entry.name.startswith(self.own_file_prefixes) for entry in tree.entries)

    @abstractmethod
    def divide_among_pools(self, prefix: str, wnid: str, rows: Sequence[int]) -> Mapping[str, Sequence[int]]:
        """Return pool -> rows of a class.

        Args:
            prefix: Of the file.
            wnid: Of the class.
            rows: Of its images.
        """

    def build(self, context: BuildContext) -> None:
        tree = context.file_tree
        entries = {
            prefix: find_required_entry(tree, f"{prefix}_labels.pkl", self.title) for prefix in self.sides_of_prefix
        }
        images = {
            prefix: find_required_entry(tree, f"{prefix}_images_png.pkl", self.title) for prefix in self.sides_of_prefix
        }
        names = read_wnid_by_name(tree, read_side_of_wnid(), self.title)
        counts: dict[str, int] = {}
        pools: dict[str, dict[str, Sequence[int]]] = {pool: {} for pool in POOL_COUNTS}
        source: dict[str, str] = {}  # pool -> the prefix that its images come from
        for prefix, entry in entries.items():
            counts[prefix], groups = read_label_rows(tree, entry, names)
            for wnid, rows in groups.items():
                if (side := read_side_of_wnid()[wnid]) not in self.sides_of_prefix[prefix]:
                    raise UserError(
                        f"{tree.format_location(entry)} has class {wnid}, which tiered-ImageNet has on side {side}"
                    )
                for pool, part in self.divide_among_pools(prefix, wnid, rows).items():
                    pools[pool][wnid] = part
                    source[pool] = prefix
        check_pool_counts(context, "tiered-ImageNet", POOL_COUNTS, pools)
        import_images(
            context,
            {pool: to_list_items(images[source[pool]].name, pools[pool]) for pool in source},
            ImageSpec(IMAGE_SIZE),
            lambda pool, wanted: read_list_items(tree, images[source[pool]], wanted, counts[source[pool]]),
        )


class Ren2019Pickles(_PngPickles):
    """The files of Ren et al. (2019)."""

    title: ClassVar[str] = "the files of Ren et al. (2019) (train_a_*, train_b_*, val_*, test_*)"
    sides_of_prefix: ClassVar = {
        f"train_a_train_a_phase_{phase}": ["train_a"] for phase in ("train", "val", "test")
    } | {side: [side] for side in _POOL_OF_SIDE}
    own_file_prefixes = ("train_a_", "train_b_")

    def divide_among_pools(self, prefix: str, wnid: str, rows: Sequence[int]) -> Mapping[str, Sequence[int]]:
        return {_POOL_OF_SIDE.get(prefix) or f"base/{prefix.rpartition('_')[2]}": rows}


class Ren2018Pickles(_PngPickles):
    """The files of Ren et al. (2018) and of learn2learn."""

    title: ClassVar[str] = (
        "the files of Ren et al. (2018) and of learn2learn ({train,val,test}_{images_png,labels}.pkl)"
    )
    sides_of_prefix: ClassVar = {"train": ["train_a", "train_b"], "val": ["val"], "test": ["test"]}
    own_file_prefixes = ("train_labels.pkl", "train_images_png.pkl")

    def divide_among_pools(self, prefix: str, wnid: str, rows: Sequence[int]) -> Mapping[str, Sequence[int]]:
        if read_side_of_wnid()[wnid] == "train_a":
            return split_base_class_images(rows, f"tiered-imagenet-2018:{wnid}")
        return {_POOL_OF_SIDE[read_side_of_wnid()[wnid]]: rows}


class TieredImageNet(PublishedData):
    """The exact protocol of Ren et al. (2019)."""

    name = "tiered-imagenet"
    summary: ClassVar[str] = "tiered-ImageNet, exact protocol; from the files of Ren et al. (2019) or ILSVRC-2012"
    layouts = (Ren2019Pickles(), IlsvrcFolder())
    image_shape, pool_counts, packaged_list_names = IMAGE_SHAPE, POOL_COUNTS, (CLASSES_FILE, PHASES_FILE)


class Tiered2018(PublishedData):
    """A variant: the images of the base classes are drawn into the three base pools."""

    name = "tiered-imagenet-2018"
    summary: ClassVar[str] = "tiered-ImageNet, variant: base pools drawn; from the files of 2018 (learn2learn's)"
    layouts = (Ren2018Pickles(),)
    image_shape, pool_counts, packaged_list_names = IMAGE_SHAPE, POOL_COUNTS, (CLASSES_FILE,)
