"""Tasks: streams, shards, held-out parts, answer extraction, prompt forms, and what is said about broken files."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.rl.config import TaskConfig
from shoal.node.rl.prompts import PromptFormat, shorten
from shoal.node.rl.tasks import Cursor, extract_answer, load_task
from shoal.protocol.errors import ExitCode, ShoalError

SUMS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def test_held_out_questions_are_never_trained_on():
    task = load_task(TaskConfig(options=SUMS | {"max_terms": 2}, eval_size=64), seed=1)
    held_out = {e.prompt for e in task.held_out()}
    assert len(held_out) == 64
    assert held_out.isdisjoint(task.train(i).prompt for i in range(2000))


def test_a_stream_is_a_function_of_seed_and_index():
    one, two = (load_task(TaskConfig(options=SUMS), seed=5) for _ in range(2))
    assert [one.train(i).prompt for i in (0, 3000, 1)] == [two.train(i).prompt for i in (0, 3000, 1)]
    other = load_task(TaskConfig(options=SUMS), seed=6)
    assert [one.train(i).prompt for i in range(20)] != [other.train(i).prompt for i in range(20)]


def test_too_few_questions_is_an_error_with_advice():
    task = load_task(TaskConfig(options=SUMS | {"max_terms": 1, "min_terms": 1}, eval_size=200), seed=1)
    with pytest.raises(ShoalError, match="too few different questions"):
        for i in range(50):
            task.train(i)


@pytest.mark.parametrize("name", ["basic_arithmetic", "gsm_symbolic", "spell_backward", "countdown"])
def test_other_procedural_tasks_score_their_own_answers(name):
    task = load_task(TaskConfig(name=f"reasoning_gym:{name}", eval_size=4), seed=2)
    example = task.train(7)
    if name != "countdown":  # its answer column is the target's expression, scored alike
        assert task.score(example.answer, example) == 1.0
    assert task.score("no idea", example) < 0.5


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "reasoning_gym:chain_sun"}, ["chain_sun", "nearest known: chain_sum", "task.name"]),
        ({"options": {"max_term": 3}}, ["max_term", "task.options"]),
        ({"options": {"min_terms": 5, "max_terms": 2}}, ["max_terms", "task.options"]),
        ({"name": "nowhere:thing"}, ["nowhere:thing", "JSONL"]),
        ({"name": "missing.jsonl"}, ["missing.jsonl", "cannot be read"]),
    ],
)
def test_mistakes_in_the_task_table_name_both_values(config, words):
    with pytest.raises(ShoalError) as caught:
        load_task(TaskConfig(**config), seed=0)
    assert caught.value.code == ExitCode.CONFIG
    for word in words:
        assert word in str(caught.value)


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return TaskConfig(name=str(path), eval_size=3)


def test_jsonl_splits_by_prompt_and_keeps_columns(tmp_path):
    rows = [{"prompt": f"q{i % 10}", "answer": i % 10, "level": i} for i in range(40)]
    task = load_task(write(tmp_path / "d.jsonl", *rows), seed=1)
    held_out = {e.prompt for e in task.held_out()}
    epoch = [task.train(i) for i in range(28)]
    assert len(held_out) == 3
    assert held_out.isdisjoint(e.prompt for e in epoch)
    assert len({e.columns["level"] for e in epoch}) == 28
    assert [task.train(i).columns for i in range(28, 56)] != [e.columns for e in epoch]
    assert task.score("7.0", next(e for e in epoch + task.held_out() if e.answer == "7")) == 1.0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", ["line 2", "not json"]),
        ({"prompt": "x"}, ["line 2", "missing ['answer']"]),
        ({"question": "x", "answer": "1"}, ["line 2", "['answer', 'question']", "missing ['prompt']"]),
        ("[1, 2]", ["line 2", "list"]),
        ({"prompt": "", "answer": "1"}, ["line 2", "prompt"]),
        ({"prompt": "x", "answer": None}, ["line 2", "answer is None"]),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, words):
    with pytest.raises(ShoalError) as caught:
        load_task(write(tmp_path / "d.jsonl", {"prompt": "a", "answer": "1"}, line), seed=0)
    for word in words:
        assert word in str(caught.value)


def test_one_prompt_is_too_few(tmp_path):
    with pytest.raises(ShoalError, match="too few prompts"):
        load_task(write(tmp_path / "d.jsonl", {"prompt": "a", "answer": "1"}), seed=0)


@given(count=st.integers(1, 8), draws=st.integers(1, 50), data=st.data())
def test_shards_partition_the_stream(count, draws, data):
    held = data.draw(st.permutations(range(count)))
    cut = data.draw(st.integers(0, count))
    seen = []
    for shards in (tuple(held[:cut]), tuple(held[cut:])):
        if shards:
            cursor = Cursor()
            cursor.assign(shards, count)
            found = [cursor.next() for _ in range(draws)]
            assert {i % count for i in found} <= set(shards)
            seen += found
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(("shards", "count"), [((), 2), ((2,), 2), ((-1,), 2), ((0,), 0)])
def test_impossible_shards_are_refused(shards, count):
    with pytest.raises(ValueError, match="shards"):
        Cursor().assign(shards, count)


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        ("  12 ", "auto", "12"),
        ("so <answer>1</answer> no, <answer> 2\n</answer>", "auto", "2"),
        ("nothing", "tag", ""),
        ("3 + 4 is 1,007.5, I think", "number", "1007.5"),
        ("none", "number", ""),
        ("<answer>2</answer>", "whole", "<answer>2</answer>"),
    ],
)
def test_extraction(text, how, answer):
    assert extract_answer(text, how) == answer


def test_short_form():
    assert shorten("State the final answer to the following arithmetic problem: 3 + 4 - 11 =") == "3+4-11="
    assert shorten("spell this: hello world") == "hello world"
    assert shorten("::") == "::"


def test_chat_prompts_are_conversations():
    form = PromptFormat(kind="chat", template="Q: {prompt}", system_prompt="Be brief.")
    task = load_task(TaskConfig(options=SUMS), seed=0)
    message = form.message(task.train(0))
    assert [m["role"] for m in message] == ["system", "user"]
    assert message[1]["content"].startswith("Q: State the final")
    assert form.completion("7") == [{"role": "assistant", "content": "7"}]
