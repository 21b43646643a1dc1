"""Old names of what a method defines work for one release, with a warning."""

import pytest
import torch

import ifsl_bench
from ifsl_bench import AdditiveClassifier, Base, Query, SessionOutput
from ifsl_bench.protocols.session_protocol import Sessions
from ifsl_bench.protocols.tasks.task_files import load_task


def test_old_names_of_the_package_are_the_new_objects():
    with pytest.warns(DeprecationWarning, match="ifsl_bench.Learned is now SessionOutput"):
        assert ifsl_bench.Learned is SessionOutput
    with pytest.warns(DeprecationWarning, match="GrowingMethod is now AdditiveClassifier"):
        assert ifsl_bench.GrowingMethod is AdditiveClassifier
    with pytest.raises(AttributeError, match="no attribute 'Growing'"):
        ifsl_bench.Growing  # noqa: B018


def test_a_method_with_old_attributes_is_one_with_the_new_ones():
    with pytest.warns(DeprecationWarning, match="is now") as warned:

        class Old(AdditiveClassifier):
            every_image = True
            looks_back = by_class = False

            @classmethod
            def few_episodes(cls, options):
                return 7

            def learn_classes(self, support, earlier):
                return SessionOutput(support.class_means(self.ways))

            def class_logits(self, state, query):
                return query.features @ state.mT

            def compared(self, query):
                return Query(2 * query.features, query.base_logits)

    assert {str(warning.message).split(" is now ")[0].rpartition(".")[2] for warning in warned} == {
        "every_image", "looks_back", "by_class", "few_episodes", "compared"
    }  # fmt: skip
    assert all(warning.filename == __file__ for warning in warned)
    assert (Old.uses_all_images, Old.uses_earlier_logits, Old.per_class_state) == (True, False, False)
    assert Old.gpu_min_episodes({}) == 7
    assert AdditiveClassifier.per_class_state, "the base is as it was"

    method = Old(Base(torch.ones(3, 4), torch.zeros(3), torch.ones(3, 4)), 2)
    query = Query(torch.ones(1, 5, 4), torch.zeros(1, 5, 3))
    assert torch.equal(method.transform_query(query).features, 2 * query.features)
    with pytest.warns(DeprecationWarning, match="compared is now transform_query"):
        assert torch.equal(method.compared(query).features, 2 * query.features)
    with pytest.warns(DeprecationWarning, match="by_class is now per_class_state"):
        method.by_class = True
    assert (method.per_class_state, Old.per_class_state) == (True, False)


def test_a_protocol_with_an_old_method_has_it_under_the_new_name():
    with pytest.warns(DeprecationWarning, match="curve_sessions is now sessions_in_tables"):

        class Old(Sessions):
            def curve_sessions(self, task):
                return range(1, 3)

    assert Old().sessions_in_tables(load_task("glyphs-sessions")) == range(1, 3)
    assert Sessions().sessions_in_tables(load_task("glyphs-sessions")) != range(1, 3)
    with pytest.warns(DeprecationWarning, match="curve_sessions is now sessions_in_tables"):
        assert Old().curve_sessions(load_task("glyphs-sessions")) == range(1, 3)
