"""Laws of pp.compress: training with a chosen codec is that with the same codec given; a resumed run has the choice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from lib.disturbed import Outcome, Plan, end_of, make_config, run_ranks
from lib.ranks import on_ranks

from acsgd.config.options import Config
from acsgd.pp.wire.probe import Probed
from acsgd.run.session import Session
from acsgd.run.step import link_codecs
from acsgd.run.step.codec_choice import Choice, Chooser, Measured
from acsgd.run.step.hooks import LoopState
from acsgd.run.step.link_codecs import LinkCodecs

STEPS, CHANGED, STOPPED = 9, 2, 4
"""Number of steps; those before the change, which follows the first measurement; those of a run that is resumed."""
EIGHT_BITS = "fixpoint:bits=8"


def run_with_choice(rank: int, world_size: int, store: Path, plans: Sequence[Plan]) -> list[Outcome]:
    """Run plans in which the decision is always the same: 8 bits, or a delta in both directions if there is one.

    Rows of the tied table are entropy-coded, or in 8 bits beside the deltas.

    The chosen codecs are in use before the first step, and links are measured while no rows of tied tables travel.
    """
    hooks, create, measure = list[LinkCodecs](), LinkCodecs.__init__, link_codecs.probe

    def choose(_: Chooser, measured: Measured, __: Choice) -> Choice:
        assert measured.rows is not None
        codec = min(3, measured.directions[0].usable[-1])
        assert len(measured.rows.ways) == 3
        return codec, codec, 1 + (codec == 3)

    def created(hook: LinkCodecs, session: Session, note: Any, state: LoopState) -> None:
        create(hook, session, note, state)
        assert tuple(session.pipeline.codecs.in_use) == (((2,), (2,), 1) if state.progress.codecs else ((0,), (0,), 0))
        hooks.append(hook)

    def probed(*args: Any) -> Probed:
        ahead = hooks[-1]._session.pipeline.ties._ahead
        assert ahead is not None
        assert all(rows.received == rows.started > 0 for rows in ahead[1]) == (rank == 0), "the first stage looks up"
        return measure(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chooser, "choose", choose)
        patch.setattr(LinkCodecs, "__init__", created)
        patch.setattr(link_codecs, "probe", probed)
        return run_ranks(rank, world_size, store, plans)


def test_a_chosen_codec_trains_as_a_given_one(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model("gpt2", n_layer=2, n_embd=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"word {number} of a short text, " for number in range(10)))

    def config(name: str, steps: int = STEPS, **pp: Any) -> Config:
        optim = {"steps": steps, "warmup": 0, "schedule": "constant"}
        plain = make_config(model, tmp_path / "runs" / name, stages=2, every="100", **optim)
        data = dataclasses.replace(plain.data, sources=str(text))
        return dataclasses.replace(plain, data=data, pp=dataclasses.replace(plain.pp, **pp))

    given = config("given", forward=EIGHT_BITS, backward=EIGHT_BITS, exact_steps=CHANGED)
    chosen = config("chosen", compress="auto:delta=false")
    stopped = config("resumed", STOPPED, compress="auto:delta=false")
    resumed = config("resumed", compress="auto:delta=false")
    cached = config("cached", 2 * STEPS, compress="auto")  # ten epochs; of fewer than eight, gradients are not cached
    plans = [Plan(each) for each in (given, chosen, stopped, resumed, cached)]
    outcomes = on_ranks(2, run_with_choice, tmp_path / "store", plans)
    assert [outcome.error for outcome in outcomes[0]] == [None] * len(plans)
    losses = [[line["loss"] for line in _lines(each) if "loss" in line] for each in (given, chosen, resumed)]
    assert losses[0] == losses[1] == losses[2]
    assert end_of(given).layers == end_of(chosen).layers == end_of(resumed).layers

    changes = [line for line in _lines(chosen) if line.get("event") == "codec"]
    assert [(line["after_step"], line["link"], line["of"], line["codec"]) for line in changes] == [
        (CHANGED, 0, "activations", EIGHT_BITS),
        (CHANGED, 0, "gradients", EIGHT_BITS),
        (CHANGED, None, "rows", "rows:entropy_coding=true"),
    ]
    assert len([line for line in _lines(resumed) if line.get("event") == "codec"]) == 3, "the choice was resumed"
    assert not [line for line in _lines(chosen) if line.get("event") == "links"]
    [unchanged] = [line for line in _lines(resumed) if line.get("event") == "links"]
    assert unchanged["after_step"] == STOPPED + 2
    assert (unchanged["link"], unchanged["mbit_per_s"] > 0) == (0, True)
    for direction in ("forward", "backward"):
        exact, *sent = [line[f"pp_{direction}_bytes"] for line in _lines(cached) if "loss" in line][CHANGED - 1 :]
        assert exact / 5 < sent[0] < exact / 3, "the first visit after the change travels in 8 bits"
        assert sent[-1] < sent[0], "a later one in fewer"
    rows = {
        each.log.dir: [line["tied_bytes"] for line in _lines(each) if "loss" in line][-1]
        for each in (given, chosen, cached)
    }
    exact, coded, rounded = rows.values()
    assert exact / 5 < rounded < exact / 2 < coded < exact


def _lines(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()]
