"""The contract between a method and the harness.

Shapes: E episodes at once, S support rows (ways x shots), Q queries, D features, K base classes, N novel classes.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from ifsl_bench.plugin.space import SearchSpace
from ifsl_bench.protocols.tasks.task import MetaTraining, Task
from ifsl_bench.solvers.tree import Tree
from ifsl_bench.utils.deprecated import accept_old_names, rename_attributes
from ifsl_bench.utils.errors import UserError, format_class_and_message, format_error_location

if TYPE_CHECKING:
    from ifsl_bench.solvers.linear import AdjointReport

# Episodes a step of meta-training from which an H100 beat 16 cores for LwoF and LR+A (BENCHMARKS.md)
DEFAULT_GPU_MIN_EPISODES = 64


@dataclass(frozen=True)
class BaseNetwork:
    """The pretrained network and its images, for methods that see images; :class:`.Adapting` has functions for it.

    Attributes:
        network: images [B, C, H, W] to features [B, D], in evaluation mode; it is copied, never changed.
        normalise: from rows [B, P], as ``Support.features`` has them of such methods, to what the network is given.
        images: gives the rows of all base/train images or maps [n, P] and their labels [n].
    """

    network: nn.Module
    normalise: Callable[[Tensor], Tensor]
    images: Callable[[], tuple[Tensor, Tensor]]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> BaseNetwork:
        """Return a copy of the network on another device or in another precision.

        Args:
            device: to copy to; None keeps the present one.
            dtype: of the parameters, such as ``torch.float64``; None keeps the present one.
        """
        network = copy.deepcopy(self.network).to(device=device, dtype=dtype)
        like = next(network.parameters())
        return replace(self, network=network, normalise=lambda rows: self.normalise(rows).to(like))


@dataclass(frozen=True)
class Base:
    """The frozen base classifier, and what is known of the features of base/train.

    Attributes:
        weight: [K, D], W_a.
        bias: [K], b_a; zeros for a cosine head.
        prototypes: [K, D], mean feature of every base/train image of each class.
        scale: the pretrained temperature of a cosine head, 1 for a linear one.
        counts: [K], base/train images of each class.
        covariance: [D, D], of the features within the classes: the mean over all base/train images of (x - m)(x - m)^T,
            m being the prototype of the image's class. It is pooled over all base classes, those that an episode hides
            included. A run always gives both; a base that is made by hand may lack them.
        images: gives the features of all base/train images [n, D] and their labels [n], for sums over them that a
            method makes when it is made; None where a data set has but the means of its classes.
        network: the network and its images, for methods that see images; None for others.
        extras: what the recipe of the backbone learned beside features, by name; see :attr:`Method.needs`.

    Example:
        >>> base = ifsl_bench.Base(weight=torch.eye(3), bias=torch.zeros(3), prototypes=torch.eye(3))
        >>> base.to(dtype=torch.float64).weight.dtype
        torch.float64
    """

    weight: Tensor
    bias: Tensor
    prototypes: Tensor
    scale: float = 1.0
    counts: Tensor | None = None
    covariance: Tensor | None = None
    images: Callable[[], tuple[Tensor, Tensor]] | None = None
    network: BaseNetwork | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Base:
        movable = (Tensor, BaseNetwork)
        parts: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, movable)}
        moved = {name: x.to(device=device, dtype=dtype) for name, x in parts.items()}
        extras = {name: x.to(device=device, dtype=dtype) for name, x in self.extras.items()}
        return replace(self, **moved, extras=extras)


@dataclass(frozen=True)
class Support:
    """The labelled images of E episodes, sorted by label.

    Attributes:
        features: [E, S, D].
        labels: [E, S], int64 in 0..N-1.
        hidden: [E, K] bool; a hidden base class is out of play: no logit, no share in an attention.
        base_logits: [E, S, K] of the frozen linear base classifier, W_a x + b_a, computed once a pool by the harness.
            In regular few-shot learning no base class is in a softmax: all are -inf, and yet none is hidden for that,
            so an attention may read W_a. A loss over the support set takes its base logits from here.

    Example:
        >>> labels = torch.tensor([[0, 0, 1, 1]])  # an episode with two novel classes of two images each
        >>> hidden, base_logits = torch.zeros(1, 3, dtype=torch.bool), torch.zeros(1, 4, 3)
        >>> support = ifsl_bench.Support(torch.ones(1, 4, 8), labels, hidden, base_logits)
        >>> support.class_means(ways=2).shape
        torch.Size([1, 2, 8])
    """

    features: Tensor
    labels: Tensor
    hidden: Tensor
    base_logits: Tensor

    def class_means(self, ways: int) -> Tensor:
        """Return the mean support feature of each novel class, [E, N, D]."""
        one_hot = self.labels.unsqueeze(-1) == torch.arange(ways, device=self.labels.device)
        one_hot = one_hot.to(self.features.dtype)  # [E, S, N]
        return one_hot.mT @ self.features / one_hot.sum(-2).unsqueeze(-1)


@dataclass(frozen=True)
class Query:
    """The unlabelled images of E episodes, in random order.

    Attributes:
        features: [E, Q, D].
        base_logits: [E, Q, K], as in :class:`Support`.

    Example:
        >>> query = ifsl_bench.Query(features=torch.ones(1, 10, 8), base_logits=torch.zeros(1, 10, 3))
        >>> query.features.shape
        torch.Size([1, 10, 8])
    """

    features: Tensor
    base_logits: Tensor


@dataclass(frozen=True)
class Prediction:
    """A method's answer to a batch.

    Attributes:
        logits: [E, Q, K + N], base classes first, finite and best in float32: among bfloat16 numbers many are equal.
            The harness sets base classes that are hidden, or not in the softmax at all, to -inf; a method may as well,
            but no other class.
        statistics: numbers for each episode, name -> [E], that the result summarises (solver steps, ...). One called
            ``solver_unconverged`` is 1 (or NaN) for an episode whose inner solve did not converge; a run says how many.
            Where names begin with ``solver_``, the contract allows for a search that rounding sends elsewhere.
        adjoint: how the backward pass through an inner solve goes (``Solution.adjoint``); read after it, in training.

    Example:
        >>> logits = torch.zeros(1, 10, 3 + 2)  # ten queries, three base and two novel classes
        >>> ifsl_bench.Prediction(logits, {"solver_steps": torch.tensor([12.0])}).logits.shape
        torch.Size([1, 10, 5])
    """

    logits: Tensor
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    adjoint: AdjointReport | None = None

    def __post_init__(self) -> None:
        # Two subclasses may not be compared; one that wraps another tensor has no numbers of its own, and stays.
        kind = type(self.logits)
        wraps = getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
        if isinstance(self.logits, Tensor) and kind is not Tensor and not wraps:
            object.__setattr__(self, "logits", self.logits.as_subclass(Tensor))


MemoryPolicy = Literal["none", "supports"]  # of earlier sessions' images
LEARNING_METHODS = ("learn", "learn_classes")  # the methods that say how a session is learned
State = Tree
"""What a method carries from session to session: tensors [E, ...], in dicts, lists and tuples."""


@dataclass(frozen=True)
class SessionOutput:
    """The state after a session, and its statistics.

    Attributes:
        state: everything that the method carries to the next session; images only if it declares that it keeps some.
        statistics: of the solves, as in a :class:`Prediction`.
        adjoint: of the solves, as in a :class:`Prediction`.

    Example:
        >>> ifsl_bench.SessionOutput(state={"means": torch.zeros(1, 2, 8)}).statistics
        {}
    """

    state: State
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    adjoint: AdjointReport | None = None


@accept_old_names(every_image="uses_all_images", few_episodes="gpu_min_episodes")
class Method(nn.Module, ABC):
    """Subclass this, and register it under the entry point group ``ifsl_bench.methods``.

    A subclass defines :meth:`learn` and :meth:`answer`, and works in episodes and in sessions; or :meth:`forward`, an
    episode at once. In sessions such a method is asked with the supports of all sessions so far, and its rows say so.

    The keyword-only arguments of the constructor are the method's options, set with ``--set name=value``: they need an
    annotation (int, float, bool, str, a Literal, or one of these | None) and a default. A method with parameters is
    meta-trained by the one loop there is, on the cross-entropy of ``logits``; one without is not.

    Attributes:
        head: the pretraining to start from.
        space: what ``--tune`` searches: option -> :class:`Range` or :class:`Choices`; ``train.rate`` is the learning
            rate of meta-training.
        grid: for options of the space, the values to choose from on validation episodes where nobody sets or tunes
            them.
        session_grid: for options of the grid, further values to choose from in sessions.
        schedule: replaces the task's meta-training schedule.
        shorthands: further names of the method, each with the options that it stands for.
        needs: the names of :attr:`Base.extras`, each up to a dot, without which it cannot be made. On the backbone of a
            recipe that does not learn them it is refused before anything is trained, and ``all`` leaves it out.
        requires: top-level modules that the method imports when it is made, and that its package does not depend on,
            each with the command that installs it. Where one is missing the method is listed with that command, and
            refused before anything is computed.
        transductive: whether an answer may depend on the other queries of its episode (not on other episodes). Such
            methods are marked, and ranked by themselves.
        parallel_copies: whether copies (``copy.deepcopy``) of a method may answer in several threads at once, which is
            faster on a CPU. Only where copies share nothing that an answer changes or draws from: no random generator
            of PyTorch's or NumPy's, no hook, no attribute of the class or the module. It holds for the class that says
            it, not for its subclasses, which may do more.
        order_free: whether the answer after the last session is the same in whatever order the sessions came.
        uses_all_images: whether, in sessions, it is given all training images of the novel classes in place of their k
            supports, of all sessions at once: an upper bound, which no few-shot method is.
        label_slots: whether the answers about a class depend on which of the labels 0 to N - 1 it has, as with a
            learned vector for each label. Rows say so.
        sees: "features" of the backbone, "images", or "maps:-1", what the last stage of the backbone is given
            ("maps:2": what two stages return); see :class:`.Adapting`. ``Support.features`` has their numbers in rows.
        keeps: "nothing", or "images:5" where it carries up to so many images of each class; of methods that see images.
        class_bytes: bytes that it carries for each novel class, where they are so many that fewer episodes fit at once.
        revision: raise it to have models and results made anew though the syntax of the method's own code, by which
            methods are told apart, has not changed.
        name: the name under which a method of this suite is registered; others are named by their entry points.
        display: of a method of this suite, for each of its rows in tables how papers print it, and a few words on it.
            Both are literals, since they are read without importing the file.
        bibtex: the paper to cite, as ``ifsl-bench cite NAME`` prints it.

    Example:
        >>> class NearestMean(ifsl_bench.Method):
        ...     def forward(self, support, query):
        ...         novel = query.features @ support.class_means(self.ways).mT
        ...         return ifsl_bench.Prediction(torch.cat([query.base_logits, novel], -1))
        >>> base = ifsl_bench.Base(torch.eye(3), torch.zeros(3), torch.eye(3))
        >>> method = NearestMean(base, ways=1)
        >>> hidden = torch.zeros(1, 3, dtype=torch.bool)
        >>> labels = torch.tensor([[0, 0]])
        >>> support = ifsl_bench.Support(torch.ones(1, 2, 3), labels, hidden, torch.zeros(1, 2, 3))
        >>> method(support, ifsl_bench.Query(torch.ones(1, 1, 3), torch.zeros(1, 1, 3))).logits
        tensor([[[0., 0., 0., 3.]]])
    """

    head: ClassVar[Literal["linear", "cosine"]] = "linear"
    space: ClassVar[SearchSpace] = {}
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {}
    session_grid: ClassVar[Mapping[str, Sequence[Any]]] = {}
    schedule: ClassVar[MetaTraining | None] = None
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    needs: ClassVar[Sequence[str]] = ()
    requires: ClassVar[Mapping[str, str]] = {}
    transductive: ClassVar[bool] = False
    parallel_copies: ClassVar[bool] = False
    order_free: ClassVar[bool] = False
    uses_all_images: ClassVar[bool] = False
    label_slots: ClassVar[bool] = False
    sees: ClassVar[str] = "features"
    keeps: ClassVar[str] = "nothing"
    class_bytes: int = 0
    revision: ClassVar[int] = 0
    name: ClassVar[str] = ""
    display: ClassVar[Mapping[str, tuple[str, str]]] = {}
    bibtex: ClassVar[str] = ""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        rename_attributes(cls)

    def __init__(self, base: Base, ways: int) -> None:
        super().__init__()
        self.base = base
        self.ways = ways

    @classmethod
    def may_run_in_threads(cls) -> bool:
        """Return whether this very class declares :attr:`parallel_copies`."""
        return bool(vars(cls).get("parallel_copies", False))

    @classmethod
    def gpu_min_episodes(cls, options: Mapping[str, Any]) -> int | None:
        """Return the episodes of a training step from which an accelerator is faster than the processor.

        None where a step of any number is. ``--device auto`` goes by it; ``options`` are all, defaults included.
        """
        return DEFAULT_GPU_MIN_EPISODES

    @classmethod
    def defaults(cls, task: Task) -> dict[str, Any]:
        """Return options whose default depends on the task, on its shots for example."""
        return {}

    @classmethod
    def label(cls, name: str, options: Mapping[str, Any]) -> tuple[str, set[str]]:
        """Return the method's label in tables with these options, and the options that the label implies.

        Args:
            name: the method's name.
            options: all of the constructor's, defaults included.
        """
        for shorthand, meant in cls.shorthands.items():
            if all(options[key] == value for key, value in meant.items()):
                return shorthand, set(meant)
        return name, set()

    @classmethod
    def flags(cls, options: Mapping[str, Any]) -> list[str]:
        """Return what rows say of the method with these options, in a few words each."""
        return ["answers depend on the order of labels"] if cls.label_slots else []

    @classmethod
    def sees_with(cls, options: Mapping[str, Any]) -> str:
        """Return what the method sees with these options, as :attr:`sees` has it."""
        return cls.sees

    @classmethod
    def keeps_supports(cls, options: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Return whether sessions need the supports of earlier ones.

        They do where a class defines how it answers an episode, not how it learns and answers a session, or has an
        option ``memory`` that is ``supports``.
        """
        if options.get("memory") == "supports" or Method.learn is cls.learn or Method.answer is cls.answer:
            return True
        says = next(vars(kind).keys() for kind in cls.__mro__ if {"forward", *LEARNING_METHODS} & vars(kind).keys())
        return says.isdisjoint(LEARNING_METHODS)

    @classmethod
    def example_extras(cls, classes: int, features: int) -> dict[str, Tensor]:
        """Return made-up tensors as a recipe may give them, on which the rules of the contract are tried.

        A method with :attr:`needs` defines it; random numbers are PyTorch's own.

        Args:
            classes: the number K of base classes.
            features: D.
        """
        return {}

    def base_logits(self, query: Query) -> Tensor:
        """Return logits of the base classes before any session, [E, Q, K]; by default the base classifier's.

        A method that is asked session by session and does not define them has the accuracy of session 0 from the base
        classes' logits after session 1.
        """
        return query.base_logits

    def learn(self, support: Support, before: State | None = None) -> SessionOutput:
        """Learn the N classes of a session.

        It leaves ``before`` as it is.

        Args:
            support: support images of this session alone.
            before: the state after the session before, None for the first.
        """
        raise NotImplementedError

    def answer(self, state: State, query: Query) -> Prediction:
        """Return joint logits of the queries, [E, Q, K + t N] after t sessions, base classes first.

        Args:
            state: the state after the last session, as :meth:`learn` returned it.
            query: the queries, [E, Q, D], of all classes met.
        """
        raise NotImplementedError

    def forward(self, support: Support, query: Query) -> Prediction:
        """Return joint logits of the queries.

        No state is kept between calls; an episode ignores the others in its batch.

        Args:
            support: support images of the episodes.
            query: queries of the episodes, [E, Q, D].
        """
        learned = call_method(SessionOutput, self.learn, support)
        answer = call_method(Prediction, self.answer, learned.state, query)
        return Prediction(answer.logits, {**learned.statistics, **answer.statistics}, learned.adjoint)


@accept_old_names(by_class="per_class_state", looks_back="uses_earlier_logits", compared="transform_query")
class AdditiveClassifier(Method):
    """A method whose sessions add classes and leave the logits of earlier ones as they are.

    A subclass defines :meth:`learn_classes` and :meth:`class_logits`, and :meth:`~Method.base_logits` where these are
    not the base classifier's. The state is a tuple, what was learned in each session. A sequence is answered in one
    pass.

    Attributes:
        per_class_state: whether all tensors of the output of a session are [E, N, ...], and the logit of a class
            depends on its own rows alone; then sequences that have queries in common are one multiplication of
            matrices.
        uses_earlier_logits: whether a session is learned with the logits of earlier ones; where not, all sessions of a
            batch are learned by one call of :meth:`learn_classes`, as episodes, with None for ``earlier``.

    Example:
        >>> class Means(ifsl_bench.AdditiveClassifier):
        ...     uses_earlier_logits = False
        ...
        ...     def learn_classes(self, support, earlier):
        ...         return ifsl_bench.SessionOutput(support.class_means(self.ways))  # [E, N, D]
        ...
        ...     def class_logits(self, state, query):
        ...         return query.features @ state.mT
        >>> base = ifsl_bench.Base(torch.eye(3), torch.zeros(3), torch.eye(3))
        >>> query = ifsl_bench.Query(torch.ones(1, 1, 3), torch.zeros(1, 1, 3))
        >>> Means(base, ways=2).answer(state=(torch.ones(1, 2, 3),), query=query).logits
        tensor([[[0., 0., 0., 3., 3.]]])
    """

    per_class_state: bool = True
    uses_earlier_logits: bool = True

    @abstractmethod
    def learn_classes(self, support: Support, earlier: Tensor | None) -> SessionOutput:
        """Learn the N classes of a session.

        Args:
            support: the supports of the session alone.
            earlier: [E, S, (t - 1) N] logits of the novel classes of earlier sessions, of the supports; None in the
                first.
        """

    @abstractmethod
    def class_logits(self, state: State, query: Query) -> Tensor:
        """Return logits [E, Q, N] of the classes of one session.

        Args:
            state: of this session.
            query: as :meth:`transform_query` returns it.
        """

    def transform_query(self, query: Query) -> Query:
        """Transform queries for :meth:`class_logits`, as to unit vectors: computed once for each image of a pool.

        A query is transformed by itself; where not defined, it stays as it is. Base logits that are not looked at may
        be left out, ``base_logits[..., :0]``: then a sequence's queries have none gathered.
        """
        return query

    def learn(self, support: Support, before: State | None = None) -> SessionOutput:
        before, earlier = before or (), None
        if before:
            query = self.transform_query(Query(support.features, support.base_logits))
            earlier = torch.cat([self.class_logits(state, query) for state in before], -1)
        learned = call_method(SessionOutput, self.learn_classes, support, earlier)
        return replace(learned, state=(*before, learned.state))

    def answer(self, state: State, query: Query) -> Prediction:
        transformed = self.transform_query(query)
        logits = [self.base_logits(query), *(self.class_logits(part, transformed) for part in state)]
        return Prediction(torch.cat(logits, -1))


def join_logits_so_far(base: Tensor, earlier: Tensor | None) -> Tensor:
    """Return logits [E, S, K + (t - 1) N] of all classes met before a session.

    Args:
        base: logits of the base classes, [E, S, K].
        earlier: logits of the earlier sessions' classes, [E, S, (t - 1) N]; None if there are none.
    """
    return base if earlier is None else torch.cat([base, earlier], -1)


OutputT = TypeVar("OutputT", SessionOutput, Prediction)
FLOAT_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # of logits
NUMBER_TYPES = (
    *FLOAT_TYPES[:3],
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)  # of statistics


def call_method(kind: type[OutputT], function: Callable[..., OutputT], *arguments: Any) -> OutputT:
    """Call a function of a method and return its value.

    Args:
        kind: the type that it has to return.
        function: the method's.
        arguments: of the function.

    Raises:
        UserError: it returns another type.
    """
    value: Any = function(*arguments)
    if not isinstance(value, kind):
        raise UserError(f"{function.__qualname__} returned {type(value).__name__}, expected ifsl_bench.{kind.__name__}")
    return value


def format_failure(error: BaseException, method: type[Method], base: Base) -> str:
    """Return place, class and message of an exception from a method's code, and what may explain it.

    Args:
        error: what the method raised.
        method: the class of the method; a place in the folder of its file is preferred to one in a library.
        base: the base classifier that the method was made with.
    """
    hint = ""
    if isinstance(error, AttributeError) and error.name == "labels" and isinstance(error.obj, Query):
        hint = "; the labels of queries are withheld from methods"
    elif base.images is None and isinstance(error, TypeError) and "NoneType" in str(error):
        hint = "; Base.images is None, since this data set has only the means of its base classes, not their images"
    file = getattr(sys.modules.get(method.__module__), "__file__", None) or ""
    return f"{format_error_location(error, among=file)}{format_class_and_message(error)}{hint}"


@contextmanager
def forbid_writes(name: str, *given: Base | Support | Query) -> Iterator[None]:
    """Refuse a method that changes a tensor in place which it is given.

    PyTorch counts such changes. Those through NumPy are found where values are compared: in a run's first episodes.

    Args:
        name: the method's name in errors.
        given: what the block must leave as it is.

    Raises:
        UserError: a tensor was changed; the message names it.
    """
    tensors = {
        f"{type(of).__name__.lower()}.{key}": x
        for of in given
        for key, x in named_tensors_of(of).items()
        if _counts_changes(x)
    }
    before = [x._version for x in tensors.values()]
    yield
    for (key, x), version in zip(tensors.items(), before, strict=True):
        if x._version != version:
            raise UserError(f"method {name!r} breaks the contract: it writes into {key}")


def named_tensors_of(given: Base | Support | Query) -> dict[str, Tensor]:
    """Return all tensors of what a method is given, by name."""
    extras = given.extras if isinstance(given, Base) else {}
    named = {**vars(given), **{f"extras[{name!r}]": x for name, x in extras.items()}}
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}


def _counts_changes(value: Any) -> bool:
    """Return whether this is a tensor that counts the changes in it."""
    return isinstance(value, Tensor) and not value.is_inference()


@contextmanager
def name_method_in_errors(name: str, method: Method, *given: Base | Support | Query) -> Iterator[None]:
    """Re-raise errors of a method as :class:`UserError` that names it.

    Args:
        name: the method's name in errors.
        method: the method that the block calls.
        given: inputs that the method may not change, see :func:`forbid_writes`.

    Raises:
        UserError: the method fails, and the message names the place; or it changes what it is given.
    """
    try:
        with forbid_writes(name, *given):
            yield
    except (UserError, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        told = format_failure(error, type(method), method.base)
        raise UserError(f"method {name!r} failed: {told} (ifsl-bench --traceback ... prints all of it)") from error


def predict_with_method(method: Method, name: str, support: Support, query: Query) -> Prediction:
    """Return the method's answer, not yet checked.

    Args:
        method: to be asked.
        name: its name in errors.
        support: support images of the episodes.
        query: queries of the episodes, [E, Q, D].

    Raises:
        UserError: as :func:`name_method_in_errors`, and for logits on another device.
    """
    with name_method_in_errors(name, method, support, query, method.base):
        prediction = method(support, query)
    logits = getattr(prediction, "logits", None)
    if isinstance(logits, Tensor) and logits.device != query.features.device:
        raise UserError(
            f"method {name!r} returned logits on device {logits.device}, expected them on "
            f"{query.features.device}, where the queries' features are"
        )
    return prediction


class NonFiniteLogitsError(UserError):
    """A method answered with NaN or +inf, or with -inf for a class in play."""


def check_shapes(name: str, prediction: Any, episodes: int, queries: int, classes: int) -> Prediction:
    """Check types and shapes of a method's answer; no number is read, so no device is waited for.

    Args:
        name: the method's name in errors.
        prediction: its answer.
        episodes: E.
        queries: Q, of each episode.
        classes: base and novel ones, K + N.

    Raises:
        UserError: no :class:`Prediction`, or one with parts of another type or shape; the message names what was
            expected.
    """
    if not isinstance(prediction, Prediction):
        raise UserError(f"method {name!r} returned {type(prediction).__name__}, expected ifsl_bench.Prediction(logits)")
    logits = prediction.logits
    if not _is_dense(logits) or logits.dtype not in FLOAT_TYPES:
        kind = f"of {logits.dtype}, {logits.layout}" if isinstance(logits, Tensor) else f"as {_shape_in_words(logits)}"
        kind += ", nested" if isinstance(logits, Tensor) and logits.is_nested else ""
        raise UserError(
            f"method {name!r} returned logits {kind}, expected a dense torch.Tensor of torch.float32, "
            "with a score of each class for each query"
        )
    shape, expected = tuple(logits.shape), (episodes, queries, classes)
    if shape != expected:
        raise UserError(
            f"method {name!r} returned logits of shape {list(shape)}, expected {list(expected)} "
            f"(episodes, queries, base + novel classes): a score of each class for each query"
        )
    if not isinstance(prediction.statistics, Mapping):
        type_name = type(prediction.statistics).__name__
        raise UserError(
            f"method {name!r} returned statistics of type {type_name}, expected name -> tensor; {{}} for none"
        )
    for key, value in prediction.statistics.items():
        if not isinstance(key, str):
            raise UserError(f"method {name!r} returned a statistic named {key!r}, expected a str")
        if not _is_dense(value) or tuple(value.shape) != (episodes,):
            raise UserError(
                f"method {name!r} returned statistic {key!r} as {_shape_in_words(value)}, expected [{episodes}]"
            )
        if value.dtype not in NUMBER_TYPES or value.device != logits.device:
            raise UserError(
                f"method {name!r} returned statistic {key!r} of {value.dtype} on {value.device}, expected float32, "
                f"int64 or bool on {logits.device}"
            )
    return prediction


def count_nonfinite_episodes(prediction: Prediction, masked: Tensor) -> Tensor:
    """Return [E] bool, whether any of an episode's logits is NaN or +inf, or -inf for a class in play.

    Args:
        prediction: the method's answer, logits [E, Q, K + N].
        masked: [E, K] bool, the base classes that are out of the softmax.
    """
    logits, novel = prediction.logits, prediction.logits.shape[-1] - masked.shape[-1]
    in_play = ~nn.functional.pad(masked, (0, novel)).unsqueeze(1)
    bad = ~(logits < torch.inf) | ((logits == -torch.inf) & in_play)  # a comparison with NaN is False
    return bad.flatten(1).any(1)


def check_finite(name: str, bad: int, episodes: int, of: str = "episodes of a batch") -> None:
    """Raise :class:`NonFiniteLogitsError` if some of a batch's episodes are :func:`count_nonfinite_episodes`.

    Args:
        name: the method's name in errors.
        bad: number of bad episodes.
        episodes: number of all episodes.
        of: name of the batch in errors.

    Raises:
        NonFinite: ``bad`` is not 0.
    """
    if bad:
        raise NonFiniteLogitsError(
            f"method {name!r} returned NaN or infinite logits in {bad} of {episodes} {of}, "
            f"expected finite ones (or -inf for a base class that is out of play)"
        )


def check_prediction(name: str, prediction: Any, masked: Tensor, queries: int, novel: int, *of: str) -> Prediction:
    """Check a method's answer; waits for the device.

    Args:
        name: the method's name in errors.
        prediction: its answer.
        masked: [E, K] bool, the base classes that are out of the softmax.
        queries: Q, of each episode.
        novel: novel classes of an episode, N.
        of: name of the batch in errors, if any, see :func:`check_finite`.

    Raises:
        NonFinite: logits that are NaN or infinite, but for -inf of ``masked`` classes.
        UserError: as :func:`check_shapes`.
    """
    episodes, classes = masked.shape
    check_shapes(name, prediction, episodes, queries, classes + novel)
    check_finite(name, int(count_nonfinite_episodes(prediction, masked).sum()), episodes, *of)
    return prediction


def _is_dense(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested


def _shape_in_words(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if _is_dense(value) else type(value).__name__


def masked_logits(prediction: Prediction, masked: Tensor) -> Tensor:
    """Return joint logits [E, Q, K + N], -inf for base classes that are out of the softmax.

    Args:
        prediction: the method's answer, logits [E, Q, K + N].
        masked: [E, K] bool, the base classes that are out of the softmax.
    """
    novel = prediction.logits.shape[-1] - masked.shape[-1]
    return prediction.logits.masked_fill(nn.functional.pad(masked, (0, novel)).unsqueeze(1), -torch.inf)
