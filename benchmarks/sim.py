"""Speed of the simulator: how many peers times virtual seconds one core runs in a second, and how that grows with the swarm.

Gossip mode, the quadratic learner with 1,000 parameters (2 % at 4 bits), a probe a second, an exchange every ten, an update a
minute from every peer, home-like lines (20 to 80 ms, 1 % loss). Ten peers start a second. Signatures and updates are verified
and decoded once in the process, whoever receives them; the invariant checkers look every STRIDE events.

A size runs in a process of its own, so that its memory is its own. Time is CPU time of that process ("x real time"
too): on a machine that does other things as well the wall clock says little; it is printed beside it.

    python benchmarks/sim.py [--peers 10 50 200] [--seconds 300] [--figures docs/scale/sim.json]
    python benchmarks/sim.py --peers 1000 --seconds 1200 --log-save-seconds 3600   # alone, with an hour or more to spare
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import resource
import sys
import time
from pathlib import Path
from typing import Any

from shoal.sim import Link, Simulation

STARTS_PER_SECOND = 10.0
STRIDE = 50_000
MARK_SECONDS = 30.0
RUN: dict[str, Any] = {
    "compression": "0.02/4",
    "quadratic": {"dimension": 1000},
    "admission": {"mode": "open"},
    "membership": {"preset": "lan"},  # a probe a second
    "sync": {"mode": "gossip", "gossip_seconds": 10.0, "target_samples": 64, "round_seconds_max": 60.0},
}
STEP_SECONDS = 7.5  # eight steps of eight samples: an update a minute


def measure(peers: int, seconds: float, seed: int, log_save_seconds: float, out: mp.Queue[dict[str, Any]]) -> None:
    """One run; puts its figures so far into `out` every MARK_SECONDS, and all of them at the end."""
    sim = Simulation(
        seed, run=RUN, link=Link(latency_ms=(20, 80), bandwidth_mbps=100, loss=0.01), step_seconds=STEP_SECONDS
    )
    for index in range(peers):
        sim.add_peers(1, at_s=index / STARTS_PER_SECOND, node={"log_save_seconds": log_save_seconds})
    started, cpu = time.perf_counter(), time.process_time()
    joined = peers / STARTS_PER_SECOND + 10.0
    marks: list[dict[str, float]] = []

    def mark() -> None:
        marks.append({"virtual_s": sim.now, "cpu_s": time.process_time() - cpu, "events": sim.loop.events})
        out.put(figures(peers, marks, joined, started) | {"finished": False})
        if sim.now < seconds:
            sim.at(sim.now + MARK_SECONDS, mark)

    sim.at(0.0, mark)
    report = sim.run(until_s=seconds, stride=STRIDE, settle_s=0.0)
    marks.append({"virtual_s": seconds, "cpu_s": time.process_time() - cpu, "events": report.events})
    found = figures(peers, marks, joined, started)
    found |= {
        "finished": True,
        "violations": [v["text"] for v in report.violations],
        "errors": report.errors[:5],
        "updates": [min(report.rounds.values()), max(report.rounds.values())],
        "loss": [report.loss_first, report.loss_last],
        "bytes_sent": sum(report.bytes_sent.values()),
        "by_method": {name: [c.frames, c.bytes] for name, c in sorted(sim.network.by_method().items())},
    }
    out.put(found)


def figures(peers: int, marks: list[dict[str, float]], joined: float, started: float) -> dict[str, Any]:
    """The whole run, and the part of it in which all are in."""
    last = marks[-1]
    after = next((m for m in marks if m["virtual_s"] >= joined), last)
    cpu_s = max(last["cpu_s"], 1e-9)
    steady_s, steady_cpu = last["virtual_s"] - after["virtual_s"], last["cpu_s"] - after["cpu_s"]
    return {
        "peers": peers,
        "virtual_s": last["virtual_s"],
        "cpu_s": round(last["cpu_s"], 1),
        "wall_s": round(time.perf_counter() - started, 1),
        "x_real_time": round(last["virtual_s"] / cpu_s, 2),
        "peer_seconds_per_s": round(peers * last["virtual_s"] / cpu_s),
        "steady_x_real_time": round(steady_s / steady_cpu, 2) if steady_cpu > 0 else None,
        "steady_peer_seconds_per_s": round(peers * steady_s / steady_cpu) if steady_cpu > 0 else None,
        "us_per_event": round(1e6 * cpu_s / max(1, last["events"]), 1),
        "events_per_peer_second": round(last["events"] / max(1.0, peers * last["virtual_s"]), 1),
        "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def line(found: dict[str, Any]) -> str:
    steady = "" if found["steady_x_real_time"] is None else f" (all in: {found['steady_x_real_time']:6.2f})"
    return (
        f"{found['peers']:5d} peers  {found['virtual_s']:6.0f} s virtual in {found['cpu_s']:8.1f} s CPU, "
        f"{found['wall_s']:8.1f} s wall: {found['x_real_time']:7.2f} x real time{steady}, "
        f"{found['peer_seconds_per_s']:6d} peer-seconds/s, {found['us_per_event']:5.1f} us/event, {found['rss_mib']} MiB"
    )


def keep(path: Path | None, found: dict[str, Any]) -> None:
    if path is not None:
        known = json.loads(path.read_text()) if path.exists() else {}
        known[str(found["peers"])] = found
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(sorted(known.items(), key=lambda kv: int(kv[0]))), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--log-save-seconds",
        type=float,
        default=60.0,
        help="[node] log_save_seconds; a simulated disk is memory, and a thousand whole logs are several GiB of it",
    )
    parser.add_argument("--figures", type=Path, help="a JSON file that the figures are added to")
    options = parser.parse_args()
    for peers in options.peers:
        out: mp.Queue[dict[str, Any]] = mp.get_context("spawn").Queue()
        process = mp.get_context("spawn").Process(
            target=measure, args=(peers, options.seconds, options.seed, options.log_save_seconds, out)
        )
        process.start()
        while True:
            try:
                found = out.get(timeout=5.0)
            except Exception:
                if process.is_alive():
                    continue
                sys.exit(f"the run of {peers} peers died with exit code {process.exitcode}")
            keep(options.figures, found)
            if found["finished"]:
                break
            print(line(found), file=sys.stderr, flush=True)
        process.join()
        print(line(found), flush=True)
        if found["violations"] or found["errors"]:
            sys.exit(f"violations: {found['violations'][:3]}, errors: {found['errors'][:3]}")


if __name__ == "__main__":
    main()
