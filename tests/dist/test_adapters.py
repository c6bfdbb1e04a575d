"""Law: adapters on stages x replicas are the same training as PEFT in one process."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.adapters import check_exports, initial_adapter
from lib.commands import acsgd
from lib.frozen import train_rank
from lib.ranks import on_ranks
from lib.resume import HALF, checkpoint_of, losses_of, stopped_half_way, train_ranks
from lib.resume import STEPS as SAVED_STEPS
from lib.resume import make_config as make_saved_config
from lib.saved import assert_describes_its_model
from lib.training import RELATIVE, make_config, train_whole, whole_batches
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from acsgd.adapters.export import merge, to_peft
from acsgd.adapters.inject import is_of_adapter
from acsgd.commands.generation.adapter import PEFTAdapter
from acsgd.commands.generation.model import load
from acsgd.config.options import AdapterConfig, Config, ReplicaConfig
from acsgd.errors import RunError
from acsgd.io.checkpoint.inspect import inspect
from acsgd.launch import Launch
from acsgd.model_classes import IGNORED
from acsgd.run.plan.job import prepare
from acsgd.run.setup.inputs import open_inputs
from acsgd.shards.convert import from_hf
from acsgd.shards.export import to_hf
from acsgd.shards.files import ADAPTER_WEIGHTS
from acsgd.shards.manifest import Manifest

TinyModel = Callable[..., Path]
STEPS = 6
CPU = torch.device("cpu")
SAVED_WHOLE = {"base_model.model.lm_head.modules_to_save.default.weight"}
BOUND = 1e-5
"""Relative difference of losses of the law."""
ALL_LINEAR = {"target_modules": "all-linear"}
SAME: dict[str, tuple[str, dict[str, object], dict[str, object], dict[str, object]]] = {
    "gpt2": ("gpt2", {"n_layer": 2}, {"spec": "lora:r=4,alpha=8"}, {"r": 4, **ALL_LINEAR}),
    "llama": (
        "llama",
        {"num_hidden_layers": 2},
        {"spec": "lora:r=4,alpha=8,rslora=true,targets=q_proj+down_proj,modules_to_save=lm_head"},
        {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    ),
    "qwen2": (
        "qwen2",
        {"num_hidden_layers": 2, "max_window_layers": 1},
        {"spec": "lora:r=4,alpha=8,dora=true"},
        {"r": 4, "use_dora": True, **ALL_LINEAR},
    ),
    "gpt2, ia3": ("gpt2", {"n_layer": 2}, {"spec": "ia3", "steps": 5}, {}),
    "llama, ia3": (
        "llama",
        {"num_hidden_layers": 2},
        {"spec": "ia3:targets=v_proj+up_proj,feedforward=up_proj", "steps": 5},
        {"target_modules": ["v_proj", "up_proj"], "feedforward_modules": ["up_proj"]},
    ),
}
"""Model, options of its config, spec of the adapter, and the options of PEFT's config that it stands for."""


TOKENS = 5
VIRTUAL = (f"prefix_tuning:tokens={TOKENS}", f"prompt_tuning:tokens={TOKENS},init=text,text=The statement")
"""Virtual tokens for the first two models of SAME."""


def with_adapter(config: Config, spec: str, mode: str = "allreduce", *, steps: int = STEPS) -> Config:
    optim = dataclasses.replace(config.optim, lr=1e-2, steps=steps)
    return dataclasses.replace(config, adapter=AdapterConfig(spec), dp=ReplicaConfig(mode), optim=optim)


def oracle_losses(config: Config, options: dict[str, object]) -> list[float]:
    """Train PEFT's model in one process, from the initial adapter of a run."""
    base = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32)
    is_lora = (config.adapter.spec or "").startswith("lora")
    described: PeftConfig = LoraConfig(lora_alpha=8, **options) if is_lora else IA3Config(**options)
    described.task_type = "CAUSAL_LM"
    model = get_peft_model(base, described).train()
    names = dict(model.named_parameters())
    adapter = initial_adapter(config)
    assert {f"base_model.model.{key}" for key in adapter} == {*filter(is_of_adapter, names)} - SAVED_WHOLE
    with torch.no_grad():
        for key, tensor in adapter.items():
            names[f"base_model.model.{key}"].copy_(tensor)
    return train_whole(model, config.optim, whole_batches(config))


class Prompted(torch.nn.Module):
    """PEFT's model with virtual tokens, called with placeholders for them as in the batches of a run."""

    def __init__(self, model: PeftModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, **options: object) -> Any:
        result = self.model(input_ids=input_ids[:, TOKENS:], **options)
        absent = input_ids.shape[1] - result.logits.shape[1]  # prefixes have no logits
        result.logits = torch.nn.functional.pad(result.logits, (0, 0, absent, 0))
        return result


def virtual_oracle_losses(config: Config) -> list[float]:
    """Train PEFT's model with virtual tokens in one process, from the initial ones of a run."""
    base = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32)
    is_prefix = (config.adapter.spec or "").startswith("prefix")
    kind: Any = PrefixTuningConfig if is_prefix else PromptTuningConfig
    model = get_peft_model(base, kind(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS)).train()
    (parameter,) = (param for param in model.parameters() if param.requires_grad)
    with torch.no_grad():
        parameter.copy_(torch.cat([*initial_adapter(config).values()], dim=1))
    batches = whole_batches(config)
    for batch in batches:
        assert batch.inputs is not None
        assert batch.labels is not None
        assert batch.inputs["input_ids"].shape == batch.labels.shape
        assert batch.labels.shape[-1] == config.data.sequence, "virtual tokens count towards data.sequence"
        assert bool((batch.labels[..., :TOKENS] == IGNORED).all())
        assert bool((batch.labels[..., TOKENS:] != IGNORED).all())
    return train_whole(Prompted(model), config.optim, batches)  # type: ignore[arg-type]  # called alike


def test_adapters_on_two_stages_are_peft_in_one_process(tiny_model: TinyModel, tmp_path: Path) -> None:
    """One of each kind: LoRA, with dropout, and virtual tokens."""
    family, shape, spec, options = SAME["llama"]
    plain = make_config(tiny_model(family, **shape), tmp_path, stages=2, layers=(1, 1), micro=3)
    lora = with_adapter(plain, str(spec["spec"]))
    dropout, virtual = with_adapter(plain, "lora:r=4,dropout=0.3", steps=3), with_adapter(plain, VIRTUAL[1], steps=5)
    configs = [lora, dropout, virtual]
    by_rank = on_ranks(2, train_rank, tmp_path / "store", configs)
    assert all(outcome.moved == [] and outcome.tied_bytes == 0 for outcomes in by_rank for outcome in outcomes)
    for config, *outcomes in zip(configs, *by_rank, strict=True):
        updated = set[str]().union(*(outcome.updated for outcome in outcomes))
        assert updated - {"lm_head.weight"} == initial_adapter(config).keys() - SAVED_WHOLE
    losses = [outcome.losses for outcome in by_rank[0]]
    assert losses[0] == pytest.approx(oracle_losses(lora, options), rel=BOUND)
    assert losses[0][-1] < losses[0][0]
    whole = dataclasses.replace(dropout, pp=dataclasses.replace(dropout.pp, stages=1, layers=None))
    (one,) = train_rank(0, 1, tmp_path / "store-whole", [whole])
    assert losses[1] == pytest.approx(one.losses, rel=RELATIVE)
    assert losses[2] == pytest.approx(virtual_oracle_losses(virtual), rel=BOUND)


@pytest.mark.soak
def test_adapters_on_stages_and_replicas_are_peft_in_one_process(tiny_model: TinyModel, tmp_path: Path) -> None:
    """All of SAME, also with lossy updates."""
    configs = [
        with_adapter(make_config(tiny_model(family, **shape), tmp_path, stages=2, layers=(1, 1), micro=3), **spec)
        for family, shape, spec, _ in SAME.values()
    ]
    dropout = with_adapter(configs[0], "lora:r=4,dropout=0.3", steps=3)
    compressed = with_adapter(configs[0], "lora:r=4", "cocktail_grad:topk=.25", steps=3)
    virtual = [with_adapter(config, spec, steps=5) for config, spec in zip(configs, VIRTUAL, strict=False)]
    by_rank = on_ranks(4, train_rank, tmp_path / "store", [dropout, compressed, *configs[:2]])
    alone = on_ranks(2, train_rank, tmp_path / "store-alone", [*configs[2:], *virtual])  # without a second replica

    every = [*by_rank, *alone]
    assert all(outcome.moved == [] and outcome.tied_bytes == 0 for outcomes in every for outcome in outcomes)
    trained = [*by_rank, *(outcomes[: -len(virtual)] for outcomes in alone)]
    assert all(outcome.updated for outcomes in trained for outcome in outcomes)
    compared = zip(configs, [*by_rank[0][2:], *trained[4]], SAME.values(), strict=True)
    for config, outcome, (*_, options) in compared:
        assert outcome.losses == pytest.approx(oracle_losses(config, options), rel=BOUND)
        if len(outcome.losses) == STEPS:
            assert outcome.losses[-1] < outcome.losses[0]
    for config, outcome, *others in zip(virtual, *(outcomes[-len(virtual) :] for outcomes in alone), strict=True):
        assert set().union(*(each.updated for each in (outcome, *others))) == initial_adapter(config).keys()
        assert outcome.losses == pytest.approx(virtual_oracle_losses(config), rel=BOUND)
        if "prompt" in str(config.adapter.spec):  # 5 steps with prefixes change the loss less than the batches do
            assert outcome.losses[-1] < outcome.losses[0]
    updated = set[str]().union(*(outcomes[2].updated for outcomes in by_rank))
    assert updated == initial_adapter(configs[0]).keys()

    # dropout of adapters depends on seed, step, micro-batch and layer alone
    whole = dataclasses.replace(dropout, pp=dataclasses.replace(dropout.pp, stages=1, layers=None))
    (one,) = train_rank(0, 1, tmp_path / "store-whole", [whole])
    assert by_rank[0][0].losses == pytest.approx(one.losses, rel=RELATIVE)
    assert one.losses != pytest.approx(by_rank[0][2].losses[:3], rel=10 * RELATIVE)


@pytest.mark.soak
def test_a_checkpoint_resumes_and_loads_in_peft(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    spec = "lora:r=4,dropout=0.1,dora=true,targets=q_proj+down_proj,modules_to_save=lm_head"
    whole = with_adapter(make_saved_config(model, tmp_path / "whole", "fp32", "none"), spec, steps=SAVED_STEPS)
    train_ranks(0, 1, tmp_path / "store", [whole])
    same = stopped_half_way(whole, tmp_path / "same")
    train_ranks(0, 1, tmp_path / "store-same", [same])
    split = stopped_half_way(whole, tmp_path / "split", stages=2)
    on_ranks(2, train_ranks, tmp_path / "store-split", [split])
    assert losses_of(split) == pytest.approx(losses_of(whole), rel=RELATIVE)
    checkpoint = checkpoint_of(whole)
    manifest = Manifest.read(checkpoint)
    assert losses_of(same) == losses_of(whole)
    assert manifest.layers == Manifest.read(checkpoint_of(same)).layers
    assert inspect(checkpoint)[0].errors == []
    for entry in manifest.constants.values():
        assert (checkpoint / entry.file).samefile(checkpoint_of(whole, HALF) / entry.file)
    with pytest.raises(ValueError, match="it trains other parameters"):
        open_inputs(prepare(with_adapter(whole, "lora:r=8", steps=SAVED_STEPS), Launch()))
    with pytest.raises(ValueError, match="acsgd convert merge"):
        to_hf(checkpoint, tmp_path / "refused")

    for name in ("peft", "shards", "hf"):
        (tmp_path / name).mkdir()
    to_peft(checkpoint, tmp_path / "peft")
    merge(checkpoint, tmp_path / "shards")
    to_hf(tmp_path / "shards", tmp_path / "hf")
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = load(str(checkpoint), dtype=None, device=torch.device("cpu")).model(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        assert not torch.allclose(plain(ids).logits, expected, atol=1e-3)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        assert torch.allclose(merged(ids).logits, expected, atol=1e-5)
        loaded = PeftModel.from_pretrained(plain, tmp_path / "peft").eval()
        assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)


def test_adapters_share_the_files_of_their_base_and_work_on_no_other(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    saved = [make_saved_config(model, tmp_path / name, "fp32", "none") for name in ("one", "two")]
    specs = ("lora:r=4,modules_to_save=lm_head", "ia3")
    one, two = (with_adapter(config, spec, steps=HALF) for config, spec in zip(saved, specs, strict=True))
    train_ranks(0, 1, tmp_path / "store", [one, two])
    checkpoints = [checkpoint_of(config, HALF) for config in (one, two)]
    for layer in ("embed", "block-00000", "block-00001"):
        first, second = (each / Manifest.read(each).constants[layer].file for each in checkpoints)
        assert first.samefile(second)

    other, peft = tmp_path / "other" / "model", tmp_path / "peft"
    shutil.copytree(model, other)
    rewrite(other / "model.safetensors", "model.layers.1.mlp.up_proj.weight")
    peft.mkdir()
    to_peft(checkpoints[0], peft)
    (tmp_path / "shards").mkdir()
    from_hf(model, tmp_path / "shards")
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = load(str(checkpoints[0]), dtype=None, device=CPU).model(ids).logits
        for base in (model, tmp_path / "shards"):
            both = load(str(base), dtype=None, device=CPU, adapter=PEFTAdapter.open(peft))
            assert torch.allclose(both.model(ids).logits, expected, atol=1e-5)
    prompt = ("--prompt", "The", "--max-new-tokens", 2)
    code, printed = acsgd("generate", model, "--adapter", peft, *prompt)
    assert code == 0
    assert f"with the LORA adapter {peft}" in printed
    with pytest.raises(ValueError, match=f"{peft} was trained on another base model, llama, than {other}"):
        load(str(other), dtype=None, device=CPU, adapter=PEFTAdapter.open(peft))
    with pytest.raises(ValueError, match="holds a model with an adapter already"):
        load(str(checkpoints[1]), dtype=None, device=CPU, adapter=PEFTAdapter.open(peft))

    check_exports(checkpoints[1], model, tmp_path / "ia3")

    resumed = dataclasses.replace(one, model=dataclasses.replace(one.model, name=str(other)))
    with pytest.raises(RunError, match=f"{checkpoints[0]} was trained on another base model, llama, than .*up_proj"):
        open_inputs(prepare(resumed, Launch()))


TEXT = "The statement of"


@pytest.mark.parametrize(
    ("family", "shape", "spec"),
    [
        ("gpt2", {"n_layer": 2}, f"prompt_tuning:tokens={TOKENS},init=text,text={TEXT}"),
        ("llama", {"num_hidden_layers": 2}, f"prefix_tuning:tokens={TOKENS}"),
    ],
)
def test_virtual_tokens_resume_generate_and_load_in_peft(
    tiny_model: TinyModel, tmp_path: Path, family: str, shape: dict[str, int], spec: str
) -> None:
    model, is_prefix = tiny_model(family, **shape), spec.startswith("prefix")
    whole = with_adapter(
        make_saved_config(model, tmp_path / "whole", "fp32", "none", "single"), spec, steps=SAVED_STEPS
    )
    train_ranks(0, 1, tmp_path / "store", [whole])
    same = stopped_half_way(whole, tmp_path / "same")
    train_ranks(0, 1, tmp_path / "store-same", [same])
    assert losses_of(same) == losses_of(whole)
    checkpoint, peft = checkpoint_of(whole), tmp_path / "peft"
    with pytest.raises(ValueError, match="it trains other parameters"):
        open_inputs(prepare(with_adapter(whole, "lora:r=8", steps=SAVED_STEPS), Launch()))
    assert inspect(checkpoint)[0].errors == []
    assert_describes_its_model(checkpoint)
    peft.mkdir()
    to_peft(checkpoint, peft)
    with pytest.raises(ValueError, match="virtual tokens are part of no weight"):
        merge(checkpoint, tmp_path / "merged")

    ids = torch.arange(24).view(2, 12)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if not is_prefix:
        tokens = AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"] * TOKENS
        table = plain.get_input_embeddings().weight
        assert torch.equal(*initial_adapter(whole).values(), table[tokens[:TOKENS]])
    with torch.no_grad():
        expected = PeftModel.from_pretrained(plain, peft).eval()(ids).logits
        assert expected.shape[1] == (0 if is_prefix else TOKENS) + ids.shape[1]
        assert torch.allclose(load(str(checkpoint), dtype=None, device=CPU).model(ids).logits, expected, atol=1e-5)
        both = load(str(model), dtype=None, device=CPU, adapter=PEFTAdapter.open(peft))
        assert torch.allclose(both.model(ids).logits, expected, atol=1e-5)
        other = with_other_virtual_tokens(peft)
        assert not torch.allclose(PeftModel.from_pretrained(plain, other)(ids).logits, expected, atol=1e-3)
    texts, weights = [], []
    for name, arguments in enumerate(([checkpoint], [model, "--adapter", peft], [checkpoint, "--offload", "disk"])):
        out = tmp_path / f"{name}.jsonl"
        (tmp_path / "in.jsonl").write_text('{"prompt": "The"}\n{"prompt": "The list of"}\n')
        files = ("--file", tmp_path / "in.jsonl", "--out", out, "--max-new-tokens", 3)
        assert acsgd("generate", *arguments, *files)[0] == 0
        texts.append(out.read_text())
        weights.append(json.loads(Path(f"{out}.options.json").read_text())["weights"])
    assert texts[0] == texts[1] == texts[2]
    assert weights[0] == weights[2], "a file can be resumed with or without --offload"


def with_other_virtual_tokens(peft: Path) -> Path:
    """Copy an adapter directory, with virtual tokens of zeros."""
    other = shutil.copytree(peft, peft.with_name("zeros"))
    tensors = load_file(other / ADAPTER_WEIGHTS)
    save_file({key: tensor * 0 for key, tensor in tensors.items()}, other / ADAPTER_WEIGHTS)
    return other


def rewrite(file: Path, key: str) -> None:
    """Change a tensor in a safetensors file."""
    tensors = load_file(file)
    save_file({**tensors, key: tensors[key] + 1}, file, metadata={"format": "pt"})


def test_a_directory_that_is_no_model_or_no_adapter_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, peft = tiny_model("gpt2", n_layer=2), tmp_path / "peft"
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=["c_attn"]))
    adapted.save_pretrained(peft)
    config = make_config(peft, tmp_path)
    with pytest.raises(ValueError, match=f"model.name={peft} is an adapter directory of PEFT, not a model; give"):
        prepare(config, Launch())
    assert load(str(peft), dtype=None, device=CPU).directory == model  # which it names
    with pytest.raises(ValueError, match=f"--adapter {model} is not an adapter directory of PEFT: it has no adapter_c"):
        PEFTAdapter.open(model)
    other = tiny_model("llama", num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"does not fit LlamaForCausalLM: .*c_attn.*; give the model"):
        load(str(other), dtype=None, device=CPU, adapter=PEFTAdapter.open(peft))
    rewrite_shape(peft / ADAPTER_WEIGHTS)
    with pytest.raises(ValueError, match=r"1 parameters differ, .*h.1.attn.c_attn.lora_A.weight; give"):
        load(str(model), dtype=None, device=CPU, adapter=PEFTAdapter.open(peft))


def rewrite_shape(file: Path) -> None:
    """Leave out a row of a matrix of an adapter."""
    key, tensors = "base_model.model.transformer.h.1.attn.c_attn.lora_A.weight", load_file(file)
    save_file({**tensors, key: tensors[key][1:].clone()}, file, metadata={"format": "pt"})


def test_the_initial_adapter_depends_on_the_seed_and_names_alone(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = with_adapter(make_config(tiny_model("gpt2", n_layer=2), tmp_path), "lora:r=4")
    first, again = initial_adapter(config), initial_adapter(config)
    assert all(torch.equal(first[key], again[key]) for key in first)
    other = initial_adapter(dataclasses.replace(config, data=dataclasses.replace(config.data, seed=4)))
    assert all(torch.equal(first[key], other[key]) == ("lora_B" in key) for key in first)
    drawn = [tensor for key, tensor in first.items() if "lora_A" in key and "c_attn" in key]
    assert not torch.equal(*drawn)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lora:r=0", 'adapter.spec="lora:r=0": r=0 must be at least 1'),
        ("lora:targets=q_proj", "its linear layers are c_attn, c_proj, c_fc, lm_head"),
        ("lora:modules_to_save=head", 'modules_to_save="head" matches no module; its linear layers are'),
        ("lora:modules_to_save=wte", "transformer.wte.weight is tied to lm_head.weight"),
        ("lora:targets=lm_head", "transformer.wte.weight is tied to lm_head.weight"),
        ("prompt_tuning:tokens=40", "the virtual tokens count towards data.sequence=32; use data.sequence=42 or more"),
        ("prompt_tuning:init=text", "init=text and text=TEXT belong together"),
        ("ia3:targets=q_proj", "its linear layers are c_attn, c_proj, c_fc, lm_head"),
        ("ia3:targets=c_attn,feedforward=c_proj", "feedforward=c_proj is not among the targets, c_attn; add it"),
        ("lora:targets=c_fc,modules_to_save=c_fc", "only targeted modules that are marked to be saved"),
        (
            "lorra",
            'unknown name "lorra"; use "lora", "ia3", "prompt_tuning" or "prefix_tuning" (did you mean "lora"?)',
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    spec: str, message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = with_adapter(make_config(tiny_model("gpt2", n_layer=2), tmp_path), spec)
    with pytest.raises(ValueError) as error:
        prepare(config, Launch())
    assert message in str(error.value)
