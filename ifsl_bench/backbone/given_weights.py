"""Files of weights that were made elsewhere: where they lie, how they are read, what they are known by."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ifsl_bench.backbone.contract import Card, Frozen
from ifsl_bench.common.errors import UserError, one_line
from ifsl_bench.common.files import Home, disk_errors, sha256_file, write_bytes
from ifsl_bench.common.limits import Limit
from ifsl_bench.common.progress import Reporter
from ifsl_bench.protocol.task import WEIGHTS_DIGITS, Pretraining

WEIGHTS = Limit(
    8 << 30,
    "has {value} bytes, more than {most}; no network that fits one accelerator is that large",
    "The largest vision transformers have 6 billion parameters, in half precision 12 GB; those in use have 1 to 2.",
)
TENSORS = Limit(
    100_000, "holds {value} tensors, more than {most}; it is no file of weights", "Networks have thousands."
)
ENDINGS = (".safetensors", ".pth", ".pt", ".bin")


def take_weights(home: Home, file: Path) -> str:
    """Keeps a copy of a file of weights in the home; returns the first digits of its checksum, which name it there.

    Raises:
        UserError: no such file, one that holds no weights, or a full disk.
    """
    read_weights(file)
    digest = sha256_file(file)[:WEIGHTS_DIGITS]
    target = home.weights / f"{digest}{file.suffix}"
    if not target.exists():
        write_bytes(target, file.read_bytes())
    return digest


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name; nothing in it is run.

    Raises:
        UserError: no such file, one that is too large, or no weights.
    """
    if not os.path.isfile(path):
        raise UserError(f"there is no file of weights {path}")
    if path.suffix not in ENDINGS:
        raise UserError(f"{path}: a file of weights ends in {', '.join(ENDINGS)}")
    WEIGHTS.check(path.stat().st_size, str(path))
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or one_line(str(error))}") from error
    except (EOFError, KeyError, pickle.UnpicklingError) as error:  # empty, text, or more than tensors
        what = "torch.save did not write it, not to its end, or with more than tensors by name"
        raise UserError(f"{path} holds no weights: {what}; save its state_dict") from error
    except Exception as error:  # of many kinds, safetensors' own among them
        raise UserError(f"{path} holds no weights: {type(error).__name__}: {one_line(str(error))[:200]}") from error
    for key in ("state_dict", "model"):  # as training scripts wrap them
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found or not all(isinstance(v, Tensor) for v in found.values()):
        raise UserError(f"{path} holds no weights: it should hold tensors by name, as a state_dict does")
    TENSORS.check(len(found), str(path))
    return {str(name).removeprefix("module."): value for name, value in found.items()}


def weights_file(home: Home, spec: Pretraining, plugin: Frozen, model: str, card: Card, reporter: Reporter) -> Path:
    """The file of a frozen backbone's weights: the user's, the one in the home, or the source's.

    Raises:
        UserError: it is not there and cannot be got; says which file to get and where to put it.
    """
    name = spec.weights or spec.backbone
    for ending in dict.fromkeys([*card.endings, *ENDINGS]):
        if os.path.isfile(path := home.weights / f"{name}{ending}"):
            return path
    if spec.weights is not None:
        raise UserError(
            f"the weights {spec.weights} of {spec.backbone} are not in {home.weights}; give the file once more with "
            f"--weights FILE"
        )
    target = home.weights / f"{name}{card.endings[0]}"
    reporter.say(f"weights of {spec.backbone}: {card.source}")
    with disk_errors(home.weights):
        home.weights.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=home.weights) as folder:
        try:
            got = plugin.fetch(model, Path(folder))
        except Exception as error:
            why = one_line(str(getattr(error, "reason", error))).strip()[:120] or type(error).__name__
            raise UserError(
                f"the weights of {spec.backbone} cannot be downloaded here ({why}); get {card.source or 'them'} "
                f"elsewhere, and put it at {target}"
            ) from error
        write_bytes(target, got.read_bytes())
    return target
