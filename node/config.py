"""One TOML file: `[run]` tables are the manifest, `[node]` tables are this node's alone.

Covers: the tables that belong to no room of their own, reading and overriding, errors that name the nearest key, the
canonical bytes of the manifest. The tables of model, task, rewards, GRPO and warm-up live in `rl/config.py`.

Precedence: file, then environment (`SHOAL_NODE__PORT=7000`), then flags (`--set node.port=7000`). The manifest of a run
that exists is never overridden: joiners receive it, and a restart reads it from the data directory.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from ..aggregation.compress import Compression, parse_compression
from ..protocol import limits
from ..protocol.errors import ExitCode, PeerFault, ShoalError
from ..protocol.identity import public_key_from_peer_id
from ..protocol.invite import check_address
from ..protocol.membership import PRESETS, MembershipConfig
from .rl.config import GrpoConfig, ModelConfig, RewardsConfig, Table, TaskConfig, WarmupConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "SHOAL_"
# Environment variables of this prefix that are not configuration.
ENV_OTHER = frozenset({"SHOAL_DEBUG", "SHOAL_LONG"})
PHASES = ("downloading", "training", "convening", "exchanging", "voting", "committing")


class QuadraticConfig(Table):
    """The numpy learner with a known optimum: the network alone, no model."""

    dimension: int = Field(default=1000, ge=1, le=100_000_000)
    """Coordinates."""
    condition: float = Field(default=10.0, ge=1)
    """Largest over smallest curvature; higher converges slower."""
    noise: float = Field(default=0.05, ge=0)
    """Standard deviation of the gradient noise per coordinate."""
    learning_rate: float = Field(default=0.1, gt=0, lt=2)
    """SGD step; above 2 it diverges."""
    step_seconds: float = Field(default=0.0, ge=0, le=60)
    """Every step sleeps this long, in place of work."""


class SyncConfig(Table):
    """When rounds close and how updates are merged."""

    mode: Literal["ring"] = "ring"
    """"ring": synchronous rounds, each one decree that all agree on."""
    target_samples: int = Field(default=4096, ge=1)
    """A round closes when all peers together have scored so many completions. Fewer: more, shorter rounds and more
    traffic; sparse exchange likes them."""
    round_seconds_max: float = Field(default=300.0, gt=0, le=86_400)
    """It closes after this time in any case, so that a target never reached does not stall the run."""
    rounds_max: int = Field(default=0, ge=0)
    """The run ends after so many rounds; 0 means never."""
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
    ring_size_max: int = Field(default=64, ge=1, le=limits.ROSTER_MAX // 2)
    """Members of one ring. More wait to be admitted."""


class AdmissionConfig(Table):
    """Who may enter the run."""

    mode: Literal["open", "allowlist", "token"] = "token"
    """"token": whoever has an invite with a token; "allowlist": the peers in `allow`; "open": anybody who has an address."""
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
    """"local" for one machine, "lan", or "wan" for home uplinks: quicker ones send more and accuse the slow more often."""

    def build(self) -> MembershipConfig:
        return PRESETS[self.preset]


class RunConfig(Table):
    """The manifest: equal on every peer; only the founder writes it."""

    name: str = Field(default="shoal", min_length=1, max_length=64)
    """For people."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the tiny model's weights, LoRA's A, the data stream and its split."""
    learner: Literal["grpo", "quadratic"] = "grpo"
    """"grpo" trains a language model; "quadratic" is the numpy stand-in."""
    compression: str = "short"
    """Preset ("short", "demo", "long", "sparseloco", "dense-8bit", "dense-fp16", "dense") or density/bits such as "0.05/4"."""
    model: ModelConfig = ModelConfig()
    """[run.model]"""
    task: TaskConfig = TaskConfig()
    """[run.task]"""
    rewards: RewardsConfig = RewardsConfig()
    """[run.rewards]"""
    grpo: GrpoConfig = GrpoConfig()
    """[run.grpo]"""
    warmup: WarmupConfig = WarmupConfig()
    """[run.warmup]"""
    quadratic: QuadraticConfig = QuadraticConfig()
    """[run.quadratic]"""
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
            raise ValueError(f"{error.values}; {error.todo}") from None
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

    data_dir: str = "~/.shoal"
    """Identity, state, journal and logs. One per peer."""
    listen: str = ""
    """Address to listen on; empty means all of this machine's."""
    port: int = Field(default=7447, ge=0, le=65_535)
    """TCP port; 0 takes a free one."""
    announce: list[str] = []
    """host:port where others reach this peer, if not where it listens (behind a router)."""
    model_path: str = ""
    """Local folder or .gguf to use in place of the manifest's model; must have the same weights."""
    rewards_file: str = ""
    """Python file of TRL-style reward functions. Never sent to anybody."""
    task: TaskConfig | None = None
    """[node.task]: train on other, private data than the manifest names. It never moves."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:1", "mps"."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of torch; 0 leaves its default."""
    keep_checkpoints: int = Field(default=2, ge=1, le=1000)
    """Older checkpoints are deleted."""
    eval_every_rounds: int = Field(default=0, ge=-1)
    """Held-out evaluation every so many rounds; 0: only at the start and the end of the run, -1: never."""
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
    node: NodeConfig = NodeConfig()


# --- reading ----------------------------------------------------------------------------------------------------------


def _mistake(where: str, problems: Sequence[str]) -> ShoalError:
    return ShoalError(
        f"The configuration has {len(problems)} mistake{'s' if len(problems) > 1 else ''} ({where})",
        values="\n  ".join(problems),
        todo="Mend them; `shoal up --print-config` shows every key with its meaning and default.",
        code=ExitCode.CONFIG,
    )


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Config:
    """Read the file (none: all defaults), apply environment and `a.b=value` overrides, validate.

    Raises:
        ShoalError: code CONFIG, naming every mistake: missing file, TOML syntax, unknown keys with the nearest known one,
            wrong types, impossible values.
    """
    text, tree = "", {}
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
            tree = tomllib.loads(text)
        except OSError as error:
            raise _mistake(str(path), [f"the file cannot be read: {error.strerror}, expected a TOML file"]) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise _mistake(str(path), [f"not TOML: {error}"]) from None
    for name, value in sorted((environment or {}).items()):
        if name.startswith(ENV_PREFIX) and name not in ENV_OTHER:
            _put(tree, name[len(ENV_PREFIX) :].lower().split("__"), _literal(value), name)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise _mistake("command line", [f"{override!r} is not key=value, for example node.port=7000"])
        _put(tree, key.split("."), _literal(value), override)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems = [_describe(item, text) for item in error.errors()]
        raise _mistake(str(path or "environment and flags"), problems) from None
    return _check_files(config, path)


def _check_files(config: Config, path: Path | None) -> Config:
    """Files that the configuration names must be there before anything slow begins."""
    problems = []
    names = {
        "node.rewards_file": config.node.rewards_file,
        "node.model_path": config.node.model_path,
        "run.task.name": config.run.task.name if config.run.task.name.endswith(".jsonl") else "",
        "node.task.name": config.node.task.name
        if config.node.task and config.node.task.name.endswith(".jsonl")
        else "",
        "run.model.name": config.run.model.name if _looks_like_path(config.run.model.name) else "",
    }
    for key, name in names.items():
        if name and not Path(name).expanduser().exists():
            problems.append(f"{key} = {name!r}: no such file, expected an existing path")
    if problems:
        raise _mistake(str(path or "flags"), problems)
    return config


def _looks_like_path(name: str) -> bool:
    return name.endswith(".gguf") or name.startswith(("/", "./", "../", "~"))


def _literal(text: str) -> Any:
    """A TOML value where the text is one, else the text itself."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _put(tree: dict[str, Any], keys: list[str], value: Any, source: str) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise _mistake(source, [f"{'.'.join(keys)}: {key} is not a table"])
    # An empty environment variable for a list means the empty list.
    tree[keys[-1]] = [] if value == "" and keys[-1] in ("announce", "allow", "bootstrap") else value


def _describe(item: Any, text: str) -> str:
    """One pydantic error as a line: key, place, the two values."""
    loc = [str(part) for part in item["loc"]]
    key, line = ".".join(loc), _line_of(loc, text)
    where = f" (line {line})" if line else ""
    if item["type"] == "extra_forbidden":
        known = _known_keys(loc[:-1])
        near = difflib.get_close_matches(loc[-1], known, n=1, cutoff=0.0)
        return f"{key}{where}: unknown key, the nearest known one is {near[0] if near else 'none'}"
    message = item["msg"].removeprefix("Value error, ")
    return f"{key}{where}: found {_short(item['input'])}; {message[0].lower()}{message[1:]}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _known_keys(path: list[str]) -> list[str]:
    table: Any = Config
    for part in path:
        field = table.model_fields.get(part)
        if field is None:
            return []
        annotation = field.annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        table = next((o for o in options if isinstance(o, type) and issubclass(o, Table)), None)
        if table is None:
            return []
    return list(table.model_fields)


def _line_of(loc: list[str], text: str) -> int | None:
    """Line of a key in the TOML text, as far as simple tables go."""
    current: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line)
        if header:
            current = [part.strip().strip("\"'") for part in header[1].split(".")]
            if current == loc:
                return number
            continue
        assignment = re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line)
        if assignment:
            full = current + [part.strip("\"'") for part in assignment[1].split(".")]
            if full == loc[: len(full)]:
                return number
    return None


# --- the manifest -----------------------------------------------------------------------------------------------------


def manifest_bytes(run: RunConfig) -> bytes:
    """Canonical JSON of the `[run]` tables: sorted keys, no blanks. Its sha-256 is the run id."""
    return json.dumps(run.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


def run_id_of(manifest: bytes) -> bytes:
    """32 bytes."""
    return hashlib.sha256(manifest).digest()


def run_from_manifest(manifest: bytes) -> RunConfig:
    """The tables in a manifest that a peer sent. Raises PeerFault("bad_manifest")."""
    if len(manifest) > limits.MANIFEST_BYTES_MAX:
        raise PeerFault("bad_manifest", f"{len(manifest)} bytes, limit {limits.MANIFEST_BYTES_MAX}")
    try:
        return RunConfig.model_validate_json(manifest)
    except ValidationError as error:
        raise PeerFault("bad_manifest", str(error.errors()[0]["loc"])) from None


# --- the example ------------------------------------------------------------------------------------------------------


def example_config() -> str:
    """A complete TOML file with every key, its meaning and its default, commented out where it is the default."""
    lines = ["# shoal configuration. [run] is the manifest, equal on all peers; [node] is yours alone.", ""]
    _example(lines, Config, Config(), [])
    return "\n".join(lines) + "\n"


def _example(lines: list[str], kind: type[Table], values: Table, path: list[str]) -> None:
    tables = []
    if path:
        lines += ["", f"[{'.'.join(path)}]", f"# {(kind.__doc__ or '').strip().splitlines()[0]}"]
    for name, field in kind.model_fields.items():
        value = getattr(values, name)
        if isinstance(value, Table):
            tables.append((name, type(value), value))
            continue
        for line in (field.description or "").splitlines():
            lines.append(f"# {line.strip()}")
        lines.append(f"# {name} = {_toml(value)}" if value is not None else f"# {name} = …  (absent by default)")
    for name, table, value in tables:
        _example(lines, table, value, [*path, name])


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }" if value else "{}"
    return json.dumps(value, ensure_ascii=False)
