"""The knobs of membership, each with its formula and trade-off, and the presets as differences from the defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class MembershipConfig:
    """The defaults suit a local network. n: members alive, this one included.

    A death is noticed after about: interval (until somebody probes it) + max(interval, 2 · timeout) (that probe fails) +
    the suspicion timeout. Raises ValueError for values that cannot work.
    """

    probe_interval_s: float = 1.0
    """One probe per interval · (1 + health). Shorter finds deaths sooner and sends more (two small messages per probe);
    everybody is probed at least once in 2(n - 1) intervals."""
    probe_timeout_s: float = 0.5
    """Wait for a direct ack, · (1 + health); then helpers are asked. About the 99th percentile of the round trip,
    scheduling delays included. The probe fails after max(interval, 2 · timeout) · (1 + health)."""
    indirect_probes: int = 3
    """k helpers. More survive more loss on the way, and send more when somebody really is dead. Also the number of
    independent reporters beyond the first that shrinks a suspicion timeout to its least."""
    suspicion_mult: float = 4.0
    """Least suspicion timeout = mult · max(1, log10 n) · interval. Longer gives the slow more time to refute."""
    suspicion_max_mult: float = 4.0
    """The timeout starts at this times the least and shrinks as independent reporters agree. 1 switches that off."""
    retransmit_mult: float = 4.0
    """λ. A rumour is told λ · ⌈log10(n + 1)⌉ times. More reaches everybody in spite of more loss."""
    awareness_max: int = 8
    """Local health runs from 0 to this. More lets a struggling peer probe more slowly, and find deaths later."""
    sync_interval_s: float = 30.0
    """Whole tables are exchanged with one member this often (± 25 %); mends what rumours missed."""
    redial_dead_every_s: float = 5.0
    """One dead or left member is dialled this often, so that partitions heal. Shorter heals sooner, dials more in vain."""
    tick_s: float = 0.1
    """The driver ticks at least this often. A tick that comes later by more than a probe timeout means that this
    process did not run, and that time counts for nobody."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            low = 0 if each.name in ("indirect_probes", "awareness_max") else 1 if "max_mult" in each.name else 1e-9
            if not (math.isfinite(value) and value >= low):
                raise ValueError(f"{each.name} is {value}, expected at least {low:g}")


PRESETS: dict[str, MembershipConfig] = {
    # One machine, its cores busy with training: small round trips, delays of some hundred milliseconds. A death among 3 to 7
    # is known to all after 2.4 (3 peers) to 3.1 s (7) on average when the cores are idle.
    "local": MembershipConfig(
        probe_interval_s=0.3,
        probe_timeout_s=0.25,
        suspicion_mult=4.0,
        suspicion_max_mult=1.5,
        awareness_max=3,
        sync_interval_s=10.0,
        redial_dead_every_s=2.0,
    ),
    "lan": MembershipConfig(),
    # Home uplinks: round trips up to a second, loss, short outages.
    "wan": MembershipConfig(
        probe_interval_s=5.0, probe_timeout_s=3.0, suspicion_mult=6.0, suspicion_max_mult=6.0, sync_interval_s=60.0
    ),
}
