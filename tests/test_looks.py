"""The look of a method is its own, and the same wherever it is drawn."""

from __future__ import annotations

import pytest

from ifsl_bench.board.looks import look_of, method_of
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.rows import rows


def test_methods_of_the_package_look_different():
    looks = [look_of(name) for name in rows()]
    assert len({(look.colour, look.marker) for look in looks}) == len(rows())
    named = {"attractor": "lr+a", "static-attractor": "lr+s", "ridge": "lr"}
    assert {named.get(name, name) for name in registry.names(registry.METHODS)} <= set(rows())


@pytest.mark.parametrize(
    "label", ["lr+a.gamma=1e-05", "lr+a@tuned-12", "lr+a+cal", "lr+a.gamma=0.001+cal", "lr+a (stored)"]
)
def test_options_do_not_change_a_look(label):
    assert method_of(label) == "lr+a"
    assert look_of(label) == look_of("lr+a")


def test_a_strangers_method_takes_the_look_of_none_of_ours():
    ours = {(look_of(name).colour, look_of(name).marker) for name in rows()}
    for name in ("mine", "theirs", "x" * 300, "<b>"):
        look = look_of(name)
        assert (look.colour, look.marker) not in ours
        assert look == look_of(name)
