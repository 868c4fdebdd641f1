"""What every test shares: hypothesis profiles, one thread for torch, no settings of the person who runs them, and which
tests may run at once.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any

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


def scope_of(nodeid: str) -> str:
    """Tests of one scope run one after the other in one worker.

    All with real processes are one, since several swarms at once would starve each other on a small machine. Elsewhere a
    file is one, for what its tests share. Simulations share nothing and take longest.
    """
    file = PurePosixPath(nodeid.partition("::")[0])
    return {"e2e": "e2e", "sim": nodeid}.get(file.parent.name, str(file))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In the order of collection: the real processes early, so that their waiting overlaps with the rest."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)
