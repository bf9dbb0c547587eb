"""
The machine a script runs on: which device and dtype to use, whether to compile, how much memory was used.
"""

import re
import sys
from pathlib import Path

import torch


def choose_device(device, dtype):
    """The settings device and dtype as (device name, torch dtype); "auto" is resolved, and printed with its reason.

    ValueError for a device that is not here or a dtype that cannot train on it.
    """
    device, why = str(device), "as set"
    if device == "auto":
        device, why = ("cuda", "found") if torch.cuda.is_available() else ("mps", "found, no cuda")
        if device == "mps" and not torch.backends.mps.is_available():
            device, why = "cpu", "no cuda or mps here"
    kind = device.split(":")[0]
    try:
        if kind not in ("cpu", "cuda", "mps"):
            raise RuntimeError("torch knows more kinds, this project does not")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, TypeError):
        raise ValueError(f"device {device} is not available here: auto takes what is, cpu always works") from None
    why_dtype = "as set"
    if dtype == "auto":
        dtype, why_dtype = "float32", f"half precision gains little on {kind}"
        if kind == "cuda":
            dtype, why_dtype = "bfloat16", "native on this card"
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                dtype, why_dtype = "float16", "no native bfloat16 on this card"
    if dtype not in ("float32", "bfloat16", "float16") or (kind, dtype) == ("mps", "float16"):
        raise ValueError(f"dtype must be auto, float32, bfloat16 or, except on mps, float16; got {dtype} for {kind}")
    print(f"device {device} ({why}), dtype {dtype} ({why_dtype})")
    return device, getattr(torch, dtype)


def compiled(model, wish, device):
    """The model to call in training: compiled if `wish` is True, or "auto" on cuda, and that works here; says so."""
    if wish is not True and not (wish == "auto" and device.startswith("cuda")):
        print("compile off" + (" (only on cuda)" if wish == "auto" else " (as set)"))
        return model
    try:
        torch.compile(torch.neg)(torch.ones(2, device=device))  # a missing compiler is found here, in a second
    except Exception as e:
        print(f"compile off: torch.compile does not work here ({type(e).__name__})")
        return model
    print("compile on" + (" (cuda)" if wish == "auto" else " (as set)"))
    return torch.compile(model)


def rows_that_fit(cache_rows, table_shape, itemsize, device):
    """The setting cache_rows as a number: for -1 the rows that fit into half of the device's free memory, printed.

    table_shape: (V, S, M). itemsize: bytes a number of a row takes, 12 with the state of its optimizer.
    """
    if cache_rows >= 0:
        return cache_rows
    V, S, M = table_shape
    cache_rows, why = 0, f"the tables' host memory is that of {device}"
    if device.startswith("cuda"):
        free = torch.cuda.mem_get_info(device)[0]
        cache_rows, why = min(V, free // 2 // max(1, S * M * itemsize)), f"half of the {free / 2**30:.1f} GiB free"
    print(f"cache_rows {cache_rows:,} of {V:,} ({why})")
    return cache_rows


def peak_memory(device):
    """Bytes at most in use: of the allocator on cuda, elsewhere of the process, torch included; None on Windows."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # not getrusage: after a fork and exec it knows the parent's peak
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))[1])
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
