"""`shoal doctor`: what about this machine would trouble a node. Looks, and changes nothing but a probe file."""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import shutil
import socket
import stat
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..protocol.discovery import join_address, kind_of
from ..protocol.errors import ShoalError
from .interfaces import interface_addresses
from .observe.control import call_blocking
from .store.datadir import FREE_BYTES_MIN

Status = Literal["good", "note", "bad"]
EXTRAS = {"hivemind": "dht", "gguf": "gguf", "matplotlib": "plot"}
LARGE_DISK_BYTES = 2 * 1024**3
# 2026-01-01 UTC: a clock before this software existed was never set.
EPOCH_SECONDS_MIN = 1_767_225_600


@dataclass(frozen=True)
class Finding:
    """One check. `todo` is empty where nothing needs doing."""

    name: str
    status: Status
    detail: str
    todo: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(data_dir: Path, port: int) -> list[Finding]:
    """All checks, in the order of a node's start."""
    return [
        _python(),
        _device(),
        _clock(time.time()),
        *_disk(data_dir),
        *_identity(data_dir),
        *_port(port, data_dir),
        *_addresses(port),
        *_extras(),
    ]


def _python() -> Finding:
    version = platform.python_version()
    good = sys.version_info >= (3, 10)
    return Finding("python", "good" if good else "bad", version, "" if good else "Install Python 3.10 or newer.")


def _device() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("device", "bad", "torch is not installed", "Run: pip install torch")
    import torch

    if torch.cuda.is_available():
        kind = "ROCm" if torch.version.hip else "CUDA"
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return Finding("device", "good", f"{kind}: {names}")
    if torch.backends.mps.is_available():
        return Finding("device", "good", "Apple MPS")
    return Finding(
        "device", "note", f"CPU only, {os.cpu_count()} cores", "Small models train on it; large ones need a GPU."
    )


def _clock(now: float) -> Finding:
    """shoal trusts no clock, but logs and the DHT read this one, and model hubs' certificates are checked by it."""
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now >= EPOCH_SECONDS_MIN:
        return Finding("clock", "good", text)
    return Finding("clock", "note", f"{text} lies in the past", "Set the clock, for example by NTP.")


def _disk(data_dir: Path) -> list[Finding]:
    folder = data_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{free / 1024**3:.1f} GiB free on the disk of {data_dir}"
    todo = "A checkpoint needs about eight times the trained parameters' size; free some space."
    found = [
        Finding(
            "disk",
            "bad" if free < FREE_BYTES_MIN else "note" if free < LARGE_DISK_BYTES else "good",
            text,
            todo if free < LARGE_DISK_BYTES else "",
        )  # fmt: skip
    ]
    probe = folder / f".shoal-doctor-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, b"probe")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()
        found.append(Finding("write", "good", f"{folder} can be written and synced"))
    except OSError as error:
        found.append(Finding("write", "bad", f"{folder}: {error.strerror}", "Choose another --data-dir."))
    return found


def _identity(data_dir: Path) -> list[Finding]:
    path = data_dir / "identity"
    if not path.exists():
        return [Finding("identity", "note", "none yet; made at the first start")]
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return [Finding("identity", "bad", f"{path} has mode {mode:04o}, expected 0600", f"Run: chmod 600 {path}")]
    return [Finding("identity", "good", f"{path} has mode {mode:04o}")]


def _port(port: int, data_dir: Path) -> list[Finding]:
    try:
        running = call_blocking(data_dir / "control.sock", "status", {}, timeout_s=5.0)
    except ShoalError:
        running = {}
    if any(address.rpartition(":")[2] == str(port) for address in running.get("addresses", [])):
        return [Finding("port", "good", f"TCP port {port} is used by the running node of {data_dir}")]
    found = []
    for family, host, name in ((socket.AF_INET, "0.0.0.0", "IPv4"), (socket.AF_INET6, "::", "IPv6")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
            found.append(Finding(f"port {name}", "good", f"TCP port {port} is free"))
        except OSError as error:
            missing = family == socket.AF_INET6 and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
            status: Status = "note" if missing else "bad"
            todo = f"Stop what uses it (`ss -ltnp | grep {port}`), or choose another with --port."
            if missing:
                todo = "Nothing: the node listens on IPv4 alone."
            found.append(Finding(f"port {name}", status, f"port {port}: {error.strerror}", todo))
    return found


def _addresses(port: int) -> list[Finding]:
    addresses = interface_addresses()
    kinds = {address: kind_of(address) for address in addresses}
    text = ", ".join(f"{join_address(a, port)} ({k})" for a, k in kinds.items()) or "none but loopback"
    if "public" in kinds.values():
        return [Finding("reachable", "good", text)]
    todo = (
        f"Peers outside this network cannot dial these. Forward TCP port {port} on your router to this machine and set "
        f'node.announce = ["<public address>:{port}"]; on one local network nothing is needed.'
    )
    return [Finding("reachable", "note", text, todo)]


def _extras() -> list[Finding]:
    return [
        Finding(package, "good", "installed")
        if importlib.util.find_spec(package)
        else Finding(package, "note", "not installed", f"Optional: pip install 'shoal[{extra}]'")
        for package, extra in EXTRAS.items()
    ]


def describe(findings: list[Finding]) -> str:
    """One line each, with what to do below."""
    mark = {"good": "ok  ", "note": "note", "bad": "BAD "}
    lines = []
    for finding in findings:
        lines.append(f"{mark[finding.status]} {finding.name:<10} {finding.detail}")
        if finding.todo:
            lines.append(f"     {'':<10} {finding.todo}")
    return "\n".join(lines)
