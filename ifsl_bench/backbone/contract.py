"""The interface of a backbone plugin. Register it under the entry point group ``ifsl_bench.backbones``.

There are two kinds. A subclass of :class:`Backbone` is a network that is pretrained here, on the base classes of each
task. A subclass of :class:`Frozen` knows networks with weights from elsewhere, which are used as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

UNKNOWN = "unknown"  # what a network was pretrained on, where nobody says


class Backbone(nn.Module):
    """Images [B, C, H, W] to features [B, D]; D is ``features``.

    One that is registered is made as ``kind(channels=C, norm_momentum=m)``, where ``m`` is for its batch norms, if it
    has any (the weight of the new batch).
    """

    features: int


@dataclass(frozen=True)
class Card:
    """The properties of a frozen network that are known before its weights are there.

    Attributes:
        size: (H, W) of the images that it sees.
        resize: what images are resized to before the middle of ``size`` is cut out: (H, W), or the shorter side alone.
        interpolation: "bilinear" or "bicubic", and what else torchvision's ``InterpolationMode`` has.
        mean, std: of each of three channels, of pixels from 0 to 1.
        corpora: the sets of images that it was pretrained on, as :mod:`ifsl_bench.protocol.contamination` names them;
            with :data:`UNKNOWN` among them where more may have been used.
        source: the address of its weights; "" where there is none.
        licence: of the weights, as their source says; "" where it does not.
        endings: of the files that its weights come in, the likeliest first.
    """

    size: tuple[int, int]
    resize: int | tuple[int, int]
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    corpora: tuple[str, ...]
    source: str = ""
    licence: str = ""
    endings: tuple[str, ...] = (".safetensors", ".pth")


class Frozen(ABC):
    """Networks that are used as they come.

    A registered name ``zoo`` is one network, or several: ``zoo:MODEL`` is asked for as ``model="MODEL"``, the plain
    name as ``model=""``.

    Attributes:
        requires: modules that have to be installed, and how to install them.
        libraries: distributions that a result names with their versions.
    """

    requires: ClassVar[Mapping[str, str]] = {}
    libraries: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def card(self, model: str, own_weights: bool = False) -> Card:
        """Describes a network; quick, without its weights.

        Args:
            own_weights: whether the user gives weights, so that the name need not say which.

        Raises:
            UserError: no such network.
        """

    @abstractmethod
    def network(self, model: str) -> tuple[nn.Module, int]:
        """The network with random weights, images [B, 3, H, W] to features [B, D], and D."""

    @abstractmethod
    def fill(self, model: str, network: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Gives the network its weights, of a file that may hold those of a classifier besides.

        Raises:
            Exception: they do not fit.
        """

    @abstractmethod
    def fetch(self, model: str, folder: Path) -> Path:
        """Gets the weights from their source, as a file in ``folder`` or in a cache of a library's own.

        Raises:
            Exception: it cannot be reached.
        """
