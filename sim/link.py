"""What a host's line is like: latency, bandwidth, loss. A value; network.py makes time of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Distribution = Literal["uniform", "exponential", "lognormal"]

# Standard deviations from the median to the 95th percentile of a normal distribution.
_P95 = 1.6449
# The tails of the other distributions end at this multiple of the range's high end: a frame is late, not lost.
_TAIL_MAX = 10.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """One host's access to the network.

    A path from a to b delays by half of each end's latency, loses with the two losses combined, and is as fast as a's
    uplink and b's downlink let it be. With the same link at both ends the path has exactly that link's figures.

    Attributes:
        latency_ms: one way, a figure or a range (low, high).
        jitter_ms: None: every frame draws its latency from the range. Otherwise a path draws its distance from the range
            once, the same both ways, and every frame is late by up to this on top.
        distribution: over the range. "uniform"; "exponential": low and more, high - low more on average; "lognormal": 5 % of
            draws below low and 5 % above high, the usual shape of internet paths. Tails end at ten times high.
        bandwidth_mbps: megabits per second each way, shared among all flows of the line; None: no limit.
        up_mbps, down_mbps: where the two directions differ.
        loss, duplicate, reorder: probabilities per *message* (frames of "Control" streams), below 1 for the loss. Streams
            retransmit: a loss delays a frame by one more round trip, and all that follow it.
    """

    latency_ms: float | tuple[float, float] = (1.0, 3.0)
    jitter_ms: float | None = None
    distribution: Distribution = "uniform"
    bandwidth_mbps: float | None = None
    up_mbps: float | None = None
    down_mbps: float | None = None
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0

    def __post_init__(self) -> None:
        low, high = self.latency_range()
        if not (0 <= low <= high < math.inf and (self.jitter_ms is None or 0 <= self.jitter_ms < math.inf)):
            raise ValueError(
                f"latency_ms = {self.latency_ms}, jitter_ms = {self.jitter_ms}, expected 0 <= low <= high and no negative"
            )
        if self.distribution not in ("uniform", "exponential", "lognormal"):
            raise ValueError(f"distribution = {self.distribution}, expected uniform, exponential or lognormal")
        if self.distribution == "lognormal" and low == 0:
            raise ValueError(f"latency_ms = {self.latency_ms}, expected a low above 0 for lognormal")
        for name in ("loss", "duplicate", "reorder"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}, expected a probability")
        if self.loss == 1:
            raise ValueError("loss = 1, expected less: nothing would ever pass; use a partition")
        for name in ("bandwidth_mbps", "up_mbps", "down_mbps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value}, expected more than 0, or None for no limit")

    def latency_range(self) -> tuple[float, float]:
        """Milliseconds."""
        if isinstance(self.latency_ms, int | float):
            return float(self.latency_ms), float(self.latency_ms)
        return float(self.latency_ms[0]), float(self.latency_ms[1])

    def up_ns_per_byte(self) -> float:
        return _ns_per_byte(self.up_mbps or self.bandwidth_mbps)

    def down_ns_per_byte(self) -> float:
        return _ns_per_byte(self.down_mbps or self.bandwidth_mbps)


@dataclass(frozen=True)
class Way:
    """Two ends' links made one: what a path from one host to another does to a frame. Times in nanoseconds."""

    low: float
    high: float
    distribution: Distribution
    jitter: float | None
    loss: float
    duplicate: float
    reorder: float

    @classmethod
    def between(cls, a: Link, b: Link) -> Way:
        """From `a`'s host to `b`'s. The distribution and the jitter are those of the end that has any."""
        (low_a, high_a), (low_b, high_b) = a.latency_range(), b.latency_range()
        jitters = [end.jitter_ms for end in (a, b) if end.jitter_ms is not None]
        return cls(
            low=(low_a + low_b) / 2 * 1e6,
            high=(high_a + high_b) / 2 * 1e6,
            distribution=a.distribution if a.distribution != "uniform" else b.distribution,
            jitter=sum(jitters) / len(jitters) * 1e6 if jitters else None,
            loss=_combined(a.loss, b.loss),
            duplicate=_combined(a.duplicate, b.duplicate),
            reorder=_combined(a.reorder, b.reorder),
        )

    def latency(self, rng: random.Random, distance: float) -> Callable[[], float]:
        """A function that draws the latency of one frame, in nanoseconds.

        Args:
            distance: of the two hosts, uniform in [0, 1): where in the range a path with jitter lies.
        """
        low, high, draw = self.low, self.high, rng.random
        span = high - low
        if self.jitter is not None:
            base, jitter = low + span * distance, self.jitter
            return lambda: base + jitter * draw()
        if span == 0:
            return lambda: low
        most = _TAIL_MAX * high
        if self.distribution == "exponential":
            return lambda: min(most, low + rng.expovariate(1 / span))
        if self.distribution == "lognormal":
            mu, sigma = math.log(low * high) / 2, math.log(high / low) / (2 * _P95)
            return lambda: min(most, rng.lognormvariate(mu, sigma))
        return lambda: low + span * draw()


def _combined(a: float, b: float) -> float:
    """Of two ends with the same probability the path has just that."""
    return a if a == b else 1 - math.sqrt((1 - a) * (1 - b))


def _ns_per_byte(mbps: float | None) -> float:
    return 0.0 if mbps is None else 8e3 / mbps
