"""A made-up report for tests."""

from __future__ import annotations

import math

from shoal.sim.report import Report


def a_report(count: int = 3, *, fault_count: int = 2, **changes) -> Report:
    """With something in every field."""
    names = [f"p{k}" for k in range(count)]
    values = dict(
        seed=7,
        until_s=60.0,
        peers=[{"name": n, "peer_id": f"12D3KooW{n}"} for n in names],
        identical=True,
        violations=[],
        trace_hash="ab" * 32,
        events=1234,
        wall_seconds=0.5,
        loss_first=2.0,
        loss_last=0.01,
        reward_last=-0.01,
        bytes_sent={n: 1000 * k for k, n in enumerate(names)},
        bytes_by_link=[[a, b, 10] for a in names for b in names if a != b],
        state_hashes={n: "cd" * 32 for n in names},
        rounds={n: 5 for n in names},
        faults=[
            {"kind": "kill", "who": [names[k % count]], "at_s": float(k), "until_s": None if k % 2 else k + 5.0}
            for k in range(fault_count)
        ],
        series={
            kind: {n: [[float(t), 2.0 * math.exp(-t / 9) + k] for t in range(60)] for k, n in enumerate(names)}
            for kind in ("loss", "reward", "lag", "bytes", "round")
        },
        membership=[[float(k), "p0", n, state] for k, n in enumerate(names) for state in ("alive", "suspect", "dead")],
        spans=[[n, phase, 10.0 * k, 10.0 * k + 8, k] for n in names for k, phase in enumerate(("training", "voting"))],
        errors=[],
        replay="shoal sim lan --seed 7",
    )
    return Report(**{**values, **changes})
