"""Each public name of the package has an example, which does what it shows."""

import doctest

import pytest

import ifsl_bench

SLOW = ("run", "class_accuracy")  # evaluate a method
NAMES = [name for name in ifsl_bench.__all__ if name != "__version__"]


def check(name, document, folder, monkeypatch):
    import torch

    monkeypatch.chdir(folder)
    monkeypatch.setenv("IFSL_BENCH_HOME", str(folder / "home"))
    test = doctest.DocTestParser().get_doctest(document, {"ifsl_bench": ifsl_bench, "torch": torch}, name, None, 0)
    assert test.examples, f"{name} has no example"
    found = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=found.append)
    assert not found, "".join(found)


@pytest.mark.filterwarnings("error::DeprecationWarning")  # of names that were renamed
@pytest.mark.parametrize("name", [name for name in NAMES if name not in SLOW])
def test_examples_of_public_names_hold(name, tmp_path, monkeypatch):
    check(name, getattr(ifsl_bench, name).__doc__ or "", tmp_path, monkeypatch)


@pytest.mark.slow("pretrains on glyphs")
@pytest.mark.parametrize("name", SLOW)
def test_examples_of_runs_hold(name, tmp_path, monkeypatch):
    check(name, getattr(ifsl_bench, name).__doc__ or "", tmp_path, monkeypatch)


def test_the_example_of_the_package_holds(tmp_path, monkeypatch):
    check("ifsl_bench", ifsl_bench.__doc__, tmp_path, monkeypatch)
