"""The contract of a method that sees images and changes the network after the base session."""

from __future__ import annotations

import copy
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ifsl_bench.plugin.method import (
    Base,
    BaseNetwork,
    Method,
    NonFiniteLogitsError,
    Prediction,
    Query,
    SessionOutput,
    State,
    Support,
)
from ifsl_bench.solvers.tree import list_leaves, rebuild_tree, tree_map
from ifsl_bench.utils.deprecated import accept_old_names
from ifsl_bench.utils.errors import UserError

CLASSIFY_BATCH_SIZE = 256  # that `classify` is given
CLASS_BYTES_FOR_ONE_SEQUENCE_AT_A_TIME = 1 << 40  # bytes a class: sequences are learned one at a time


@dataclass(frozen=True)
class SessionInfo:
    """The session that :meth:`Adapting.adapt` learns.

    Attributes:
        number: 1 for the first session after the base session; an episode is session 1.
        first_class: the classes met before, K + (t - 1) N: label 0 of the session is this class among all.
        hidden: [K] bool, base classes that are out of play, and get no logit.
    """

    number: int
    first_class: int
    hidden: Tensor


@accept_old_names(prepare="rows_to_images")
class Adapting(Method):
    """A method that is given images, and may change any weight of the network.

    A subclass defines :meth:`first_episode_number`, :meth:`adapt` and :meth:`classify`, and works in sessions and in
    episodes, which are sessions of their own. What it carries from one session to the next is its *state*: the tensors
    that it changed or added, in dicts, lists and tuples. All else is forgotten: :meth:`network` returns a new copy of
    the pretrained network each time. Rows say how many bytes the state has for each novel class.

    With ``sees = "maps:-1"`` it is given what the last stage of the network is given, from a cache, in place of images,
    and :meth:`network` has that stage alone: nothing below it is computed, or changes.

    PyTorch's random numbers are seeded before each call of :meth:`adapt`, by the training seed, the session and its
    images, so that a sequence has the same bits whichever others are learned.

    Attributes:
        changes: what it changes in the network, in a few words; rows say so.
        keeps: "nothing", or "images:5" where the state has up to so many images of each class; rows say so.

    Example:
        >>> class LastMeans(ifsl_bench.Adapting):
        ...     changes = "nothing"
        ...
        ...     def start(self):
        ...         return self.base.prototypes
        ...
        ...     def adapt(self, state, images, labels, session):
        ...         features = self.network()(images).detach()
        ...         return torch.cat([state, torch.stack([features[labels == k].mean(0) for k in range(self.ways)])])
        ...
        ...     def classify(self, state, images):
        ...         return -torch.cdist(self.network()(images), state)
    """

    sees = "images"
    drawn_seed: Tensor
    changes: ClassVar[str] = "the network"
    class_bytes = CLASS_BYTES_FOR_ONE_SEQUENCE_AT_A_TIME

    def __init__(self, base: Base, ways: int) -> None:
        super().__init__(base, ways)
        # A run seeds it by the method's name and the training seed.
        self.register_buffer("drawn_seed", torch.randint(1 << 62, ()))

    @classmethod
    def flags(cls, options: Mapping[str, Any]) -> list[str]:
        kept = [] if cls.keeps == "nothing" else [f"keeps {cls.keeps.removeprefix('images:')} images a class"]
        return [f"changes {cls.changes_with(options)}", *kept]

    @classmethod
    def changes_with(cls, options: Mapping[str, Any]) -> str:
        """Return what it changes with these options, as :attr:`changes` has it."""
        return cls.changes

    @abstractmethod
    def start(self) -> State:
        """Return the state before any session."""

    @abstractmethod
    def adapt(self, state: State, images: Tensor, labels: Tensor, session: SessionInfo) -> State:
        """Return the state after a session; the one that is given stays as it is.

        Gradients are on.

        Args:
            state: the state before it.
            images: the supports, normalised, [S, C, H, W].
            labels: [S], 0 to N - 1, sorted.
            session: its number and place.
        """

    @abstractmethod
    def classify(self, state: State, images: Tensor) -> Tensor:
        """Return logits [B, K + t N] of all classes met in t sessions, base classes first.

        Args:
            state: the state after t sessions.
            images: normalised, [B, C, H, W]; some of the queries, in any order.
        """

    def network(self, changed: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return a copy of the pretrained network in evaluation mode, which turns images into features [B, D].

        Args:
            changed: tensors to put in place of its own, by their names in its ``state_dict()``.
        """
        network = copy.deepcopy(self._require_base_network().network).requires_grad_(True).eval()
        if changed:
            own = network.state_dict()
            with torch.no_grad():
                for name, value in changed.items():
                    own[name].copy_(value)
        return network

    def parameters_from(self, stage: int = -1) -> list[str]:
        """Return the names of the parameters that a stage of the network and the later ones use.

        Args:
            stage: its number from 0, or from -1 for the last.

        Raises:
            UserError: the network has no such stage, or is not divided into stages.
        """
        network, (rows, _) = self.network(), self.base_images()
        stages = getattr(network, "stages", ())
        # The last stage of a network that is not divided would be all of it.
        undivided = len(stages) < 2 and stage != 0 and self.sees_with(self.__dict__.get("_made_with", {})) == "images"
        if undivided or not -len(stages) <= stage < len(stages):
            raise UserError(
                f"{type(self).__qualname__} changes stage {stage} of a network that has {len(stages)}: its class needs "
                "`stages`, see docs/backbones.md"
            )
        return stage_parameters(network, self.rows_to_images(rows[:2]), stage)

    def base_images(self) -> tuple[Tensor, Tensor]:
        """Return all images of base/train as rows for :meth:`rows_to_images`, [n, P], and their labels [n]."""
        return self._require_base_network().images()

    def rows_to_images(self, rows: Tensor) -> Tensor:
        """Return images [B, C, H, W], normalised for the network, or maps, from rows [B, P]."""
        return self._require_base_network().normalise(rows)

    def _require_base_network(self) -> BaseNetwork:
        if self.base.network is None:
            raise UserError(f"{type(self).__qualname__} sees images, and its base has no network")
        return self.base.network

    # -- as the harness asks any method

    def base_logits(self, query: Query) -> Tensor:
        start = self._check_and_detach_state("start", self.start())
        return torch.stack([self.logits_of_rows(start, rows) for rows in query.features])

    def learn(self, support: Support, before: State | None = None) -> SessionOutput:
        sessions = () if before is None else before["sessions"]
        states = []
        for at, (rows, labels) in enumerate(zip(support.features, support.labels, strict=True)):
            state = (
                self._check_and_detach_state("start", self.start())
                if before is None
                else self.state_of_sequence(before, at)
            )
            absent = (support.base_logits[at] == -torch.inf).all(0)  # where no base class is in the softmax
            classes = support.hidden.shape[1] + len(sessions) * self.ways
            session = SessionInfo(len(sessions) + 1, classes, support.hidden[at] | absent)
            with torch.random.fork_rng([rows.device] if rows.is_cuda else []), torch.enable_grad():
                torch.manual_seed(self._derive_session_seed(session.number, rows))
                states.append(
                    self._check_and_detach_state("adapt", self.adapt(state, self.rows_to_images(rows), labels, session))
                )
        columns = zip(*map(list_leaves, states), strict=True)
        stacked = [None if parts[0] is None else torch.stack(parts) for parts in columns]
        # A None for each session, which takes no bytes.
        return SessionOutput({"state": rebuild_tree(states[0], stacked), "sessions": (*sessions, None)})

    def answer(self, state: State, query: Query) -> Prediction:
        logits = [
            self.logits_of_rows(self.state_of_sequence(state, at), rows) for at, rows in enumerate(query.features)
        ]
        return Prediction(torch.stack(logits))

    @staticmethod
    def state_of_sequence(state: State, at: int) -> State:
        """Return the state of one sequence, as :meth:`adapt` returned it.

        Args:
            state: of a batch, as :meth:`learn` returned it.
            at: number of the sequence in the batch.
        """
        return tree_map(lambda x: x[at], state["state"])

    def _derive_session_seed(self, session: int, rows: Tensor) -> int:
        drawn = f"{self.drawn_seed.item()} {session} ".encode() + rows.cpu().numpy().tobytes()
        return int.from_bytes(hashlib.sha256(drawn).digest()[:7])

    def logits_of_rows(self, state: State, rows: Tensor, at_once: int = CLASSIFY_BATCH_SIZE) -> Tensor:
        """Return the logits of images, [Q, C].

        Args:
            state: of one sequence.
            rows: [Q, P], the images' numbers.
            at_once: images in a batch; a transductive method is given all at once.
        """
        logits = []
        for part in rows.split(max(1, len(rows)) if self.transductive else at_once):
            of_part = self.classify(state, self.rows_to_images(part))
            if not isinstance(of_part, Tensor) or of_part.dim() != 2 or len(of_part) != len(part):
                shape = list(of_part.shape) if isinstance(of_part, Tensor) else type(of_part).__name__
                raise UserError(
                    f"{type(self).__qualname__}.classify returned {shape}, expected logits [{len(part)}, classes]"
                )
            logits.append(of_part.detach())
        return torch.cat(logits)

    def _check_and_detach_state(self, name: str, state: State) -> State:
        """Return a state without gradients; refuse one that is no tree of finite tensors."""
        try:
            state = tree_map(lambda x: x.detach(), state)
        except TypeError as error:
            raise UserError(
                f"{type(self).__qualname__}.{name} returned a state that is no tree of tensors: "
                f"{str(error).partition(';')[0]}"
            ) from error
        if not all(x.isfinite().all() for x in list_leaves(state) if x is not None and x.is_floating_point()):
            raise NonFiniteLogitsError(
                f"{type(self).__qualname__}.{name} returned a state with NaN or infinite numbers"
            )
        return state


def stage_parameters(network: nn.Module, images: Tensor, stage: int) -> list[str]:
    """Return the names of the parameters that a stage of a network and the later ones use.

    Args:
        network: with ``stages``.
        images: some that it is given, [B, C, H, W].
        stage: its number from 0, or from -1 for the last.
    """
    network = copy.deepcopy(network).requires_grad_(True).eval()
    names, parameters = zip(*network.named_parameters(), strict=True)
    with torch.enable_grad():
        x, stages = images, list(getattr(network, "stages", ()))
        for number, run in enumerate(stages):
            x = run(x.detach() if number == stage % len(stages) else x)
        gradients = torch.autograd.grad(x.sum(), parameters, allow_unused=True)
    return [name for name, gradient in zip(names, gradients, strict=True) if gradient is not None]


def class_means(features: Tensor, labels: Tensor, ways: int) -> Tensor:
    """Return the mean feature of each class of a session, [N, D].

    Args:
        features: of its supports, [S, D].
        labels: [S], 0 to N - 1.
        ways: the number N of classes.
    """
    return torch.stack([features[labels == label].mean(0) for label in range(ways)])


# -- a small base classifier with a network and images, for checks before anything is computed


class SmallCheckNetwork(nn.Module):
    """Two stages with batch norm and dropout: images [B, 1, 8, 8] to 8 features."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(4, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))

    @property
    def stages(self) -> list[Callable[[Tensor], Tensor]]:
        """The two stages."""
        return [self.stem, lambda x: self.last(x).mean((2, 3))]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.stem(x)).mean((2, 3))


def make_small_base_for_checks() -> Base:
    """Make a base classifier of 6 classes on the features of a :class:`SmallCheckNetwork`; always the same one."""
    classes, each = 6, 10
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = SmallCheckNetwork().eval().requires_grad_(False)
        labels = torch.arange(classes).repeat_interleave(each)
        rows = (torch.randint(40, 216, (classes, 64))[labels] + torch.randint(-40, 40, (len(labels), 64))).byte()

    def normalise(some: Tensor) -> Tensor:
        return some.unflatten(1, (1, 8, 8)) / 128 - 1

    features = network(normalise(rows))
    means = features.unflatten(0, (classes, each)).mean(1)
    apart = features - means[labels]
    moments = torch.full((classes,), float(each)), apart.mT @ apart / len(apart)
    images = BaseNetwork(network, normalise, lambda: (rows, labels))
    weight = means - means.mean(0)
    return Base(weight, -(weight * means).sum(1) / 2, means, 1.0, *moments, lambda: (features, labels), images)
