"""What a process has in memory, by the kernel's account (Linux), in bytes."""

import re
from pathlib import Path

__all__ = ["forget_peak", "peak", "resident"]


def resident(process: int | str = "self") -> int:
    return _status(process, "VmRSS")


def peak(process: int | str = "self") -> int:
    """The most that was resident at once, since the start or the last `forget_peak`."""
    return _status(process, "VmHWM")


def forget_peak(process: int | str = "self") -> None:
    """The high-water mark begins anew."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def _status(process: int | str, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
