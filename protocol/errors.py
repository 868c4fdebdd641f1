"""The two families of errors, and the form of every message that a person reads.

`PeerFault` means that a remote peer sent something it must not: it is counted, charged to that peer, and never stops the
node. `ShoalError` means that this node, its configuration or its machine cannot go on with what was asked: it carries
what happened, the two values that disagree, and what to do next, and an exit code.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the `shoal` command; listed in `shoal --help` and docs/commands.md."""

    OK = 0
    FAILED = 1  # anything without a code of its own
    USAGE = 2  # command line (click's own code)
    CONFIG = 3  # a mistake in the TOML file, an environment variable or a flag
    ADDRESS = 4  # the port is taken or the address cannot be bound
    UNREACHABLE = 5  # nobody named in the invite or the peer cache answered
    REFUSED = 6  # the swarm refused us: wrong token, not on the allowlist, banned, identity in use
    MISMATCH = 7  # other run, other base model, other layout, other protocol version
    DISK = 8  # disk full or not writable
    LOCKED = 9  # the data directory or identity is in use by another process
    NOT_RUNNING = 10  # the command needs a running daemon and there is none
    DEPENDENCY = 11  # an optional package or a model file is missing
    DIVERGED = 12  # a fork older than the kept commit records: a person must decide


class ShoalError(Exception):
    """An error that a person reads.

    Args:
        what: what happened, one sentence.
        values: the two values that disagree, or the value and its limit, as text ("found X, expected Y").
        todo: what to do next, one sentence.
        code: the exit code that a command ends with when nothing handles this.
    """

    def __init__(self, what: str, *, values: str, todo: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(f"{what}\n  {values}\n  {todo}")
        self.what = what
        self.values = values
        self.todo = todo
        self.code = code


class PeerFault(Exception):
    """A remote peer broke the protocol. `kind` is a short stable word for counters (for example "bad_signature")."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail
