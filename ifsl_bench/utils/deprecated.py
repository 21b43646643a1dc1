"""Old names that other packages may use, for one release."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

ClassT = TypeVar("ClassT", bound=type)


def forward_module_names(old: str, new: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that takes every name from another module, with a warning.

    Args:
        old: the module's name, ``ifsl_bench.solve``.
        new: the module that has its content now.
    """

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(new), name)
        warnings.warn(f"{old} is now {new}; the old name goes in the next release", DeprecationWarning, stacklevel=2)
        return value

    return attribute


class RenamedAttribute:
    """An old attribute of a class, which reads and writes the new one with a warning.

    Args:
        new: the attribute's name now.
    """

    def __init__(self, new: str) -> None:
        self.new_name = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.old_name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        self.warn_of_old_name(owner)
        return getattr(owner if instance is None else instance, self.new_name)

    def __set__(self, instance: Any, value: Any) -> None:
        self.warn_of_old_name(type(instance))
        setattr(instance, self.new_name, value)

    def warn_of_old_name(self, owner: type, stacklevel: int = 3) -> None:
        """Warn that a class uses the old name.

        Args:
            owner: the class.
            stacklevel: of the warning, see :func:`warnings.warn`.
        """
        text = f"{owner.__qualname__}.{self.old_name} is now {self.new_name}; the old name goes in the next release"
        warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)


def accept_old_names(**new_names: str) -> Callable[[ClassT], ClassT]:
    """Return a decorator of a class whose attributes can still be read and written under old names, with a warning.

    Args:
        new_names: old name -> new name.
    """

    def decorate(cls: ClassT) -> ClassT:
        for old, new in new_names.items():
            attribute = RenamedAttribute(new)
            attribute.__set_name__(cls, old)
            setattr(cls, old, attribute)
        return cls

    return decorate


def rename_attributes(cls: type) -> None:
    """Give a class the new names of what it defines under old ones, with a warning each.

    Args:
        cls: a subclass of one that :func:`accept_old_names` decorates.
    """
    renamed = {name: value for base in cls.__mro__[1:] for name, value in vars(base).items()}
    for old, value in list(vars(cls).items()):
        if isinstance(attribute := renamed.get(old), RenamedAttribute):
            attribute.warn_of_old_name(cls, stacklevel=5)
            setattr(cls, attribute.new_name, value)
            delattr(cls, old)
