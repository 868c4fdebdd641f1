"""The asyncio side of membership: ticks, signatures, messages; and everybody's latest summary.

The decisions are protocol/membership.py's. Summaries (round, lineage, samples) ride on every message in both directions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from ...protocol import limits, membership, membership_wire
from ...protocol.errors import PeerFault
from ...protocol.identity import Identity
from ...protocol.membership import Membership, MembershipConfig, Record, State
from ...protocol.transport import Clock
from ...protocol.wire_pb2 import Envelope, Signed, Summary, Swim

# The state machine is asked this often at least: its shortest timeout is a few of these.
TICK_SECONDS = 0.1
GOODBYES = 8


class Members:
    """Who is here. `run` in a task."""

    def __init__(
        self,
        *,
        identity: Identity,
        run_id: bytes,
        config: MembershipConfig,
        rng: random.Random,
        clock: Clock,
        incarnation: int,
        boot_id: bytes,
        addresses: tuple[str, ...],
        post: Callable[[str, Envelope], None],
        heard: Callable[[str, tuple[str, ...]], None],
        changed: Callable[[str, State | None, State, str], None],
        summary: Callable[[], Summary | None],
    ) -> None:
        """
        Args:
            heard: an admitted peer's addresses are new.
            changed: a member's state changed, with the reason.
            summary: what to tell of ourselves.
        """
        self._identity, self._run_id = identity, run_id
        self._clock, self._post = clock, post
        self._heard, self._changed, self._summary = heard, changed, summary
        me = Record(identity.peer_id, State.ALIVE, incarnation, 1, boot_id, addresses)
        self.machine = Membership(me, config, rng)
        self._summaries: dict[str, Summary] = {}

    # ------------------------------------------------------------------------------------------------ readers

    def alive(self) -> set[str]:
        return self.machine.alive()

    def dead(self) -> frozenset[str]:
        return self.machine.dead()

    def summaries(self) -> dict[str, Summary]:
        """Latest summary of every live member."""
        alive = self.machine.alive()
        return {p: s for p, s in self._summaries.items() if p in alive}

    def last_summary(self, peer: str) -> Summary | None:
        """Latest summary of a member in any state."""
        return self._summaries.get(peer)

    def known_dot(self, peer: str) -> tuple[int, int]:
        """Highest life heard of a peer; its seq is the rounds' business."""
        record = self.machine.record(peer)
        return (record.incarnation, 0) if record else (0, 0)

    # ------------------------------------------------------------------------------------------------ running

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self._perform(self.machine.tick(self._clock.now()))
            await self._clock.sleep(TICK_SECONDS)

    def received(self, peer: str, wire: Swim) -> None:
        """Raises PeerFault for what must be charged to `peer`."""
        message = membership_wire.decode(wire, self._run_id)
        if wire.HasField("summary"):
            self._take_summary(peer, wire.summary)
        self._perform(self.machine.received(self._clock.now(), peer, message))

    def _take_summary(self, peer: str, summary: Summary) -> None:
        sizes = {len(summary.lineage), len(summary.state_hash)}
        if not sizes <= {0, 32} or max(summary.round, summary.open_round, summary.total_weight) > limits.INT64_MAX:
            raise PeerFault("bad_summary", f"hashes of {sizes} bytes")
        if summary.samples > limits.WEIGHT_MAX:
            raise PeerFault("bad_summary", f"{summary.samples} samples")
        self._summaries[peer] = summary

    def introduce(self, peer: str) -> None:
        """A peer that was just connected to."""
        self._perform(self.machine.introduce(self._clock.now(), peer))

    def expect(self, peers: Iterable[str]) -> None:
        """These peers should be here: probe whoever was never heard of."""
        self._perform(self.machine.expect(self._clock.now(), peers))

    def set_speed(self, samples_per_s: float) -> None:
        """Tell others how fast this peer is; small changes are not worth a rumour."""
        before = self.machine.me.samples_per_s
        if abs(samples_per_s - before) > 0.25 * max(before, 1e-9):
            self._perform(self.machine.update_me(samples_per_s=samples_per_s))

    def new_life(self, incarnation: int) -> None:
        """This peer starts a new incarnation."""
        self._perform(self.machine.update_me(incarnation=incarnation))

    def leave(self) -> None:
        """Say goodbye to several members; they pass it on."""
        self._perform(self.machine.update_me(state=State.LEFT))
        for peer in sorted(self.machine.alive())[:GOODBYES]:
            self._perform(self.machine.introduce(self._clock.now(), peer))

    def _perform(self, actions: list[membership.Action]) -> None:
        for action in actions:
            if isinstance(action, membership.Sign):
                record = action.record
                if record.peer != self._identity.peer_id and record.reporter != self._identity.peer_id:
                    continue
                signed = membership_wire.sign_record(self._identity, self._run_id, record)
                self._perform(self.machine.signed(self._clock.now(), signed))
            elif isinstance(action, membership.Send):
                wire = membership_wire.encode(action.message)
                summary = self._summary()
                if summary is not None:
                    wire.summary.CopyFrom(summary)
                self._post(action.to, Envelope(swim=wire))
            elif isinstance(action, membership.Changed):
                self._changed(action.peer, action.old, action.new, action.reason)
            else:
                self._heard(action.peer, action.addresses)


__all__ = ["Members", "Signed"]
