"""Writes kinds.jsonl: everyday nouns with what kind of thing each is, as `prompt` and `answer`.

python examples/smollm2/kinds.py
"""

from __future__ import annotations

import json
from pathlib import Path

NOUNS = {
    "animal": """ant bear bee bird camel cat cow crab deer dog dolphin donkey duck eagle elephant fish fox frog goat goose
        hamster hen horse lion lizard monkey mouse owl parrot penguin pig pigeon rabbit rat seal shark sheep snail snake
        spider squirrel swan tiger turtle whale wolf worm zebra""",
    "food": """apple bacon banana bean biscuit bread butter cabbage cake carrot cheese cherry chocolate cookie corn cream
        cucumber egg garlic grape ham honey jam lemon lettuce melon mushroom noodles nut olive onion orange pasta pea peach
        pear pepper pie pizza plum potato rice salad sausage soup spinach strawberry tomato""",
    "clothing": """apron belt blouse boot bra cap cape cardigan cloak coat dress glove gown hat helmet hoodie jacket jeans
        jersey kilt kimono mitten necktie overcoat pajamas pants poncho raincoat robe sandal scarf shawl shirt shoe shorts
        skirt slipper sneaker sock stocking suit sweater swimsuit tie trousers tunic underwear vest""",
    "tool": """anvil axe broom brush bucket chisel clamp compass crowbar cutter drill file fork grinder hammer hatchet hoe
        jack knife ladder lathe lever mallet mop needle pickaxe pitchfork plane pliers plow pump rake ruler sander saw
        scissors scraper screwdriver scythe shears shovel sickle spade spanner trowel vise wedge wrench""",
    "vehicle": """airplane ambulance balloon barge bicycle boat bulldozer bus cab canoe car carriage cart chariot coach
        ferry glider helicopter hovercraft jeep jet kayak limousine lorry minibus moped motorbike motorcycle rickshaw
        rocket rowboat sailboat scooter ship skateboard sled spaceship submarine tank taxi tractor trailer train tram
        truck van wagon yacht""",
}


def rows() -> list[dict[str, str]]:
    """One a noun."""
    return [{"prompt": noun, "answer": kind} for kind, nouns in NOUNS.items() for noun in nouns.split()]


if __name__ == "__main__":
    Path(__file__).with_name("kinds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
