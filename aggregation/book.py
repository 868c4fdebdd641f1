"""The residual, derived and to the bit: `residual = learned - own dots in the adopted state - damped` (invariant 3).

Everything is int64 [d] in units of 2^-40, so that the law is an equality of integers. Nothing is subtracted when an update
is *sent*: only when the swarm *adopted* it. An update that was dropped, voided, or lost with a branch is therefore back in
the residual by itself.

The book keeps own updates by dot until they are settled; then they are forgotten, and the sum of what is adopted stays. What
was adopted after a *split* may still be lost with its branch, however many rounds later: it is folded into a sum of its own,
by branch, which can be given up as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ..protocol.version import Dot
from .compress import Sparse
from .merge import UNIT


@dataclass
class _Own:
    """One own update in 2^-40 units. `indices` None: dense."""

    indices: np.ndarray | None
    fixed: np.ndarray
    adopted: bool = False
    branch: bytes = b""  # the last split under which it was adopted
    damped: tuple[int, int] = (0, 1)  # the share of it that is booked as damped


def to_fixed(values: np.ndarray) -> np.ndarray:
    """rint(f64(value) * 2^40) as int64. Raises ValueError on a non-finite value or one of 2^22 and more."""
    wide = values.astype(np.float64)
    if not (np.abs(wide) < 2.0**22).all():
        raise ValueError("a value is not finite or too large to be booked")
    return np.rint(wide * UNIT).astype(np.int64)


def _share(fixed: np.ndarray, part: int, whole: int) -> np.ndarray:
    """Exactly floor(fixed * part / whole), in an order of operations that stays within int64. Raises ValueError."""
    if not 0 <= part <= whole or not 1 <= whole < 2**31:
        raise ValueError(f"cannot damp {part}/{whole} of an update")
    quotient, rest = np.divmod(fixed, whole)
    return quotient * part + rest * part // whole


# Splits whose branch can still be given up; an older one is taken for decided.
BRANCHES_MAX = 4


class Book:
    """What one peer has learned and what the swarm has of it. Not thread-safe; one user at a time.

    Memory: three int64 [d], one more for each of the last splits, and the own updates on record. What is adopted is kept as a
    sum, so that no question costs more with more of them.
    """

    def __init__(self, d: int) -> None:
        self.d = d
        self._learned = np.zeros(d, np.int64)
        self._adopted = np.zeros(d, np.int64)
        self._damped = np.zeros(d, np.int64)
        self._branches: dict[bytes, np.ndarray] = {}  # lineage before the split → settled mass adopted after it
        self._branch = b""
        self._own: dict[Dot, _Own] = {}

    # ------------------------------------------------------------------------------------------------ entries

    def learn(self, delta: np.ndarray) -> None:
        """Inner steps came to fp32 [d] `delta`. Raises ValueError (and books nothing) when it is not finite."""
        if delta.shape != (self.d,):
            raise ValueError(f"delta of shape {delta.shape}, the book has ({self.d},)")
        self._learned += to_fixed(delta)

    def record(self, dot: Dot, update: Sparse | np.ndarray) -> None:
        """An own update as decoded (or a dense fp32 [d]). Recording the same dot again changes nothing."""
        if dot in self._own:
            return
        if isinstance(update, Sparse):
            self._own[dot] = _Own(update.indices, to_fixed(update.values))
        else:
            self._own[dot] = _Own(None, to_fixed(update))

    def adopt(self, dot: Dot) -> None:
        """The state holds this own update. Twice counts once. Raises KeyError for a dot that is not on record.

        What was damped of it when it was lost before is damped no more: the state has all of it.
        """
        own = self._own[dot]
        if not own.adopted:
            if own.damped[0]:
                self.damp(dot, 0, 1)
            own.adopted, own.branch = True, self._branch
            self._put(self._adopted, own, own.fixed)

    def split(self, base: bytes) -> None:
        """What is adopted from now on stands on a split from lineage `base` (32 bytes) and may be lost with it."""
        self._branch = base

    def lose(self, base: bytes, part: int, whole: int) -> None:
        """The branch that split from `base` lost: its settled mass is owed again, but for part/whole that is damped."""
        mass = self._branches.pop(base, None)
        if mass is not None:
            self._damped += _share(mass, part, whole)
            self._adopted -= mass
        if self._branch == base:
            self._branch = b""

    def unadopt(self, dot: Dot) -> None:
        """The state that held it lost a conflict."""
        own = self._own[dot]
        if own.adopted:
            self._put(self._adopted, own, -own.fixed)
        own.adopted = False

    def narrow(self, dot: Dot, indices: np.ndarray) -> None:
        """Of this own update only the coordinates among int64 [k] `indices` can ever be adopted: what it holds elsewhere
        stays owed. Repeats change nothing. Raises KeyError."""
        own = self._own[dot]
        if own.indices is None:
            raise ValueError(f"{dot} is dense and counts whole")
        kept = np.isin(own.indices, indices)
        if not kept.all():
            if own.adopted:
                self._adopted[own.indices[~kept]] -= own.fixed[~kept]
            own.indices, own.fixed = own.indices[kept], own.fixed[kept]

    def damp(self, dot: Dot, part: int, whole: int) -> None:
        """Book part/whole of an update's mass (rounded down) as damped: it counts neither as adopted nor as owed.

        In place of the share of it that was damped before.
        """
        own = self._own[dot]
        mass = _share(own.fixed, part, whole) - _share(own.fixed, *own.damped)
        self._put(self._damped, own, mass)
        own.damped = (part, whole)

    def settle(self, dots: Iterable[Dot]) -> None:
        """Forget the updates: what was adopted of them is in the sum, and in its branch's."""
        for dot in list(dots):
            own = self._own.pop(dot, None)
            if own is None or not own.adopted:
                continue
            if not own.branch:
                continue
            if own.branch not in self._branches:
                self._branches[own.branch] = np.zeros(self.d, np.int64)
            self._put(self._branches[own.branch], own, own.fixed)
            while len(self._branches) > BRANCHES_MAX:
                self._branches.pop(next(iter(self._branches)))

    # ------------------------------------------------------------------------------------------------ readers

    def knows(self, dot: Dot) -> bool:
        return dot in self._own

    def adopted(self, dot: Dot) -> bool:
        return dot in self._own and self._own[dot].adopted

    def dots(self) -> list[Dot]:
        """Own updates on record, in order."""
        return sorted(self._own)

    def residual(self, but: Iterable[Dot] = ()) -> np.ndarray:
        """int64 [d]. `but`: own updates on record to be taken for adopted: their adoption is under way."""
        residual = self._learned - self._adopted - self._damped
        for dot in dict.fromkeys(but):
            if dot in self._own and not self._own[dot].adopted:
                self._put(residual, self._own[dot], -self._own[dot].fixed)
        return residual

    def residual_f64(self, but: Iterable[Dot] = ()) -> np.ndarray:
        """fp64 [d]; `but` as in `residual`."""
        return self.residual(but).astype(np.float64) / UNIT

    def parts(self) -> dict[str, np.ndarray]:
        """int64 [d] each: learned, adopted, damped. The law: residual = learned - adopted - damped."""
        return {"learned": self._learned.copy(), "adopted": self._adopted.copy(), "damped": self._damped.copy()}

    @staticmethod
    def _put(target: np.ndarray, own: _Own, mass: np.ndarray) -> None:
        if own.indices is None:
            target += mass
        else:
            target[own.indices] += mass

    # ------------------------------------------------------------------------------------------------ checkpoint

    def to_arrays(self) -> dict[str, np.ndarray | bytes]:
        """Everything, for a checkpoint."""
        arrays: dict[str, np.ndarray | bytes] = {
            "learned": self._learned.copy(),
            "adopted": self._adopted.copy(),
            "damped": self._damped.copy(),
        }
        index = []
        for number, (dot, own) in enumerate(sorted(self._own.items())):
            sparse = own.indices is not None
            index.append([dot.peer, dot.incarnation, dot.seq, own.adopted, sparse, own.branch.hex(), *own.damped])
            arrays[f"own/{number}/fixed"] = own.fixed
            if own.indices is not None:
                arrays[f"own/{number}/indices"] = own.indices
        arrays["index"] = json.dumps(index).encode()
        for base, mass in self._branches.items():
            arrays[f"branch/{base.hex()}"] = mass.copy()
        arrays["branches"] = json.dumps([self._branch.hex(), [base.hex() for base in self._branches]]).encode()
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray | bytes]) -> Book:
        """Inverse of `to_arrays`. Raises KeyError or ValueError when something is missing or misshapen."""
        book = cls(len(arrays["learned"]))
        for name in ("learned", "adopted", "damped"):
            array = np.array(arrays[name], np.int64)
            if array.shape != (book.d,):
                raise ValueError(f"{name} of shape {array.shape}, the book has ({book.d},)")
            setattr(book, f"_{name}", array)
        branch, bases = json.loads(bytes(arrays["branches"]))
        book._branch = bytes.fromhex(branch)
        for base in bases:
            mass = np.array(arrays[f"branch/{base}"], np.int64)
            if mass.shape != (book.d,):
                raise ValueError(f"a branch of shape {mass.shape}, the book has ({book.d},)")
            book._branches[bytes.fromhex(base)] = mass
        for number, row in enumerate(json.loads(bytes(arrays["index"]))):
            peer, incarnation, seq, adopted, sparse, of, part, whole = row
            indices = np.array(arrays[f"own/{number}/indices"], np.int64) if sparse else None
            fixed = np.array(arrays[f"own/{number}/fixed"], np.int64)
            if fixed.shape != (indices.shape if indices is not None else (book.d,)):
                raise ValueError(f"own update {number} has {fixed.shape} values")
            if indices is not None and indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < book.d:
                raise ValueError(f"own update {number} has an index outside {book.d} coordinates")
            _share(fixed, part, whole)  # refuses an impossible share
            book._own[Dot(peer, incarnation, seq)] = _Own(indices, fixed, adopted, bytes.fromhex(of), (part, whole))
        return book
