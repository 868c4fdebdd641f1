"""Writes what was learned in the form others load: a PEFT adapter folder, or an ordinary Hugging Face model folder.

Writes into a new folder beside the target and renames it, so that a full disk never leaves half an export.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from peft import PeftModel

from ...protocol.errors import ExitCode, ShoalError
from ..store.folders import free_folder
from .models import ADAPTER, LoadedModel


def export_adapter(loaded: LoadedModel, folder: Path, *, base: str | None = None) -> Path:
    """Write adapter_config.json and adapter_model.safetensors (LoRA), or the whole model (full fine-tuning).

    Args:
        base: the base model's name or folder, noted in the adapter's configuration for those who load it.

    Raises:
        ShoalError: the folder exists and is not empty, or cannot be written.
    """
    if not loaded.is_lora:
        return export_merged(loaded, folder)

    def write(target: Path) -> None:
        config = loaded.model.peft_config[ADAPTER]
        before = config.base_model_name_or_path
        if base is not None:
            config.base_model_name_or_path = base
        try:
            # Embeddings are not trained; "auto" would ask the hub for the base model's config, to compare vocabularies.
            loaded.model.save_pretrained(target, safe_serialization=True, save_embedding_layers=False)
        finally:
            config.base_model_name_or_path = before
        loaded.tokenizer.save_pretrained(target)

    return _whole(folder, write)


def export_merged(loaded: LoadedModel, folder: Path) -> Path:
    """Write the model with its adapters merged in, as an ordinary Hugging Face folder (safetensors and tokenizer).

    The model in memory is unchanged; needs memory for a second copy while it runs when LoRA is on.

    Raises:
        ShoalError: as `export_adapter`.
    """

    def write(target: Path) -> None:
        model = copy.deepcopy(loaded.model).merge_and_unload() if loaded.is_lora else loaded.model
        model.save_pretrained(target, safe_serialization=True)
        loaded.tokenizer.save_pretrained(target)

    return _whole(folder, write)


def load_adapter(loaded: LoadedModel, folder: Path) -> LoadedModel:
    """Put a PEFT adapter folder on a plain model.

    Raises:
        ShoalError: it is not an adapter folder, or does not fit this model.
    """
    if not (folder / "adapter_config.json").is_file() or not (folder / "adapter_model.safetensors").is_file():
        raise ShoalError(
            f"{folder} is not an adapter folder.",
            values=f"found {sorted(p.name for p in folder.glob('*'))[:6]}, expected adapter_config.json and "
            "adapter_model.safetensors",
            todo="Give a folder written by `shoal export` or by PEFT.",
            code=ExitCode.CONFIG,
        )
    try:
        model = PeftModel.from_pretrained(loaded.model, str(folder), adapter_name=ADAPTER)
    except (ValueError, RuntimeError, KeyError) as error:
        raise ShoalError(
            f"The adapter {folder} does not fit the base model.",
            values=str(error).splitlines()[0] if str(error) else repr(error),
            todo="Load it on the base model it was trained on.",
            code=ExitCode.MISMATCH,
        ) from error
    model.eval()
    return dataclasses.replace(loaded, model=model)


def _whole(folder: Path, write: Callable[[Path], None]) -> Path:
    free_folder(folder)
    scratch = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        write(scratch)
        if folder.exists():
            folder.rmdir()
        scratch.rename(folder)
        folder.chmod(0o755)  # mkdtemp made it private
    except OSError as error:
        raise ShoalError(
            f"The export to {folder} failed.",
            values=str(error),
            todo="Free some space, or choose another folder.",
            code=ExitCode.DISK,
        ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder
