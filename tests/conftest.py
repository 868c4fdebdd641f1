"""What every test shares: hypothesis profiles, one thread for torch, and no settings of the person who runs them."""

from __future__ import annotations

import os

import hypothesis
import pytest

# Before anything imports torch. Two test runs on one machine must not fight over its cores, and results stay the same
# bits whatever the core count.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test that wants the network is a mistake: fail at once instead of waiting for it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LONG = bool(os.environ.get("SHOAL_LONG"))

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.register_profile(
    "long",
    deadline=None,
    max_examples=10_000,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("long" if LONG else "default")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """SHOAL_NODE__… and SHOAL_RUN__… of the caller's shell would change what the tests see."""
    for name in list(os.environ):
        if name.startswith(("SHOAL_NODE__", "SHOAL_RUN__")):
            monkeypatch.delenv(name)
