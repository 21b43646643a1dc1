"""Backbones by name, through entry points: ours and everybody's alike."""

from __future__ import annotations

from ifsl_bench.backbone.contract import UNKNOWN, Backbone, Card, Frozen
from ifsl_bench.common.errors import UserError, unknown
from ifsl_bench.plugin import registry
from ifsl_bench.protocol.task import INCLUDED, NO_BACKBONE, Pretraining

BACKBONES = "ifsl_bench.backbones"


def backbone_plugin(name: str) -> tuple[type[Backbone] | Frozen, str]:
    """Finds what is registered under a backbone's name, and which of its networks is meant ("" of most).

    Args:
        name: ``NAME``, ``NAME:MODEL``, or ``PACKAGE:NAME`` where several packages register one name.

    Raises:
        UserError: unknown name (with the nearest ones), or a plugin that cannot be used.
    """
    known, model = name, ""
    if not registry.owners(BACKBONES, name):
        known, _, model = name.partition(":")
        if not registry.owners(BACKBONES, known):
            raise unknown("backbone", name, [*registry.names(BACKBONES), NO_BACKBONE])
    value = registry.get(BACKBONES, "backbone", known)
    if isinstance(value, type) and issubclass(value, Frozen):
        return value(), model
    if isinstance(value, type) and issubclass(value, Backbone):
        if model:
            raise UserError(f"backbone {known!r} is one network, there is no {name!r}")
        return value, ""
    raise UserError(f"backbone {known!r} is {value!r}, neither a Backbone nor a Frozen of ifsl_bench.backbone.contract")


def described() -> dict[str, str]:
    """Each registered name, and the first line of what it says of itself; or why it cannot be used."""
    found = {name: registry.load(BACKBONES, name) for name in registry.names(BACKBONES)}
    said = {name: one.problem or (one.value.__doc__ or "").strip() for name, one in found.items()}
    return {name: text.partition("\n")[0] for name, text in said.items()}


def frozen_backbone(name: str) -> tuple[Frozen, str] | None:
    """The plugin and the network of a backbone with weights from elsewhere; None for one that is pretrained here.

    Raises:
        UserError: as :func:`backbone_plugin`.
    """
    if name in (NO_BACKBONE, INCLUDED):
        return None
    plugin, model = backbone_plugin(name)
    return (plugin, model) if isinstance(plugin, Frozen) else None


def check_backbone(spec: Pretraining) -> Card | None:
    """The description that a frozen backbone gives of itself, None for another one.

    Raises:
        UserError: no such backbone, or weights or centring for one that is pretrained here.
    """
    found = frozen_backbone(spec.backbone)
    if found is None:
        if spec.weights is not None:
            raise UserError(f"backbone {spec.backbone!r} is pretrained here and takes no weights; leave them out")
        if spec.centre is not None:
            raise UserError(f"centre is for frozen backbones, and {spec.backbone!r} is pretrained here; leave it out")
        return None
    plugin, model = found
    return plugin.card(model, spec.weights is not None)


def corpora_of(spec: Pretraining) -> tuple[str, ...] | None:
    """Data that the backbone of a task was pretrained on elsewhere; None for one that has seen the task's data alone.

    Of weights that somebody gives nobody knows what else they have seen.

    Raises:
        UserError: as :func:`check_backbone`.
    """
    card = check_backbone(spec)
    if card is None:
        return None
    more = () if spec.weights is None and card.corpora else (UNKNOWN,)
    return tuple(dict.fromkeys([*card.corpora, *more]))


def libraries_of(spec: Pretraining) -> tuple[str, ...]:
    """The distributions that a frozen backbone depends on; of another one none.

    Raises:
        UserError: as :func:`backbone_plugin`.
    """
    found = frozen_backbone(spec.backbone)
    return found[0].libraries if found else ()
