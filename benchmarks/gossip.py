"""What gossip mode costs and how fast it spreads: real nodes in the simulator.

* *Agreement and bytes*: 64 peers on lines that lose 20 % of messages, duplicate and reorder 5 % each; every peer publishes two
  updates of 64 KiB and more; at the end all hashes are equal and every update is included once. Bytes of updates (headers and
  framing included) over (n - 1) · size; hellos, wants and news apart. The simulator's streams retransmit below what is counted
  here: a loss delays a frame and is not sent twice in the count, so the figure is what is left when the line's own losses and
  duplicates are taken out.
* *Spreading*: one peer publishes into a quiet swarm of 8 … 512; the time until everybody has it, in gossip periods, with news
  (fanout 3, the default) and by exchanges alone (news switched off).

    python benchmarks/gossip.py bytes                       # 64 peers
    python benchmarks/gossip.py spread --peers 8 16 32 64 128 256 512
    python benchmarks/gossip.py plot                        # docs/scale/gossip.png from docs/scale/gossip.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from shoal.node.swarm.gossip import Gossip
from shoal.node.swarm.gossip_exchange import GossipExchange
from shoal.node.swarm.mesh import Mesh
from shoal.sim import Link, Simulation

FIGURES = Path("docs/scale/gossip.json")
LOSSY = Link(latency_ms=(20, 80), bandwidth_mbps=1000, loss=0.2, duplicate=0.05, reorder=0.05)
PERIOD_SECONDS = 2.0


class Counting:
    """A stream to send on that notes how much."""

    def __init__(self, stream: Any, counts: Counter[str]) -> None:
        self._stream, self._counts = stream, counts

    async def send(self, frame: bytes) -> None:
        self._counts["update bytes"] += len(frame)
        await self._stream.send(frame)

    async def done_sending(self) -> None:
        await self._stream.done_sending()


class Counted:
    """While it is entered, everything that gossip sends is counted by kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Counter[str]:
        self._send, self._post, self._take = GossipExchange._send, Mesh.post, GossipExchange._take
        counts, send, post, take = self.counts, self._send, self._post, self._take

        async def counted_send(exchange: Any, stream: Any, wanted: Any) -> None:
            await send(exchange, Counting(stream, counts), wanted)

        def counted_post(mesh: Any, peer: str, envelope: Any) -> None:
            if envelope.WhichOneof("body") == "gossip_news":
                counts["news messages"] += 1
                counts["news bytes"] += envelope.ByteSize()
            post(mesh, peer, envelope)

        def counted_take(exchange: Any, peer: str, header: Any, payload: bytes, *more: Any) -> bool:
            new = take(exchange, peer, header, payload, *more)
            counts["received new" if new else "received again"] += 1
            counts["payload bytes received"] += len(payload)
            return new

        GossipExchange._send, Mesh.post, GossipExchange._take = counted_send, counted_post, counted_take  # type: ignore[method-assign]
        return counts

    def __exit__(self, *_: object) -> None:
        GossipExchange._send, Mesh.post, GossipExchange._take = self._send, self._post, self._take  # type: ignore[method-assign]


def bytes_sent(peers: int = 64, d: int = 70_000, updates: int = 2, seed: int = 1) -> dict[str, Any]:
    """Agreement, and bytes by kind. One byte a parameter: an update is as large as d."""
    run = {
        "compression": "1/8",
        "quadratic": {"dimension": d},
        "admission": {"mode": "open"},
        "sync": {
            "mode": "gossip",
            "gossip_seconds": 10.0,
            "target_samples": 64,
            "rounds_max": updates,
            "round_seconds_max": 60.0,
        },
    }
    with Counted() as counts:
        sim = Simulation(seed, run=run, link=LOSSY, step_seconds=5.0)
        for index in range(peers):
            sim.add_peers(1, at_s=index / 5)
        report = sim.run(until_s=peers / 5 + 40.0 * updates + 60.0, stride=20_000, settle_s=120.0)
    streams = sim.network.by_method()
    whole = sum(streams[name].bytes for name in ("Gossip", "Fetch") if name in streams)
    arrivals = counts["received new"] + counts["received again"]
    size = counts["payload bytes received"] / max(1, arrivals)
    published = sum(p.node.rounds.published for p in sim.peers if p.node and isinstance(p.node.rounds, Gossip)) or (
        peers * updates
    )
    expected = published * (peers - 1) * size
    return {
        "peers": peers,
        "update_bytes": round(size),
        "updates": published,
        "identical": report.identical,
        "violations": [v["text"] for v in report.violations][:5],
        "errors": report.errors[:3],
        "included_by_each": sorted(set(report.rounds.values())),
        "received_new": counts["received new"],
        "received_again": counts["received again"],
        "bytes_of_updates_over_least": round(counts["update bytes"] / expected, 4),
        "the_same_on_the_line": round(counts["update bytes"] / expected / (1 - LOSSY.loss), 4),
        "digest_bytes": whole - counts["update bytes"],
        "digests_over_least": round((whole - counts["update bytes"]) / expected, 4),
        "news_messages": counts["news messages"],
        "news_bytes": counts["news bytes"],
    }


def spread(peers: int, news: bool, seed: int = 1, updates: int = 4) -> dict[str, Any]:
    """Periods until everybody has an update; `updates` of them, one after another."""
    apart = PERIOD_SECONDS * (8 + 3 * math.ceil(math.log2(peers)))
    run = {
        "compression": "0.25/8",
        "quadratic": {"dimension": 64},
        "admission": {"mode": "open"},
        "membership": {"preset": "wan"},  # fewer probes: they are not what is measured
        "sync": {
            "mode": "gossip",
            "gossip_seconds": PERIOD_SECONDS,
            "target_samples": round(8 * apart),
            "round_seconds_max": 3600.0,
        },
    }
    sim = Simulation(seed, run=run, link=LOSSY, step_seconds=1.0)
    joined = peers / 10 + 20.0
    for index in range(peers):
        sim.add_peers(1, at_s=index / 10, node={"wait_for_start": index > 0})
    had: list[tuple[float, list[int]]] = []

    def look() -> None:
        rounds = [p.node.rounds for p in sim.peers if p.node is not None]
        had.append((sim.now, [r.log.included for r in rounds if isinstance(r, Gossip)]))
        sim.at(sim.now + 0.05, look)

    sim.at(joined, look)
    grew = Gossip.grew
    if not news:
        Gossip.grew = lambda self, keys, but="": None  # type: ignore[method-assign]
    try:
        report = sim.run(until_s=joined + apart * (updates + 1.5), stride=200_000, settle_s=0.0)
    finally:
        Gossip.grew = grew  # type: ignore[method-assign]
    had = [(at, counts) for at, counts in had if len(counts) == peers]
    first, last = had[0][1][0], had[-1][1][0]
    times, half = [], []
    for number in range(first + 1, last + 1):
        since = next(at for at, counts in had if counts[0] >= number)
        all_at = next((at for at, counts in had if min(counts) >= number), None)
        if all_at is not None:
            times.append((all_at - since) / PERIOD_SECONDS)
            half_at = next(at for at, counts in had if sum(c >= number for c in counts) * 2 >= peers)
            half.append((half_at - since) / PERIOD_SECONDS)
    return {
        "peers": peers,
        "news": news,
        "updates": len(times),
        "periods_until_all": {"mean": round(statistics.mean(times), 2), "max": round(max(times), 2)},
        "periods_until_half": round(statistics.mean(half), 2),
        "log2_n": round(math.log2(peers), 2),
        "violations": [v["text"] for v in report.violations][:5],
    }


def keep(name: str, found: dict[str, Any]) -> None:
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    known[name] = found
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    FIGURES.write_text(json.dumps(known, indent=1) + "\n")


def plot() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    known = json.loads(FIGURES.read_text())
    figure, axes = plt.subplots(figsize=(6.5, 4))
    for news, label in ((True, "with news (fanout 3)"), (False, "exchanges alone")):
        rows = sorted((f for f in known.values() if f.get("news") is news), key=lambda f: f["peers"])
        sizes = [f["peers"] for f in rows]
        axes.plot(sizes, [f["periods_until_all"]["mean"] for f in rows], "o-", label=f"all, {label}")
    sizes = sorted({f["peers"] for f in known.values() if "news" in f})
    axes.plot(sizes, [math.log2(n) for n in sizes], "k:", label="log2 n")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("peers")
    axes.set_ylabel("gossip periods until everybody has an update")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(FIGURES.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bytes", "spread", "plot"))
    parser.add_argument("--peers", type=int, nargs="+")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.what == "plot":
        return plot()
    started = time.process_time()
    if options.what == "bytes":
        found = bytes_sent((options.peers or [64])[0], seed=options.seed)
        keep(f"bytes {found['peers']}", found)
        print(json.dumps(found), flush=True)
    else:
        for peers in options.peers or [8, 16, 32, 64, 128, 256, 512]:
            for news in (True, False):
                found = spread(peers, news, options.seed)
                keep(f"spread {peers} {'news' if news else 'exchanges'}", found)
                print(json.dumps(found), flush=True)
    print(f"({time.process_time() - started:.0f} s CPU)", flush=True)


if __name__ == "__main__":
    main()
