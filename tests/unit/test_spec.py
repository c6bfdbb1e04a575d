"""Spec strings: parsing, round trips and error messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from acsgd.codecs import CODECS
from acsgd.config.spec import from_spec, to_spec
from acsgd.dp import MODES
from acsgd.pp.schedules.schedules import SCHEDULES


@dataclass(frozen=True)
class Plugin:
    RENAMED: ClassVar[dict[str, str]] = {"share": "fraction"}

    fraction: float = 0.5
    bits: int = 8
    signed: bool = True
    kind: Literal["max", "l2"] = "max"
    FREE_TEXT: ClassVar[str] = "text"
    text: str = ""

    def __post_init__(self) -> None:
        if self.bits > 8:
            raise ValueError(f"bits={self.bits} must be at most 8")


TABLE = {"plain": Plugin, "other": Plugin}


@pytest.mark.parametrize(
    ("spec", "plugin"),
    [
        ("plain", Plugin()),
        ("plain:fraction=0.25,bits=4", Plugin(fraction=0.25, bits=4)),
        ("plain:text=think, step by step, x=1,bits=4", Plugin(text="think, step by step, x=1", bits=4)),
        (" plain: signed=false , kind=l2 ", Plugin(signed=False, kind="l2")),
    ],
)
def test_round_trip(spec: str, plugin: Plugin) -> None:
    assert from_spec(spec, TABLE, key="k") == plugin
    assert from_spec(to_spec(plugin, TABLE), TABLE, key="k") == plugin


@pytest.mark.parametrize("table", [CODECS, MODES, SCHEDULES])
def test_every_plugin_has_defaults_and_round_trips(table: dict[str, type[Any]]) -> None:
    for name in table:
        plugin = from_spec(name, table, key="k")
        assert from_spec(to_spec(plugin, table), table, key="k") == plugin


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("plian", 'k="plian": unknown name "plian"; use "plain" or "other" (did you mean "plain"?)'),
        ("plain:bit=4", '"plain" has no option "bit"; it takes "fraction", "bits", "signed", "kind" or "text"'),
        ("plain:text=a,bitz=4", '"plain" has no option "bitz"'),
        ("plain8", 'unknown name "plain8"; use "plain" or "other"'),
        ("plain:share=0.5", 'k="plain:share=0.5": option "share" is now called "fraction"'),
        ("plain:bits", '"bits" has no value; write bits=VALUE'),
        ("plain:bits=x", 'bits="x" is not of type int'),
        ("plain:bits=4,bits=2", "bits is given twice"),
        ("plain:bits=9", "bits=9 must be at most 8"),
        ("plain:signed=yes", 'signed="yes" is neither true nor false'),
        ("plain:kind=min", 'kind="min" is not one of max, l2'),
    ],
)
def test_error_messages(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^k=") as error:
        from_spec(spec, TABLE, key="k")
    assert message in str(error.value)
