"""The daemon: a node on this machine. Signals, the control socket, discovery by LAN and DHT; the peer itself is node.py's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

from ..protocol.invite import Invite
from .config import Config
from .discovery import join_dht, join_lan
from .host import real_host
from .node import Node
from .observe.control import ControlServer
from .status import describe, describe_peers

SECOND_SIGNAL = 130
OPEN_FILES = 16_384


class Daemon:
    """One node from start to end."""

    def __init__(self, config: Config, invite: Invite | None, *, given_run: bool) -> None:
        """`given_run`: the configuration file has [run] tables, so they must agree with a run already on disk."""
        self.config = config
        self._signalled = False
        self.node = Node(
            config, invite, real_host(), given_run=given_run, on_open=self._serve_people, on_ready=self._look_around
        )

    async def run(self) -> int:
        """The exit code. Raises ShoalError for what a person must mend, KeyboardInterrupt when a signal came before there was
        anything to leave."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        code = await self.node.run()
        if self._signalled and not self.node.ready:
            raise KeyboardInterrupt
        return code

    def _on_signal(self) -> None:
        if self.node.leaving:
            os._exit(SECOND_SIGNAL)  # a second one exits now; everything that must survive is on disk already
        self._signalled = True
        self.node.leave()

    # ------------------------------------------------------------------------------------------------ people

    async def _serve_people(self, node: Node) -> None:
        control = ControlServer(node.data.control, self._methods(), lambda error: _say_failed(node, error))
        await control.start()
        node.closers.append(control.close)

    def _methods(self) -> dict[str, Any]:
        node = self.node

        async def status(params: dict[str, Any]) -> dict[str, Any]:
            return describe(node)

        async def peers(params: dict[str, Any]) -> dict[str, Any]:
            return {"peers": describe_peers(node)}

        async def invite(params: dict[str, Any]) -> dict[str, Any]:
            text = node.invite()
            node.run_.save_secrets()
            return {"invite": text}

        async def leave(params: dict[str, Any]) -> dict[str, Any]:
            node.leave()
            return {"leaving": True, "grace_seconds": self.config.node.leave_grace_seconds}

        async def start(params: dict[str, Any]) -> dict[str, Any]:
            node.started.set()
            return {"started": True}

        async def book(params: dict[str, Any]) -> dict[str, Any]:
            return await node.clock.run(node.book_law)

        return {"status": status, "peers": peers, "invite": invite, "leave": leave, "start": start, "book": book}

    # ------------------------------------------------------------------------------------------------ others

    async def _look_around(self, node: Node) -> None:
        if self.config.node.lan_discovery:
            await join_lan(node)
        if self.config.node.dht.enabled:
            await join_dht(node)


def _say_failed(node: Node, error: BaseException) -> None:
    """A question that cannot be answered is no reason to stop training."""
    node.say("a request on the control socket failed", level="error", cause=repr(error))


def _allow_open_files() -> None:
    """As many as the system allows, up to a bound: the usual 1024 are used up by as many strangers that only connect."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_daemon(config: Config, invite: str | None, *, given_run: bool = False) -> int:
    """Run a node until it ends; the exit code. Raises ShoalError for what a person must mend."""
    # An empty one (an unset variable in a script) is a mistake, not the wish to found a run.
    parsed = Invite.parse(invite) if invite is not None else None
    _allow_open_files()

    async def live() -> int:
        return await Daemon(config, parsed, given_run=given_run).run()

    return int(asyncio.run(live()))
