"""What a majority has voted for can no longer be undone: Paxos, looked at from outside.

Two commits of one round show too late, and only to a very unlucky schedule, that a vote was forgotten. Here it shows with the
first vote that contradicts a value which a majority's disks already hold.
"""

from __future__ import annotations

from collections.abc import Collection

from ..protocol.ballot_record import BallotRecord

Cast = tuple[int, bytes]  # attempt, value hash


class Choices:
    """Votes as the journals of honest peers hold them. Those of splits are left out: they never bind a majority."""

    def __init__(self) -> None:
        self._votes: dict[bytes, dict[Cast, set[str]]] = {}  # by base lineage

    def cast(self, peer: str, record: BallotRecord, electorate: Collection[str], lost: Collection[str]) -> str:
        """A peer's newest durable record of a round. What is wrong with its vote, or "".

        `lost`: peers whose disk was lost, whose votes bind nobody any more.
        """
        if record.voted is None:
            return ""
        votes = self._votes.setdefault(record.base_lineage, {})
        votes.setdefault((record.voted.attempt, record.voted.value.hash), set()).add(peer)
        for (attempt, value), voters in votes.items():
            if 2 * len(voters - set(lost)) <= len(electorate):
                continue
            for (later, other), against in votes.items():
                if later > attempt and other != value:
                    return (
                        f"round {record.round}: a majority voted for {value.hex()[:12]} in attempt {attempt}, and "
                        f"{len(against)} for {other.hex()[:12]} in attempt {later}"
                    )
        return ""
