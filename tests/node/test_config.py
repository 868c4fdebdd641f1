"""The configuration: precedence, every kind of mistake in words, the manifest, the printed example."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.config import Config, RunConfig, manifest_bytes, run_from_manifest, run_id_of
from shoal.node.config_file import _all_keys, _field, example_config, load_config, tomllib
from shoal.protocol import limits
from shoal.protocol.errors import ExitCode, PeerFault, ShoalError

CORRECTION = "run.grpo.vllm_importance_sampling_correction"
EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def mistake(path: Path | None = None, overrides=(), environment=None) -> str:
    with pytest.raises(ShoalError) as caught:
        load_config(path, overrides, environment)
    assert caught.value.code == ExitCode.CONFIG
    assert caught.value.todo.startswith("Mend")
    return caught.value.values


# --- precedence -------------------------------------------------------------------------------------------------------


def test_no_file_means_the_defaults():
    assert load_config() == Config()


def test_file_then_environment_then_flags(write):
    path = write('[node]\nport = 1\nthreads = 1\nlisten = "a"')
    environment = {"SHOAL_NODE__PORT": "2", "SHOAL_NODE__THREADS": "2"}
    node = load_config(path, ["node.port=3"], environment).node
    assert (node.port, node.threads, node.listen) == (3, 2, "a")


def test_variables_that_are_no_settings_are_left_alone():
    # Container platforms define these for a service called shoal.
    environment = {
        "SHOAL_PORT": "tcp://10.0.0.1:7447",
        "SHOAL_SERVICE_HOST": "10.0.0.1",
        "SHOAL_DEBUG": "1",
        "HOME": "/",
    }
    assert load_config(None, (), environment) == Config()


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("run.name=7", lambda c: c.run.name, "7"),  # a text may look like a number
        ('run.name="a b"', lambda c: c.run.name, "a b"),
        ("node.announce=a.example:1, b.example:2", lambda c: c.node.announce, ["a.example:1", "b.example:2"]),
        ('node.announce=["a.example:1"]', lambda c: c.node.announce, ["a.example:1"]),
        ("node.announce=", lambda c: c.node.announce, []),
        ("run.grpo.epsilon_high=1", lambda c: c.run.grpo.epsilon_high, 1.0),
        (f"{CORRECTION}=false", lambda c: c.run.grpo.vllm_importance_sampling_correction, False),
        (f"{CORRECTION}=auto", lambda c: c.run.grpo.vllm_importance_sampling_correction, "auto"),
        ("run.compression=0.05/4", lambda c: c.run.compression, "0.05/4"),
        ("run.sync.dense_bits=8", lambda c: c.run.sync.dense_bits, 8),
        ("run.model.lora.r=4", lambda c: c.run.model.lora.r, 4),
        ("run.task.options={max_terms = 3}", lambda c: c.run.task.options, {"max_terms": 3}),
        ("node.lan_discovery=false", lambda c: c.node.lan_discovery, False),
    ],
)  # fmt: skip
def test_an_override_is_read_by_the_type_of_its_key(override, get, value):
    assert get(load_config(None, [override])) == value
    name, text = override.split("=", 1)
    variable = "SHOAL_" + name.upper().replace(".", "__")
    assert get(load_config(None, (), {variable: text})) == value


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[node]\nprot = 1", ["node.prot (line 2)", "unknown key", "port"]),
        ("[nod]\nport = 1", ["nod (line 1)", "unknown key", "node"]),
        ("[run.sync]\n\ntarget_sample = 1", ["run.sync.target_sample (line 3)", "target_samples"]),
        ("[run]\nport = 1", ["run.port (line 2)", "expected it in [node]"]),
        ("[run]\nname.x = 1", ["run.name (line 2)", "expected a valid string"]),
        ('[node]\nport = "7000"', ["node.port (line 2)", "'7000'", "expected a valid integer"]),
        ("[node]\nlan_discovery = 1", ["node.lan_discovery (line 2)", "found 1", "expected a valid boolean"]),
        ("node = 3", ["node (line 1)", "found 3"]),
        ('[node]\ndata_dir = ""', ["node.data_dir (line 2)", "found ''", "at least 1"]),
        ("[node]\nport = 70000", ["node.port", "70000", "65535"]),
        ('[run.sync]\nmode = "rings"', ["run.sync.mode", "'rings'", "'ring'"]),
        ("[run.sync]\nnorm_max = nan", ["run.sync.norm_max (line 2)", "nan", "finite"]),
        ("[run.task.options]\nx = [1.0, inf]", ["run.task.options.x (line 2)", "inf", "finite"]),
        ('[run]\ncompression = "shrot"', ["run.compression (line 2)", "shrot", "short"]),
        ('[run]\ncompression = "2/4"', ["run.compression", "2/4", "density"]),
        ('[run.admission]\nmode = "allowlist"\nallow = ["x"]', ["run.admission.allow (line 3)", "bad_peer_id"]),
        ('[run.admission]\nallow = []\nmode = "opne"', ["run.admission.mode (line 3)", "'opne'", "allowlist"]),
        ("[run.model.lora]\ntarget_modules = 5", ["run.model.lora.target_modules (line 2)", "string or a valid list"]),
        ("[run.model.lora]\ntarget_modules = [5]", ["run.model.lora.target_modules", "found 5"]),
        ("[run.grpo]\ndelta = 0.5", ["run.grpo", "delta = 0.5", "1.2"]),
        ('[node]\nannounce = ["nowhere"]', ["node.announce (line 2)", "nowhere"]),
        ('[node]\nrewards_file = "/no/such.py"', ["node.rewards_file (line 2)", "/no/such.py", "exists"]),
        ('[node]\nmodel_path = "/no/such"', ["node.model_path", "/no/such"]),
        ('[run.task]\nname = "no_such.jsonl"', ["run.task.name (line 2)", "no_such.jsonl"]),
        ('[node.task]\nname = "no_such.jsonl"', ["node.task.name (line 2)", "no_such.jsonl"]),
        ('[run.model]\nname = "./no_such"', ["run.model.name (line 2)", "./no_such"]),
        ('[node]\ntest_hold = "sleeping"', ["node.test_hold", "sleeping", "voting"]),
        ("[node]\nport = = 1", ["not TOML", "line 2"]),
        (f'[run.task]\nsystem_prompt = "{"x" * 65536}"', ["manifest", str(limits.MANIFEST_BYTES_MAX)]),
    ],
)  # fmt: skip
def test_a_mistake_names_its_key_its_place_and_both_values(write, text, words):
    said = mistake(write(text))
    for word in words:
        assert word in said


def test_all_mistakes_are_listed_at_once(write):
    said = mistake(write("[node]\nprot = 1\nport = -1\n[run]\nseed = -1\nnam = 1"))
    assert said.count("\n") == 3
    for key in ("node.prot", "node.port", "run.seed", "run.nam"):
        assert key in said


def test_a_mistake_outside_the_file_names_its_source(write):
    path = write("[node]\nport = 1")
    assert "node.port (--set)" in mistake(path, ["node.port=x"])
    assert "node.port (SHOAL_NODE__PORT)" in mistake(path, (), {"SHOAL_NODE__PORT": "x"})
    assert "unknown key, the nearest known one is port" in mistake(path, (), {"SHOAL_NODE__PROT": "1"})
    assert "expected key=value" in mistake(path, ["node.port"])
    assert "expected a table" in mistake(path, ["node.port.x=1"])


def test_files_that_cannot_be_read(tmp_path):
    assert "No such file" in mistake(tmp_path / "absent.toml")
    assert "directory" in mistake(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not TOML" in mistake(tmp_path / "binary")
    with open(tmp_path / "huge.toml", "wb") as file:
        file.truncate(2 * 1024 * 1024)
    assert "2097152 bytes" in mistake(tmp_path / "huge.toml")


@given(st.text(max_size=200))
def test_any_text_gives_a_config_or_a_three_part_error(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "x.toml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        load_config(path)
    except ShoalError as error:
        assert error.code == ExitCode.CONFIG and error.values and error.todo


# --- the manifest -----------------------------------------------------------------------------------------------------


def test_the_manifest_is_canonical_and_complete():
    run = load_config(None, ["run.seed=5", "run.task.options={b = 1, a = 2}", "run.model.lora.r=4"]).run
    manifest = manifest_bytes(run)
    assert run_from_manifest(manifest) == run
    assert manifest_bytes(run_from_manifest(manifest)) == manifest
    assert len(run_id_of(manifest)) == 32
    tree = json.loads(manifest)
    assert list(tree) == sorted(tree) and list(tree["task"]["options"]) == ["a", "b"]
    assert set(tree) == set(RunConfig.model_fields)


def test_equal_tables_give_equal_bytes_however_they_are_written(write):
    one = load_config(write("[run]\nseed = 1\n[run.grpo]\nlearning_rate = 1e-4\ndelta = 2")).run
    two = load_config(write("run.grpo = {delta = 2.0, learning_rate = 0.0001}\nrun.seed = 1")).run
    assert manifest_bytes(one) == manifest_bytes(two)
    assert run_id_of(manifest_bytes(one)) != run_id_of(manifest_bytes(RunConfig()))


def test_node_settings_are_not_in_the_manifest():
    assert b"rewards_file" not in manifest_bytes(RunConfig()) and b"data_dir" not in manifest_bytes(RunConfig())


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"seed": "1"}',
        b'{"seed": 1.5}',
        b'{"seed": ' + b"1" * 5000 + b"}",
        b'{"sync": {"outer_lr": NaN}}',
        b'{"sync": {"norm_max": Infinity}}',
        b'{"surprise": 1}',
        b'{"name": "\\ud800"}',
        b"[" * 60_000,
        b'{"task": ' * 2000 + b"1" + b"}" * 2000,
        b" " * (limits.MANIFEST_BYTES_MAX + 1),
    ],
)
def test_a_hostile_manifest_is_the_peers_fault(manifest):
    with pytest.raises(PeerFault) as caught:
        run_from_manifest(manifest)
    assert caught.value.kind == "bad_manifest" and len(caught.value.detail) <= limits.REASON_CHARS_MAX


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(
            st.sampled_from(sorted({k[-1] for k in _all_keys()})) | st.text(max_size=5), below, max_size=6
        )
    ),
    max_leaves=20,
)


@given(st.binary(max_size=300) | JSON.map(lambda tree: json.dumps(tree).encode()))
def test_any_bytes_are_a_manifest_or_a_fault(manifest):
    try:
        run = run_from_manifest(manifest)
    except PeerFault as fault:
        assert fault.kind == "bad_manifest"
    else:
        assert run_from_manifest(manifest_bytes(run)) == run


# --- the example ------------------------------------------------------------------------------------------------------


def test_the_example_loads_as_the_defaults(write):
    assert load_config(write(example_config())) == Config()


def test_the_example_with_every_key_in_force_is_still_the_defaults(write):
    lines = []
    for line in example_config().splitlines():
        bare = line.removeprefix("# ")
        if re.match(r"[a-z_0-9]+ = [^ ]|\[[a-z_.]+\]$", bare) and "  # absent" not in bare:
            lines.append(bare)
    tree = tomllib.loads("\n".join(lines))
    assert tree["run"]["model"].pop("lora") and tree["node"].pop("task") and tree["node"].pop("judge")
    assert Config.model_validate(tree, strict=True) == Config()


def test_every_key_is_described_and_in_the_example():
    text = example_config()
    for key in _all_keys():
        field = _field(key)
        assert field is not None and field.description, f"{'.'.join(key)} has no description"
        if key[-1] != "test_hold":
            assert re.search(rf"^# {key[-1]} =|^(# )?\[{re.escape('.'.join(key))}\]", text, re.MULTILINE), key
    assert "test_hold" not in text


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.toml")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_the_examples_are_right(path):
    load_config(path)


def test_the_documentation_has_the_example_as_it_is():
    assert example_config() in DOCS.read_text(), "docs/configuration.md is stale: run `make docs`"
