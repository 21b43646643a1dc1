"""The look of a method is its own, and the same wherever it is drawn."""

from __future__ import annotations

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.display_names import display_names_by_row
from ifsl_bench.reporting.plot_styles import MATPLOTLIB_MARKERS, distinct_styles, style_of_label, with_distinct_markers


def test_methods_of_the_package_look_different():
    looks = [style_of_label(name) for name in display_names_by_row()]
    assert len({(look.colour, look.marker) for look in looks}) == len(display_names_by_row())
    named = {"attractor": "lr+a", "static-attractor": "lr+s", "ridge": "lr"}
    assert {named.get(name, name) for name in registry.registered_entry_points(registry.METHOD_GROUP)} <= set(
        display_names_by_row()
    )


def test_rows_of_one_method_beside_each_other_look_different_and_the_plain_one_as_everywhere():
    labels = ["lr+a.gradient=implicit", "lr+a", "lr+a", "lr+s", "lr+a@tuned-12", "lr+a+cal"]
    looks = distinct_styles(labels, [False, True, False, False, False, False])
    assert looks[2] == style_of_label("lr+a")
    assert looks[3] == style_of_label("lr+s")
    assert [look.is_further_row for look in looks] == [True, True, False, False, True, True]
    assert {look.colour for look in (*looks[:3], *looks[4:])} == {style_of_label("lr+a").colour}
    assert len({(look.colour, look.marker, look.is_further_row) for look in looks}) == len(looks)
    assert distinct_styles(["lr+a.gradient=implicit"]) == [style_of_label("lr+a")], "alone"
    mine, stored_look = distinct_styles(["lr@tuned-12", "lr@tuned-12"], [True, False])
    assert stored_look == style_of_label("lr"), "whichever is first"
    assert mine.is_further_row


def test_marks_without_lines_repeat_no_marker_while_there_are_any():
    repeated = [style_of_label(label) for label in ("lr", "ncm", "lda", "lr", "teen")]
    assert len({style.marker for style in repeated}) < 5
    looks = with_distinct_markers(repeated)
    assert len({style.marker for style in looks}) == 5
    assert [style.colour for style in looks] == [style.colour for style in repeated]
    assert looks[0] == repeated[0], "the first of a marker keeps it"
    many = [style_of_label("lr")] * 9
    assert {style.marker for style in with_distinct_markers(many)} == set(MATPLOTLIB_MARKERS)
