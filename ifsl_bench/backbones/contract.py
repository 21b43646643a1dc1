"""The interface of a backbone plugin, and backbones by name; their entry point group is ``ifsl_bench.backbones``.

There are two kinds. A subclass of :class:`Backbone` is a network that is pretrained here, on the base classes of each
task, unless the task names a file of weights. A subclass of :class:`FrozenBackbone` makes networks with weights from
elsewhere, which are used as they are.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task import INCLUDED_BACKBONE, NO_BACKBONE, Pretraining
from ifsl_bench.utils.deprecated import accept_old_names, rename_attributes
from ifsl_bench.utils.errors import UserError, unknown_name_error

BACKBONE_GROUP = "ifsl_bench.backbones"
UNKNOWN_CORPUS = "unknown"  # the images that a network was pretrained on, where its source does not name them


class Backbone(nn.Module):
    """A network from images [B, C, H, W] to features [B, D], where D is the attribute ``features``.

    A registered class is constructed as ``MyNet(channels=C, norm_momentum=m)``; ``m`` is the momentum of its batch
    norms, if it has any (the weight of the new batch).
    """

    features: int

    @property
    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        """The parts of the network in order, whose composition is ``forward``; recipes may work between two."""
        return [self]


@dataclass(frozen=True)
class BackboneInfo:
    """The properties of a frozen network that are known before its weights are there.

    Attributes:
        size: (H, W) in pixels of the images that enter it.
        resize: size to which images are resized before the middle of ``size`` is cut out: (H, W), or the shorter side.
        interpolation: "bilinear", "bicubic" or another value of torchvision's ``InterpolationMode``.
        mean, std: of each of three channels, of pixels from 0 to 1.
        corpora: the sets of images that it was pretrained on, as
            :mod:`ifsl_bench.protocols.tasks.contamination` names them; with :data:`UNKNOWN_CORPUS` among them where
            more may have been used.
        source: the address of its weights; "" where there is none.
        endings: of the names of its files of weights, the likeliest first.
    """

    size: tuple[int, int]
    resize: int | tuple[int, int]
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    corpora: tuple[str, ...]
    source: str = ""
    endings: tuple[str, ...] = (".safetensors", ".pth")


@accept_old_names(network="make_network", fill="load_weights", fetch="download_weights")
class FrozenBackbone(ABC):
    """Networks with weights from elsewhere, which are not trained.

    A registered name ``zoo`` is one network, or several: ``zoo:MODEL`` calls each method with ``model="MODEL"``, the
    plain name with ``model=""``.

    Attributes:
        requires: modules that have to be installed, and how to install them.
        libraries: distributions that a result names with their versions.
    """

    requires: ClassVar[Mapping[str, str]] = {}
    libraries: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rename_attributes(cls)

    @abstractmethod
    def describe(self, model: str, own_weights: bool = False) -> BackboneInfo:
        """Describe a network; quick, without its weights.

        Args:
            model: the name of the network, or "".
            own_weights: whether the user gives weights, so that the name need not name any.

        Raises:
            UserError: no such network.
        """

    @abstractmethod
    def make_network(self, model: str) -> tuple[nn.Module, int]:
        """Make the network with random weights, images [B, 3, H, W] to features [B, D]; return it and D."""

    @abstractmethod
    def load_weights(self, model: str, network: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Load the network's weights.

        Args:
            model: the name of the network, or "".
            network: as :meth:`network` makes it.
            weights: the tensors of a file, which may also have a classifier's.

        Raises:
            Exception: they do not fit.
        """

    @abstractmethod
    def download_weights(self, model: str, folder: Path) -> Path:
        """Download the weights.

        Args:
            model: the name of the network, or "".
            folder: an empty folder for the file.

        Returns:
            The file, in ``folder`` or in a library's own cache.

        Raises:
            Exception: it cannot be reached.
        """


def find_backbone_and_model(name: str) -> tuple[type[Backbone] | FrozenBackbone, str]:
    """Find the plugin of a backbone.

    Args:
        name: ``NAME``, ``NAME:MODEL``, or ``PACKAGE:NAME`` where several packages register one name.

    Returns:
        The class of a network that is pretrained here, or an instance of a :class:`FrozenBackbone`; and MODEL or "".

    Raises:
        UserError: unknown name (with the nearest ones), or a plugin that cannot be used.
    """
    plugin_name, model = name, ""
    if not registry.find_owning_entry_points(BACKBONE_GROUP, name):
        plugin_name, _, model = name.partition(":")
        if not registry.find_owning_entry_points(BACKBONE_GROUP, plugin_name):
            raise unknown_name_error("backbone", name, [*registry.registered_entry_points(BACKBONE_GROUP), NO_BACKBONE])
    value = registry.get_registered(BACKBONE_GROUP, "backbone", plugin_name)
    if isinstance(value, type) and issubclass(value, FrozenBackbone):
        return value(), model
    if isinstance(value, type) and issubclass(value, Backbone):
        if model:
            raise UserError(f"backbone {plugin_name!r} is one network, there is no {name!r}")
        return value, ""
    raise UserError(
        f"backbone {plugin_name!r} is {value!r}, neither a Backbone nor a FrozenBackbone of "
        "ifsl_bench.backbones.contract"
    )


def describe_backbones() -> dict[str, str]:
    """Return the first line of each registered backbone's docstring, by name; or why it cannot be used."""
    plugins = {
        name: registry.load_plugin(BACKBONE_GROUP, name) for name in registry.registered_entry_points(BACKBONE_GROUP)
    }
    texts = {
        name: plugin.load_problem or (plugin.loaded_object.__doc__ or "").strip() for name, plugin in plugins.items()
    }
    return {name: text.partition("\n")[0] for name, text in texts.items()}


def is_frozen(spec: Pretraining) -> bool:
    """Return whether a backbone has weights from elsewhere: a file's, or its library's.

    Raises:
        UserError: as :func:`find_backbone_and_model`.
    """
    plugin, _ = _find_registered(spec)
    return isinstance(plugin, FrozenBackbone) or (plugin is not None and spec.weights is not None)


def _find_registered(spec: Pretraining) -> tuple[type[Backbone] | FrozenBackbone | None, str]:
    """Find the plugin as :func:`find_backbone_and_model` does; None where the data are features."""
    return (None, "") if spec.backbone in (NO_BACKBONE, INCLUDED_BACKBONE) else find_backbone_and_model(spec.backbone)


def check_backbone(spec: Pretraining) -> BackboneInfo | None:
    """Check a backbone's options; return the description of a :class:`FrozenBackbone` one, None for another.

    Raises:
        UserError: no such backbone; weights for data that are features; centring for a backbone that is pretrained
            here; or ``pretrained_on`` without a file of weights.
    """
    if spec.pretrained_on is not None and spec.weights is None:
        raise UserError(
            "pretrained-on says what a file of weights has seen; give it with --weights FILE, or leave this out"
        )
    plugin, model = _find_registered(spec)
    if plugin is None and spec.weights is not None:
        raise UserError(f"backbone {spec.backbone!r} is for features and takes no weights; leave them out")
    if spec.centre is not None and not is_frozen(spec):
        raise UserError(f"centre is for frozen backbones, and {spec.backbone!r} is pretrained here; leave it out")
    return plugin.describe(model, spec.weights is not None) if isinstance(plugin, FrozenBackbone) else None


def pretraining_corpora(spec: Pretraining) -> tuple[str, ...] | None:
    """Return the data that a backbone was pretrained on elsewhere; None for one that is pretrained here.

    Of a file of weights these are what the user declares, or unknown.

    Raises:
        UserError: as :func:`check_backbone`.
    """
    about = check_backbone(spec)
    if not is_frozen(spec):
        return None
    if spec.pretrained_on is not None:
        return tuple(spec.pretrained_on.split(":"))
    named = about.corpora if about else ()
    more = () if spec.weights is None and named else (UNKNOWN_CORPUS,)
    return tuple(dict.fromkeys([*named, *more]))


def required_libraries(spec: Pretraining) -> tuple[str, ...]:
    """Return the distributions that a :class:`FrozenBackbone` backbone depends on; none for another one.

    Raises:
        UserError: as :func:`find_backbone_and_model`.
    """
    plugin, _ = _find_registered(spec)
    return plugin.libraries if isinstance(plugin, FrozenBackbone) else ()


def __getattr__(name: str) -> Any:
    if name != "Frozen":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.Frozen is now FrozenBackbone; the old name goes in the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    return FrozenBackbone
