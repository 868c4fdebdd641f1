"""`shoal demo` in each mode, with a smaller model and fewer samples than it has by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shoal.node.demo
from shoal.node.commands.demo_options import DemoOptions
from shoal.node.rl.config import demo_defaults

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PEERS, ROUNDS = 4, 6


def small() -> dict[str, Any]:
    """Two single-digit terms, which 32 dimensions learn in seconds."""
    defaults = demo_defaults()
    defaults["model"]["tiny"] = {"hidden": 32, "layers": 2, "heads": 2, "mlp": 64}
    defaults["task"] |= {
        "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "eval_size": 16,
        "eval_generations": 1,
    }
    defaults["grpo"] |= {"prompts_per_step": 16, "learning_rate": 1e-3, "warmup_steps": 2}
    defaults["warmup"] |= {"steps": 250, "seconds_max": 40.0, "learning_rate": 3e-3}
    defaults["rounds"] |= {"count": ROUNDS, "samples_per_peer": 6_144}
    return defaults


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ring", "gossip", "hybrid"])
def test_one_is_killed_and_comes_back_and_all_have_the_same_bits(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shoal.node.demo, "demo_defaults", small)
    code = shoal.node.demo.run_demo(DemoOptions(peers=PEERS, mode=mode, json=True, directory=tmp_path / "demo"))
    told = capsys.readouterr()
    found = json.loads(told.out.splitlines()[-1])
    assert code == 0 and found["identical"] and len(set(found["state_hashes"].values())) == 1, told.err
    assert (found["mode"], found["peers"], found["rounds"]) == (mode, PEERS, ROUNDS)
    assert found["killed"] and found["rejoined"]
    assert found["reward_last"] > found["reward_first"]
