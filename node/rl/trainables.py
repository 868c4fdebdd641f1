"""The trainable parameters of a model as one flat fp32 vector, in a deterministic order.

16-bit parameters get fp32 masters: the optimizer works on the masters, the model sees their rounded copies, and small
steps are not lost. Does not choose what is trainable (`models.py`) nor step an optimizer (`learner.py`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ...aggregation.layout import Layout, TensorSpec


class Trainables:
    """Reads and writes every parameter with `requires_grad`, sorted by name.

    Attributes:
        layout: names and shapes of the flat vector.
        masters: fp32 tensors that the optimizer owns; a parameter that is fp32 already is its own master.
    """

    def __init__(self, model: nn.Module) -> None:
        named = sorted((n, p) for n, p in model.named_parameters() if p.requires_grad)
        if not named:
            raise ValueError("the model has no trainable parameter")
        self.names = [n for n, _ in named]
        self._parameters = [p for _, p in named]
        self.layout = Layout(tuple(TensorSpec(n, tuple(p.shape)) for n, p in named))
        self.masters: list[Tensor] = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self._parameters
        ]

    def read(self) -> np.ndarray:
        """A copy of the masters, fp32 [d]."""
        return torch.cat([m.detach().reshape(-1) for m in self.masters]).cpu().numpy().astype(np.float32, copy=True)

    @torch.no_grad()
    def write(self, theta: np.ndarray) -> None:
        """Set masters and model from theta, fp32 [d].

        Raises:
            ValueError: theta has another length.
        """
        if theta.shape != (self.layout.size,):
            raise ValueError(f"theta has shape {theta.shape}, the layout has {self.layout.size} parameters")
        flat = torch.from_numpy(np.array(theta, np.float32))  # a copy: of a read-only array torch would warn
        for master, part in zip(self.masters, flat.split([m.numel() for m in self.masters]), strict=True):
            master.copy_(part.view_as(master))
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the model, after an optimizer step."""
        for master, parameter in zip(self.masters, self._parameters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    def zero_grad(self) -> None:
        """Forget the gradients of model and masters."""
        for master, parameter in zip(self.masters, self._parameters, strict=True):
            master.grad = parameter.grad = None

    def collect_grads(self) -> Tensor:
        """Move the model's gradients to the masters in fp32; returns their L2 norm (NaN or Inf if any is)."""
        norms = []
        for master, parameter in zip(self.masters, self._parameters, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # a parameter without a path to the loss
            if master is not parameter:
                master.grad = parameter.grad.float()
                parameter.grad = None
            assert master.grad is not None
            norms.append(torch.linalg.vector_norm(master.grad))
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def scale_grads(self, factor: float) -> None:
        """Multiply the masters' gradients, for norm clipping."""
        for master in self.masters:
            if master.grad is not None:
                master.grad.mul_(factor)
