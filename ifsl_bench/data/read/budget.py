"""A bound on what threads hold together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """Lets threads hold so many units in all; who wants more than is left waits."""

    def __init__(self, most: int) -> None:
        self.most = self.left = most
        self.changed = threading.Condition()

    @contextmanager
    def of(self, count: int) -> Iterator[None]:
        """``count`` units, or all of them where it is more, for the time of the block."""
        count = min(count, self.most)
        with self.changed:
            self.changed.wait_for(lambda: count <= self.left)
            self.left -= count
        try:
            yield
        finally:
            with self.changed:
                self.left += count
                self.changed.notify_all()
