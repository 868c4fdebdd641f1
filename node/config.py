"""The tables of the configuration: `[run]` is the manifest, equal on every peer; `[node]` is this node's alone.

Covers: the tables that belong to no room of their own, and the canonical bytes of the manifest with its hash, the run
id. The tables of model, task, rewards, GRPO and warm-up live in `rl/config.py`. Reading the file, environment and
flags, and the words for a mistake in them, are in `config_file.py`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal, NoReturn

from pydantic import Field, ValidationError, field_validator, model_validator

from ..aggregation.compress import Compression, parse_compression
from ..protocol import limits
from ..protocol.errors import PeerFault, ShoalError
from ..protocol.identity import public_key_from_peer_id
from ..protocol.invite import check_address
from ..protocol.membership import PRESETS, MembershipConfig
from .rl.config import (
    GrpoConfig,
    JudgeBackend,
    JudgeConfig,
    ModelConfig,
    RewardsConfig,
    SamplerConfig,
    Table,
    TaskConfig,
    WarmupConfig,
)

# The phases in which `node.test_hold` can hold a peer.
PHASES = ("downloading", "training", "convening", "exchanging", "voting", "committing")


class QuadraticConfig(Table):
    """The numpy learner with a known optimum: the network alone, no model."""

    dimension: int = Field(default=1000, ge=1, le=100_000_000)
    """Coordinates."""
    condition: float = Field(default=10.0, ge=1, le=1e12)
    """Largest over smallest curvature; higher converges slower."""
    noise: float = Field(default=0.05, ge=0, le=1e6)
    """Standard deviation of the gradient noise per coordinate."""
    learning_rate: float = Field(default=0.1, gt=0, lt=2)
    """SGD step; above 2 it diverges."""
    step_seconds: float = Field(default=0.0, ge=0, le=60)
    """Every step sleeps this long, in place of work."""


class BanditConfig(Table):
    """The numpy learner with a policy: a contextual bandit whose best reward is known, no model."""

    features: int = Field(default=16, ge=1, le=1_000_000)
    """Of a context; features x arms parameters are trained."""
    arms: int = Field(default=8, ge=2, le=10_000)
    """To choose from; more take longer to find out."""
    contexts: int = Field(default=256, ge=1, le=1_000_000)
    """How many there are; every step's loss is the mean over all."""
    contexts_per_step: int = Field(default=8, ge=1, le=4096)
    """Drawn in an inner step. More make it steadier and slower."""
    num_generations: int = Field(default=8, ge=2, le=1024)
    """Arms drawn for each context (the group), compared with their mean."""
    learning_rate: float = Field(default=0.5, gt=0, le=100)
    """SGD step; too high settles on an arm too early."""
    step_seconds: float = Field(default=0.0, ge=0, le=60)
    """Every step sleeps this long, in place of work."""


class SyncConfig(Table):
    """When rounds close and how updates are merged."""

    mode: Literal["ring", "gossip", "hybrid"] = "ring"
    """"ring": synchronous rounds, each one decree that all agree on. "gossip": everybody publishes when it has something,
    and all sums are alike once all have everything; no round waits for anybody, and more peers take part. "hybrid": rings of at
    most ring_size_max, drawn anew for every round, each of which gossips the one sum that its round came to."""
    gossip_seconds: float = Field(default=10.0, gt=0, le=3600)
    """Gossip: a peer exchanges with a random other this often, besides on news. Shorter mends losses sooner, sends more."""
    gossip_fanout: int = Field(default=3, ge=1, le=64)
    """Gossip: peers that news is passed on to. More reach everybody sooner and send more small messages."""
    step_max: float = Field(default=0.0, ge=0)
    """Gossip: an update whose scale times norm is above this is void; 0 means no limit."""
    heal_max: int = Field(default=0, ge=0)
    """Gossip: when two sides of a partition meet, their states are simply added while the lighter one's new samples are at
    most this; above it they would overshoot, and `heal` decides. 0 stands for 8 times target_samples per peer."""
    heal: Literal["heavier", "merge"] = "heavier"
    """"heavier": the side with more samples wins, the other's work flows back damped. "merge": the average of the two."""
    compact_updates: int = Field(default=16, ge=1, le=100_000)
    """Gossip: the log is compacted once it holds more updates than this per origin. More: longer partitions and later proofs
    are undone exactly; fewer: less memory and quicker joining."""
    forget_after_seconds: float = Field(default=3600.0, gt=0, le=10_000_000)
    """Gossip: a dead member holds up compaction for this long; one that returns later takes a snapshot."""
    target_samples: int = Field(default=4096, ge=1)
    """A round closes when all peers together have scored so many completions (in gossip mode: a peer publishes when it has
    scored so many itself; in hybrid mode: a full ring's members together). Fewer: more, shorter rounds and more traffic; sparse
    exchange likes them."""
    round_seconds_max: float = Field(default=300.0, gt=0, le=86_400)
    """It closes after this time in any case, so that a target never reached does not stall the run."""
    rounds_max: int = Field(default=0, ge=0)
    """The run ends after so many rounds (in gossip and hybrid mode: a peer's own updates); 0 means never."""
    outer: Literal["sgd", "nesterov"] = "sgd"
    """Outer optimizer. "sgd" with rate 1 is averaging, best for RL; "nesterov" is for long runs."""
    outer_lr: float = Field(default=1.0, gt=0, le=10)
    """Outer step size."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of "nesterov"; high values overshoot in short RL runs."""
    exchange: Literal["auto", "sparse", "dense"] = "auto"
    """"auto" takes what costs fewer bytes for the electorate's size; the reason is logged."""
    dense_bits: Literal[8, 16, 32] = 32
    """How a reduced chunk travels in a dense exchange; 32 loses nothing, 8 is four times smaller."""
    weight_max: int = Field(default=1_000_000, ge=1, le=limits.WEIGHT_MAX)
    """A peer's claimed samples count up to this per round."""
    weight_median_multiple_max: float = Field(default=4.0, ge=1)
    """And up to this multiple of the round's median: a claim is only a claim."""
    norm_max: float = Field(default=0.0, ge=0)
    """Updates of a larger Euclidean norm are scaled down to it; 0 means no limit."""
    sum_keep: float = Field(default=4.0, ge=0, le=1000)
    """Hybrid: the sum that a ring gossips keeps its largest coordinates, as many as this many updates have; what is left out
    stays with the members for later rounds. More: quicker in short runs, more traffic; 0 keeps all."""
    sum_bits: int = Field(default=12, ge=4, le=62)
    """Hybrid: bits of the largest number in such a sum; smaller ones are rounded to the same unit."""
    ring_size_max: int = Field(default=64, ge=1, le=limits.ROSTER_MAX // 2)
    """Members of one ring. In ring mode more wait to be admitted; in hybrid mode more rings are drawn."""


class AdmissionConfig(Table):
    """Who may enter the run."""

    mode: Literal["open", "allowlist", "token"] = "token"
    """"token": whoever has an invite with a token; "allowlist": the peers in `allow`; "open": anybody."""
    allow: list[str] = []
    """Peer ids, for "allowlist"."""

    @field_validator("allow")
    @classmethod
    def _peer_ids(cls, value: list[str]) -> list[str]:
        for peer in value:
            try:
                public_key_from_peer_id(peer)
            except PeerFault as fault:
                raise ValueError(str(fault)) from None
        return value

    @model_validator(mode="after")
    def _list_has_use(self) -> AdmissionConfig:
        if self.allow and self.mode != "allowlist":
            raise ValueError(f'allow is set but mode is "{self.mode}"; expected mode = "allowlist"')
        return self


class MembershipTable(Table):
    """How fast deaths are noticed."""

    preset: Literal["local", "lan", "wan"] = "lan"
    """"local" for one machine, "lan", or "wan" for home uplinks. Quicker ones send more and
    accuse the slow more often."""

    def build(self) -> MembershipConfig:
        return PRESETS[self.preset]


class RunConfig(Table):
    """The manifest: equal on every peer; only the founder writes it."""

    name: str = Field(default="shoal", min_length=1, max_length=64)
    """For people."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the tiny model's weights, LoRA's A, the data stream and its split."""
    learner: Literal["grpo", "quadratic", "bandit"] = "grpo"
    """"grpo" trains a language model; "quadratic" (known optimum) and "bandit" (known best reward) are numpy stand-ins."""
    compression: str = "short"
    """Preset ("short", "demo", "long", "sparseloco", "dense-8bit", "dense-fp16", "dense") or density/bits ("0.05/4").
    Sparser costs less traffic and lags in short runs, until the residual has filled."""
    model: ModelConfig = ModelConfig()
    """[run.model]"""
    task: TaskConfig = TaskConfig()
    """[run.task]"""
    rewards: RewardsConfig = RewardsConfig()
    """[run.rewards]"""
    judge: JudgeConfig = JudgeConfig()
    """[run.judge]"""
    grpo: GrpoConfig = GrpoConfig()
    """[run.grpo]"""
    warmup: WarmupConfig = WarmupConfig()
    """[run.warmup]"""
    quadratic: QuadraticConfig = QuadraticConfig()
    """[run.quadratic]"""
    bandit: BanditConfig = BanditConfig()
    """[run.bandit]"""
    sync: SyncConfig = SyncConfig()
    """[run.sync]"""
    admission: AdmissionConfig = AdmissionConfig()
    """[run.admission]"""
    membership: MembershipTable = MembershipTable()
    """[run.membership]"""

    @field_validator("compression")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            parse_compression(value)
        except ShoalError as error:
            why = error.values.partition("; ")[2]  # what was found is said by whoever reports the mistake
            raise ValueError(f"{why}; {error.todo[0].lower()}{error.todo[1:]}") from None
        return value

    def parsed_compression(self) -> Compression:
        return parse_compression(self.compression)


class DhtConfig(Table):
    """Finding peers over the open internet (hivemind's DHT; needs the `dht` extra)."""

    enabled: bool = False
    """Announce this peer and look for others there."""
    bootstrap: list[str] = []
    """Multiaddresses of DHT peers; none starts a DHT of its own."""
    listen: str = "/ip4/0.0.0.0/tcp/0"
    """Multiaddress that the DHT listens on."""


class NodeConfig(Table):
    """This node's own settings; nobody else sees them."""

    data_dir: str = Field(default="~/.shoal", min_length=1)
    """Identity, state, journal and logs. One per peer."""
    listen: str = ""
    """Address to listen on; empty means all of this machine's."""
    port: int = Field(default=7447, ge=0, le=65_535)
    """TCP port; 0 takes a free one."""
    announce: list[str] = []
    """host:port where others reach this peer, if not where it listens (behind a router)."""
    model_path: str = ""
    """Local folder or .gguf to use in place of the manifest's model; must have the same weights."""
    sampler: SamplerConfig = SamplerConfig()
    """[node.sampler]"""
    rewards_file: str = ""
    """Python file of TRL-style reward functions. Never sent to anybody."""
    task: TaskConfig | None = None
    """[node.task]: train on other, private data than the manifest names. It never moves."""
    judge: JudgeBackend | None = None
    """[node.judge]: judge with this in place of run.judge.backend."""
    preferences_file: str = ""
    """Append what judges prefer here, as JSONL with prompt, chosen and rejected; empty keeps nothing."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:1", "mps"."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of torch; 0 leaves its default."""
    keep_checkpoints: int = Field(default=2, ge=1, le=1000)
    """Older checkpoints are deleted."""
    eval_every_rounds: int = Field(default=0, ge=-1)
    """Held-out evaluation every so many rounds; 0: only at the start and the end of the run, -1: never."""
    log_save_seconds: float = Field(default=60.0, gt=0)
    """Gossip mode: the log of updates is written to disk at the latest after this. What it lacks after a crash comes again from
    others; your own updates are on disk before anybody gets them."""
    updates_bytes_max: int = Field(default=1024**3, ge=1024**2)
    """Memory for verified updates kept for peers that missed them."""
    leave_grace_seconds: float = Field(default=20.0, ge=0, le=3600)
    """After SIGTERM: time to push what is learned, say goodbye and checkpoint."""
    wait_for_start: bool = False
    """Do not train before `start` is sent to the control socket (used by `shoal demo`)."""
    exit_when_finished: bool = True
    """Leave once the run's last round is committed; false keeps serving those who are behind."""
    lan_discovery: bool = True
    """Announce on and look around the local network (zeroconf)."""
    dht: DhtConfig = DhtConfig()
    """[node.dht]"""
    bootstrap_seconds_max: float = Field(default=0.0, ge=0)
    """Give up joining after this time; 0 keeps trying with backoff."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of the lines on stderr; the file gets info and above, or debug."""
    record_bytes_max: int = Field(default=0, ge=0)
    """Record own updates and commits in the data folder, up to this size, so that the run can be played again by
    `python -m shoal.sim.replay`; 0 records nothing."""
    test_hold: str = ""
    """For tests: "phase" or "phase@round", in which this peer waits until the file `holding` is removed."""

    @field_validator("announce")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        return [check_address(a) for a in value]

    @field_validator("test_hold")
    @classmethod
    def _phase(cls, value: str) -> str:
        phase, _, round_ = value.partition("@")
        if value and (phase not in PHASES or (round_ and not round_.isdigit())):
            raise ValueError(f"{value!r} is not a phase ({', '.join(PHASES)}), optionally @round")
        return value


class Config(Table):
    """The whole file."""

    run: RunConfig = RunConfig()
    """[run]"""
    node: NodeConfig = NodeConfig()
    """[node]"""


# --- the manifest -----------------------------------------------------------------------------------------------------


def manifest_bytes(run: RunConfig) -> bytes:
    """Canonical JSON of the `[run]` tables: every key, sorted, no blanks, ASCII. Its sha-256 is the run id.

    Floats are written by the shortest digits that read back as the same float, so equal tables give equal bytes.
    """
    tree = run.model_dump(mode="json")
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def run_id_of(manifest: bytes) -> bytes:
    """32 bytes."""
    return hashlib.sha256(manifest).digest()


def run_from_manifest(manifest: bytes) -> RunConfig:
    """The tables in a manifest that a peer sent. Raises PeerFault("bad_manifest")."""
    if len(manifest) > limits.MANIFEST_BYTES_MAX:
        raise PeerFault("bad_manifest", f"{len(manifest)} bytes, limit {limits.MANIFEST_BYTES_MAX}")
    try:
        # The standard parser, since what Python writes must be what Python reads: NaN and Infinity are not JSON.
        tree = json.loads(manifest, parse_constant=_no_constant)
        return RunConfig.model_validate(tree, strict=True)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise PeerFault("bad_manifest", where[: limits.REASON_CHARS_MAX]) from None
    except (ValueError, RecursionError) as error:
        raise PeerFault("bad_manifest", f"not JSON: {error}"[: limits.REASON_CHARS_MAX]) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
