"""Loads the model that a run trains: `tiny`, a local folder, a .gguf file or a hub id; wraps it in LoRA if asked.

Only safetensors (or GGUF) weights are read and no code of a repository is ever run. `base_hash` names the base weights
so that peers can tell whether they start from the same model. Does not train and does not export (`export.py`).
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...protocol.errors import ExitCode, ShoalError
from .config import LoraConfig, ModelConfig
from .tiny import build_model, build_tokenizer, portable_uniform

Progress = Callable[[str, float], None]
"""Called with a stage ("reading weights", "hashing", ...) and the fraction done, 0 to 1."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ADAPTER = "default"  # PEFT's name for the only adapter


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready for training.

    Attributes:
        model: the causal LM; a `PeftModel` when LoRA is on. Parameters to train have `requires_grad`.
        tokenizer: pads on the left; its pad id is set (to eos where the model has none).
        base_hash: sha256 over names, shapes, types and bytes of the base weights before any training.
        kind: where it came from.
        device: where it lies.
        eos_ids: every token id that ends a completion.
    """

    model: Any
    tokenizer: Any
    base_hash: bytes
    kind: Literal["tiny", "folder", "gguf", "hub"]
    device: torch.device
    eos_ids: tuple[int, ...]

    @property
    def is_lora(self) -> bool:
        """Whether adapters are trained instead of the base."""
        return isinstance(self.model, PeftModel)

    @property
    def pad_id(self) -> int:
        """Token id put at padding; never used to tell padding from text."""
        return int(self.tokenizer.pad_token_id or 0)


def load_model(
    config: ModelConfig,
    *,
    seed: int,
    cache_dir: Path | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load, hash, wrap.

    Args:
        config: the run's model table.
        seed: run seed, behind the weights of `tiny` and LoRA's A.
        cache_dir: where a converted GGUF is kept; default a folder in the user's cache.
        device: "auto" or a torch device name.
        progress: see `Progress`.

    Raises:
        ShoalError: the model is missing, unreachable or unusable (exit code DEPENDENCY or CONFIG).
    """
    report = progress or (lambda stage, fraction: None)
    target = pick_device(device)
    report("reading weights", 0.0)
    kind, model, tokenizer = _read(config, seed, cache_dir or default_cache_dir(), report)
    model = model.to(DTYPES[config.dtype])
    report("hashing weights", 0.0)
    digest = base_hash(model, progress=report)
    if config.lora is None:
        model.requires_grad_(True)
    else:
        report("adding adapters", 0.0)
        model = add_lora(model, config.lora, seed=seed)
    model.to(target)
    model.eval()  # dropout off everywhere but in LoRA training, which asks for it
    _set_padding(tokenizer)
    report("model ready", 1.0)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        base_hash=digest,
        kind=kind,
        device=target,
        eos_ids=_eos_ids(model, tokenizer),
    )


def pick_device(name: str = "auto") -> torch.device:
    """CUDA (or ROCm, which torch also calls cuda), then Apple's MPS, then the CPU; or the one named.

    Raises:
        ShoalError: the named device is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ShoalError(
            f"The device {name!r} cannot be used.",
            values=f"asked for {name!r}; torch says: {str(error).splitlines()[0]}",
            todo='Set device = "auto", or "cpu".',
            code=ExitCode.CONFIG,
        ) from error
    return device


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/shoal`, or `~/.cache/shoal`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


def base_hash(model: nn.Module, *, progress: Progress | None = None) -> bytes:
    """sha256 over (name, shape, type, bytes) of all parameters in name order, before LoRA is added."""
    named = sorted(model.named_parameters())
    total = sum(p.numel() for _, p in named) or 1
    digest, done = hashlib.sha256(), 0
    for name, parameter in named:
        tensor = parameter.detach().cpu().contiguous()
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        digest.update(
            tensor.view(torch.uint8).numpy().data if tensor.dim() else bytes(tensor.view(1).view(torch.uint8))
        )
        done += tensor.numel()
        if progress:
            progress("hashing weights", done / total)
    return digest.digest()


def add_lora(model: Any, config: LoraConfig, *, seed: int, task_type: str | None = "CAUSAL_LM") -> PeftModel:
    """Wrap in PEFT LoRA: A from (seed, name), the same bits on every machine, B zero; with `freeze_a`, B alone trains.

    Raises:
        ShoalError: no module has one of the names in `target_modules`.
    """
    peft_config = PeftLoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        target_modules=config.target_modules,
        lora_dropout=config.dropout,
        task_type=task_type,  # type: ignore[arg-type]
    )
    try:
        with torch.random.fork_rng(devices=[]):  # PEFT draws an A that is replaced below
            wrapped = get_peft_model(model, peft_config, adapter_name=ADAPTER)
    except ValueError as error:
        raise ShoalError(
            "LoRA found nothing to adapt in this model.",
            values=f"target_modules = {config.target_modules!r}; PEFT says: {str(error).splitlines()[0]}",
            todo='Use target_modules = "all-linear", or names of this model\'s linear layers.',
            code=ExitCode.CONFIG,
        ) from error
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_A." in name:
                bound = 1 / math.sqrt(parameter.shape[1])  # as kaiming_uniform(a = sqrt 5), PEFT's own choice
                parameter.copy_(portable_uniform(tuple(parameter.shape), bound, seed, name))
                parameter.requires_grad_(not config.freeze_a)
            elif ".lora_B." in name:
                parameter.zero_()
    return wrapped  # type: ignore[return-value]


def _read(
    config: ModelConfig, seed: int, cache_dir: Path, report: Progress
) -> tuple[Literal["tiny", "folder", "gguf", "hub"], Any, Any]:
    name = config.name
    if name == "tiny":
        tokenizer = build_tokenizer()
        return "tiny", build_model(config.tiny, seed=seed, vocab_size=len(tokenizer)), tokenizer
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        folder = convert_gguf(path, cache_dir, report)
        return "gguf", *_from_pretrained(str(folder), config)
    if path.is_dir():
        return "folder", *_from_pretrained(str(path), config)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ShoalError(
            f"There is no model at {name!r}.",
            values=f'found nothing at {path}, expected "tiny", a model folder, a .gguf file or a hub id (owner/name)',
            todo="Correct model.name.",
            code=ExitCode.DEPENDENCY,
        )
    return "hub", *_from_pretrained(name, config)


def _from_pretrained(source: str, config: ModelConfig) -> tuple[Any, Any]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[config.dtype], trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ShoalError(
            f"The model {source!r} could not be loaded.",
            values=f"expected a causal language model with safetensors weights and a tokenizer; got: {first}",
            todo="Check the name, the network and HF_TOKEN, or download the model and give its folder.",
            code=ExitCode.DEPENDENCY,
        ) from error
    return model, tokenizer


def convert_gguf(path: Path, cache_dir: Path, report: Progress) -> Path:
    """Turn a .gguf file into a safetensors folder, once; later calls return the cached folder.

    The folder is named by the file's sha256 and appears whole or not at all.

    Raises:
        ShoalError: the file is missing, not a GGUF, or the `gguf` package is not installed.
    """
    if not path.is_file():
        raise ShoalError(
            f"There is no file {path}.",
            values=f"model.name = {str(path)!r}, expected an existing .gguf file",
            todo="Correct the path.",
            code=ExitCode.DEPENDENCY,
        )
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    folder = cache_dir / f"gguf-{digest.hexdigest()[:32]}"
    if (folder / "config.json").is_file():
        return folder
    report("converting gguf", 0.0)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        report("converting gguf", 0.3)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, NotImplementedError) as error:
        raise ShoalError(
            f"The GGUF file {path.name} could not be read.",
            values=f"expected a causal language model; got: {str(error).splitlines()[0] if str(error) else error!r}",
            todo="Install the `gguf` package, or use a file of an architecture that transformers can convert.",
            code=ExitCode.DEPENDENCY,
        ) from error
    report("converting gguf", 0.8)
    # The weights are plain now, and save_pretrained refuses a model that carries a quantizer's marks.
    for owner, mark in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, mark):
            delattr(owner, mark)
    cache_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="gguf-", dir=cache_dir))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.rename(folder)
    except OSError as error:
        if not (folder / "config.json").is_file():  # else another process was first
            raise ShoalError(
                "The converted model could not be written.",
                values=f"cache folder {cache_dir}: {error}",
                todo="Free some space, or choose another cache folder.",
                code=ExitCode.DISK,
            ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report("converting gguf", 1.0)
    return folder


def _set_padding(tokenizer: Any) -> None:
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    configured = getattr(model, "generation_config", None)
    ids = configured.eos_token_id if configured is not None else None
    found: set[int] = {ids} if isinstance(ids, int) else set(ids or ())
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    if not found:
        raise ShoalError(
            "The model has no end-of-sequence token.",
            values="found none in its tokenizer or generation config, expected at least one",
            todo="Set eos_token_id in the model's generation_config.json.",
            code=ExitCode.CONFIG,
        )
    return tuple(sorted(found))
