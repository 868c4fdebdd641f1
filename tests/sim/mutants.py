"""One-line bugs, planted in the real code, and the seed whose schedule catches each.

    python -m tests.sim.mutants NAME SEED     runs one mutant on one seed; exit code 10: caught
    python -m tests.sim.mutants --hunt [NAME …] [--seeds 40]     looks for catching seeds

A mutant lives in its own process: the module that it changes is compiled from the changed source, nothing is written.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

import pytest

ROOT = Path(__file__).parents[2]
# The plugins of pytest would import what is to be changed.
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
CAUGHT = 10  # the exit code; an interpreter that fails has 1


@dataclass(frozen=True)
class Mutant:
    """`before` stands exactly once in the file and becomes `after`. `seed`: a schedule that catches it; or `test`: a file of
    tests that does."""

    name: str
    file: str
    before: str
    after: str
    seed: int = 0
    byzantine: str | None = None
    mode: str = "ring"
    test: str = ""


MUTANTS = [
    Mutant("own updates that were not adopted count as adopted", "node/swarm/local_work.py",
           "        self.book.record(dot, own)\n", "        self.book.record(dot, own)\n        self.book.adopt(dot)\n", 1),
    Mutant("a settled update forgets that it was adopted", "aggregation/book.py",
           "            if not own.branch:\n",
           "            if not own.branch:\n                self._put(self._adopted, own, -own.fixed)\n", 10),
    Mutant("an own update is not journaled", "node/store/journal.py",
           "            self._append(_UPDATE, _encode_update(update))\n", "", 2),
    Mutant("the journal is not synced", "node/store/journal.py",
           "record, self._end)\n            self._disk.sync(self._descriptor)\n", "record, self._end)\n", 2),
    Mutant("a checkpoint is not synced", "node/store/disk.py", "            disk.sync(descriptor)\n", "", 2),
    Mutant("the journal is not booked again after a restart", "node/saving.py",
           "rebook(node.book, node.journal.updates, self._decoded)", "rebook(node.book, [], self._decoded)", 2),
    Mutant("weights are not capped", "aggregation/merge.py",
           "    return {key: min(weight, bound) for key, weight in limited.items()}\n", "    return limited\n", 0),
    Mutant("an update is merged twice", "node/swarm/state.py",
           "            items.append((header.dot, sparse, weights[header.dot.peer]))\n",
           "            items += [(header.dot, sparse, weights[header.dot.peer])] * 2\n", 0),
    Mutant("a coordinate is truncated, not rounded", "aggregation/merge.py",
           "    return np.rint(scaled * UNIT).astype(np.int64)\n", "    return (scaled * UNIT).astype(np.int64)\n", 0),
    Mutant("a fork is healed without a word", "node/swarm/catch_up.py",
           "        self._conflict(\n            f\"CONC", "        str(\n            f\"CONC", 24),
    Mutant("the loser of a fork keeps its branch", "node/swarm/catch_up.py",
           "        elif resolution.winner is Winner.THEIRS and resolution.fork is not None:\n",
           "        elif resolution.winner is Winner.THEIRS and resolution.fork is None:\n", 24),
    Mutant("a lost branch's updates still count as adopted", "node/swarm/history.py",
           "                    book.unadopt(update.dot)\n", "", 24),
    Mutant("newcomers are never named joiners", "protocol/ballot_convener.py",
           "joiners=self._joiners(size)", "joiners=()", 64),
    Mutant("a token's proof is not checked", "protocol/admission.py",
           "        if not hmac.compare_digest(proof, self.prove(role, token_id, transcript)) or not proof:\n",
           "        if not proof:\n", 0, "stranger"),
    Mutant("the seq of a journaled update is forgotten", "node/store/journal.py",
           "self.last_head = update.dot.incarnation, update.dot.seq, update.head\n        elif",
           "self.last_head = update.dot.incarnation, update.dot.seq - 1, update.head\n        elif", 2),
    Mutant("a void update is not counted", "aggregation/merge.py",
           "    normalizer = sum(weight for _, _, weight in items)\n",
           "    normalizer = sum(weight for _, update, weight in items if update is not None)\n", 0, "nan"),
    Mutant("a commit means dots, whatever their hashes", "node/swarm/rounds.py",
           "                    return [self._store.load(h) for h in hashes]\n",
           "                    return [self._store.load(self._store._headers[u.dot].update_hash) for u in value.updates]\n",
           31, "equivocate"),
    Mutant("a roster's signature is not checked", "protocol/ballot_wire.py",
           'return _roster(_open(envelope.roster, wire_pb2.Roster(), peer, "roster", "convener", run_id), peer, run_id)',
           'return _roster(_parse(envelope.roster.body, wire_pb2.Roster(), "roster"), peer, run_id)', 43, "forge"),
    Mutant("a dense update is forgotten over a restart", "node/swarm/ballot_driver.py",
           "for update in self._journal.updates if update.dot == mine]",
           "for update in self._journal.updates if update.dot == mine and self._ballot.roster.attempt == 0]", 60021),
    Mutant("gossip: heads are not compared", "aggregation/gossip.py",
           "            if held.header.signed == header.signed or held.top[1] == head_of(header):\n",
           "            if True:\n", 31, "equivocate", "gossip"),
    Mutant("gossip: the log is compacted before everybody has it", "aggregation/stability.py",
           "        if not self._members <= self._view.holders or not", "        if not", 10, None, "gossip"),
    Mutant("gossip: what a proof disputes stays counted", "aggregation/gossip.py",
           "                    self._sum.subtract(*held)\n", "                    pass\n", 31, "equivocate", "gossip"),
    Mutant("gossip: an update that is repeated is new", "aggregation/gossip.py",
           "                return Verdict.DUPLICATE, None\n", "                return Verdict.NEW, None\n",
           31, "replay", "gossip"),
    Mutant("gossip: a repeated update is merged again", "aggregation/gossip.py",
           "            self._sum.add(*held)\n        self.total_weight += record.header.weight\n",
           "            self._sum.add(*held)\n            self._sum.add(*held)\n"
           "        self.total_weight += record.header.weight\n", 10, None, "gossip"),
    Mutant("gossip: floats are summed in the order of arrival", "aggregation/merge.py",
           "        self.total[indices] += fixed\n",
           "        self.total[indices] = (self.total[indices].astype(np.float32) + fixed).astype(np.int64)\n",
           10, None, "gossip"),
    # Short schedules hardly bring about what these need (a convener that dies between a majority's votes and the commit, a lost
    # disk under a clock that was set back, a proof that overtakes a frontier); the tests of the parts do.
    Mutant("a vote is not carried to the next attempt", "protocol/ballot_attempt.py",
           "        return binding((self._record.voted, self._record.voted_split))\n", "        return None\n",
           test="tests/protocol/test_ballot.py"),
    Mutant("a new life takes an incarnation that is not above the one known", "node/store/journal.py",
           "incarnation = max(int(now_wall), known + 1, self.incarnation + 1)",
           "incarnation = max(int(now_wall), self.incarnation + 1)", test="tests/node/store/test_journal.py"),
    Mutant("a member's word of an older incarnation is believed", "protocol/membership_events.py",
           "        return (self.incarnation, self.counter, self.state)\n",
           "        return (0, self.counter, self.state)\n", test="tests/protocol/test_membership.py"),
    Mutant("gossip: a proof takes back what is final", "aggregation/gossip.py",
           "        return max(limit, self._frontier.get(key, NOTHING)[0])\n", "        return limit\n",
           test="tests/aggregation/test_gossip.py"),
]  # fmt: skip
SIMULATED = [mutant for mutant in MUTANTS if not mutant.test]


class _Planting(importlib.abc.MetaPathFinder):
    """Compiles one module from changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._module = "shoal." + mutant.file.removesuffix(".py").replace("/", ".")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        file = ROOT / self._mutant.file
        return importlib.util.spec_from_file_location(
            fullname, file, loader=_Changed(fullname, str(file), self._mutant)
        )


class _Changed(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text()
        found = source.count(self._mutant.before)
        if found != 1:
            raise SystemExit(
                f"{self._mutant.name}: its line stands {found} times in {self._mutant.file}, expected once"
            )
        return compile(source.replace(self._mutant.before, self._mutant.after), self.path, "exec")


def plant(mutant: Mutant) -> None:
    """Before anything of shoal was imported."""
    assert not any(name.startswith("shoal.") for name in sys.modules)
    sys.meta_path.insert(0, _Planting(mutant))


def named(name: str) -> Mutant:
    return next(m for m in MUTANTS if m.name == name)


def run(mutant: Mutant, seed: int) -> str:
    """What the mutant breaks on a seed: a violation, an error of the run, or unequal ends; "" for nothing. Once in a process.

    Raises what its import does: that a module cannot be loaded proves nothing about the simulator.
    """
    importlib.import_module("shoal." + mutant.file.removesuffix(".py").replace("/", "."))
    if mutant.test:  # 1: tests failed; another code: they could not even be run
        return "a test failed" if pytest.main([*PYTEST, mutant.test]) == 1 else ""
    from shoal.sim.schedules import SETTLE_SECONDS, random_simulation

    sim = random_simulation(seed, byzantine=mutant.byzantine, mode=mutant.mode)
    sim.checkers.broken = _stop  # type: ignore[method-assign]
    try:
        report = sim.run(sim.fault_end_s, settle_s=SETTLE_SECONDS, must_settle=True)
    except Caught as caught:
        return f"invariant {caught}"
    except Exception:
        return traceback.format_exc(limit=-3)
    return "; ".join(error[-300:] for error in report.errors)


class Caught(Exception):
    """The first violation: the rest of the schedule cannot make it undone."""


def _stop(invariant: int, peer: str, text: str) -> None:
    raise Caught(f"{invariant}: {peer} {text}")


def caught_at(mutant: Mutant, seeds: range) -> int | None:
    """The first seed that catches it, each tried in a process of its own."""
    for seed in seeds:
        done = subprocess.run(
            [sys.executable, "-m", "tests.sim.mutants", mutant.name, str(seed)],
            cwd=ROOT, stdout=subprocess.DEVNULL, timeout=300, env=ENVIRONMENT,
        )  # fmt: skip
        if done.returncode == CAUGHT:
            return seed
        if done.returncode != 0:
            raise RuntimeError(f"{mutant.name}: exit code {done.returncode}")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--hunt", action="store_true")
    parser.add_argument("--seeds", type=int, default=40)
    options = parser.parse_args()
    if options.hunt:
        missed = 0
        for mutant in [named(n) for n in options.names] or SIMULATED:
            found = caught_at(mutant, range(options.seeds))
            missed += found is None
            print(f"{mutant.name}: {'MISSED' if found is None else f'seed {found}'}", flush=True)
        return 1 if missed else 0
    name, seed = options.names
    plant(named(name))
    said = run(named(name), int(seed))
    print(said)
    return CAUGHT if said else 0


if __name__ == "__main__":
    sys.exit(main())
