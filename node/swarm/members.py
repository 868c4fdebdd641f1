"""The asyncio side of membership: ticks, signatures, messages, callbacks.

The decisions are protocol/membership.py's. Summaries (round, lineage, samples) ride on every message in both directions.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from ...protocol import limits, membership_wire
from ...protocol import membership as m
from ...protocol.identity import Identity
from ...protocol.membership import Membership, MembershipConfig, MemberView, Record, State
from ...protocol.transport import Clock, Timer
from ...protocol.wire_pb2 import Envelope, Summary, Swim

# A measured speed that changed by less than this share is not worth a rumour.
SPEED_CHANGE_MIN = 0.25
# A sleep may end this much early by rounding.
ROUNDING_SECONDS = 1e-6
NAP_SECONDS_MAX = 3600.0


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
        admissible: Callable[[str], bool] = lambda peer: True,
    ) -> None:
        """
        Args:
            post: the mesh's: queues a message, best effort.
            heard: a member's addresses are new, or it is back: dial it afresh.
            changed: a member's state changed: peer, old, new, reason.
            summary: what to tell of ourselves.
            admissible: whether a peer may be a member at all; news of others is dropped.
        """
        self._identity, self._run_id = identity, run_id
        self._clock, self._post = clock, post
        self._heard, self._changed, self._summary = heard, changed, summary
        self._admissible = admissible
        me = Record(identity.peer_id, State.ALIVE, incarnation, 1, boot_id, addresses[: limits.ADDRESSES_MAX])
        self.machine = Membership(me, config, rng, self._sign)
        self._next_tick = 0.0
        self._timer: Timer | None = None  # of the next tick
        self._over: asyncio.Future[None] | None = None  # what `run` waits for

    def _sign(self, record: Record) -> Record:
        return membership_wire.sign_record(self._identity, self._run_id, record)

    # ------------------------------------------------------------------------------------------------ readers

    def members(self) -> dict[str, MemberView]:
        """All others ever heard of, in any state."""
        return dict(self.machine.members())

    def alive(self) -> set[str]:
        """Others that are alive or only suspect."""
        return self.machine.alive()

    def neighbours(self) -> frozenset[str]:
        """Live others to stay connected to; all of them in a small swarm."""
        return self.machine.neighbours()

    def dead(self) -> frozenset[str]:
        """Others that are dead or have left."""
        return self.machine.dead()

    def summaries(self) -> dict[str, Summary]:
        """Latest summary of every live member."""
        alive, members = self.machine.alive(), self.machine.members()
        return {p: v.summary for p, v in members.items() if p in alive and v.summary is not None}

    def last_summary(self, peer: str) -> Summary | None:
        """Latest summary of a member in any state."""
        view = self.machine.member(peer)
        return view.summary if view else None

    def acquainted(self, peer: str) -> bool:
        """Whether a new connection with it needs no exchange of whole tables: it is a live member of a large swarm, in which
        connections come and go."""
        return self.machine.sparse and self.machine.state(peer) is State.ALIVE

    def known_dot(self, peer: str) -> tuple[int, int]:
        """Highest life heard of a peer; its seq is the rounds' business."""
        view = self.machine.member(peer)
        return (view.incarnation, 0) if view else (0, 0)

    # ------------------------------------------------------------------------------------------------ running

    async def run(self) -> None:
        """Tick when the machine is due, until cancelled."""
        self._over = asyncio.get_running_loop().create_future()
        try:
            self._tick()
            await self._over
        finally:
            self._over = None
            if self._timer is not None:
                self._timer.cancel()

    def _tick(self) -> None:
        """By timers and not by a task that sleeps: every peer does this several times a second."""
        if self._over is None or self._over.done():
            return
        try:
            if self._clock.now() >= self._next_tick:
                self._handle(m.Tick())
                self._next_tick = self.machine.due() + ROUNDING_SECONDS
            self._set_timer()
        except Exception as error:
            self._over.set_exception(error)

    def _set_timer(self) -> None:
        # After a goodbye nothing is due any more.
        left = min(self._next_tick - self._clock.now(), NAP_SECONDS_MAX)
        self._timer = self._clock.call_later(max(0.0, left), self._tick)

    def _come_forward(self) -> None:
        """Events may bring the next tick forward, never put it off."""
        due = self.machine.due() + ROUNDING_SECONDS
        if due < self._next_tick and self._over is not None and self._timer is not None:
            self._next_tick = due
            self._timer.cancel()
            self._set_timer()

    def received(self, peer: str, wire: Swim) -> None:
        """Raises PeerFault for what must be charged to `peer`; nothing of such a message is used."""
        message = membership_wire.decode(wire, self._run_id)
        rumours = tuple(r for r in message.rumours if self._admissible(r.peer))
        self._handle(m.Received(peer, replace(message, rumours=rumours)))

    def introduce(self, peer: str) -> None:
        """A peer that was just connected to."""
        self._handle(m.Introduced(peer))

    def expect(self, peers: Iterable[str]) -> None:
        """These peers should be here: probe whoever was never heard of."""
        self._handle(m.Expected(tuple(peers)))

    def set_speed(self, samples_per_s: float) -> None:
        """Tell others how fast this peer is; small changes are not worth a rumour."""
        before = self.machine.me.samples_per_s
        if math.isfinite(samples_per_s) and abs(samples_per_s - before) > SPEED_CHANGE_MIN * max(before, 1e-9):
            self._handle(m.SetMe(samples_per_s=max(0.0, samples_per_s)))

    def set_addresses(self, addresses: tuple[str, ...]) -> None:
        """This peer can be dialled elsewhere now."""
        if addresses != self.machine.me.addresses:
            self._handle(m.SetMe(addresses=addresses[: limits.ADDRESSES_MAX]))

    def new_life(self, incarnation: int) -> None:
        """This peer starts a new incarnation."""
        self._handle(m.SetMe(incarnation=incarnation))

    def leave(self) -> None:
        """Say goodbye to several members; they pass it on."""
        self._handle(m.Leave())

    def _handle(self, event: m.Event) -> None:
        """Perform what the machine decides. Callbacks may come back in here: each event's actions are its own list."""
        for action in self.machine.handle(self._clock.now(), event):
            if isinstance(action, m.Send):
                message = replace(action.message, summary=self._summary())
                self._post(action.to, Envelope(swim=membership_wire.encode(message)))
            elif isinstance(action, m.Changed):
                self._changed(action.peer, action.old, action.new, action.reason)
            else:
                self._heard(action.peer, action.addresses)
        if not isinstance(event, m.Tick):
            self._come_forward()
