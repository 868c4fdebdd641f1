"""When repeated faults become a ban. Pure: it is told the time.

A fault alone ends a stream or a connection (node/swarm/links.py). Some kinds no honest peer makes, whatever others sent to
it, because everybody checks before passing on; a peer that makes many of those within a window is broken or hostile, and
every connection of it costs work. The ban that follows is a local opinion: others believe proofs alone, and such a count
proves nothing to them.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque

from . import limits

# Not among them: what an honest peer may pass on or run into because of somebody else. A sum that overflows ("bad_chunk"),
# a roster of a convener that names two ("unsolicited_update"), an electorate seen otherwise ("bad_commit").
BANNABLE = frozenset({"bad_signature", "wrong_signer", "bad_envelope", "bad_message", "bad_payload", "bad_ban"})
DETAIL_CHARS_MAX = 160


class Conduct:
    """The recent bannable faults of every peer, bounded in peers and in faults."""

    def __init__(self) -> None:
        self._faults: OrderedDict[str, deque[tuple[float, str, str]]] = OrderedDict()

    def fault(self, peer: str, kind: str, detail: str, now: float) -> str | None:
        """Count one fault; why the peer is to be banned, or None."""
        if kind not in BANNABLE:
            return None
        recent = self._faults.setdefault(peer, deque(maxlen=limits.FAULTS_BEFORE_BAN))
        self._faults.move_to_end(peer)
        if len(self._faults) > 2 * limits.MEMBERS_MAX:
            self._faults.popitem(last=False)
        recent.append((now, kind, detail[:DETAIL_CHARS_MAX]))
        while now - recent[0][0] > limits.FAULT_WINDOW_SECONDS:
            recent.popleft()
        if len(recent) < limits.FAULTS_BEFORE_BAN:
            return None
        kinds = ", ".join(sorted({k for _, k, _ in recent}))
        return f"{len(recent)} faults within {now - recent[0][0]:.0f} s that no honest peer makes: {kinds}"

    def evidence(self, peer: str, now: float) -> bytes:
        """The faults as JSON: seconds ago, kind, detail. Shows a person why; proves nothing."""
        recent = self._faults.get(peer, ())
        return json.dumps([[round(now - at, 1), kind, detail] for at, kind, detail in recent]).encode()

    def forget(self, peer: str) -> None:
        """Start anew, as after a ban, so that one that is lifted is not there again at the next fault."""
        self._faults.pop(peer, None)
