"""Time and peak memory of a step on a GPU or CPU, and a record of what they were measured on."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from inductor_gqa.cli.versions import version_of

Step = Callable[[], object]


def default_device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def times_ms(step: Step, device: torch.device, count: int) -> list[float]:
    """Milliseconds of `count` runs of `step`; on CUDA between events on the current stream."""
    if device.type != "cuda":
        found: list[float] = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            found.append(1e3 * (time.perf_counter() - start))
        return found
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in pairs]


def median_ms(step: Step, device: torch.device, count: int) -> float:
    """Median of `times_ms`."""
    return statistics.median(times_ms(step, device, count))


@dataclass(frozen=True)
class Memory:
    """Bytes held before a step and at its peak: the allocator's on CUDA, the process's on a CPU."""

    before: int
    peak: int

    @property
    def added(self) -> int:
        """What the step needed on top of what was there."""
        return max(0, self.peak - self.before)


def peak_memory(step: Step, device: torch.device) -> Memory | None:
    """Runs `step` once; None where the system does not tell (CPU outside Linux)."""
    release_memory(device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return Memory(before, torch.cuda.max_memory_allocated(device))
    try:
        # Writing 5 sets the kernel's high-water mark of this process back to what it holds (Linux).
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = _status_bytes("VmRSS")
        step()
        return Memory(before, _status_bytes("VmHWM"))
    except OSError:
        return None


def release_memory(device: torch.device) -> None:
    """Gives back what is not in use, so that the next measurement does not see it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    else:
        # glibc keeps freed blocks: without this a step that reuses them seems to need nothing.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def environment(device: torch.device) -> dict[str, Any]:
    """What a number was measured on: versions and hardware, no name of a user."""
    record: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "transformers": version_of("transformers"),
        "inductor_gqa": version_of("inductor-gqa"),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.type,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        record["gpu"] = properties.name
        record["capability"] = f"{properties.major}.{properties.minor}"
        record["gpu_memory_bytes"] = properties.total_memory
        record["cuda"] = torch.version.cuda
    else:
        record["threads"] = torch.get_num_threads()
    return record
