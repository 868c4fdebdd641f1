"""RLAIF end to end: the only reward is a judge's, and a ground truth that the trainer never sees goes up.

The task is to say the first of two letters; a tiny policy that can say it sometimes learns from each kind of judge: a small
model in this process (rating, and comparing), a server in a process of its own, a function of the reward file, the judges of
four peers of which one lies, and a reward model trained on preferences.
"""

import asyncio
import json
import random
import subprocess
import sys
import textwrap

import pytest
import torch

from shoal.node.judging import Group
from shoal.node.rl.build import build_learner
from shoal.node.rl.config import (
    GrpoConfig,
    JudgeBackend,
    JudgeConfig,
    ModelConfig,
    RewardsConfig,
    TaskConfig,
    TinyConfig,
    WarmupConfig,
)
from shoal.node.rl.dpo import DpoConfig, train_dpo
from shoal.node.rl.models import load_model
from shoal.node.rl.policy import completion_logps
from shoal.node.rl.preferences import read_preferences
from shoal.node.rl.reward_model import RewardModel, train_reward_model
from shoal.node.rl.rollout import pairs
from shoal.node.swarm.peer_judges import PeerJudges

from ..swarm.memory import InlineClock, MemoryNet, run

SMALL = TinyConfig(hidden=32, layers=2, heads=2, mlp=64)
STEPS = 150
LONGER = pytest.mark.timeout(900)  # one to two minutes on a quiet machine
# Where the warm-up leaves the policy, and where its reward must bring it (judges that are mostly right: 0.9 to 1).
START, LEARNED = 0.35, 0.7
ROWS = [{"prompt": f"{a}{b}=", "answer": a} for a in "abcdefghijkl" for b in "mnopqrst"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("first") / "first.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return path


def make(data, *, seed=0, functions=("judge",), reward_model="", **judge):
    return build_learner(
        model=ModelConfig(tiny=SMALL),
        task=TaskConfig(name=str(data), eval_size=24, eval_generations=8, prompt_format="plain"),
        rewards=RewardsConfig(functions=list(functions), reward_model=reward_model),
        grpo=GrpoConfig(
            num_generations=8,
            prompts_per_step=8,
            max_completion_length=2,
            learning_rate=3e-3,
            gradient_checkpointing=False,
            # Most groups hold no right answer at first: divided by their own deviation, a judge's noise would weigh as
            # much there as its opinion does elsewhere.
            scale_rewards="batch",
        ),
        warmup=WarmupConfig(steps=60, learning_rate=3e-3, batch_size=32),
        run_seed=seed,
        peer_seed=seed,
        device="cpu",
        **judge,
    )


def train(data, *, peers=None, **options):
    """Ground truth (share of right sampled answers to held-out prompts) before and after, and the last metrics."""
    learner = make(data, **options)
    try:
        if peers is not None:
            learner.judging.use_peers(peers)
        learner.load(learner.initial())
        learner.warmup()
        before = learner.evaluate()["pass_at_1"]
        learner.begin(1)
        metrics = [learner.step().metrics for _ in range(STEPS)][-1]
        learner.load(learner.theta())
        return before, learner.evaluate()["pass_at_1"], metrics
    finally:
        learner.close()


def truth(prompt, completion):
    return float(completion == prompt[0])


# --- a model that judges ----------------------------------------------------------------------------------------------

RATE = "{prompt}{completion}?"
COMPARE = "{prompt}{first};{second}?"


def train_judge(folder, question, steps):
    """A tiny model that reads `question(random)` and says what comes with it: it knows what is right, mostly."""
    loaded = load_model(ModelConfig(tiny=SMALL), seed=9, device="cpu")
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=3e-3)
    rng = random.Random(5)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
        texts, words = zip(*(question(rng) for _ in range(64)), strict=True)
        encode = loaded.tokenizer
        batch = pairs(
            [encode(t).input_ids for t in texts],
            [encode(w).input_ids for w in words],
            pad_id=loaded.pad_id,
            device=loaded.device,
        )
        loss = -completion_logps(loaded.model, batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def answer(rng, prompt, right):
    """A right or a wrong answer; wrong ones of every kind that a policy gives."""
    if right:
        return prompt[0]
    alphabet = "abcdefghijklmnopqrst=0"
    wrong = rng.choice(["", prompt[1], prompt[0] + rng.choice(alphabet), rng.choice(alphabet) + rng.choice(alphabet)])
    return wrong if rng.random() < 0.5 and wrong != prompt[0] else rng.choice([c for c in alphabet if c != prompt[0]])


def rated(rng):
    prompt, right = rng.choice(ROWS)["prompt"], rng.random() < 0.5
    return prompt + answer(rng, prompt, right) + "?", str(int(right))


def compared(rng):
    prompt, first, both_wrong = rng.choice(ROWS)["prompt"], rng.random() < 0.5, rng.random() < 0.5
    one, other = (answer(rng, prompt, right and not both_wrong) for right in (first, not first))
    return f"{prompt}{one};{other}?", "A" if first else "B"


@pytest.mark.parametrize(
    ("mode", "question", "steps", "template"),
    [("rate", rated, 300, RATE), pytest.param("compare", compared, 1200, COMPARE, marks=[pytest.mark.slow, LONGER])],
)
def test_a_model_judges(data, tmp_path, mode, question, steps, template):
    folder = train_judge(tmp_path / "judge", question, steps)
    backend = JudgeBackend(model=str(folder), mode=mode, template=template, rating_max=1, opponents=7, batch_size=64)
    before, after, _ = train(data, judge=JudgeConfig(backend=backend))
    print(f"ground truth {before:.3f} -> {after:.3f}")
    assert before < START and after > LEARNED


# --- a server, a function ---------------------------------------------------------------------------------------------

SERVER = """
    import http.server, json, math, os

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, _, completion = body["messages"][0]["content"].partition("=")
            p = 0.9 if completion == prompt[0] + "?" else 0.2
            tops = [{"token": str(n), "logprob": math.log(q)} for n, q in ((1, p), (0, 1 - p))]
            choice = {"message": {"content": "?"}, "logprobs": {"content": [{"token": "1", "top_logprobs": tops}]}}
            reply = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
"""


def test_a_server_judges(data):
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SERVER)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        backend = JudgeBackend(kind="server", url=url, template=RATE, rating_max=1)
        before, after, _ = train(data, judge_backend=backend)
    finally:
        process.kill()
        process.wait(10)
    print(f"ground truth {before:.3f} -> {after:.3f}")
    assert before < START and after > LEARNED


def test_a_function_judges(data, tmp_path):
    file = tmp_path / "judge.py"
    file.write_text(
        "def mine(prompts, completions, **kwargs):\n"
        "    return [0.9 if c == p[0] else 0.2 for p, c in zip(prompts, completions)]\n"
    )
    backend = JudgeBackend(kind="function", function="mine")
    before, after, _ = train(data, judge=JudgeConfig(backend=backend), rewards_file=file)
    print(f"ground truth {before:.3f} -> {after:.3f}")
    assert before < START and after > LEARNED


# --- peers ------------------------------------------------------------------------------------------------------------


def peers_of(seed, liars):
    """`ask` of a node whose four peers judge with noise of their own; `liars` of them say the opposite, in unison."""
    net = MemoryNet({})

    def judge(name):
        rng = random.Random(f"{seed}/{name}")

        def score(groups):
            known = [[truth(g.prompt, c) for c in g.completions] for g in groups]
            if name in liars:
                return [[1.0 - s for s in row] for row in known]
            return [[min(1.0, max(0.0, 0.2 + 0.6 * s + rng.gauss(0, 0.1))) for s in row] for row in known]

        return score

    def peer(judge, alive=()):
        return PeerJudges(
            open_stream=net.opener("me"),
            alive=lambda: set(alive),
            clock=InlineClock(),
            rng=random.Random(seed),
            judge=judge,
            count=4,
            quorum=3,
            budget_seconds=20.0,
        )

    me = peer(None, "abcd")

    def ask(groups: list[Group]):
        async def once():
            me._busy = asyncio.Lock()
            for name in "abcd":  # handlers belong to a loop, and here each batch has its own
                net.handlers[name] = peer(judges[name]).serve
            return await me.ask(groups)

        return run(once())

    judges = {name: judge(name) for name in "abcd"}
    return ask, me


@pytest.mark.slow
@LONGER
def test_peers_judge_and_one_of_four_that_lies_changes_nothing(data):
    """Within the spread of seeds, and better than the same liar among judges that are all believed alike would be."""
    outcomes = {}
    for liars in ("", "b"):
        for seed in range(3):
            ask, me = peers_of(seed, liars)
            config = JudgeConfig(ask="peers", peers=4, quorum=3, fallback="none")
            before, after, metrics = train(data, seed=seed, peers=ask, judge=config)
            print(f"liars {liars!r}, seed {seed}: ground truth {before:.3f} -> {after:.3f}")
            assert before < START and after > LEARNED
            assert metrics["logged/judges"] == 4.0 and metrics["logged/judge_fallback"] == 0.0
            outcomes[liars, seed] = after
            weights = me.trust.weights(list("abcd"))
            assert all((weight < 0.1) == (name in liars) for name, weight in zip("abcd", weights, strict=True))
    honest = [outcomes["", seed] for seed in range(3)]
    lied = [outcomes["b", seed] for seed in range(3)]
    spread = max(honest) - min(honest)
    assert sum(lied) / 3 >= sum(honest) / 3 - max(spread, 0.1)


# --- preferences ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(data, tmp_path_factory):
    """A judge's opinions, written down while a policy learned from them."""
    folder = tmp_path_factory.mktemp("told")
    file, path = folder / "judge.py", folder / "preferences.jsonl"
    file.write_text(
        "def mine(prompts, completions, **kwargs):\n    return [float(c == p[0]) for p, c in zip(prompts, completions)]\n"
    )
    backend = JudgeBackend(kind="function", function="mine")
    train(data, judge=JudgeConfig(backend=backend), rewards_file=file, preferences_file=path)
    preferences = read_preferences(path)
    assert len(preferences) > 500
    assert all(truth(p.prompt, p.chosen) > truth(p.prompt, p.rejected) for p in preferences)
    return preferences


@pytest.fixture
def warm(data):
    """A learner after its warm-up: what a reward model grows from, and what DPO begins with."""
    learner = make(data, functions=["task"], seed=1)
    learner.load(learner.initial())
    learner.warmup()
    yield learner
    learner.close()


@pytest.mark.slow
@LONGER
def test_preferences_train_a_reward_model_that_is_a_reward(data, told, warm, tmp_path):
    """The reward model of one policy's preferences teaches another policy, though less than the judge itself would: the
    policy finds answers that no preference is about, and some of them score well."""
    made = RewardModel.on(warm.loaded)
    metrics = train_reward_model(made, told, steps=400, learning_rate=3e-3, batch_size=64)
    assert metrics["accuracy"] > 0.9 and metrics["held_out"] > 20
    made.save(tmp_path / "rm")
    again = RewardModel.load(tmp_path / "rm", device="cpu")
    texts = [("am=", "a"), ("am=", "m")]
    assert again.score(texts) == pytest.approx(made.score(texts), abs=1e-5)
    before, after, _ = train(data, seed=1, functions=["reward_model"], reward_model=str(tmp_path / "rm"))
    print(f"ground truth {before:.3f} -> {after:.3f}")
    assert before < START and after > before + 0.3


def test_preferences_teach_a_policy_by_dpo(told, warm):
    before = warm.evaluate()["pass_at_1"]
    metrics = train_dpo(warm.loaded, told, DpoConfig(learning_rate=1e-3, batch_size=32, num_train_epochs=4))
    warm.load(warm.theta())
    after = warm.evaluate()["pass_at_1"]
    print(f"ground truth {before:.3f} -> {after:.3f}, {metrics}")
    assert metrics["eval_rewards/accuracies"] > 0.8
    assert before < START and after > before + 0.2
