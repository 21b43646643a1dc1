"""Chooses the device on which each stage of a run computes.

A rule, not a timing: the same command gives the same digits whatever else the machine does. An accelerator answers a
call after some microseconds whatever the call computes, so work of few large calls goes there: pretraining, features
and evaluation, which takes hundreds of episodes at once. A step of meta-training on one episode is hundreds to
thousands of small calls, one after the other, and stays on the host; so do the files of a data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["data", "pretraining", "features", "meta-training", "evaluation"]
HOST = torch.device("cpu")
WHY = {
    "pretraining": "batches of images",
    "features": "batches of images",
    "evaluation": "many episodes at once",
}


@dataclass(frozen=True)
class Place:
    """A device, and why it is that one."""

    device: torch.device
    why: str

    def __str__(self) -> str:
        return f"{self.device}: {self.why}"


def place_of(kind: Kind, device: torch.device, forced: bool, episodes: int = 0, few: int | None = None) -> Place:
    """The place where a stage runs.

    Args:
        kind: of work.
        device: what the user named, or what ``auto`` found.
        forced: whether the user named it, so that all work of numbers goes there.
        episodes: of a step of meta-training.
        few: a step of fewer episodes is faster on the host; None where a step of any number is.
    """
    if kind == "data":
        return Place(HOST, "files and indices")
    if forced:
        return Place(device, f"--device {device}")
    if device.type == "cpu":
        return Place(device, "no accelerator here")
    if kind == "meta-training":
        each = f"{episodes} episode{'s' * (episodes != 1)} a step"
        if few is None:
            return Place(HOST, f"{each}, this method's are faster here")
        return Place(HOST, f"{each}, fewer than {few}") if episodes < few else Place(device, f"{each}, at least {few}")
    return Place(device, WHY[kind])
