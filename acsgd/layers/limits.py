"""Options of a config with which a model cannot be trained in stages, and what to set instead."""

from __future__ import annotations

from transformers import PreTrainedConfig

from acsgd.layers.description import LayersError


def check_config(config: PreTrainedConfig) -> None:
    """Raise LayersError for an option that stages do not support, with the value to set."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            check_config(value)
        elif "layerdrop" in name and isinstance(value, float) and value > 0:
            raise LayersError(
                f'{name} is {value}, but stages cannot skip layers at random; set "{name}": 0.0 in config.json'
            )
        elif name == "output_router_logits" and value:
            raise LayersError(
                "output_router_logits is true, but the balancing loss of the routers needs all layers on one rank; "
                'set "output_router_logits": false in config.json to train without that loss'
            )
