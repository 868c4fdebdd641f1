"""The history of a node's rounds: one JSON object a line, bounded, readable by anyone while the node runs.

Not part of the shared state and never needed for correctness, so it is flushed but not fsynced; a torn last line is ignored.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
# ~400 B a round: at this size the older half is dropped.
METRICS_BYTES_MAX = 16 * 1024 * 1024


def append_metrics(data_dir: Path, record: dict[str, Any]) -> None:
    """Append one record. A full disk loses the record, never the training: OSError is the caller's to log."""
    path = data_dir / METRICS_FILE
    if path.exists() and path.stat().st_size > METRICS_BYTES_MAX:
        lines = path.read_bytes().splitlines(keepends=True)
        kept = path.with_suffix(".jsonl.tmp")
        kept.write_bytes(b"".join(lines[len(lines) // 2 :]))
        os.replace(kept, path)
    with open(path, "ab") as file:
        # A record torn by a crash must not swallow the next one.
        if file.tell() and not _ends_with_newline(path):
            file.write(b"\n")
        file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


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
