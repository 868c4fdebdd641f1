"""One-line bugs, planted in the real code, and the seed whose schedule catches each.

    python -m tests.sim.mutants NAME SEED [--byzantine KIND]     runs one mutant on one seed; exit code 1: caught
    python -m tests.sim.mutants --hunt [NAME …] [--seeds 40]     looks for catching seeds

A mutant lives in its own process: the module that it changes is compiled from the changed source, nothing is written.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """`before` stands exactly once in the file and becomes `after`. `seed`: a schedule that catches it."""

    name: str
    file: str
    before: str
    after: str
    seed: int
    byzantine: str | None = None
    mode: str = "ring"


MUTANTS = [
    Mutant("own updates that were not adopted count as adopted", "aggregation/book.py",
           "            if own.adopted:\n                self._put(residual",
           "            if True:\n                self._put(residual", 1),
    Mutant("a settled update forgets that it was adopted", "aggregation/book.py",
           "            if own is None or not own.adopted:\n", "            if own is None or own.adopted:\n", 3),
    Mutant("an own update is not journaled", "node/store/journal.py",
           "            self._append(_UPDATE, _encode_update(update))\n", "", 2),
    Mutant("the journal is not synced", "node/store/journal.py",
           "record, self._end)\n            self._disk.sync(self._descriptor)\n", "record, self._end)\n", 2),
    Mutant("a checkpoint is not synced", "node/store/disk.py", "            disk.sync(descriptor)\n", "", 2),
    Mutant("the journal is not booked again after a restart", "node/node.py",
           "rebook(self.book, self.journal.updates, self._decoded)", "rebook(self.book, [], self._decoded)", 2),
    Mutant("weights are not capped", "aggregation/merge.py",
           "    return {key: min(weight, bound) for key, weight in limited.items()}\n", "    return limited\n", 0),
    Mutant("an update is merged twice", "node/swarm/state.py",
           "            items.append((header.dot, sparse, weights[header.dot.peer]))\n",
           "            items += [(header.dot, sparse, weights[header.dot.peer])] * 2\n", 0),
    Mutant("a coordinate is truncated, not rounded", "aggregation/merge.py",
           "    return np.rint(scaled * UNIT).astype(np.int64)\n", "    return (scaled * UNIT).astype(np.int64)\n", 0),
    Mutant("a fork is healed without a word", "node/swarm/catch_up.py", "        self._conflict(\n", "        str(\n", 24),
    Mutant("the loser of a fork keeps its branch", "node/swarm/catch_up.py",
           "        elif resolution.winner is Winner.THEIRS and resolution.fork is not None:\n",
           "        elif resolution.winner is Winner.THEIRS and resolution.fork is None:\n", 24),
    Mutant("a lost branch's updates still count as adopted", "node/swarm/history.py",
           "                    book.unadopt(update.dot)\n", "", 24),
    Mutant("newcomers are never named joiners", "protocol/ballot_convener.py",
           "        return tuple(sorted(named)[:room])\n", "        return ()\n", 0),
    Mutant("a token's proof is not checked", "protocol/admission.py",
           "        if not hmac.compare_digest(proof, self.prove(role, token_id, transcript)) or not proof:\n",
           "        if not proof:\n", 0, "stranger"),
    Mutant("gossip: a repeated update is merged again", "aggregation/gossip.py",
           "            self._sum.add(*held)\n        self.total_weight += record.header.weight\n",
           "            self._sum.add(*held)\n            self._sum.add(*held)\n"
           "        self.total_weight += record.header.weight\n", 0, None, "gossip"),
    Mutant("gossip: floats are summed in the order of arrival", "aggregation/merge.py",
           "        self.total[indices] += fixed\n",
           "        self.total[indices] = (self.total[indices].astype(np.float32) + fixed).astype(np.int64)\n",
           0, None, "gossip"),
]  # fmt: skip


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
    """What the mutant breaks on a seed; "" for nothing. Call it once in a process."""
    from tests.sim.hunt import broken

    return broken(seed, mutant.byzantine, mutant.mode)


def caught_at(mutant: Mutant, seeds: range) -> int | None:
    """The first seed that catches it, each tried in a process of its own."""
    for seed in seeds:
        done = subprocess.run(
            [sys.executable, "-m", "tests.sim.mutants", mutant.name, str(seed)],
            cwd=ROOT, stdout=subprocess.DEVNULL, timeout=300,
        )  # fmt: skip
        if done.returncode == 1:
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
        for mutant in [named(n) for n in options.names] or MUTANTS:
            found = caught_at(mutant, range(options.seeds))
            missed += found is None
            print(f"{mutant.name}: {'MISSED' if found is None else f'seed {found}'}", flush=True)
        return 1 if missed else 0
    name, seed = options.names
    plant(named(name))
    said = run(named(name), int(seed))
    print(said)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
