"""The optional package learn2learn: how to get it, and how to import it. Nothing else here or in a method may do so.

It brings gym, gsutil and NumPy below 2 along, takes seconds to import, and version 0.2.0 must be compiled: hence an
extra, imported where it is used and not before. :mod:`ifsl_bench.experiments.learn2learn_exchange`
exchanges data sets and tasks with it.
"""

from __future__ import annotations

from types import ModuleType

from ifsl_bench.plugin.registry import is_installed
from ifsl_bench.utils.errors import UserError

# What is on PyPI holds C sources that no longer compile; the option has them made again from the Cython ones.
INSTALL_COMMAND = 'pip install "learn2learn==0.2.0" --config-settings "--build-option=build_ext"'
REQUIRED_MODULES = {"learn2learn": f"{INSTALL_COMMAND} (in an environment of its own: it brings NumPy below 2)"}


def load_learn2learn() -> ModuleType:
    """Return the module ``learn2learn``.

    Raises:
        UserError: it is not installed, or broken; the message explains how to install it.
    """
    if not is_installed("learn2learn"):
        raise UserError(f"this needs learn2learn, which is not installed: {INSTALL_COMMAND}")
    try:
        import learn2learn
    except Exception as error:  # compiled modules built for another NumPy raise more than ImportError
        raise UserError(
            f"learn2learn is installed but cannot be imported ({type(error).__name__}: {error}); "
            f"to install it again: {INSTALL_COMMAND} --force-reinstall"
        ) from error
    return learn2learn
