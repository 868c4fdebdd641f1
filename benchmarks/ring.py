"""All-reduce of the same tensors by shoal, torch.distributed's gloo and hivemind's averager: same processes, one run.

Each of n processes holds a fp32 vector; what is timed is from a common start until every process has the mean. shoal is
measured in its three exchanges over real TLS streams: dense fp32, dense 8-bit, and sparse (10 %, 4 bits) all-gather with
encode and decode; without ballots and commits, which cost a fixed few round trips. gloo is plaintext and unauthenticated;
hivemind's time includes its matchmaking. What a method cannot do here is reported as such.

    python benchmarks/ring.py [--peers 4] [--megabytes 20] [--repeat 3] [--json] [--skip hivemind]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

METHODS = ("gloo", "shoal-dense", "shoal-dense-8bit", "shoal-sparse", "hivemind")


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def vector_of(rank: int, d: int) -> np.ndarray:
    return (np.random.default_rng(rank).standard_t(3, d) * 1e-3).astype(np.float32)


# --- torch.distributed ------------------------------------------------------------------------------------------------


def run_gloo(rank: int, n: int, d: int, repeat: int, ports: list[int], barrier: Callable[[], None]) -> list[float]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=n)
    times = []
    for _ in range(repeat):
        tensor = torch.from_numpy(vector_of(rank, d))
        barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        tensor /= n
        times.append(time.perf_counter() - started)
    dist.destroy_process_group()
    return times


# --- shoal ------------------------------------------------------------------------------------------------------------


def run_shoal(
    rank: int, n: int, d: int, repeat: int, ports: list[int], barrier: Callable[[], None], method: str
) -> list[float]:
    return asyncio.run(_shoal(rank, n, d, repeat, ports, barrier, method))


async def _shoal(
    rank: int, n: int, d: int, repeat: int, ports: list[int], barrier: Callable[[], None], method: str
) -> list[float]:
    from shoal.aggregation.compress import PRESETS, decode, encode
    from shoal.aggregation.merge import OuterSgd, merge_round
    from shoal.node.swarm.dense_exchange import DenseExchange
    from shoal.node.swarm.mesh import Mesh
    from shoal.node.swarm.ring_exchange import RingExchange, Transfer
    from shoal.node.swarm.state import MergeRules
    from shoal.node.swarm.updates import UpdateStore
    from shoal.protocol.admission import Admission, Bans
    from shoal.protocol.ballot_messages import Exchange, Roster, RosterEntry, parse_header
    from shoal.protocol.clock import RealClock
    from shoal.protocol.grpc_transport import GrpcTransport
    from shoal.protocol.handshake import Self
    from shoal.protocol.identity import Identity
    from shoal.protocol.signing import sign_body
    from shoal.protocol.version import sha256
    from shoal.protocol.wire_pb2 import Dot, UpdateHeader

    run_id = b"b" * 32
    identities = [Identity.generate(bytes([i + 1]) * 32) for i in range(n)]
    peers = [i.peer_id for i in identities]
    me, clock, boot = identities[rank], RealClock(), os.urandom(16)
    mine = Self(me, run_id, boot, 1, (f"127.0.0.1:{ports[rank]}",), Admission(), Bans())
    mesh = Mesh(
        transport=GrpcTransport(me), clock=clock, me=lambda: mine, random_bytes=os.urandom, rng=random.Random(rank)
    )  # fmt: skip
    await mesh.listen("127.0.0.1", ports[rank])
    for i, peer in enumerate(peers):
        mesh.news(peer, [f"127.0.0.1:{ports[i]}"])
    setting, sparse = PRESETS["short"], method == "shoal-sparse"
    rules = MergeRules(setting, OuterSgd(1.0), 10, 10.0, 0.0)
    done = asyncio.Event()
    failures: list[str] = []

    def trouble(where: str, error: BaseException) -> None:
        failures.append(f"{where}: {error!r}")

    store = UpdateStore(run_id=run_id, d=d, compression=setting, bytes_max=2**31)
    ring = RingExchange(
        me=me.peer_id, clock=clock, open_stream=mesh.open, store=store, is_dead=lambda peer: False,
        on_arrival=lambda: done.set() if not ring.missing() else None, on_trouble=trouble,
    )  # fmt: skip
    dense = DenseExchange(
        me=me.peer_id, clock=clock, open_stream=mesh.open, d=d, bits=8 if method.endswith("8bit") else 32,
        rules=rules, on_complete=lambda hashes: done.set(), on_failure=lambda a, why: failures.append(why),
        on_trouble=trouble,
    )  # fmt: skip
    for name, handler in (("Push", ring.serve_push), ("Pull", ring.serve_pull), ("Dense", dense.serve)):
        mesh.serve(name, handler)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, barrier)
    await mesh.open(peers[(rank + 1) % n], "Pull")  # connections are made once and kept, as in a run
    vector = vector_of(rank, d)
    theta = np.zeros(d, np.float32)

    def header_of(i: int, payload: bytes, round_: int) -> Any:
        body = UpdateHeader(
            dot=Dot(peer=peers[i], incarnation=1, seq=round_), previous_head=bytes(32), round=round_,
            base_lineage=bytes(32), weight=1, encoding="SPARSE" if sparse else "DENSE",
            payload_hash=sha256(payload), payload_size=len(payload),
        )  # fmt: skip
        return parse_header(sign_body(identities[i], "update", "origin", run_id, body.SerializeToString()))

    # In a run the roster tells the others' headers before the exchange; here everybody computes them beforehand.
    others = [encode(vector_of(i, d), setting) if sparse else b"" for i in range(n)]
    times = []
    for round_ in range(1, repeat + 1):
        headers = [header_of(i, others[i], round_) for i in range(n)]
        done.clear()
        await loop.run_in_executor(None, barrier)
        started = time.perf_counter()
        if sparse:
            payload = await clock.run(lambda: encode(vector, setting))
            store.put(headers[rank], payload)
            ring.begin(Transfer((round_, bytes(32), 0), tuple(peers), {h.update_hash: h for h in headers}))
        else:
            entries = tuple(RosterEntry(p, h) for p, h in zip(peers, headers, strict=True))
            dense.begin(Roster(peers[0], round_, bytes(32), 0, entries, (), Exchange.RING_DENSE, ""), vector)
        await asyncio.wait_for(done.wait(), 120)
        if sparse:
            updates = [(i, decode(store.load(h.update_hash)[1], d, setting), 1) for i, h in enumerate(headers)]
            await clock.run(lambda u=updates: merge_round(theta, None, u, rules.outer))
        else:
            assert dense._reduce is not None
            await clock.run(dense._reduce.result)
        times.append(time.perf_counter() - started)
        await loop.run_in_executor(None, barrier)
        store.drop_before(round_ + 1)
    await loop.run_in_executor(None, barrier)
    await mesh.close()
    return times


# --- hivemind ---------------------------------------------------------------------------------------------------------


def run_hivemind(rank: int, n: int, d: int, repeat: int, folder: str, barrier: Callable[[], None]) -> list[float]:
    mp.set_start_method("fork", force=True)  # hivemind starts its own processes that way
    import hivemind
    import torch

    torch.set_num_threads(1)
    address = os.path.join(folder, "dht")
    if rank == 0:
        dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        with open(address, "w") as file:
            file.write("\n".join(str(m) for m in dht.get_visible_maddrs()))
    barrier()
    if rank:
        with open(address) as file:
            dht = hivemind.DHT(start=True, initial_peers=file.read().split(), host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    averager = hivemind.DecentralizedAverager(
        [torch.from_numpy(vector_of(rank, d))], dht=dht, prefix="bench", target_group_size=n, min_group_size=n,
        min_matchmaking_time=2.0, request_timeout=1.0, start=True,
    )  # fmt: skip
    times = []
    for _ in range(repeat):
        barrier()
        started = time.perf_counter()
        averager.step(timeout=90)
        times.append(time.perf_counter() - started)
    barrier()
    averager.shutdown()
    dht.shutdown()
    return times


# --- the run ----------------------------------------------------------------------------------------------------------


def worker(
    method: str, rank: int, n: int, d: int, repeat: int, ports: list[int], folder: str, gate: Any, out: Any
) -> None:
    def barrier() -> None:
        gate.wait(180)

    try:
        if method == "gloo":
            times = run_gloo(rank, n, d, repeat, ports, barrier)
        elif method == "hivemind":
            times = run_hivemind(rank, n, d, repeat, folder, barrier)
        else:
            times = run_shoal(rank, n, d, repeat, ports, barrier, method)
        out.put((rank, times, ""))
    except Exception as error:
        gate.abort()
        out.put((rank, [], f"{type(error).__name__}: {error}"))


def measure(method: str, n: int, d: int, repeat: int) -> dict[str, Any]:
    """The slowest process of each repetition; the median over repetitions after the first, which warms up."""
    context = mp.get_context("spawn")
    gate, out = context.Barrier(n), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ports = free_ports(n)
        arguments = [(method, rank, n, d, repeat + 1, ports, folder, gate, out) for rank in range(n)]
        processes = [context.Process(target=worker, args=a) for a in arguments]
        for process in processes:
            process.start()
        results = [out.get(timeout=600) for _ in processes]
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()
    errors = [error for _, _, error in results if error]
    if errors:
        return {"method": method, "error": errors[0]}
    slowest = [max(times) for times in zip(*(times for _, times, _ in results), strict=True)]
    return {"method": method, "seconds": round(float(np.median(slowest[1:])), 3), "first": round(slowest[0], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=20.0, help="of fp32 per process")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--skip", nargs="*", default=[], choices=METHODS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    d = int(options.megabytes * 250_000)
    rows = [measure(m, options.peers, d, options.repeat) for m in METHODS if m not in options.skip]
    base = next((r["seconds"] for r in rows if r["method"] == "gloo" and "seconds" in r), None)
    for row in rows:
        if base and "seconds" in row:
            row["against_gloo"] = round(row["seconds"] / base, 2)
    report = {"peers": options.peers, "megabytes": options.megabytes, "cores": os.cpu_count(), "rows": rows}
    if options.json:
        print(json.dumps(report))
        return
    print(f"{options.peers} processes on {os.cpu_count()} cores, {options.megabytes:g} MB of fp32 each")
    for row in rows:
        if "error" in row:
            print(f"  {row['method']:<17} failed: {row['error'][:90]}")
        else:
            print(
                f"  {row['method']:<17} {row['seconds']:8.3f} s   {row.get('against_gloo', float('nan')):6.2f} x gloo"
            )


if __name__ == "__main__":
    main()
