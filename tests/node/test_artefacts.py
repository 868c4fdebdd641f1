"""`shoal export` and `shoal eval`: from a data directory on disk, without a node, to what others load."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from shoal.node import cli, learners
from shoal.node.config import RunConfig, manifest_bytes, run_id_of
from shoal.node.config_file import load_config
from shoal.node.store.checkpoint import Checkpoint, Checkpoints
from shoal.node.store.metrics import append_metrics
from shoal.node.swarm.state import SharedState
from shoal.protocol.errors import ExitCode
from shoal.protocol.version import VersionVector

SMALL = [
    "run.model.tiny={hidden = 16, layers = 2, heads = 2, mlp = 32}",
    "run.task.options={min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1}",
    "run.task.eval_size=8",
    "run.grpo.max_completion_length=3",
    "node.device=cpu",
    "node.threads=1",
]


@pytest.fixture
def data_dir(tmp_path):
    """Makes a data directory with one checkpoint whose parameters are not the initial ones."""

    def make(*overrides: str):
        run = load_config(None, [*SMALL, *overrides]).run
        folder = tmp_path / "node"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "manifest.json").write_bytes(manifest_bytes(run))
        if run.learner == "grpo":
            learner = learners.build(load_config(None, SMALL).model_copy(update={"run": run}), "p", folder, print)
            start = learner.initial()
            learner.close()
        else:
            start = np.zeros(4, np.float32)
        noise = np.random.default_rng(0).standard_normal(start.size).astype(np.float32)
        state = SharedState.make(
            theta=start + np.float32(0.1) * noise,
            outer=None,
            round_=3,
            lineage=run_id_of(b"lineage"),
            vector=VersionVector({}),
            electorate=["p"],
            total_weight=1,
        )
        Checkpoints(folder / "checkpoints").save(Checkpoint(state, b"", {}, {}, {}))
        return folder

    return make


def ask(capsys, *arguments: str):
    code = cli.run([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, json.loads(out.strip().splitlines()[-1])


def test_an_exported_adapter_scores_as_the_state_it_came_from(data_dir, tmp_path, capsys):
    folder = str(data_dir("run.model.lora={r = 2, alpha = 4}"))
    code, state = ask(capsys, "eval", "--data-dir", folder)
    assert code == 0 and state["round"] == 3
    adapter = tmp_path / "adapter"
    code, wrote = ask(capsys, "export", "--data-dir", folder, "--out", str(adapter))
    assert (code, wrote) == (0, {"folder": str(adapter), "kind": "adapter", "round": 3})
    assert (adapter / "adapter_model.safetensors").exists() and (adapter / "adapter_config.json").exists()
    code, scored = ask(capsys, "eval", "--data-dir", folder, "--adapter", str(adapter))
    assert code == 0
    assert {k: scored[k] for k in ("accuracy", "reward")} == {k: state[k] for k in ("accuracy", "reward")}
    code, refused = ask(capsys, "export", "--data-dir", folder, "--out", str(adapter))
    assert code == ExitCode.FAILED and "in the way" in refused["error"]["what"]


@pytest.mark.parametrize("overrides", [(), ("run.model.lora={r = 2}",)])
def test_a_merged_export_is_an_ordinary_model(data_dir, tmp_path, capsys, overrides):
    folder = str(data_dir(*overrides))
    _, state = ask(capsys, "eval", "--data-dir", folder)
    model = tmp_path / "model"
    code, wrote = ask(capsys, "export", "--data-dir", folder, "--out", str(model), "--merged")
    assert code == 0 and wrote["kind"] == "model" and (model / "model.safetensors").exists()
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(model).num_parameters() > 0
    assert state["n"] == 8


def test_another_task_and_size(data_dir, capsys):
    folder = str(data_dir())
    task = ["--task", "reasoning_gym:spell_backward", "--size", "4"]
    code, found = ask(capsys, "eval", "--data-dir", folder, *task)
    assert code == 0 and found["n"] == 4


def test_a_run_without_a_language_model(data_dir, capsys):
    folder = str(data_dir('run.learner="quadratic"'))
    code, found = ask(capsys, "export", "--data-dir", folder, "--out", "x")
    assert code == ExitCode.CONFIG and "quadratic" in found["error"]["values"]


def test_a_checkpoint_of_another_model(data_dir, capsys):
    folder = data_dir()
    (folder / "manifest.json").write_bytes(manifest_bytes(RunConfig()))
    code, found = ask(capsys, "eval", "--data-dir", str(folder))
    assert code == ExitCode.MISMATCH and "parameters" in found["error"]["values"]


def test_pass_at_k_and_a_picture(data_dir, tmp_path, capsys):
    folder = data_dir()
    for round_ in range(3):
        append_metrics(folder, {"round": round_, "eval_reward": 0.1 * round_, "eval_accuracy": 0.2 * round_})
    append_metrics(folder, {"round": 3, "reward": 0.3})  # a round without an evaluation
    code, found = ask(
        capsys, "eval", "--data-dir", str(folder), "--samples", "4", "--plot", str(tmp_path / "held-out.png")
    )
    assert code == ExitCode.OK
    assert found["pass_at_1"] <= found["pass_at_2"] <= found["pass_at_4"]
    picture = (tmp_path / "held-out.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(picture[16:20], "big") == 1200  # pixels wide: two panels
    assert [p.name for p in tmp_path.glob(".held-out*")] == []


def test_a_picture_that_cannot_be_written(data_dir, tmp_path, capsys):
    code = cli.run(["eval", "--data-dir", str(data_dir()), "--plot", str(tmp_path / "nowhere" / "x.png"), "--json"])
    assert code == ExitCode.DISK
    assert "nowhere" in capsys.readouterr().err


def test_a_picture_without_matplotlib(data_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code = cli.run(["eval", "--data-dir", str(data_dir()), "--plot", str(tmp_path / "x.png"), "--json"])
    assert code == ExitCode.DEPENDENCY
    assert "shoal[plot]" in capsys.readouterr().err


# --- training on preferences ------------------------------------------------------------------------------------------


@pytest.fixture
def told(tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "?"} for a in range(4) for b in range(4)]
    path = tmp_path / "preferences.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_dpo_goes_on_from_the_newest_state_and_writes_an_adapter(data_dir, told, tmp_path, capsys):
    folder, out = str(data_dir("run.model.lora={r = 2, alpha = 4}")), tmp_path / "dpo"
    wanted = ("dpo", "--data-dir", folder, "--preferences", str(told), "--out", str(out))
    code, found = ask(capsys, *wanted, "--learning-rate", "0.01", "--max-steps", "30", "--device", "cpu")
    assert code == 0 and found["kind"] == "adapter" and found["steps"] == 30 and found["pairs"] == 14
    assert found["loss"] < 0.69 and found["eval_rewards/accuracies"] == 1.0
    code, scored = ask(capsys, "eval", "--data-dir", folder, "--adapter", str(out))
    assert code == 0 and "accuracy" in scored
    code, refused = ask(capsys, *wanted)
    assert code == ExitCode.FAILED and "in the way" in refused["error"]["what"]
    code, refused = ask(capsys, *wanted[:-1], str(tmp_path / "other"), "--lora-r", "4")
    assert code == ExitCode.CONFIG


def test_dpo_trains_a_named_model(told, tmp_path, capsys):
    out, made = tmp_path / "model", ("--model", "tiny", "--max-steps", "2", "--device", "cpu")
    code, found = ask(capsys, "dpo", *made, "--preferences", str(told), "--out", str(out), "--loss-type", "ipo")
    assert code == 0 and found["kind"] == "model" and (out / "model.safetensors").exists()
    adapter = tmp_path / "adapter"
    code, found = ask(capsys, "dpo", *made, "--lora-r", "2", "--preferences", str(told), "--out", str(adapter))
    assert code == 0 and json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"] == 4.0
    several = (
        "--loss-type",
        "sigmoid,bco_pair,sft",
        "--loss-weights",
        "0.8,0.2,1",
        "--use-weighting",
        "--ld-alpha",
        "0.5",
    )
    code, found = ask(capsys, "dpo", *made, *several, "--preferences", str(told), "--out", str(tmp_path / "several"))
    assert code == 0 and found["steps"] == 2
    code, refused = ask(
        capsys, "dpo", *made, "--preferences", str(told), "--out", str(tmp_path / "no"), "--loss-type", "exo_pair"
    )
    assert code == ExitCode.USAGE and "label_smoothing" in refused["error"]["what"] + refused["error"]["values"]


def test_a_reward_model_is_one_command_away(told, tmp_path, capsys):
    from shoal.node.rl.reward_model import RewardModel

    out = tmp_path / "rm"
    code, found = ask(
        capsys,
        *("reward-model", "--model", "tiny", "--preferences", str(told), "--out", str(out)),
        *("--learning-rate", "0.01", "--max-steps", "30", "--device", "cpu"),
    )
    assert code == 0 and found["kind"] == "reward model" and found["accuracy"] == 1.0
    good, bad = RewardModel.load(out, device="cpu").score([("1+1=", "2"), ("1+1=", "?")])
    assert good > bad
    code, found = ask(
        capsys,
        *(
            "reward-model",
            "--model",
            "tiny",
            "--lora-r",
            "4",
            "--preferences",
            str(told),
            "--out",
            str(out.parent / "lora"),
        ),
        *("--learning-rate", "0.01", "--max-steps", "40", "--device", "cpu", "--weight-decay", "0.1"),
    )
    assert code == 0 and found["accuracy"] == 1.0
    good, bad = RewardModel.load(tmp_path / "lora", device="cpu").score([("1+1=", "2"), ("1+1=", "?")])
    assert good > bad  # what was merged is what was trained
