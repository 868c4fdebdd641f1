"""The history of a node's rounds: one JSON object a line, bounded, readable by anyone while the node runs.

Not part of the shared state and never needed for correctness, so it is flushed but not fsynced; a torn last line is ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .disk import REAL_DISK, Disk, write_all

METRICS_FILE = "metrics.jsonl"
# ~400 B a round: at this size the older half is dropped.
METRICS_BYTES_MAX = 16 * 1024 * 1024


def append_metrics(data_dir: Path, record: dict[str, Any], disk: Disk = REAL_DISK) -> None:
    """Append one record. A full disk loses the record, never the training: OSError is the caller's to log."""
    path = data_dir / METRICS_FILE
    descriptor = disk.open(path)
    try:
        end = disk.size(descriptor)
        if end > METRICS_BYTES_MAX:
            lines = disk.read(path).splitlines(keepends=True)
            kept = b"".join(lines[len(lines) // 2 :])
            disk.close(descriptor)
            descriptor = disk.open(path, fresh=True)
            write_all(disk, descriptor, kept, 0)
            end = len(kept)
        # A record torn by a crash must not swallow the next one.
        torn = end > 0 and disk.pread(descriptor, 1, end - 1) != b"\n"
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        write_all(disk, descriptor, b"\n" * torn + line, end)
    finally:
        disk.close(descriptor)


def read_metrics(data_dir: Path) -> list[dict[str, Any]]:
    """All complete records, oldest first; the last record of a repeated round wins."""
    try:
        lines = (data_dir / METRICS_FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    records: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("round"), int):
            records.pop(record["round"], None)
            records[record["round"]] = record
    return list(records.values())
