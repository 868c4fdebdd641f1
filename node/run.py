"""The run that a node is in: manifest, genesis, who may enter, and what of that is on disk. No network.

Decides on a start whether this node founds a run, joins the invite's, or goes on with the one in its data directory, and
refuses when these disagree.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from google.protobuf.message import DecodeError

from ..protocol.admission import Admission, Bans
from ..protocol.errors import ExitCode, PeerFault, ShoalError
from ..protocol.invite import Invite
from ..protocol.transport import StreamClosed
from ..protocol.wire_pb2 import Signed
from . import config as configuration
from .config import Config
from .store.checkpoint import Checkpoints
from .store.datadir import DataDir, damaged
from .swarm.manifest import RunInfo, open_genesis


class Run:
    """One run as this node knows it. `config.run` is the manifest's once that is known."""

    def __init__(
        self, config: Config, invite: Invite | None, data: DataDir, random_bytes: Callable[[int], bytes]
    ) -> None:
        self.config, self.invite = config, invite
        self._data, self._random_bytes = data, random_bytes
        self.manifest = b""
        self.id = b""
        self.genesis: Signed | None = None
        self.base_hash = self.layout_hash = b""
        self.admission = Admission("open", frozenset())
        self.bans = Bans()

    # ------------------------------------------------------------------------------------------------ the start

    def choose(self, *, given_run: bool) -> bool:
        """Found, join or go on. True when this node founds the run now.

        Args:
            given_run: the configuration file has [run] tables, so they must agree with a run already on disk.

        Raises:
            ShoalError: MISMATCH when the data directory belongs to another run, DISK when a file of it is damaged.
        """
        on_disk = self._data.read(self._data.manifest)
        if on_disk:
            self._go_on(on_disk, given_run)
        elif Checkpoints(self._data.checkpoints, disk=self._data.disk).paths():
            raise damaged(self._data.manifest, "it is missing, and there are checkpoints of a run")
        elif self.invite is not None:
            self.id = self.invite.run_id
        else:
            self.take_manifest(configuration.manifest_bytes(self.config.run))
            self.id = configuration.run_id_of(self.manifest)
        founding = not on_disk and self.invite is None
        self._open_admission(founding)
        if on_disk and (genesis := self._data.read(self._data.genesis)):
            self.genesis = self._genesis_on_disk(genesis)
        return founding

    def _genesis_on_disk(self, data: bytes) -> Signed:
        try:
            genesis = Signed.FromString(data)
            open_genesis(genesis, self.id)
        except (DecodeError, PeerFault) as error:
            why = f"{error}; it is no genesis of run {self.id.hex()[:16]}, which {self._data.manifest.name} names"
            raise damaged(self._data.genesis, why) from None
        return genesis

    def _go_on(self, on_disk: bytes, given_run: bool) -> None:
        self.id = configuration.run_id_of(on_disk)
        wanted = self.id
        if self.invite is not None:
            wanted = self.invite.run_id
        elif given_run:
            wanted = configuration.run_id_of(configuration.manifest_bytes(self.config.run))
        if wanted != self.id:
            raise ShoalError(
                "The data directory belongs to another run",
                values=f"{self._data.path} has run {self.id.hex()[:16]}, asked for {wanted.hex()[:16]}",
                todo="Use another --data-dir for the other run, or leave the [run] tables as they were.",
                code=ExitCode.MISMATCH,
            )
        try:
            self.take_manifest(on_disk)
        except PeerFault as fault:
            raise damaged(self._data.manifest, str(fault)) from None

    def _open_admission(self, founding: bool) -> None:
        table = self.config.run.admission
        mode = table.mode if self.manifest else ("token" if self.invite and self.invite.token else "open")
        self.admission = Admission(mode, frozenset(table.allow))
        if secrets := self._data.read(self._data.secrets):
            try:
                saved = json.loads(secrets)
                self.admission.load(saved["admission"])
                self.bans = Bans.from_dict(saved["bans"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                why = f"it lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
                raise damaged(self._data.secrets, why) from None
        if founding and mode == "token":
            self.admission.key = self._random_bytes(32)
        if self.invite is not None and self.invite.token and not self.admission.key:
            self.admission.token = self.invite.token
        if self.manifest and mode == "token" and not (self.admission.key or self.admission.token):
            raise ShoalError(
                "This node has lost what lets it into its run",
                values=f"{self._data.secrets} holds no admission key, and run {self.id.hex()[:16]} admits by token",
                todo="Restore that file, or ask a member for an invite and `shoal join` it with this --data-dir.",
                code=ExitCode.DISK,
            )

    def take_manifest(self, manifest: bytes) -> None:
        """From here on `config.run` is the manifest's. Raises PeerFault("bad_manifest")."""
        self.manifest = manifest
        self.config = self.config.model_copy(update={"run": configuration.run_from_manifest(manifest)})

    def learned(self, info: RunInfo) -> None:
        """A member gave us the manifest. Raises ShoalError(MISMATCH) when this version of shoal cannot read it."""
        try:
            self.take_manifest(info.manifest)
        except PeerFault as fault:
            raise ShoalError(
                "This version of shoal does not understand the run's manifest",
                values=f"run {self.id.hex()[:16]}: {fault.detail}",
                todo="Install the version of shoal that the run was founded with.",
                code=ExitCode.MISMATCH,
            ) from None
        self.admission.mode = self.config.run.admission.mode
        self.admission.allowed = frozenset(self.config.run.admission.allow)
        self.save_secrets()

    # ------------------------------------------------------------------------------------------------ readers

    def info(self) -> RunInfo:
        """What newcomers are told. Raises StreamClosed while this node itself does not know the run."""
        if not self.manifest:
            raise StreamClosed("this peer does not know the run yet")
        return RunInfo(self.manifest, self.base_hash, self.layout_hash, self.genesis)

    def compare(self, info: RunInfo, peer: str) -> None:
        """Refuse to train on another base than the others. Raises ShoalError(MISMATCH)."""
        for name, theirs, mine in (
            ("base model", info.base_hash, self.base_hash),
            ("trainable layout", info.layout_hash, self.layout_hash),
        ):
            if theirs and theirs != mine:
                raise ShoalError(
                    f"This node's {name} is not the run's",
                    values=f"mine {mine.hex()[:16]} ({self.config.node.model_path or self.config.run.model.name}), "
                    f"the run's {theirs.hex()[:16]} (as {peer} has it)",
                    todo="Point node.model_path at the same weights, the same file or revision that the founder uses.",
                    code=ExitCode.MISMATCH,
                )

    def origin(self) -> tuple[bytes, str]:
        """Lineage of round 0, and the founder."""
        assert self.genesis is not None
        genesis = open_genesis(self.genesis, self.id)
        return genesis.lineage, genesis.founder

    def admissible(self, peer: str) -> bool:
        """Whose signed words may enter the member table."""
        if self.bans.reason(peer) is not None:
            return False
        return self.admission.mode != "allowlist" or peer in self.admission.allowed

    # ------------------------------------------------------------------------------------------------ disk

    def secrets(self) -> bytes:
        """What `save_secrets` writes."""
        return json.dumps({"admission": self.admission.to_dict(), "bans": self.bans.to_dict()}).encode()

    def save_secrets(self) -> None:
        """Admission key, token bindings, bans. Raises ShoalError(DISK)."""
        self._data.write(self._data.secrets, self.secrets())

    def save(self) -> None:
        """Manifest and genesis: from now on a restart goes on with this run. Raises ShoalError(DISK)."""
        assert self.genesis is not None
        self.save_secrets()
        self._data.write(self._data.genesis, self.genesis.SerializeToString())
        self._data.write(self._data.manifest, self.manifest)
