"""The documentation shows what exists: its code runs, its commands parse, its links lead somewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from acsgd.codecs.base import Field, pack, unpack, wire_bytes

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced code blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page].read_text(), re.DOTALL | re.MULTILINE)


def test_the_example_of_a_codec_encodes_and_decodes() -> None:
    names: dict[str, Any] = {"dataclass": dataclass, "torch": torch, "Field": Field}
    exec(blocks("docs/howto/extend.md", "python")[0], names)
    codec, x = names["Sign"](), torch.tensor([[3.0, -1.0, 0.0], [2.0, -2.0, 4.0]])
    wire = codec.wire(x.shape)
    message = torch.empty(wire_bytes(wire), dtype=torch.uint8)
    pack(codec.encode(x), message)
    assert codec.decode(unpack(message, wire), x.shape, x.dtype).tolist() == [[2.0, -2.0, 0.0], [2.0, -2.0, 2.0]]


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text())
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]
