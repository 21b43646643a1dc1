"""Development tasks: ``nox -l`` lists them, ``nox -s lint`` runs one.

They run in the environment that nox is called in, ``pip install -e ".[test]"``, and make none of their own: PyTorch
takes several gigabytes.
"""

from __future__ import annotations

import os

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "test"]


@nox.session
def lint(session: nox.Session) -> None:
    """Run the linters and the type checker."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def test(session: nox.Session) -> None:
    """Run the quick tests, or those that the arguments after ``--`` select."""
    session.run("pytest", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Run all tests, the slow ones too."""
    session.run("pytest", "-m", "slow or not slow", "--ignore", "tests/fuzz", *session.posargs)


@nox.session
def golden(session: nox.Session) -> None:
    """Write or check golden copies of all tables: ``nox -s golden -- write FOLDER``, then ``-- check FOLDER``."""
    session.run("python", "tests/golden.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the manual; a warning is an error."""
    session.run("sphinx-build", "-W", "--keep-going", "-n", "docs", "build/manual", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Read mutated files for FUZZ_SECONDS, a minute by default."""
    session.run("pytest", "-q", "-n", "0", "tests/fuzz", env={"FUZZ_SECONDS": os.environ.get("FUZZ_SECONDS", "60")})


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure which lines the quick tests execute; needs ``pip install pytest-cov``."""
    session.run("pytest", "--cov=ifsl_bench", "--cov-report=term", *session.posargs)
