"""Writes kinds-preferences.jsonl: of each noun of kinds.jsonl the right kind, preferred to one wrong kind.

python examples/smollm2/preferences.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
PROMPT = "Is it an animal, food, clothing, a tool or a vehicle? One word.\nchair: furniture\n{prompt}:"  # of kinds.toml


def main() -> None:
    rows = [json.loads(line) for line in (HERE / "kinds.jsonl").read_text().splitlines()]
    kinds = sorted({row["answer"] for row in rows})
    rng = random.Random(0)
    pairs = [
        {
            "prompt": PROMPT.format(prompt=row["prompt"]),
            "chosen": " " + row["answer"],
            "rejected": " " + rng.choice([kind for kind in kinds if kind != row["answer"]]),
        }
        for row in rows
    ]
    (HERE / "kinds-preferences.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


if __name__ == "__main__":
    main()
