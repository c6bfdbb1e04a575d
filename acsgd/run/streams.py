"""What a run cannot do with streamed sources. Checked before any work."""

from __future__ import annotations

from collections.abc import Sequence

from acsgd.config.options import Config
from acsgd.io.sources.sources import WeightedSource
from acsgd.io.sources.streamed import PREFIX, Streamed
from acsgd.pp.wire.delta import Delta
from acsgd.run.plugins import Plugins


def check_streams(
    config: Config, sources: Sequence[WeightedSource], eval_sources: Sequence[WeightedSource], plugins: Plugins
) -> None:
    """Raise ValueError if an option needs all sequences of a source, and the source is streamed."""
    for source, _ in eval_sources:
        if isinstance(source, Streamed):
            raise ValueError(
                f"data.eval_sources: {source.name} cannot be streamed, since every evaluation reads the same "
                f"sequences; give {source.name.removeprefix(PREFIX)}, or a part of it in a file"
            )
    streamed = next((source.name for source, _ in sources if isinstance(source, Streamed)), None)
    if streamed is None:
        return
    data, optim = config.data, config.optim
    problems = {
        f"data.eval_fraction={data.eval_fraction:g} holds out the end": (data.eval_fraction > 0, "data.eval_sources"),
        "optim.epochs needs the length": (optim.epochs is not None, "optim.steps"),
        "data.weights=tokens needs the number of target tokens": (data.weights == "tokens", "data.weights=sequences"),
        f"pp.forward={config.pp.forward} keeps the activations of all sequences": (
            isinstance(plugins.forward, Delta),
            "another codec, such as fixpoint:bits=8",
        ),
        "model.dropout_mask=sample repeats the masks of all sequences": (
            config.model.dropout_mask == "sample",
            "model.dropout_mask=step",
        ),
    }
    for problem, (is_given, remedy) in problems.items():
        if is_given:
            raise ValueError(
                f"{problem} of {streamed}, whose length a run does not know; use {remedy}, or remove {PREFIX}"
            )
    if len(sources) > 1 and sources[0].weight is None:
        names = ",".join(f"{source.name}:{1 / len(sources):.2g}" for source, _ in sources)
        raise ValueError(
            f"data.sources has no weights, but the length of {streamed} is not known; write, for example, "
            f'data.sources="{names}"'
        )
