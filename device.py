"""
The machine a script runs on: which device and dtype to use, whether to compile, how much memory was used, and which of
several processes this is.
"""

import atexit
import functools
import os
import re
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def join_processes():
    """(rank, world, index on this machine) of this process among torchrun's; (0, 1, 0) alone. Only rank 0 prints."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return 0, 1, 0
    if sys.platform == "win32":
        raise ValueError("several processes need Linux or macOS: run one, without torchrun")
    sys.excepthook = functools.partial(connection_lost, sys.excepthook)
    # gloo carries what is on the CPU, checkpoints for one. An hour, since all wait while rank 0 writes them
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(hours=1))
    atexit.register(dist.destroy_process_group)
    total(0)  # one that stops at once, for a wrong setting, must not be gone before the others have come
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    return dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])


def connection_lost(otherwise, kind, error, tb):
    """sys.excepthook: what a collective fails with is in general the end of another rank, whose message counts."""
    if issubclass(kind, dist.DistError) or "gloo" in str(error):
        print("stopped, for another process has failed or is gone:", str(error).splitlines()[0][:200], file=sys.stderr)
    else:
        otherwise(kind, error, tb)


def total(number):
    """A number's sum over ranks, the same on all of them; they wait for each other."""
    if not dist.is_initialized():
        return number
    sums = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.item()


def choose_device(device, dtype, index=None):
    """The settings device and dtype as (device name, torch dtype); "auto" is resolved, and printed with its reason.

    index: of this process among several on the machine, which take a GPU each. ValueError for a device that is not
    here, cannot be several processes', or a dtype that cannot train on it.
    """
    device, why = str(device), "as set"
    if device == "auto":
        device, why = ("cuda", "found") if torch.cuda.is_available() else ("mps", "found, no cuda")
        if device == "mps" and not torch.backends.mps.is_available():
            device, why = "cpu", "no cuda or mps here"
    kind = device.split(":")[0]
    if index is not None and kind == "mps":
        raise ValueError("several processes cannot share mps: run one, or set --device=cpu")
    if index is not None and kind == "cuda":
        device, why = f"cuda:{index}", "a GPU for each process"
    try:
        if kind not in ("cpu", "cuda", "mps"):
            raise RuntimeError("torch knows more kinds, this project does not")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, TypeError):
        raise ValueError(f"device {device} is not available here: auto takes what is, cpu always works") from None
    if index is not None and kind == "cuda":
        torch.cuda.set_device(device)  # where NCCL works, and whatever stream or event names no device
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
