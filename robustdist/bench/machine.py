"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["bf16_units", "describe_machine", "installed_version", "processor_name"]

#: Feature flags of processors that multiply bfloat16 numbers in hardware (x86 and ARM).
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
_CPUINFO = Path("/proc/cpuinfo")


def installed_version(package: str) -> str | None:
    """Return the version of ``package``, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpuinfo(path: Path) -> dict[str, str]:
    """Return the fields of the first processor in ``path``; empty where there is no such file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields = (line.partition(":") for line in text.split("\n\n", maxsplit=1)[0].splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in fields}


def processor_name(device: torch.device, cpuinfo: Path = _CPUINFO) -> str:
    """Return the name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpuinfo(cpuinfo).get("model name") or platform.processor() or platform.machine()


def bf16_units(device: torch.device, cpuinfo: Path = _CPUINFO) -> list[str] | None:
    """Return the features that multiply bfloat16 numbers in hardware; None where the system does not say.

    Without any, a bfloat16 attack is emulated and gains nothing.
    """
    if device.type == "cuda":
        return ["cuda"] if torch.cuda.is_bf16_supported(including_emulation=False) else []
    fields = _cpuinfo(cpuinfo)
    flags = fields.get("flags") or fields.get("features")
    return None if flags is None else sorted(_BF16_FLAGS.intersection(flags.split()))


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return processor, features and versions as plain values; nothing that names the host or its user."""
    return {
        "device": device.type,
        "processor": processor_name(device),
        "num_cpus": os.cpu_count(),
        "bf16_units": bf16_units(device),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "robustdist": installed_version("robustdist"),
    }
