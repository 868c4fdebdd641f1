"""Stands between the node and a reward worker, so that whatever reward functions start ends with the worker.

Run as a script: `reward_guard.py NODE_PID FDS PROGRAM ARGUMENT...`. Starts the program with the file descriptors FDS (comma
separated), and ends it and everything that descends from it when the program ends, on SIGTERM, or when the node is gone.
On Linux it adopts orphans (PR_SET_CHILD_SUBREAPER), so a process cannot get away by `setsid` or by a second fork;
elsewhere it ends its process group. Imports nothing of shoal, so that it starts fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

NODE_SECONDS = 1.0  # how often to look whether the node still lives
KILL_ROUNDS_MAX = 200  # against a function that forks without end; 10 ms each
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Ended(BaseException):
    """Asked to end, or the node is gone."""


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, where the kernel can do that."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (AttributeError, OSError):
        pass


def descendants(root: int) -> list[int]:
    """Process ids of everything below `root` that still runs; empty where there is no /proc."""
    children: dict[int, list[tuple[int, str]]] = {}
    try:
        entries = os.listdir("/proc")
    except OSError:
        return []
    for entry in filter(str.isdigit, entries):
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # gone meanwhile
        children.setdefault(int(parent), []).append((int(entry), state.decode()))
    found, open_ = [], [root]
    while open_:
        for pid, state in children.get(open_.pop(), []):
            open_.append(pid)
            if state not in "ZX":
                found.append(pid)
    return found


def end_descendants() -> None:
    """Kill and reap until there are none: what a killed process leaves behind comes to this one."""
    for _ in range(KILL_ROUNDS_MAX):
        left = descendants(os.getpid())
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        reap()
        if not left:
            return
        time.sleep(0.01)


def reap() -> None:
    """Take the exit statuses of all children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def watch(node: int, descriptors: list[int], command: list[str]) -> int:
    """Run the command; returns its wait status, or -1 if it had to be ended."""
    me = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() == me:
            raise Ended
        os._exit(127)

    def look(*_: object) -> None:
        if os.getppid() != node:
            end()

    signal.signal(signal.SIGALRM, look)
    try:
        signal.signal(signal.SIGTERM, end)
        signal.setitimer(signal.ITIMER_REAL, NODE_SECONDS, NODE_SECONDS)
        program = os.fork()
        if program == 0:
            try:
                os.execv(command[0], command)  # timers are not inherited, handlers are forgotten
            finally:
                os._exit(127)
        for descriptor in descriptors:  # the node sees the end of the program by the end of its pipe
            os.close(descriptor)
        while True:
            pid, status = os.waitpid(-1, 0)  # whatever else ends here is an adopted orphan
            if pid == program:
                return status
    except Ended:
        return -1


def main() -> None:
    """Never returns. The exit status is the program's, 128 and its number if a signal ended it."""
    adopt_orphans()
    status = watch(int(sys.argv[1]), [int(fd) for fd in sys.argv[2].split(",")], sys.argv[3:])
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_descendants()
    code = 128 + signal.SIGTERM if status == -1 else os.waitstatus_to_exitcode(status)
    if not sys.platform.startswith("linux"):
        os.killpg(os.getpgid(0), signal.SIGKILL)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
