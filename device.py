"""
The machine a script runs on: which device and dtype to use, and how much memory was.
"""

import sys

import torch


def choose_device(device, dtype):
    """The settings device and dtype as (device name, torch dtype); "auto" is resolved, and printed with its reason.

    ValueError for a device that is not here or a dtype that cannot train on it.
    """
    why = "as set"
    if device == "auto":
        device, why = ("cuda", "found") if torch.cuda.is_available() else ("mps", "found, no cuda")
        if device == "mps" and not torch.backends.mps.is_available():
            device, why = "cpu", "no cuda or mps here"
    kind = device.split(":")[0]
    here = {"cpu": lambda: True, "cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if kind not in here or not here[kind]():
        raise ValueError(f"device {device} is not available here: auto takes what is, cpu always works")
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


def peak_memory(device):
    """Bytes at most in use: of the allocator on cuda, elsewhere of the process, torch included; None on Windows."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
