"""Short stories from a small grammar, the text of `make demo`. They are in the public domain (CC0).

    python examples/stories.py 3       (print three)

Every story has a hero with a wish, a trouble, a helper and an end that refers back to the wish, so that a model
which writes one that holds together has learned to look back.
"""

from __future__ import annotations

import random
import sys
from typing import NamedTuple

HEROES = {
    "fox": ("Rusk", "Vela", "Amber"),
    "hedgehog": ("Pim", "Thistle", "Otto"),
    "owl": ("Mira", "Hollis", "Sage"),
    "otter": ("Juno", "Brook", "Finn"),
    "mouse": ("Tilly", "Crumb", "Nib"),
    "badger": ("Bram", "Elda", "Moss"),
    "heron": ("Silas", "Wren", "Isla"),
    "bear": ("Odo", "Berta", "Hazel"),
}
TRAITS = ("small", "curious", "sleepy", "brave", "shy", "clever", "stubborn", "cheerful", "forgetful", "polite")
PLACES = (
    "under an old oak",
    "at the edge of the marsh",
    "behind the mill",
    "on a quiet island",
    "beside the river",
    "in the tall grass",
    "above the harbour",
    "at the foot of the hill",
)
TIMES = (
    "One morning",
    "One evening",
    "On a windy day",
    "On the first day of spring",
    "Late in autumn",
    "After the rain",
)
FEELINGS = ("happy", "proud", "warm", "glad", "quite content", "not tired at all")
ANSWERS = ("whispered", "laughed", "said", "answered", "called", "nodded and said")


class Quest(NamedTuple):
    """What a hero wishes for, and what belongs to it."""

    thing: str
    purpose: str
    trouble: str
    remedy: str
    ending: str


QUESTS = (
    Quest("a boat", "to see the sea", "it had a hole in it", "closed the hole with wax", "sailed"),
    Quest("a lantern", "to read at night", "it would not burn", "filled it with oil", "shone"),
    Quest("a kite", "to touch the clouds", "its string was too short", "tied two strings together", "flew"),
    Quest("a clock", "to be in time for supper", "it ran backwards", "turned one little wheel around", "ticked"),
    Quest("a bell", "to call every friend", "it made no sound", "took the moss out of it", "rang"),
    Quest("a ladder", "to pick the highest apple", "two steps were missing", "cut new steps from a branch", "held"),
    Quest("a garden", "to grow a giant pumpkin", "nothing came up", "carried water to it every day", "bloomed"),
    Quest("a violin", "to play at the summer feast", "it only squeaked", "put new strings on it", "sang"),
    Quest("a sledge", "to race down the snowy hill", "it was stuck in the mud", "pulled it out with a rope", "slid"),
    Quest(
        "a map", "to find the hidden lake", "half of it was missing", "drew the other half from memory", "led the way"
    ),
)
DISCOVERIES = (
    "{name} found it in a dusty shed",
    "A peddler sold it for three hazelnuts",
    "{name} built it from what the storm had left",
    "An old aunt had kept it in a chest",
    "It lay beside the road, and nobody wanted it",
)
SIGHS = (
    "{name} sat down on a stone and sighed.",
    "{name} tried again and again, until the moon came up.",
    '"Perhaps tomorrow," said {name}, and went to bed without supper.',
    "{name} wanted to throw it into the river.",
)
CLOSINGS = (
    "From that day on, {name} and {friend} were never seen apart.",
    "{name} thanked {friend} with a slice of honey cake.",
    '"Tomorrow we shall do it again," said {friend}.',
    "And if the wind is right, you can hear them laugh.",
    "{friend} fell asleep at once, but {name} lay awake and smiled.",
)


def story(random: random.Random) -> str:
    """Return a story of nine sentences."""
    (kind, names), (friend_kind, friend_names) = random.sample(sorted(HEROES.items()), 2)
    name, friend = random.choice(names), random.choice(friend_names)
    quest = random.choice(QUESTS)
    noun = quest.thing.partition(" ")[2]
    words = {"name": name, "friend": friend}
    trait, other_trait = random.sample(TRAITS, 2)
    offer = random.choice(("Let me help you", "I know what to do", "Do not give up", "Two can do more than one"))
    sentences = (
        f"{name} was a {trait} {kind} who lived {random.choice(PLACES)}.",
        f"More than anything, {name} wanted {quest.thing} {quest.purpose}.",
        f"{random.choice(TIMES)} the wish came true.",
        random.choice(DISCOVERIES).format(**words) + f". But alas, {quest.trouble}.",
        random.choice(SIGHS).format(**words),
        f"Then {friend} came by, a {other_trait} {friend_kind}.",
        f'"{offer}," {random.choice(ANSWERS)} {friend}, and {quest.remedy}.',
        f"At last the {noun} {quest.ending}, and {name} was {random.choice(FEELINGS)}.",
        random.choice(CLOSINGS).format(**words),
    )
    return " ".join(sentences)


def stories(number: int, seed: int = 0) -> list[str]:
    """Return a number of stories; equal seeds give equal stories."""
    source = random.Random(seed)
    return [story(source) for _ in range(number)]


if __name__ == "__main__":
    print("\n\n".join(stories(int(sys.argv[1]) if sys.argv[1:] else 1)))
