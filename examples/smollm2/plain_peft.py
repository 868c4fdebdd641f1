"""Scores an exported adapter with transformers and PEFT alone: shoal is asked for the held-out prompts and nothing else.

python examples/smollm2/plain_peft.py ADAPTER
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomllib
import torch
from model_path import model_path
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.node.rl.config import TaskConfig
from shoal.node.rl.tasks import load_task


def main() -> None:
    with (Path(__file__).parent / "run.toml").open("rb") as file:
        run = tomllib.load(file)["run"]
    task_config = TaskConfig.model_validate(run["task"])
    task = load_task(task_config, seed=run.get("seed", 0))
    gguf = model_path()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, padding_side="left")
    base = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, sys.argv[1]).eval()
    examples, correct = task.held_out(), 0
    for example in examples:
        messages = [
            {"role": "system", "content": task_config.system_prompt},
            {"role": "user", "content": example.prompt},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            out = model.generate(**ids, do_sample=False, max_new_tokens=run["grpo"]["max_completion_length"])
        completion = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        numbers = re.findall(r"-?\d+", completion)
        correct += bool(numbers) and int(numbers[-1]) == int(example.answer)
    print(f"{correct} of {len(examples)} right: {correct / len(examples):.2f}")


if __name__ == "__main__":
    main()
