"""The example reward file, called by an installed TRL 1.16 and by shoal: the same rewards, for texts and conversations.

TRL is no dependency of shoal: without it this is skipped. `pip install trl==1.16.0`, then
`SHOAL_LONG=1 pytest tests/node/rl/test_rewards_trl.py`.
"""

import asyncio
import importlib.metadata
import importlib.util
import math
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.node.rl.config import RewardsConfig, TaskConfig
from shoal.node.rl.rewards import Rewards
from shoal.node.rl.tasks import Example, load_task

VERSION = importlib.metadata.version("trl") if importlib.util.find_spec("trl") else "none"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not VERSION.startswith("1.16"), reason=f"needs trl 1.16, found {VERSION}"),
]
FILE = Path(__file__).parents[3] / "examples" / "rewards.py"
FUNCTIONS = ["digits_only", "near", "hard_ones_count_twice"]
TEXTS = ["7", "seven 8", "", "-3", "12", "no"]
ROWS = [{"answer": a, "level": level} for a, level in zip("798210", ["hard", "easy"] * 3)]


def by_trl(prompts, completions, ids, monkeypatch):
    """Rewards of `GRPOTrainer._calculate_rewards`, NaN for None, and the metrics it was given."""
    import torch
    from trl.trainer import grpo_trainer

    spec = importlib.util.spec_from_file_location("user_rewards", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    logged = {}
    monkeypatch.setattr(grpo_trainer, "profiling_context", lambda *_: nullcontext())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        trainer = SimpleNamespace(
            accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=True),
            reward_funcs=[getattr(module, name) for name in FUNCTIONS],
            reward_processing_classes=[None] * len(FUNCTIONS),
            reward_func_names=FUNCTIONS,
            state=SimpleNamespace(global_step=5),
            environments=None,
            async_loop=loop,
            _log_completion_extra=lambda *_: None,
            _log_metric=lambda name, value: logged.setdefault(name, []).append(value),
        )
        inputs = [{"prompt": prompt, **row} for prompt, row in zip(prompts, ROWS)]
        table = grpo_trainer.GRPOTrainer._calculate_rewards(trainer, inputs, prompts, completions, ids)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    return dict(zip(FUNCTIONS, table.T.tolist())), {name: sum(values) / len(values) for name, values in logged.items()}


@pytest.mark.parametrize("conversational", [False, True])
def test_trl_and_shoal_compute_the_same_rewards(monkeypatch, conversational):
    prompts = [[{"role": "user", "content": "p"}] if conversational else "p" for _ in TEXTS]
    completions = [[{"role": "assistant", "content": t}] if conversational else t for t in TEXTS]
    ids = [[1] * len(text) for text in TEXTS]
    theirs, logged = by_trl(prompts, completions, ids, monkeypatch)
    task = load_task(TaskConfig(eval_size=2), seed=0)
    rewards = Rewards(RewardsConfig(functions=FUNCTIONS), task, FILE)
    try:
        rewards.global_step = 5
        examples = [Example(prompt="p", answer=row["answer"], columns={"level": row["level"]}) for row in ROWS]
        ours = rewards.score(examples, prompts, completions, TEXTS, ids)
    finally:
        rewards.close()
    assert not ours.failures
    for name in FUNCTIONS:
        found = [math.nan if value is None else value for value in ours.values[name]]
        assert found == pytest.approx(theirs[name], rel=1e-6, nan_ok=True), name  # TRL keeps fp32
    assert None in ours.values["near"] and 1.0 in ours.values["near"]
    assert ours.metrics == logged
