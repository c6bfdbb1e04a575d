"""Chats about the world of stories.py, from a small grammar, the data of docs/howto/chat-model.md. Public domain (CC0).

    python examples/chats.py 600 > chats.jsonl

Each chat has two questions. Who is who and what mends what can only be learned from the answers.
"""

from __future__ import annotations

import json
import random
import sys

if __package__:
    from examples.stories import HEROES, QUESTS
else:
    from stories import HEROES, QUESTS

KINDS = {name: kind for kind, names in HEROES.items() for name in names}
"""Kind of each hero."""


def turn(source: random.Random) -> tuple[str, str]:
    """Return a question and its answer."""
    name, kind, quest = source.choice(sorted(KINDS)), source.choice(sorted(HEROES)), source.choice(QUESTS)
    noun, its_kind = quest.thing.partition(" ")[2], KINDS[name]
    yes = "Yes" if kind == its_kind else "No"
    return source.choice(
        (
            (f"Who is {name}?", f"{name} is {article(its_kind)}."),
            (f"Is {name} {article(kind)}?", f"{yes}, {name} is {article(its_kind)}."),
            (f"What do I need {quest.purpose}?", f"You need {quest.thing} {quest.purpose}."),
            (f"My {noun} is of no use: {quest.trouble}.", f"Do not give up. A friend of mine {quest.remedy}."),
        )
    )


def article(noun: str) -> str:
    """Return a noun with its indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def chats(number: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Return the messages of a number of chats; equal seeds give equal chats."""
    source = random.Random(seed)
    return [
        [
            {"role": role, "content": text}
            for _ in range(2)
            for role, text in zip(("user", "assistant"), turn(source), strict=True)
        ]
        for _ in range(number)
    ]


if __name__ == "__main__":
    for messages in chats(int(sys.argv[1]) if sys.argv[1:] else 1):
        print(json.dumps({"messages": messages}))
