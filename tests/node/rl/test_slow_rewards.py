"""Rewards in a process of their own: math-verify, and programs under limits."""

import pytest

from shoal.node.rl.config import RewardsConfig, TaskConfig
from shoal.node.rl.rewards import Rewards
from shoal.node.rl.slow_rewards import code, program, run
from shoal.node.rl.tasks import Example, load_task

OK = "print(int(input()) + 1)"


@pytest.fixture(scope="module")
def task():
    return load_task(TaskConfig(eval_size=2), seed=0)


def score(rewards, rows):
    """rows: (completion, answer, columns)."""
    examples = [Example(prompt="p", answer=answer, columns=columns) for _, answer, columns in rows]
    texts = [text for text, _, _ in rows]
    return rewards.score(examples, ["p"] * len(rows), texts, texts, [[1]] * len(rows))


def test_math_in_its_process(task):
    pytest.importorskip("math_verify")
    rewards = Rewards(RewardsConfig(functions=["math"]), task)
    try:
        result = score(
            rewards,
            [
                ("so it is $\\frac{2}{4}$", "1/2", {}),
                ("The answer is \\boxed{0.5}", "$\\frac12$", {}),
                ("the answer is 7", "8", {}),
                ("no number", "8", {}),
            ],
        )
        assert not result.failures
        assert result.total == [1.0, 1.0, 0.0, 0.0]
    finally:
        rewards.close()


def test_code_in_its_process(task):
    rewards = Rewards(RewardsConfig(functions=["code"]), task)
    pairs = [{"input": "1\n", "output": "2"}, {"input": "4\n", "output": "6"}]
    try:
        result = score(
            rewards, [(OK, "", {"tests": pairs}), (f"Here:\n```python\n{OK}\n```\n", "", {"tests": pairs[:1]})]
        )
        assert result.total == [0.5, 1.0]
        assert score(rewards, [(OK, "", {})]).failures.keys() == {"code"}  # the data set has no such column
    finally:
        rewards.close()


def test_asserts_count_only_when_they_were_reached():
    double = "def double(x):\n    return 2 * x"
    tests = ["assert double(2) == 4", "assert double(3) == 7"]
    cases = [double, "import os\nos._exit(0)", "raise SystemExit(0)", "def double(x", "def double(x):\n    return 7"]
    assert code(cases, [tests] * len(cases)) == [0.5, 0.0, 0.0, 0.0, 0.5]
    assert code([double], [None]) == [None]


def test_the_last_block_is_the_program():
    assert program("```python\na\n```\nbetter:\n```\nb\n```") == "b\n"
    assert program("print(1)") == "print(1)"


def test_a_program_has_limits():
    assert run("print('hello')", seconds=20) == (0, "hello\n")
    status, _ = run("while True: pass", seconds=0.5)
    assert status != 0
    status, _ = run("x = bytearray(1 << 30); print(len(x))", seconds=20)
    assert status != 0
    status, output = run("while True: print('x' * 65536, flush=True)", seconds=20)
    assert status != 0 and len(output) <= 1 << 20
    status, _ = run("open('big', 'wb').truncate(1 << 24)", seconds=20)
    assert status != 0


def test_a_program_sees_neither_environment_nor_network(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "token")
    source = "import os; print('MY_SECRET' in os.environ)"
    assert run(source, seconds=20) == (0, "False\n")
    isolated = run("import os; print(os.getpid() < 10)", seconds=20)[1] == "True\n"  # a namespace of its own
    if not isolated:
        pytest.skip("this kernel gives no namespaces to an unprivileged user")
    source = "import socket; print([name for _, name in socket.if_nameindex()])"
    assert run(source, seconds=20) == (0, "['lo']\n")
