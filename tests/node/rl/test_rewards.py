"""Rewards: built-ins, a user's file in its own process, missing and failing values."""

import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.node.rl.advantages import combined_advantages
from shoal.node.rl.builtin_rewards import soft_overlong
from shoal.node.rl.config import WEIGHT_MAX, RewardsConfig, TaskConfig
from shoal.node.rl.rewards import REWARD_MAX, Rewards
from shoal.node.rl.tasks import Example, load_task
from shoal.protocol.errors import ExitCode, ShoalError

FILE = """
    import time
    from json import dumps

    def length(prompts, completions, completion_ids, **kwargs):
        print("noise on stdout does not matter")
        return [float(len(ids)) for ids in completion_ids]

    async def level(prompts, completions, level, answer, **kwargs):
        return [l if a == "7" else None for l, a in zip(level, answer)]

    def conversational(prompts, completions, **kwargs):
        return [float(c[0]["role"] == "assistant" and p[-1]["role"] == "user") for p, c in zip(prompts, completions)]

    def as_trl_calls_it(prompts, completions, completion_ids, answer, log_metric=None, log_extra=None, **kwargs):
        log_metric("seen", len(completions))
        log_metric("seen", 2 * len(completions))
        log_metric("nothing", float("nan"))
        log_extra("answer", answer)
        return [float(kwargs["trainer_state"].global_step), float("nan")]

    class Counter:
        __name__ = "counter"

        def __call__(self, completion_ids, **kwargs):
            return [len(ids) for ids in completion_ids]

    counter = Counter()
    meeting = None

    async def first_to_meet(prompts, completions, **kwargs):
        return await _meet(1.0)

    async def second_to_meet(prompts, completions, **kwargs):
        return await _meet(2.0)

    async def _meet(value):  # each waits for the other: run one after the other, both would overrun
        import asyncio
        global meeting
        if meeting is None:
            meeting = asyncio.Event()
            await meeting.wait()
        else:
            meeting.set()
            meeting = None
        return [value, None]

    async def never(prompts, completions, **kwargs):
        import asyncio
        await asyncio.Event().wait()

    def leaves_a_child(prompts, completions, answer, **kwargs):
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(answer[0], "w").write(str(child.pid))
        time.sleep(600)

    def broken(prompts, completions, **kwargs):
        raise KeyError("oops")

    def short(prompts, completions, **kwargs):
        return [1.0]

    def slow(prompts, completions, **kwargs):
        while True:
            time.sleep(60)

    def forks(prompts, completions, answer, **kwargs):
        import os
        child = os.fork()  # both come back from here
        if child:
            os.waitpid(child, 0)
        return [float(answer[0]), float(child != 0)]

    def forks_and_reads(prompts, completions, answer, **kwargs):
        import os, sys
        if os.fork() == 0:
            while True:  # would take the next request, or answer in the place of the other
                os.write(int(sys.argv[3]), b'{"id": 1, "results": {}, "metrics": {}}\\n')
                if not os.read(int(sys.argv[2]), 1):
                    os._exit(0)
        return [float(answer[0]), 1.0]

    def forks_behind_pythons_back(prompts, completions, answer, **kwargs):
        import ctypes, os
        libc = ctypes.CDLL(None)
        child = libc.fork()  # without the hooks of os.fork
        if child:
            os.waitpid(child, 0)
        return [float(answer[0]), float(child != 0)]

    def answers_twice(prompts, completions, answer, **kwargs):
        import os, sys
        stale = b'{"id": 0, "results": {"answers_twice": {"values": [-1, -1]}}, "metrics": {}}\\n'
        os.write(int(sys.argv[3]), stale)
        return [float(answer[0]), 1.0]

    def speaks_nonsense(prompts, completions, **kwargs):
        import os, sys
        os.write(int(sys.argv[3]), b"nonsense\\n")
        return [1.0, 1.0]

    def reads_and_prints(prompts, completions, **kwargs):
        import sys
        print('{"id": 1, "results": {}, "metrics": {}}', flush=True)
        return [float(len(sys.stdin.read())), 1.0]

    def huge(prompts, completions, **kwargs):
        return [1e308, -1e308]

    def hides_a_child(prompts, completions, answer, **kwargs):
        import os
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                open(answer[0] + ".tmp", "w").write(str(os.getpid()))
                os.rename(answer[0] + ".tmp", answer[0])
                time.sleep(600)
            os._exit(0)
        os.wait()
        while not os.path.exists(answer[0]):
            time.sleep(0.01)
        if answer[-1] == "stay":
            time.sleep(600)
        return [1.0] * len(completions)

    def dies(prompts, completions, **kwargs):
        import os
        os._exit(3)
"""


@pytest.fixture(scope="module")
def task():
    return load_task(TaskConfig(eval_size=2), seed=0)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(textwrap.dedent(FILE))
    return path


def score(rewards, texts=("7", "8"), chat=False):
    examples = [
        Example(prompt="p", answer=a, columns={"level": i}, source={"answer": a}) for i, a in enumerate(["7", "9"])
    ]
    prompts = [[{"role": "user", "content": "p"}] if chat else "p"] * 2
    completions = [[{"role": "assistant", "content": t}] if chat else t for t in texts]
    return rewards.score(examples, prompts, completions, list(texts), [[5, 1], [6, 7, 1]])


def test_built_ins_and_weights(task):
    rewards = Rewards(RewardsConfig(functions=["task", "exact", "format"], weights=[1.0, 0.5, 0.25]), task)
    result = score(rewards, ("007", "<answer>9</answer>"))
    assert result.total == [1.0, 1.75]
    assert result.means == {"task": 1.0, "exact": 0.5, "format": 0.5}


def test_user_functions_get_columns_and_ids(task, file):
    rewards = Rewards(RewardsConfig(functions=["length", "level", "task"]), task, file)
    try:
        result = score(rewards)
        assert result.total == [2.0 + 0 + 1, 3.0 + 0]  # the second `level` does not apply
        assert result.means["level"] == 0.0
        assert not result.failures
    finally:
        rewards.close()


def test_conversational_completions(task, file):
    rewards = Rewards(RewardsConfig(functions=["conversational"]), task, file)
    try:
        assert score(rewards, chat=True).total == [1.0, 1.0]
    finally:
        rewards.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "oops"),
        ("short", "1 values for 2"),
        ("dies", "exit status 3"),
        ("speaks_nonsense", "sent no answer"),
        ("slow", "no answer"),
        ("never", "no answer"),
    ],
)
def test_a_failing_function_is_counted_and_named(task, file, name, reason):
    limit = 0.3 if name in ("slow", "never") else 30.0
    rewards = Rewards(RewardsConfig(functions=["task", name], timeout_seconds=limit), task, file)
    try:
        for n in (1, 2):
            result = score(rewards)
            assert result.total == [1.0, 0.0]
            assert reason in result.failures[name]
            assert rewards.failures == {"task": 0, name: n}
    finally:
        rewards.close()


def test_the_signature_is_trls(task, file):
    rewards = Rewards(RewardsConfig(functions=["as_trl_calls_it", "counter"]), task, file)
    try:
        rewards.global_step = 12
        result = score(rewards)
        assert not result.failures
        assert result.values == {"as_trl_calls_it": [12.0, None], "counter": [2.0, 3.0]}  # NaN is None, as in TRL
        assert result.metrics == {"seen": 3.0}
    finally:
        rewards.close()


def test_async_functions_run_together(task, file):
    rewards = Rewards(RewardsConfig(functions=["first_to_meet", "second_to_meet"], timeout_seconds=10), task, file)
    try:
        for _ in range(2):
            result = score(rewards)
            assert not result.failures
            assert result.total == [3.0, None]
    finally:
        rewards.close()


def test_what_a_function_started_ends_with_it(task, file, tmp_path):
    rewards = Rewards(RewardsConfig(functions=["leaves_a_child"], timeout_seconds=2), task, file)
    try:
        told = tmp_path / "pid"
        example = Example(prompt="p", answer=str(told))
        result = rewards.score([example], ["p"], ["c"], ["c"], [[1]])
        assert "no answer" in result.failures["leaves_a_child"]
        deadline = time.monotonic() + 20
        while _runs(int(told.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.02)  # poll interval of a bounded wait
    finally:
        rewards.close()


@pytest.mark.parametrize(
    "name", ["forks", "forks_and_reads", "forks_behind_pythons_back", "answers_twice", "reads_and_prints"]
)
def test_every_call_gets_its_own_answer(task, file, name):
    rewards = Rewards(RewardsConfig(functions=[name], timeout_seconds=20), task, file)
    try:
        for call in range(4):
            examples = [Example(prompt="p", answer=str(call))] * 2
            result = rewards.score(examples, ["p"] * 2, ["c"] * 2, ["c"] * 2, [[1]] * 2)
            assert not result.failures
            assert result.total == [0.0 if name == "reads_and_prints" else float(call), 1.0]
    finally:
        rewards.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a child subreaper")
@pytest.mark.parametrize("then", ["stay", "return", "die"])
def test_a_process_that_left_the_session_ends_too(task, file, tmp_path, then):
    told = tmp_path / "pid"
    functions = ["hides_a_child", "dies"] if then == "die" else ["hides_a_child"]
    limit = 3.0 if then == "stay" else 30.0
    rewards = Rewards(RewardsConfig(functions=functions, timeout_seconds=limit), task, file)
    try:
        examples = [Example(prompt="p", answer=a) for a in (str(told), then)]
        result = rewards.score(examples, ["p"] * 2, ["c"] * 2, ["c"] * 2, [[1]] * 2)
        assert ("no answer" in result.failures.get("hides_a_child", "")) == (then == "stay")
    finally:
        rewards.close()
    hidden = int(told.read_text())
    deadline = time.monotonic() + 20
    while _runs(hidden):
        assert time.monotonic() < deadline
        time.sleep(0.02)  # poll interval of a bounded wait


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_when_the_node_is_killed_its_rewards_end(tmp_path, file):
    told = tmp_path / "pid"
    program = f"""
from pathlib import Path
from shoal.node.rl.reward_process import RewardWorker
worker = RewardWorker(Path({str(file)!r}))
worker.start()
worker.call(["hides_a_child"], {{"prompts": [], "completions": [], "answer": [{str(told)!r}, "stay"]}}, timeout_seconds=600)
"""
    node = subprocess.Popen([sys.executable, "-c", program])
    try:
        deadline = time.monotonic() + 60
        while not told.exists():
            assert time.monotonic() < deadline and node.poll() is None
            time.sleep(0.02)  # poll interval of a bounded wait
    finally:
        node.kill()
        node.wait(10)
    while _runs(int(told.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)  # poll interval of a bounded wait


def test_calls_leave_no_descriptor_thread_or_process_behind(task, file):
    before = _held()
    rewards = Rewards(RewardsConfig(functions=["length", "dies", "never"], timeout_seconds=0.5), task, file)
    try:
        for _ in range(3):
            score(rewards)
    finally:
        rewards.close()
    assert _held() == before


def _held():
    return len(os.listdir("/dev/fd")), threading.active_count()


def test_huge_rewards_are_cut_and_counted(task, file):
    rewards = Rewards(RewardsConfig(functions=["huge", "task"], weights=[1e6, 1.0]), task, file)
    try:
        for n in (1, 2):
            result = score(rewards)
            assert result.values["huge"] == [REWARD_MAX, -REWARD_MAX]
            assert result.clipped == {"huge": 2}
            assert rewards.clipped == {"huge": 2 * n}
            assert not result.failures
            assert all(math.isfinite(total) for total in result.total)
    finally:
        rewards.close()


@given(
    st.lists(st.tuples(*[st.none() | st.floats(-REWARD_MAX, REWARD_MAX)] * 2), min_size=2, max_size=12),
    st.tuples(*[st.floats(-WEIGHT_MAX, WEIGHT_MAX)] * 2),
    st.sampled_from(["sum_then_normalize", "normalize_then_sum"]),
)
def test_what_is_cut_makes_finite_advantages(rows, weights, aggregation):
    columns = [list(column) for column in zip(*rows)]
    found = combined_advantages(columns, list(weights), [len(rows)], aggregation=aggregation)
    assert np.isfinite(found.values).all()
    assert np.abs(found.values).max() <= 2 * len(rows)  # a standardized value, or a sum of two
    assert math.isfinite(found.reward_std)


def test_weights_are_finite():
    for weight in (math.nan, math.inf, 2 * WEIGHT_MAX):
        with pytest.raises(ValidationError, match="weights"):
            RewardsConfig(functions=["task"], weights=[weight])


def _runs(pid):
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@given(st.integers(0, 400), st.integers(1, 200), st.integers(0, 200))
def test_soft_overlong_is_a_slope_between_two_levels(tokens, length_max, buffer):
    buffer = min(buffer, length_max)
    value = soft_overlong(tokens, length_max=length_max, buffer=buffer)
    assert -1.0 <= value <= 0.0
    assert value >= soft_overlong(tokens + 1, length_max=length_max, buffer=buffer)
    if tokens <= length_max - buffer:
        assert value == 0.0
    elif tokens >= length_max:
        assert value == -1.0
    else:  # linear in between
        assert value == pytest.approx((length_max - buffer - tokens) / buffer)


def test_built_ins_with_settings(task):
    config = RewardsConfig(
        functions=["regex", "overlong", "think_format"], pattern=r"\d+", overlong_length=3, overlong_buffer=2
    )
    result = score(Rewards(config, task, length_max=100), ("12", "<think>a\nb</think>12"))
    assert result.values == {"regex": [1.0, 0.0], "overlong": [-0.5, -1.0], "think_format": [0.0, 1.0]}
    assert score(Rewards(RewardsConfig(functions=["overlong"]), task, length_max=2)).total == [0.0, -1.0]


def test_settings_that_cannot_work():
    with pytest.raises(ValidationError, match="not a regular expression"):
        RewardsConfig(pattern="(")
    with pytest.raises(ValidationError, match="reward_model"):
        RewardsConfig(functions=["reward_model"])


def test_when_nothing_applies_the_total_is_none(task, file):
    rewards = Rewards(RewardsConfig(functions=["broken"]), task, file)
    try:
        assert score(rewards).total == [None, None]
    finally:
        rewards.close()


def test_unknown_function_names(task, file):
    with pytest.raises(ShoalError) as caught:
        Rewards(RewardsConfig(functions=["lenght"]), task, file)
    assert "lenght" in str(caught.value) and "length" in str(caught.value)
    with pytest.raises(ShoalError, match="no reward file") as caught:
        Rewards(RewardsConfig(functions=["length"]), task)
    assert caught.value.code == ExitCode.CONFIG


def test_a_file_that_cannot_be_imported(task, tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import does_not_exist_anywhere")
    with pytest.raises(ShoalError, match="does_not_exist_anywhere"):
        Rewards(RewardsConfig(functions=["f"]), task, bad)
    with pytest.raises(ShoalError, match="cannot be loaded"):
        Rewards(RewardsConfig(functions=["f"]), task, tmp_path / "none.py")
