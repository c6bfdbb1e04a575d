"""A model divided into layers: equal to the whole model at every cut, and the check that users run finds a fault."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.model_types import CAUSAL, SHAPE, TYPES, small_config, task_of
from torch import nn
from transformers import AutoConfig, BertConfig, PreTrainedModel

from acsgd.failures.report import report_startup_error
from acsgd.launch import Launch
from acsgd.layers import compare as comparison
from acsgd.layers import verify as verification
from acsgd.layers.compare import ComparedStages, compare
from acsgd.layers.composed import ComposedModel, Context
from acsgd.layers.description import HIDDEN, LOGITS, LayersError, LayerSpec, ModelLayers, Origin, Replicated
from acsgd.layers.masks import PREFIXES, positions
from acsgd.layers.verify import (
    add_prefixes,
    fill_with_random,
    keeps_apart,
    looks_ahead_in_prefixes,
    make_batches,
    pack,
)
from acsgd.model_classes import MODEL_CLASSES

pytestmark = pytest.mark.usefixtures("own_caches")

Change = Callable[[ModelLayers], ModelLayers]


@functools.cache
def stages_of(model_type: str) -> ComparedStages:
    """Return a small model of a type, with weights, and its layers."""
    task, config = task_of(model_type), small_config(model_type)
    return ComparedStages(fill_with_random(task.build(config)), task.build(config), task.layers(config))


@pytest.mark.parametrize("model_type", TYPES)
def test_layers_equal_the_whole_model(model_type: str) -> None:
    """Every batch is compared layer by layer, the padded one at every cut into two stages, too."""
    stages = stages_of(model_type)
    count = len(stages.layers.layers)
    batches = make_batches(stages.whole, task_of(model_type).inputs)
    assert {"plain", "padded"} <= batches.keys()
    for name, batch in batches.items():
        cuts = [(0, cut) for cut in range(1, count)] if name == "padded" else []
        compare(stages, batch, [range(count), *cuts], name)


@pytest.mark.parametrize(
    ("model_type", "task"),
    [("gpt2", "lm"), ("llama", "classification"), ("bart", "seq2seq"), ("bart", "classification")],
)
def test_the_values_of_inputs_matter_to_the_layers_that_read_them_alone(model_type: str, task: str) -> None:
    """Ranks without such layers get other inputs, of zeros."""
    config = small_config(model_type)
    model, layers = fill_with_random(MODEL_CLASSES[task].build(config)).eval(), MODEL_CLASSES[task].layers(config)
    inputs = make_batches(model, MODEL_CLASSES[task].inputs)["padded" if task != "lm" else "plain"]
    others = {name: x.roll(1, dims=1) for name, x in inputs.items()}  # with as many ends of sequences
    composed, state = ComposedModel(model, layers), dict[str, torch.Tensor]()
    with torch.no_grad():
        context = composed.context(inputs, range(len(layers.layers)))
        for layer in layers.layers:
            out = composed.call(layer.index, state, inputs, context)
            without = composed.call(layer.index, state, others, context)
            is_same = all(torch.equal(out[name], without[name]) for name in out)
            assert is_same == (not layer.reads), layer.name
            state = out
    assert any(layer.reads for layer in layers.layers[1:]) == (task != "lm")


@pytest.mark.parametrize("model_type", ["bart", "t5"])
def test_a_classifier_that_looks_for_the_end_of_each_sequence_reads_the_tokens(model_type: str) -> None:
    task, config = MODEL_CLASSES["classification"], small_config(model_type, num_labels=3, decoder_start_token_id=0)
    layers = task.layers(config)
    assert "input_ids" in layers.layers[-1].reads
    assert task.verify(config, layers).batches == ("plain", "padded")


@pytest.mark.parametrize("model_type", sorted(CAUSAL.keys() - {"roformer"}))
def test_documents_in_one_sequence_are_kept_apart(model_type: str) -> None:
    """Documents have the logits that each has alone, and layers equal the whole model."""
    stages = stages_of(model_type)
    packed = pack(make_batches(stages.whole, task_of(model_type).inputs)["plain"])
    assert keeps_apart(stages, packed)
    compare(stages, packed, [range(len(stages.layers.layers))], "packed")


@pytest.mark.parametrize("model_type", sorted(CAUSAL))
def test_prefixes_have_attention_in_both_directions(model_type: str) -> None:
    """Layers equal the whole model. GPT-Neo masks later tokens itself, which is found."""
    stages = stages_of(model_type)
    prefixed = add_prefixes(make_batches(stages.whole, task_of(model_type).inputs)["plain"])
    assert looks_ahead_in_prefixes(stages, prefixed) == (model_type != "gpt_neo")
    compare(stages, prefixed, [range(len(stages.layers.layers))], "prefixed")


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gptj"])
def test_a_prefix_has_the_logits_of_transformers_with_its_mask(model_type: str) -> None:
    stages = stages_of(model_type)
    batch = add_prefixes(make_batches(stages.whole, task_of(model_type).inputs)["plain"])
    is_prefix = batch[PREFIXES] >= 0
    causal = torch.ones(is_prefix.shape[1], is_prefix.shape[1]).tril().bool()
    seen = causal | (is_prefix[:, :, None] & is_prefix[:, None])
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = stages.whole(input_ids=batch["input_ids"], attention_mask=mask[:, None], use_cache=False).logits
        torch.testing.assert_close(stages.run_whole(batch), expected)


def test_recurrent_blocks_do_not_keep_documents_apart() -> None:
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=3, state_size=8, vocab_size=96)
    task = MODEL_CLASSES["lm"]
    assert task.verify(config, task.layers(config)).batches == ("plain", "padded")


def test_positions_start_at_each_document() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1], [5, 2, 2, 5, 5]])
    assert positions(documents).tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 0, 1]]


@pytest.mark.parametrize("window", [4, 48])
def test_sequences_may_be_padded_to_whole_windows(window: int) -> None:
    """Boundaries have the shapes that layers return, for lengths below, between and of multiples of the window."""
    sizes = SHAPE | {"attention_window": [window] * 3, "vocab_size": 96}
    task, config = MODEL_CLASSES["classification"], AutoConfig.for_model("longformer", **sizes)
    layers = task.layers(config)
    composed = ComposedModel(fill_with_random(task.build(config)).eval(), layers)
    for length in (7, window, window + 2, 3 * window):
        inputs = {name: torch.ones(2, length, dtype=torch.long) for name in task.inputs}
        context = composed.context(inputs, range(len(layers.layers)))
        state: dict[str, torch.Tensor] = {}
        for cut in range(1, len(layers.layers)):
            state = composed.call(cut - 1, state, inputs, context)
            shapes = {
                name: shape.resolve({"batch": 2, "sequence": length}, torch.float32)[0]
                for name, shape in layers.boundary(cut).items()
            }
            assert {name: x.shape for name, x in state.items()} == shapes


def in_layer(index: int, change: Callable[[LayerSpec], dict[str, Any]]) -> Change:
    """Return what changes the fields of one layer of a description."""

    def changed(model: ModelLayers) -> ModelLayers:
        layers = list(model.layers)
        layers[index] = dataclasses.replace(layers[index], **change(layers[index]))
        return dataclasses.replace(model, layers=tuple(layers))

    return changed


def without_parameter(index: int, name: str) -> Change:
    def change(layer: LayerSpec) -> dict[str, Any]:
        assert name in layer.parameters
        return {"parameters": tuple(key for key in layer.parameters if key != name)}

    return in_layer(index, change)


def without_buffers(layer: LayerSpec) -> dict[str, Any]:
    assert layer.buffers
    return {"buffers": ()}


def without_input(name: str) -> Callable[[LayerSpec], dict[str, Any]]:
    def change(layer: LayerSpec) -> dict[str, Any]:
        assert name in layer.inputs
        return {"inputs": {key: shape for key, shape in layer.inputs.items() if key != name}}

    return change


def without_origin(name: str) -> Callable[[LayerSpec], dict[str, Any]]:
    def change(layer: LayerSpec) -> dict[str, Any]:
        assert name in layer.origins
        return {"origins": {key: origin for key, origin in layer.origins.items() if key != name}}

    return change


def replicated_as_zeros(layer: LayerSpec) -> dict[str, Any]:
    assert layer.replicated["position_bias"].kind == "relative_bias"
    return {"replicated": {"position_bias": Replicated("default")}}


def without_forward(layer: LayerSpec) -> dict[str, Any]:
    assert layer.runs_forward
    return {"origins": {HIDDEN: Origin("output")}}


FAULTS: dict[str, tuple[str, Change]] = {
    "a relative bias that is not replicated": ("t5", in_layer(2, replicated_as_zeros)),
    "a tie forgotten": ("gpt2", without_parameter(-1, "transformer.wte.weight")),
    "positions of no layer": ("gpt2", without_parameter(0, "transformer.wpe.weight")),
    "code between blocks forgotten": ("deberta-v2", in_layer(1, without_forward)),
    "a state that is not sent": (
        "bart",
        lambda model: in_layer(4, without_input("encoder_hidden_states"))(
            in_layer(3, without_origin("encoder_hidden_states"))(model)
        ),
    ),
    "a buffer that is not stored": ("deepseek_v3", in_layer(2, without_buffers)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_description_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, change = FAULTS[fault]
    task, config, layers = task_of(model_type), small_config(model_type), stages_of(model_type).layers
    derive = verification.derive
    monkeypatch.setattr(verification, "derive", lambda *args: change(derive(*args)))
    with pytest.raises(LayersError, match=r"differs from the whole model: the (output|gradient of \S+) for a plain"):
        task.verify(config, change(layers))


def test_a_mask_of_another_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2 alternates between sliding windows and full attention."""
    task, config = MODEL_CLASSES["lm"], small_config("gemma2")
    right = ComposedModel.context

    def shifted(self: ComposedModel, inputs: Any, layers: range) -> Context:
        calls = right(self, inputs, range(len(self.layers)))
        return {index: calls[(index + 1) % len(calls)] for index in calls}

    monkeypatch.setattr(ComposedModel, "context", shifted)
    with pytest.raises(LayersError, match="the output for a plain batch by"):
        task.verify(config, task.layers(config))


def test_a_missing_bias_is_found_among_stand_ins_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    task, config = MODEL_CLASSES["lm"], small_config("gpt2")
    layers = without_parameter(-1, "transformer.ln_f.bias")(stages_of("gpt2").layers)
    fill = comparison.fill_with_stand_ins

    def fill_with_zeros(model: PreTrainedModel, *args: Any) -> None:
        fill(model, *args)
        for name, param in model.named_parameters():
            if not param.requires_grad and param.device.type != "meta":
                path, _, leaf = name.rpartition(".")
                model.get_submodule(path)._parameters[leaf] = nn.Parameter(torch.zeros(param.shape))

    monkeypatch.setattr(comparison, "fill_with_stand_ins", fill_with_zeros)
    stages = ComparedStages(fill_with_random(task.build(config)), task.build(config), layers)
    batch = make_batches(stages.whole, task.inputs)["plain"]
    with pytest.raises(LayersError, match="the output for a batch by"):
        compare(stages, batch, [range(len(layers.layers))], "a batch")


def test_a_large_model_is_verified_with_few_blocks_of_every_kind() -> None:
    """Gemma 2 with 46 blocks, 27 billion parameters, and windows of 4096 tokens."""
    config = AutoConfig.for_model(
        "gemma2", hidden_size=4608, intermediate_size=36864, num_hidden_layers=46, num_attention_heads=32,
        num_key_value_heads=16, head_dim=128,
    )  # fmt: skip
    task = MODEL_CLASSES["lm"]
    bounds = (2**22, 2**23)
    result = verification.verify(
        task.build, config, task.inputs, task.layers(config), predicted=task.predicted, bounds=bounds
    )
    assert result.batches == ("plain", "padded", "packed", "prefixed")
    assert result.blocks == 3
    assert 2**20 < result.parameters < bounds[0]
    assert result.difference <= comparison.TOLERANCE


def test_a_model_for_short_sequences_is_verified_with_longer_ones() -> None:
    task, config = MODEL_CLASSES["lm"], small_config("gpt2", n_positions=16)
    assert task.verify(config, task.layers(config)).difference == 0


@pytest.mark.parametrize("longest", [8, 16, 32])
def test_the_layers_of_a_model_for_short_sequences_are_those_of_one_for_long_ones(longest: int) -> None:
    task, shape = MODEL_CLASSES["classification"], {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    short, long = (BertConfig(num_attention_heads=4, max_position_embeddings=each, **shape) for each in (longest, 64))
    assert task.layers(short) == task.layers(long)


def test_the_blocks_of_a_vision_tower_are_no_layers() -> None:
    """Text without images does not enter them."""
    text = SHAPE | {"head_dim": 8, "vocab_size": 96, "sliding_window": 8}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}
    )
    task = MODEL_CLASSES["lm"]
    layers = task.layers(config)
    assert [path.rpartition(".")[0] for path in layers.blocks] == ["model.language_model.layers"] * 3
    assert any("vision_tower" in name for name in layers.frozen)
    task.verify(config, layers)


def test_blocks_that_text_does_not_enter_are_no_layers() -> None:
    """Mllama has blocks for images among those for text."""
    text = SHAPE | {"num_hidden_layers": 4, "cross_attention_layers": [1], "vocab_size": 96, "pad_token_id": 0}
    config = AutoConfig.for_model("mllama", text_config=text)
    task = MODEL_CLASSES["lm"]
    layers = task.layers(config)
    assert layers.blocks == [f"model.layers.{index}" for index in (0, 2, 3)]
    assert {name for name in layers.frozen if name.startswith("model.layers.1.")}
    task.verify(config, layers)


def test_stored_buffers_outside_of_blocks_are_on_every_rank() -> None:
    """Blocks of ESM use rotary frequencies that are stored once."""
    sizes = {"vocab_size": 33, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "esm", num_hidden_layers=2, position_embedding_type="rotary", pad_token_id=1, mask_token_id=32, **sizes
    )
    task = MODEL_CLASSES["classification"]
    layers = task.layers(config)
    assert layers.layers[-1].buffers == ("esm.rotary_embeddings.inv_freq",)
    task.verify(config, layers)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "layer drop": ("opt", {"layerdrop": 0.1}, 'set "layerdrop": 0.0 in config.json'),
    "layer drop of a stack": ("bart", {"encoder_layerdrop": 0.1}, 'set "encoder_layerdrop": 0.0 in config.json'),
    "losses of routers": (
        "mixtral",
        {"output_router_logits": True},
        'set "output_router_logits": false in config.json',
    ),
    "time first": ("xlnet", {}, "hidden enters layer block-00000 with axis 1 for the sequences of a batch"),
    "data-dependent shapes": ("jetmoe", {}, "forward depends on the values of tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_stages_cannot_train_is_refused(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    model_type, options, message = REFUSED[case]
    config = small_config(model_type, **options) if model_type in TYPES else AutoConfig.for_model(model_type)
    task = task_of(model_type) if model_type in TYPES else MODEL_CLASSES["lm"]
    with pytest.raises(SystemExit), report_startup_error(Launch()):
        task.layers(config)
    printed = capsys.readouterr().err
    assert re.search(rf"\nerror: .*{re.escape(message)}.*\n\Z", printed)
    assert "bug" not in printed


def test_a_classifier_without_a_padding_token_is_refused() -> None:
    config = small_config("gpt2", pad_token_id=None)
    with pytest.raises(LayersError, match=r'padding token is defined; set "pad_token_id" in config\.json$'):
        MODEL_CLASSES["classification"].layers(config)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_an_encoder_learns_next_tokens_only_as_decoder(is_decoder: bool) -> None:
    config = AutoConfig.for_model(
        "bert", hidden_size=48, intermediate_size=48, num_hidden_layers=2, is_decoder=is_decoder
    )
    task = MODEL_CLASSES["lm"]
    if is_decoder:
        task.verify(config, task.layers(config))
    else:
        with pytest.raises(LayersError, match=re.escape('set "is_decoder": true in config.json')):
            task.verify(config, task.layers(config))


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "gemma2", "granite", "roformer"])
def test_the_head_makes_logits_of_the_hidden_states_that_enter_it(model_type: str) -> None:
    """With the soft cap of gemma2 and the scale of granite; also of some positions at a time."""
    model_class, config = task_of(model_type), small_config(model_type)
    model, layers = fill_with_random(model_class.build(config)).eval(), stages_of(model_type).layers
    composed, batch = ComposedModel(model, layers), make_batches(model, model_class.inputs)["plain"]
    last = len(layers.layers) - 1
    with torch.no_grad():
        context, state = composed.context(batch, range(last + 1)), dict[str, torch.Tensor]()
        for index in range(last):
            state = composed.call(index, state, batch, context)
        logits = composed.call(last, state, batch, context)[LOGITS]
        hidden, head = composed.call_to_head(state, batch)
        assert hidden.shape[-1] < logits.shape[-1]
        for _ in range(2):  # from the second call on, it may be the module alone
            assert torch.equal(head(hidden), logits)
        assert torch.allclose(torch.cat([head(hidden[:, :5]), head(hidden[:, 5:])], dim=1), logits, atol=1e-6)
