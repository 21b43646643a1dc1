"""The device on which each stage of a run computes, and the precision of convolutions on it.

It follows a rule, not a timing: the same command gives the same digits whatever else the machine does. An accelerator
answers a call after some microseconds whatever the call computes, so work of few large calls goes there: pretraining,
features and evaluation, which takes hundreds of episodes at once. A step of meta-training on one episode is hundreds to
thousands of small calls, one after the other, and stays on the host; so do the files of a data set.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.text_format import format_count

StageType = Literal["data", "pretraining", "features", "meta-training", "evaluation"]
CPU_DEVICE = torch.device("cpu")
ACCELERATOR_REASONS = {
    "pretraining": "batches of images",
    "features": "batches of images",
    "evaluation": "many episodes at once",
}


class Accelerator:
    """The properties of a type of accelerator, here of CUDA devices."""

    def count(self) -> int:
        """Return the number of devices; 0 without a driver."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def name(self, device: torch.device) -> str:
        """Return the name of the device, for provenance."""
        return torch.cuda.get_device_name(device)

    def has_bf16(self, device: torch.device) -> bool:
        """Return whether it has instructions for bf16."""
        return torch.cuda.is_bf16_supported(including_emulation=False)

    def free_memory(self, device: torch.device) -> int:
        """Return the bytes that a new tensor could take: free at the driver, or unused in the allocator."""
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused


ACCELERATORS = {"cuda": Accelerator()}  # by type of device


def choose_device(name: str) -> torch.device:
    """Find a device by name: ``auto`` (an accelerator where there is one), ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        UserError: no such device here.
    """
    if name == "auto":
        return torch.device(next((kind for kind, accelerator in ACCELERATORS.items() if accelerator.count()), "cpu"))
    choices = ", ".join(["auto", "cpu", *ACCELERATORS])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}; available: {choices}, cuda:0, ...") from None
    if device.type == "cpu":
        return device
    if device.type not in ACCELERATORS:
        raise UserError(f"device {name!r} is not supported; available: {choices}")
    count = ACCELERATORS[device.type].count()
    if not count:
        raise UserError(f"there is no device {name!r}: PyTorch sees no CUDA device here; use --device cpu")
    if (device.index or 0) >= count:
        raise UserError(f"there is no device {name!r}: only {count} such devices are here")
    return device


@dataclass(frozen=True)
class DeviceChoice:
    """A device, and the reason for it."""

    device: torch.device
    reason: str

    def __str__(self) -> str:
        return f"{self.device}: {self.reason}"


def choose_stage_device(
    stage: StageType, device: torch.device, is_forced: bool, n_episodes: int = 0, min_episodes: int | None = None
) -> DeviceChoice:
    """Choose the device of a stage.

    Args:
        stage: its type.
        device: the one that the user named, or that ``auto`` found.
        is_forced: whether the user named it, so that everything but the preparation of data goes there.
        n_episodes: of a step of meta-training.
        min_episodes: a step of fewer episodes is faster on the host; None where a step of any number is.
    """
    if stage == "data":
        return DeviceChoice(CPU_DEVICE, "files and indices")
    if is_forced:
        return DeviceChoice(device, f"--device {device}")
    if device.type == "cpu":
        return DeviceChoice(device, "no accelerator here")
    if stage == "meta-training":
        each = f"{n_episodes} episode{'s' * (n_episodes != 1)} a step"
        if min_episodes is None:
            return DeviceChoice(CPU_DEVICE, f"{each}, this method's are faster here")
        return (
            DeviceChoice(CPU_DEVICE, f"{each}, fewer than {min_episodes}")
            if n_episodes < min_episodes
            else DeviceChoice(device, f"{each}, at least {min_episodes}")
        )
    return DeviceChoice(device, ACCELERATOR_REASONS[stage])


def free_device_memory_bytes(device: torch.device) -> int | None:
    """Return the bytes that are free on an accelerator; None on the CPU."""
    return ACCELERATORS[device.type].free_memory(device) if device.type in ACCELERATORS else None


def copy_tensors_to_numpy(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Copy tensors of one device to arrays of the same types and shapes, with one wait for all of them."""
    plain = [x.detach() for x in tensors]
    if all(x.device.type == "cpu" for x in plain):
        return [x.numpy() for x in plain]
    packed = torch.cat([x.contiguous().flatten().view(torch.uint8) for x in plain]).cpu().numpy()
    arrays, at = [], 0
    for x in plain:
        size = x.numel() * x.element_size()
        kind = torch.empty((), dtype=x.dtype, device="cpu").numpy().dtype
        arrays.append(packed[at : at + size].view(kind).reshape(tuple(x.shape)))
        at += size
    return arrays


def keep_freed_memory_in_allocator() -> bool:
    """Let this process's allocator keep freed memory for the next step, where it can (glibc).

    glibc gives every block beyond 32 MiB back to the kernel when it is freed, and gets zeroed pages for the next one:
    up to a third of the processor time of a training step on images, whose activations are such blocks. What was set in
    the environment stays. Returns whether it does.
    """
    own = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in own):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    return mallopt is not None and bool(mallopt(m_mmap_max, 0) and mallopt(m_trim_threshold, 2**31 - 1))


def release_freed_memory() -> None:
    """Return the memory that this process's allocator keeps to the kernel, where it can (glibc), after a stage."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def describe_device(device: torch.device) -> str:
    """Return the name of a device, for provenance."""
    if device.type in ACCELERATORS:
        return ACCELERATORS[device.type].name(device)
    return f"{_cpu_name()}, {format_count(torch.get_num_threads(), 'thread')}"


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision of convolutions in training, and the reason for it, which is recorded with the checkpoint."""

    bf16: bool
    reason: str

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which convolutions on the device have this precision."""
        return torch.autocast(device.type, torch.bfloat16) if self.bf16 else nullcontext()


def disable_tf32() -> AbstractContextManager[None]:
    """Keep all digits of float32 in convolutions: on a GPU PyTorch would let cuDNN round them to TF32, 10 bits."""
    cudnn = torch.backends.cudnn
    return torch.backends.cudnn.flags(cudnn.enabled, cudnn.benchmark, cudnn.benchmark_limit, cudnn.deterministic, False)


def choose_precision(device: torch.device) -> PrecisionChoice:
    """Choose bf16 where the processor has instructions for it (AMX, AVX-512 BF16, Ampere and later), else float32."""
    if device.type in ACCELERATORS:
        bf16 = ACCELERATORS[device.type].has_bf16(device)
        return PrecisionChoice(bf16, f"{describe_device(device)} {'has' if bf16 else 'lacks'} bf16")
    flags = {"amx_tile": "_is_amx_tile_supported", "avx512_bf16": "_is_avx512_bf16_supported"}
    for flag, probe in flags.items():
        if getattr(torch.cpu, probe, lambda: False)():
            return PrecisionChoice(True, f"the CPU has {flag}")
    return PrecisionChoice(False, "the CPU has neither amx_tile nor avx512_bf16")
