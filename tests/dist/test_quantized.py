"""Laws: QLoRA on stages is PEFT with the quantized model of bitsandbytes in one process; it resumes bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from lib.adapters import check_exports, initial_adapter
from lib.frozen import train_rank
from lib.ranks import on_ranks
from lib.resume import STEPS, checkpoint_of, losses_of, stopped_half_way, train_ranks
from lib.resume import make_config as make_saved_config
from lib.training import make_config, train_whole, whole_batches
from lib.views import ScriptedView, train_in_views
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

from acsgd.config.options import AdapterConfig, Config, ElasticConfig, EvalConfig
from acsgd.errors import RunError
from acsgd.launch import Launch
from acsgd.layers import quantize
from acsgd.layers.quantize import quantize_layers
from acsgd.run.plan.job import prepare
from acsgd.shards.manifest import Manifest

bitsandbytes = pytest.importorskip("bitsandbytes")
TinyModel = Callable[..., Path]
SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
"""Rows of 64 and 128 weights: the CPU kernels of bitsandbytes 0.50 restore others wrongly."""
BOUND = 1e-5


def quantized(config: Config, quantization: str) -> Config:
    model = dataclasses.replace(config.model, quantize=quantization)
    optim = dataclasses.replace(config.optim, lr=1e-2, steps=STEPS)
    return dataclasses.replace(config, model=model, optim=optim, adapter=AdapterConfig("lora:r=4,alpha=8"))


def oracle_losses(config: Config) -> list[float]:
    """Train PEFT's model on layers of bitsandbytes in one process, from the initial adapter of a run."""
    base = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32)
    for path, module in list(base.model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            sizes = module.in_features, module.out_features, False
            if config.model.quantize == "nf4":
                new = bitsandbytes.nn.Linear4bit(*sizes, quant_type="nf4", compress_statistics=False)
            else:
                new = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
            new.load_state_dict(module.state_dict())
            base.model.layers.set_submodule(path, new.to("cpu"))
    setattr(base, "is_loaded_in_4bit" if config.model.quantize == "nf4" else "is_loaded_in_8bit", True)
    described = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, described).train()
    names = dict(model.named_parameters())
    with torch.no_grad():
        for key, tensor in initial_adapter(config).items():
            names[f"base_model.model.{key}"].copy_(tensor)
    return train_whole(model, config.optim, whole_batches(config))


def test_qlora_on_stages_is_peft_on_the_quantized_model(tiny_model: TinyModel, tmp_path: Path) -> None:
    plain = make_config(tiny_model("llama", **SHAPE), tmp_path, stages=2, layers=(1, 1), micro=3)
    configs = [quantized(plain, name) for name in ("nf4", "int8")]
    by_rank = on_ranks(2, train_rank, tmp_path / "store", configs)
    assert all(outcome.moved == [] for outcomes in by_rank for outcome in outcomes)
    losses = [outcome.losses for outcome in by_rank[0]]
    for config, found in zip(configs, losses, strict=True):
        assert found == pytest.approx(oracle_losses(config), rel=BOUND), config.model.quantize
        assert found[-1] < found[0]
    assert losses[0] != pytest.approx(losses[1], rel=10 * BOUND)


@pytest.mark.parametrize(("quantization", "dtype"), [("nf4", "bf16"), ("int8", "fp32")])
def test_evaluations_change_nothing_and_a_checkpoint_resumes_bit_for_bit(
    quantization: str, dtype: Literal["fp32", "bf16"], tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model("llama", **SHAPE)
    whole = quantized(make_saved_config(model, tmp_path / "whole", dtype, "none"), quantization)
    evaluated = quantized(make_saved_config(model, tmp_path / "evaluated", dtype, "none"), quantization)
    evaluated = dataclasses.replace(evaluated, eval=EvalConfig(every=2))
    train_ranks(0, 1, tmp_path / "store", [whole, evaluated])
    assert losses_of(evaluated) == losses_of(whole)
    metrics = [(Path(config.log.dir) / "metrics.jsonl").read_text() for config in (whole, evaluated)]
    assert [text.count('"eval_loss"') for text in metrics] == [1, STEPS // 2]
    same = stopped_half_way(whole, tmp_path / "same")
    train_ranks(0, 1, tmp_path / "store-same", [same])
    assert losses_of(same) == losses_of(whole)
    assert Manifest.read(checkpoint_of(same)).layers == Manifest.read(checkpoint_of(whole)).layers
    check_exports(checkpoint_of(whole), model, tmp_path / "exports")  # which are on the base in full precision


def test_processes_that_join_quantize_the_base_on_their_own(tiny_model: TinyModel, tmp_path: Path) -> None:
    """With the adapter of another process, in the background, and with that of a snapshot."""
    config = quantized(make_config(tiny_model("llama", **SHAPE), tmp_path, micro=1), "nf4")
    config = dataclasses.replace(config, elastic=ElasticConfig(snapshot="2"))
    steps = config.optim.num_steps
    scripts = {
        "calm": [ScriptedView((0, 1), steps)],
        "joins": [ScriptedView((0, 1), 2), ScriptedView((0, 1, 2), steps)],
        "all others end": [ScriptedView((0,), 2), ScriptedView((0, 2), 5), ScriptedView((2,), steps)],
    }
    runs = on_ranks(3, train_in_views, tmp_path / "store", {name: (config, each) for name, each in scripts.items()})
    calm = runs[0]["calm"].losses
    assert len(calm) == steps
    for name in scripts:
        merged = {step: loss for process in runs for step, loss in process[name].losses.items()}
        assert merged == pytest.approx(calm, rel=BOUND), name
    assert runs[2]["joins"].joining[3], "it joins in the background"
    assert runs[2]["all others end"].origins == ["memory", "snapshot"]


def test_layers_that_stay_in_full_precision() -> None:
    """Modules trained as a whole, tied layers, the head, and what the model keeps in fp32, such as wo of T5."""
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=64, d_kv=32, d_ff=64, num_layers=2))
    blocks = [path for path, module in model.named_modules() if isinstance(module, T5Block)]
    first, second = (model.encoder.block[index].layer[0].SelfAttention for index in (0, 1))
    first.o.weight = second.o.weight
    quantize_layers(model, blocks, "nf4", ["k"])
    assert isinstance(first.q, bitsandbytes.nn.Linear4bit)
    assert all(type(each) is nn.Linear for each in (first.k, first.o, second.o, model.lm_head))
    assert all(type(each) is nn.Linear for path, each in model.named_modules() if path.endswith(".wo"))


def test_what_cannot_be_quantized_is_refused(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = quantized(make_config(tiny_model("llama", **SHAPE), tmp_path), "nf4")
    with pytest.raises(ValueError, match=r"model\.quantize=nf4: quantized weights cannot be trained; add an adapter"):
        prepare(dataclasses.replace(plain, adapter=AdapterConfig()), Launch())
    for spec in ("ia3", "lora:dora=true", "prompt_tuning:tokens=4"):
        with pytest.raises(ValueError, match=r"model\.quantize=nf4 is for lora without dora=true; use --adapter.spec"):
            prepare(dataclasses.replace(plain, adapter=AdapterConfig(spec)), Launch())
    with pytest.raises(ValueError, match=r"blocks of GPT2LMHeadModel have no torch.nn.Linear .* frozen and not tied"):
        prepare(quantized(make_config(tiny_model("gpt2", n_layer=2), tmp_path), "nf4"), Launch())
    dequantize = quantize.dequantize
    with monkeypatch.context() as patch:  # as kernels of CPUs with AVX512 do with narrow weights
        patch.setattr(quantize, "dequantize", lambda param: dequantize(param).roll(1))
        with pytest.raises(RunError, match=r"does not restore model.layers.0.self_attn.o?q?_?proj.*weight .* on cpu"):
            train_rank(0, 1, tmp_path / "store", [plain])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'needs bitsandbytes, which is not installed; pip install "acsgd\[8bit,adap'):
        prepare(plain, Launch())
