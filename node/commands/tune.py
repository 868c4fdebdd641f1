"""`shoal dpo` and `shoal reward-model`: training on preferences, on this machine. Options and defaults are TRL's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ...protocol.errors import ExitCode, ShoalError
from .options import data_dir_of, data_dir_option, json_option


def _shared(learning_rate: float, learns: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of both commands."""
    options = (
        click.option(
            "--preferences",
            required=True,
            type=click.Path(path_type=Path),
            help="JSONL with prompt, chosen and rejected, as node.preferences_file writes it.",
        ),
        click.option("--out", required=True, type=click.Path(path_type=Path), help="New folder to write."),
        click.option(
            "--model",
            default=None,
            help=f"What {learns}: tiny, folder, .gguf or hub id. [default: the newest state in the data directory]",
        ),
        data_dir_option,
        click.option("--learning-rate", default=learning_rate, show_default=True, type=click.FloatRange(0, 1, True)),
        click.option("--num-train-epochs", default=3, show_default=True, type=click.IntRange(1, 1000)),
        click.option("--max-steps", default=0, type=click.IntRange(0), help="Optimizer steps in place of epochs."),
        click.option(
            "--batch-size", default=8, show_default=True, type=click.IntRange(1, 4096), help="Pairs at a time."
        ),
        click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of order, split and tiny."),
        click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, mps."),
    )

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        function = json_option(function)
        for option in reversed(options):
            function = option(function)
        return function

    return add


@click.command()
@_shared(1e-6, "learns")
@click.option(
    "--loss-type",
    default="sigmoid",
    show_default=True,
    help="One of TRL's, such as ipo, robust; or several: sigmoid,sft.",
)
@click.option("--loss-weights", default=None, help="Of several losses, such as 0.8,0.2. [default: 1 each]")
@click.option("--beta", default=0.1, show_default=True, type=float, help="How strongly it is held to where it began.")
@click.option("--label-smoothing", default=0.0, show_default=True, type=float, help="For robust, exo_pair and aot.")
@click.option("--f-divergence-type", default="reverse_kl", show_default=True, help="One of TRL's, such as forward_kl.")
@click.option("--use-weighting", is_flag=True, help="Weigh pairs by how likely the policy is to write them (WPO).")
@click.option("--ld-alpha", default=None, type=float, help="Weight of what is longer than the other one (LD-DPO).")
@click.option("--max-length", default=1024, show_default=True, type=int, help="Tokens of prompt and completion.")
@click.option("--gradient-accumulation-steps", default=1, show_default=True, type=int)
@click.option(
    "--lora-r", default=0, type=click.IntRange(0, 1024), help="With --model: LoRA of this rank; 0 trains all."
)
@click.option("--lora-alpha", default=None, type=float, help="LoRA's scale. [default: twice the rank]")
def dpo(
    preferences: Path,
    out: Path,
    model: str | None,
    data_dir: Path | None,
    lora_r: int,
    lora_alpha: float | None,
    loss_type: str,
    loss_weights: str | None,
    seed: int,
    device: str,
    as_json: bool,
    **settings: Any,
) -> int:
    """Train a policy on preferences, without a reward model (DPO), on this machine.

    The reference is the model as it is at the start. Writes a PEFT adapter where LoRA is trained (`shoal eval --adapter`
    measures it), else a whole model, which a run may start from.

    \b
    Examples: shoal dpo --data-dir /data/shoal --preferences told.jsonl --out ./dpo
              shoal dpo --model ./base --lora-r 16 --learning-rate 1e-5 --preferences told.jsonl --out ./dpo
    """
    from pydantic import ValidationError

    from ..observe.progress import bar
    from ..rl.dpo import DpoConfig, train_dpo
    from ..rl.export import export_adapter
    from ..rl.preferences import read_preferences
    from ..store.folders import free_folder

    try:
        weights = None if loss_weights is None else loss_weights.split(",")
        config = DpoConfig.model_validate({**settings, "loss_type": loss_type.split(","), "loss_weights": weights})
    except ValidationError as error:
        raise click.UsageError("; ".join(e["msg"] for e in error.errors())) from None
    free_folder(out)  # before the minutes of work whose result it is to hold
    pairs = read_preferences(preferences)
    with _loaded(model, data_dir, lora_r, lora_alpha, seed, device) as (loaded, base), bar("training") as show:
        try:
            found = train_dpo(loaded, pairs, config, seed=seed, progress=lambda stage, share: show(share, 1.0, stage))
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        export_adapter(loaded, out, base=base)
    return _done({"folder": str(out), "kind": "adapter" if loaded.is_lora else "model", **found}, as_json)


@click.command("reward-model")
@_shared(1e-4, "it grows from")
@click.option(
    "--lora-r",
    default=0,
    type=click.IntRange(0, 1024),
    help="Train LoRA of this rank, merged at the end; 0 trains all.",
)
@click.option("--weight-decay", default=0.0, show_default=True, type=click.FloatRange(0, 1), help="AdamW's.")
def reward_model(
    preferences: Path,
    out: Path,
    model: str | None,
    data_dir: Path | None,
    seed: int,
    device: str,
    as_json: bool,
    learning_rate: float,
    num_train_epochs: int,
    max_steps: int,
    batch_size: int,
    lora_r: int,
    weight_decay: float,
) -> int:
    """Train a Bradley-Terry reward model on preferences, on this machine.

    Name its folder in [run.rewards] as reward_model, and "reward_model" among the functions.

    \b
    Example: shoal reward-model --model ./base --preferences told.jsonl --out ./reward-model
    """
    from ..observe.progress import bar
    from ..rl.config import LoraConfig
    from ..rl.preferences import read_preferences
    from ..rl.reward_model import RewardModel, train_reward_model
    from ..store.folders import free_folder

    free_folder(out)
    pairs = read_preferences(preferences)
    with _loaded(model, data_dir, 0, None, seed, device) as (loaded, _), bar("training") as show:
        lora = LoraConfig(r=lora_r, alpha=2.0 * lora_r) if lora_r else None
        made = RewardModel.on(loaded, lora=lora, seed=seed)
        found = train_reward_model(
            made,
            pairs,
            steps=max_steps or -(-num_train_epochs * len(pairs) // batch_size),
            learning_rate=learning_rate,
            batch_size=batch_size,
            weight_decay=weight_decay,
            seed=seed,
            progress=lambda stage, share: show(share, 1.0, stage),
        )
        made.save(out)
    return _done({"folder": str(out), "kind": "reward model", **found}, as_json)


def _loaded(
    model: str | None, data_dir: Path | None, lora_r: int, lora_alpha: float | None, seed: int, device: str
) -> Any:
    """A context with the model to train and the name of its base: the one named, or the newest state of the data directory."""
    from contextlib import contextmanager

    from ..observe.progress import bar
    from .artefacts import newest_policy

    @contextmanager
    def opened() -> Any:
        if model is None:
            if lora_r:
                raise ShoalError(
                    "The run says what is trained",
                    values=f"--lora-r {lora_r} without --model, expected none: the run's own adapters are trained",
                    todo="Leave --lora-r away, or name a --model.",
                    code=ExitCode.CONFIG,
                )
            with newest_policy(data_dir_of(data_dir)) as found:
                yield found
            return
        from ..rl.config import LoraConfig, ModelConfig
        from ..rl.models import load_model

        lora = LoraConfig(r=lora_r, alpha=lora_alpha or 2.0 * lora_r) if lora_r else None
        with bar("loading the model") as show:
            loaded = load_model(
                ModelConfig(name=model, lora=lora),
                seed=seed,
                cache_dir=Path("~/.cache/shoal").expanduser(),
                device=device,
                progress=lambda stage, share: show(share, 1.0, stage),
            )
        yield loaded, model

    return opened()


def _done(found: dict[str, Any], as_json: bool) -> int:
    click.echo(json.dumps(found) if as_json else "\n".join(f"{name:>26}  {value}" for name, value in found.items()))
    return ExitCode.OK
