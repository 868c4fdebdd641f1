"""Judges: what is asked, how answers become scores, local models, servers, functions of a file, and fallbacks."""

import json
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.node.judging import Group, Verdict
from shoal.node.rl.config import JudgeBackend, JudgeConfig
from shoal.node.rl.judges.asking import Comparing, Rating, fill, matches, meets
from shoal.node.rl.judges.local import LocalReader
from shoal.node.rl.judges.reward import JudgeReward, build_judge, groups_of
from shoal.node.rl.judges.server import ServerReader, odds_in
from shoal.node.rl.preferences import PreferenceLog, plain, read_preferences
from shoal.node.rl.rewards import Batch
from shoal.node.rl.tasks import Example
from shoal.protocol.errors import ShoalError

GROUP = Group("2+2=", ("4", "5", "4", "22"))


class Fixed:
    """A reader that answers by a function of the question and remembers what it was asked."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def probabilities(self, questions, options):
        self.asked += questions
        return [self.answer(q, options) for q in questions]

    def close(self):
        pass


# --- asking -----------------------------------------------------------------------------------------------------------


def test_rating_is_the_expected_value():
    reader = Fixed(lambda q, options: [0.5, 0.0, 0.25, 0.25] if "|4|" in q else [1.0, 0.0, 0.0, 0.0])
    judge = Rating(reader, principles="Be right.", template="{principles} {prompt}|{completion}|", rating_max=3)
    assert judge.score([GROUP]) == [[(0.5 + 0.75) / 3, 0.0, (0.5 + 0.75) / 3, 0.0]]
    assert reader.asked == ["Be right. 2+2=|4|", "Be right. 2+2=|5|", "Be right. 2+2=|22|"]  # equal ones once


def test_a_question_without_an_answer_is_no_score():
    reader = Fixed(lambda q, options: None if "|5|" in q else [0.0, 1.0])
    judge = Rating(reader, principles="", template="{prompt}|{completion}|", rating_max=1)
    assert judge.score([GROUP]) == [[1.0, None, 1.0, 1.0]]
    judge = Comparing(Fixed(lambda q, options: None), principles="")
    assert judge.score([Group("p", ("a", "b"))]) == [[None, None]]


def test_comparing_in_both_orders_cancels_a_liking_for_the_first_place():
    judge = Comparing(Fixed(lambda q, options: [0.9, 0.1]), principles="", opponents=4)
    assert judge.score([GROUP]) == [[pytest.approx(0.5)] * 4]


def test_comparing_finds_the_order():
    def longer(question, options):
        first, second = question.split("|")[1:3]
        return [1.0, 0.0] if len(first) > len(second) else [0.0, 1.0] if len(first) < len(second) else [0.5, 0.5]

    judge = Comparing(Fixed(longer), principles="", template="{prompt}|{first}|{second}", opponents=8)
    assert judge.score([Group("p", ("aa", "a", "aaaa", "aaa"))]) == [[1 / 3, 0.0, 1.0, 2 / 3]]


@given(st.integers(1, 40), st.integers(1, 40))
def test_meeting_is_mutual_and_enough(size, opponents):
    for i in range(size):
        met = meets(i, size, opponents)
        assert i not in met and len(set(met)) == len(met) >= min(opponents, size - 1)
        assert len(met) <= opponents + 1
        assert all(i in meets(j, size, opponents) for j in met)


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=8), st.integers(1, 8), st.floats(0, 1))
def test_shares_of_wins_sum_to_half_of_the_meetings(completions, opponents, p):
    judge = Comparing(Fixed(lambda q, options: [p, 1 - p]), principles="", opponents=opponents)
    (shares,) = judge.score([Group("p", tuple(completions))])
    assert math.fsum(shares) == pytest.approx(len(completions) / 2)
    assert all(a != b for a, b in matches(completions, opponents))


def test_what_a_completion_says_is_never_a_slot():
    text = fill("{prompt} / {completion} / {other}", prompt="{completion}", completion="{prompt}")
    assert text == "{completion} / {prompt} / {other}"


# --- a model in this process ------------------------------------------------------------------------------------------


def test_local_odds_are_those_of_the_model(tiny):
    """Against a plain forward pass of each question alone: neither batching nor padding changes anything."""
    questions = ["3+4=7?", "a longer question: 12?", "x"]
    reader = LocalReader(tiny, batch_size=2)
    found = reader.probabilities(questions, ["0", "1", "2"])
    ids = [tiny.tokenizer.convert_tokens_to_ids(c) for c in "012"]
    for question, odds in zip(questions, found, strict=True):
        with torch.no_grad():
            logits = tiny.model(torch.tensor([tiny.tokenizer(question).input_ids])).logits[0, -1, ids]
        assert odds == pytest.approx(logits.softmax(-1).tolist(), abs=1e-5)


def test_local_refuses_options_that_are_no_token_and_skips_what_is_too_long(tiny):
    with pytest.raises(ShoalError, match="one token"):
        LocalReader(tiny).probabilities(["q"], ["10"])
    long = "x" * (tiny.model.config.max_position_embeddings + 1)
    assert LocalReader(tiny).probabilities([long, "q"], ["0", "1"])[0] is None


@pytest.mark.parametrize("mode", ["rate", "compare"])
def test_the_built_in_questions_fit_the_tiny_model(mode):
    backend = JudgeBackend(mode=mode)
    judge = build_judge(backend, "Be brief.", seed=0, rewards_file=None, cache_dir=None, device="cpu")
    (scores,) = judge.score([Group("2+2=", ("4", "five"))])
    assert all(s is not None and 0 <= s <= 1 for s in scores)


# --- a server ---------------------------------------------------------------------------------------------------------

SERVER = """
    import http.server, json, math, sys

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            question = body["messages"][0]["content"]
            assert self.path == "/v1/chat/completions" and body["model"] == "m"
            if "FAIL" in question:
                return self.send_error(500)
            if "REDIRECT" in question:
                self.send_response(302)
                self.send_header("Location", "http://127.0.0.1:1/")
                return self.end_headers()
            p = 0.75 if "good" in question else 0.25
            message = {"role": "assistant", "content": " 1" if p > 0.5 else " 0"}
            choice = {"index": 0, "message": message}
            if "PLAIN" not in question:
                tops = [{"token": "1", "logprob": math.log(p)}, {"token": " 0", "logprob": math.log(1 - p)},
                        {"token": "maybe", "logprob": -9.0}]
                choice["logprobs"] = {"content": [{"token": "\\\\n", "logprob": -0.1, "top_logprobs": []},
                                                  {"token": "1", "logprob": -0.1, "top_logprobs": tops}]}
            if "KEY" in question:
                message["content"] = "1" if self.headers["Authorization"] == "Bearer secret" else "0"
            reply = json.dumps({"choices": [choice]} if "SHAPE" not in question else {"odd": 1}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
"""


@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SERVER)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    process.kill()
    process.wait(10)
    process.stdout.close()


def test_a_server_gives_odds_or_an_answer(server):
    reader = ServerReader(server, "m", timeout_seconds=20)
    found = reader.probabilities(["good", "bad", "good PLAIN", "bad PLAIN", "FAIL", "SHAPE"], ["0", "1"])
    assert found[:4] == [pytest.approx([0.25, 0.75]), pytest.approx([0.75, 0.25]), [0.0, 1.0], [1.0, 0.0]]
    assert found[4:] == [None, None]
    with pytest.raises(RuntimeError, match="500"):
        reader.probabilities(["FAIL"], ["0", "1"])
    with pytest.raises(RuntimeError, match="302"):
        reader.probabilities(["REDIRECT"], ["0", "1"])
    reader.close()
    with pytest.raises(RuntimeError, match="refused"):
        ServerReader("http://127.0.0.1:1/v1", "m").probabilities(["q"], ["0", "1"])


def test_the_key_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    backend = JudgeBackend(
        kind="server",
        url=server,
        model="m",
        api_key_variable="MY_KEY",
        rating_max=1,
        template="KEY PLAIN {prompt} {completion}",
    )
    judge = build_judge(backend, "", seed=0, rewards_file=None, cache_dir=None, device="cpu")
    assert judge.score([Group("p", ("c",))]) == [[1.0]]
    judge.close()


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": [{"message": 3}]}, {"choices": "x"}, [], None])
def test_replies_of_another_shape(reply):
    with pytest.raises((LookupError, TypeError, AttributeError)):
        odds_in(reply, ["0", "1"])


def test_a_word_that_only_begins_like_an_option_is_none():
    reply = {"choices": [{"message": {"content": "About 12 of them, so 7."}}]}
    assert odds_in(reply, [str(n) for n in range(10)]) == [float(n == 7) for n in range(10)]
    assert odds_in({"choices": [{"message": {"content": None}}]}, ["0"]) is None


# --- a function, and the reward ---------------------------------------------------------------------------------------


def test_a_function_of_the_reward_file_judges(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def mine(prompts, completions, **kwargs):\n"
        "    return [None if c == 'none' else len(c) / 4 for c in completions]\n"
        "def broken(**kwargs):\n    raise ValueError('oops')\n"
    )

    def build(name):
        backend = JudgeBackend(kind="function", function=name)
        return build_judge(backend, "", seed=0, rewards_file=file, cache_dir=None, device="cpu")

    judge = build("mine")
    assert judge.score([Group("p", ("a", "aaaaaaaa")), Group("q", ("none",))]) == [[0.25, 1.0], [None]]
    judge.close()
    judge = build("broken")
    with pytest.raises(RuntimeError, match="oops"):
        judge.score([Group("p", ("a",))])
    judge.close()
    with pytest.raises(ShoalError, match="mine"):
        build("other")
    with pytest.raises(ShoalError, match="judges with"):
        build_judge(
            JudgeBackend(kind="function", function="f"), "", seed=0, rewards_file=None, cache_dir=None, device="cpu"
        )


class ByLength:
    def score(self, groups):
        return [[min(1.0, len(c) / 4) for c in g.completions] for g in groups]

    def close(self):
        pass


def batch(*rows):
    """rows: (example, completion)."""
    texts = [text for _, text in rows]
    return Batch(
        examples=[e for e, _ in rows],
        prompts=[[{"role": "user", "content": e.prompt}] for e, _ in rows],
        completions=[[{"role": "assistant", "content": t}] for t in texts],
        texts=texts,
        completion_ids=[[1]] * len(rows),
    )


ONE, TWO = Example(prompt="one", answer=""), Example(prompt="two", answer="")
BATCH = batch((ONE, "a"), (ONE, "aa"), (TWO, "aaa"), (TWO, "a"))


def test_completions_are_grouped_by_prompt():
    assert groups_of(BATCH) == [Group("one", ("a", "aa")), Group("two", ("aaa", "a"))]
    assert plain([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]) == "system: s\n\nuser: u"


def test_its_own_judge_and_what_it_prefers(tmp_path):
    path = tmp_path / "preferences.jsonl"
    reward = JudgeReward(JudgeConfig(), ByLength(), preferences=PreferenceLog(path))
    assert reward(BATCH) == [0.25, 0.5, 0.75, 0.25]
    assert [(p.prompt, p.chosen, p.rejected) for p in read_preferences(path)] == [
        ((("user", "one"),), "aa", "a"),
        ((("user", "two"),), "aaa", "a"),
    ]
    assert json.loads(path.read_text().splitlines()[0]) == {
        "prompt": [{"role": "user", "content": "one"}],
        "chosen": [{"role": "assistant", "content": "aa"}],
        "rejected": [{"role": "assistant", "content": "a"}],
        "margin": 0.25,
    }


def test_peers_first_and_the_fallback_without_them():
    config = JudgeConfig(ask="peers")
    reward = JudgeReward(config, ByLength())
    assert reward(BATCH) == [0.25, 0.5, 0.75, 0.25]  # no network yet
    assert reward.metrics == {"judge_fallback": 1.0}
    verdict = Verdict(scores=[[1.0, 0.0], [None, 0.5]], answered=3, asked=3, agreement=0.9)
    reward.use_peers(lambda groups: verdict if groups == groups_of(BATCH) else None)
    assert reward(BATCH) == [1.0, 0.0, None, 0.5]
    assert reward.metrics == {"judge_fallback": 0.0, "judges": 3.0, "judge_agreement": 0.9}
    reward = JudgeReward(JudgeConfig(ask="peers", fallback="none"), ByLength())
    reward.use_peers(lambda groups: None)
    assert reward(BATCH) == [None] * 4


def test_private_prompts_stay_here():
    assert JudgeReward(JudgeConfig(ask="peers"), ByLength(), private=True).asks_peers is False


def test_settings_that_cannot_work():
    for table in (
        {"kind": "server"},
        {"kind": "function"},
        {"template": "{prompt}"},
        {"mode": "compare", "template": "{prompt}{completion}"},
    ):
        with pytest.raises(ValidationError):
            JudgeBackend(**table)
    with pytest.raises(ValidationError, match="quorum"):
        JudgeConfig(peers=1)
    with pytest.raises(ValidationError, match="each node's own"):
        JudgeConfig(backend=JudgeBackend(kind="server", url="http://x/v1"))
