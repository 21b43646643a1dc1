"""``ifsl-bench`` in float32 without bf16, for torchrun to start in tests; ``KILL=rank:step`` ends a process there.

Only what was started first: the processes that torchrun starts in place of those live.
"""

from __future__ import annotations

import os
import signal

from ifsl_bench.backbone import trainer
from ifsl_bench.backbone.device import Precision
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

if __name__ == "__main__":
    main()
