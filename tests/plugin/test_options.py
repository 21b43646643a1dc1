"""Options of a method: what is read, what is refused, and those that a base class shares."""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
import pytest
import torch
from ifsl_bench.methods.attractor import Attractor
from ifsl_bench.methods.static_attractor import StaticAttractor

from ifsl_bench.experiments.job import make_jobs, without_duplicates
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.plugin.attractor_method import AttractorMethod
from ifsl_bench.plugin.method import Method, Prediction
from ifsl_bench.plugin.options import declared_options, resolve_options
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.utils.errors import UserError

(TASK,) = load_tasks("glyphs-5shot")


class Every(Method):
    """One option of each type."""

    def __init__(
        self, base, ways, *, count: int = -1, share: float = -1.0, flag: bool | None = None, word: str = "-",
        choice: Literal["a", "yes", 3] = "a", limit: float | None = -1.0, size: int | str = -1, name: str | None = "-",
    ) -> None:  # fmt: skip
        super().__init__(base, ways)

    def forward(self, support, query):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [
        *(("flag", text, True) for text in ("true", "YES", "1")),
        *(("flag", text, False) for text in ("False", "no", "0")),
        ("flag", True, True),
        ("count", "-3", -3),
        ("count", "1_000", 1000),
        ("share", "1e-3", 1e-3),
        ("share", "inf", float("inf")),
        ("share", 2, 2.0),
        ("share", np.float64(0.25), 0.25),
        ("word", "none", "none"),
        ("choice", "yes", "yes"),
        ("choice", "3", 3),
        ("limit", "none", None),
        ("size", "5", 5),
        ("size", "five", "five"),
        ("name", "none", "none"),
    ],
)
def test_values_and_their_spellings(option, given, expected):
    (value,) = resolve_options(Every, "every", {option: given}, TASK).values()
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("flag", "maybe", "option 'flag' of method 'every' takes bool|none, not 'maybe'"),
        ("count", "1.5", "takes int, not '1.5'"),
        ("count", True, "takes int, not True"),
        ("count", 2.0, "takes int, not 2.0"),
        ("share", False, "takes float, not False"),
        ("word", 1, "takes str, not 1"),
        ("choice", "b", "takes a|yes|3, not 'b'"),
    ],
)
def test_other_values_are_refused_in_one_line(option, given, message):
    with pytest.raises(UserError) as caught:
        resolve_options(Every, "every", {option: given}, TASK)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_literal_of_floats_is_no_option():
    class Broken(Every):
        def __init__(self, base, ways, *, share: Literal[0.1, 0.2] = 0.1) -> None:
            super().__init__(base, ways)

    with pytest.raises(UserError, match="which --set cannot read"):
        declared_options(Broken)


class Passing(Every):
    """Its own options behind those of the base class, one of which has another default."""

    def __init__(self, base, ways, *, own: int = 1, count: int = 5, **shared: Any) -> None:
        super().__init__(base, ways, count=count, **shared)


class Closed(Every):
    """Takes no option of the base class."""

    def __init__(self, base, ways, *, own: int = 1) -> None:
        super().__init__(base, ways)


def test_a_constructor_that_passes_options_on_has_those_of_its_base_class_first():
    every = declared_options(Every)
    assert list(declared_options(Passing)) == [*every, "own"]
    assert {name for name, option in declared_options(Passing).items() if option != every.get(name)} == {"own", "count"}
    assert declared_options(Passing)["count"].default == 5
    assert list(declared_options(Closed)) == ["own"]
    resolved = resolve_options(Passing, "passing", {"own": "2", "share": "3", "count": "5"}, TASK)
    assert resolved == {"share": 3.0, "own": 2}


@pytest.mark.parametrize(("method", "own"), [(StaticAttractor, []), (Attractor, ["hidden", "dropout"])])
def test_what_the_attractors_share_is_declared_and_documented_once(method, own):
    shared = ["learner", "gradient", "steps", "damping", "rate", "converge", "weight_decay", "memory"]
    # The order is that of stored labels.
    assert list(declared_options(method)) == [*shared, *own, "gamma"]
    text = method.__doc__.partition("\nOptions:\n")[2]
    described = [line.strip().partition(":")[0] for line in text.splitlines() if re.match(" {4}[a-z]", line)]
    assert sorted(described) == sorted(declared_options(method))
    common = AttractorMethod.__doc__.partition("Options:\n")[2]
    assert common.split() == text[text.index("    learner:") :].split()


class Stepping(Method):
    """Options of the names that training has too, and one of any text."""

    def __init__(self, base, ways, *, steps: int = 1, text: str = "", more: str = ""):
        super().__init__(base, ways)
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, support, query):
        novel = self.weight * query.features @ support.class_means(self.ways).mT
        return Prediction(torch.cat([query.base_logits, novel], -1))


def jobs(options=None, **train):
    return make_jobs(RunConfig([Stepping], ["glyphs-5shot"], options or {}, train))


def test_options_and_training_of_one_name_have_labels_of_their_own():
    (first,), (second,) = jobs({"steps": 20}), jobs(steps=20)
    assert (first.label, second.label) == ("Stepping.steps=20", "Stepping.train.steps=20")
    assert without_duplicates([first, second, *jobs({"steps": "20"})]) == [first, second]


def test_two_choices_with_one_label_are_refused():
    """They would take each other's place."""
    (first,), (second,) = jobs({"text": "x.more=y"}), jobs({"text": "x", "more": "y"})
    assert first.label == second.label
    message = "two settings share the name 'Stepping.text=x.more=y': text 'x.more=y', and text 'x', more 'y'; change"
    with pytest.raises(UserError, match=message):
        without_duplicates([first, second])
