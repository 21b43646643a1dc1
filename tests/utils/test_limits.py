"""Limits on files of other people: each has an error that says what to do."""

from __future__ import annotations

import pytest

from ifsl_bench.utils import limits
from ifsl_bench.utils.errors import UserError


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "²", "9" * 5000])
def test_a_setting_that_is_no_number_is_refused(value, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_LARGEST_IMAGE", value)
    with pytest.raises(UserError, match="expected a whole number of MB"):
        limits.image_bytes_limit()


def test_every_limit_says_what_to_do():
    all_limits = [limit for limit in vars(limits).values() if isinstance(limit, limits.Limit)] + [
        limits.image_bytes_limit()
    ]
    assert len(all_limits) >= 12
    for limit in all_limits:
        limit.check(limit.maximum, "x")
        with pytest.raises(UserError) as error:
            limit.check(limit.maximum + 1, "x.zip")
        assert str(error.value).startswith("x.zip ")
        assert f"{limit.maximum:,}" in str(error.value)
        assert "{" not in str(error.value)
