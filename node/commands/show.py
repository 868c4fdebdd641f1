"""How status and peers look to a person, and waiting for a node to end."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any


def plain(text: str) -> str:
    """Without control characters: names, reasons and addresses may come from a peer, and go to a terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def describe_status(status: dict[str, Any]) -> str:
    """Several lines."""
    return "\n".join(plain(line) for line in _status_lines(status))


def _status_lines(status: dict[str, Any]) -> list[str]:
    lines = [f"{status['peer_id']}  ({status['name']}, run {status['run_id'][:16]})"]
    warnings = [f"  warning: {w}" for w in status["warnings"]]
    if "round" not in status:
        return [*lines, f"  {status['phase']} since {status['uptime_seconds']:.0f} s", *warnings]
    last = f" of {status['rounds_max']}" if status["rounds_max"] else ""
    state = f"now {status['phase']}; state {status['state_hash'][:16]}"
    have, want = status["swarm_samples"], status["target_samples"]
    if status["published"] is None:
        lines.append(f"  round {status['round']}{last} committed, {state}")
        lines.append(f"  {have} of {want} samples for the next round, {status['samples']} of them here")
    else:
        lines.append(f"  {status['round']} updates included, {status['published']}{last} published here, {state}")
        lines.append(f"  {status['samples']} of {want} samples for the next update")
    alone = "  ALONE: training goes on by itself" if status["alone"] else ""
    electorate = f", {len(status['electorate'])} in the electorate" if status["published"] is None else ""
    lines.append(f"  {status['alive']} alive{electorate}{alone}")
    if not status["member"] and status["published"] is None:
        lines.append("  not a member yet: named in the next commit")
    if status["metrics"]:
        lines.append("  " + "  ".join(f"{k} {v:.4g}" for k, v in sorted(status["metrics"].items())))
    sent = status["bytes"]
    lines.append(f"  sent {sent['round']:,} bytes in rounds, {sent['control']:,} control, {sent['state']:,} state")
    if status["disk_trouble"]:
        lines.append(f"  DISK: {status['disk_trouble']}; nothing is published until this is mended")
    return [*lines, *warnings]


def describe_peers(peers: list[dict[str, Any]]) -> str:
    """A table."""
    if not peers:
        return "nobody else is known"
    rows = [("peer", "state", "round", "same", "samples/s", "address")]
    for peer in peers:
        address = peer["addresses"][0] if peer["addresses"] else "-"
        note = f"  ({peer['last_error']})" if peer["last_error"] and not peer["connected"] else ""
        rows.append(
            (
                "…" + peer["peer_id"][-12:],
                peer["state"],
                str(peer["round"]),
                "yes" if peer["same_state"] else "no",
                f"{peer['samples_per_s']:.1f}",
                address + note,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(plain("  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[5]])) for row in rows)


def wait_until_gone(data_dir: Path, seconds: float) -> bool:
    """Whether the daemon released its data directory within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            descriptor = os.open(data_dir / "lock", os.O_RDWR)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.1)  # polling a lock under a deadline
        finally:
            os.close(descriptor)
    return False
