"""A reporter that keeps what it is told, for tests to look at."""

from __future__ import annotations

from ifsl_bench.utils.progress import Reporter


class Messages(Reporter):
    """Keeps remarks and warnings, each in a list."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)
