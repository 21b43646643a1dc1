"""``ifsl-bench`` in float32 without bf16, for torchrun to start in tests; ``KILL=rank:step`` ends a process there.

Only what was started first: the processes that torchrun starts in place of those live. ``EXACT=path`` has the trained
tensors written there before they are rounded.
"""

from __future__ import annotations

import os
import signal

import torch

from ifsl_bench.backbones import trainer
from ifsl_bench.backbones.device import Precision
from ifsl_bench.cli.main import main

trainer.choose_precision = lambda device: Precision(False, "the test wants it")
step = trainer.Trainer._step


def dying(self, model, images, labels, number):
    rank, _, at = os.environ.get("KILL", "").partition(":")
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if at and self.world.rank == int(rank) and number == int(at) and not restarted:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, model, images, labels, number)


trainer.Trainer._step = dying
rounded = trainer.Trainer._round


def writing(self):
    if "EXACT" in os.environ and self.world.first:
        torch.save(self._tensors(), os.environ["EXACT"])
    rounded(self)


trainer.Trainer._round = writing

if __name__ == "__main__":
    main()
