"""Law: runs on labelled examples and target sequences, in stages, have the losses of one process in plain PyTorch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lib.adapters import initial_adapter
from lib.cache import with_shared_cache
from lib.commands import acsgd
from lib.labelled import save_model, with_special_tokens
from lib.ranks import on_ranks
from lib.resume import HALF, STEPS, checkpoint_of, losses_of, stopped_half_way, train_ranks
from lib.training import (
    RELATIVE,
    TIMEOUT,
    assert_same_training,
    batches_of,
    plain_config,
    train,
    train_whole,
    whole_batches,
)
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from acsgd.adapters.export import merge, to_peft
from acsgd.adapters.virtual_tokens import inject_prompt
from acsgd.config.adapters import PromptTuning
from acsgd.config.options import AdapterConfig, Config
from acsgd.groups import connect
from acsgd.launch import Launch
from acsgd.model_classes import IGNORED, MODEL_CLASSES
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.setup.build import build_session
from acsgd.run.setup.data import open_data
from acsgd.shards.export import to_hf

GLUE = Path(__file__).parents[2].parent / "shared" / "data" / "glue"
TABLES = {
    "classification": ("bert", {"num_labels": 3}, "text\tlabel", "the number {n}\t{label}"),
    "regression": ("bert", {"num_labels": 1}, "sentence1\tsentence2\tlabel", "it is {n}\tnot {label}\t0.{n}"),
    "seq2seq": ("bart", {"decoder_start_token_id": 513}, "input\toutput", "double {n}\tit is {double}"),
}
"""ModelClass -> type of the model, its options, and header and rows of a table of examples."""
PEFT = {"classification": "SEQ_CLS", "regression": "SEQ_CLS", "seq2seq": "SEQ_2_SEQ_LM"}
"""ModelClass -> its name in PEFT."""
EXPORTED = [
    ("regression", "deberta-v2", "lora:r=4,dora=true"),
    ("seq2seq", "bart", "lora:r=4,rslora=true,modules_to_save=fc2"),
    ("classification", "bert", "ia3"),
]
"""Tasks, types of models and adapters."""
PROMPT, VIRTUAL_TOKENS = "prompt_tuning:tokens=3,init=text,text=numbers, doubled", 3


@pytest.fixture(scope="module")
def special(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer with special tokens around texts."""
    return with_special_tokens(tokenizer)


def run_of(model: Path, tmp_path: Path, source: object, task: str, sequence: int, **pp: object) -> Config:
    """Return a run of 4 steps of 6 examples."""
    config = plain_config(model, tmp_path / "runs", steps=4, **pp)
    data = dataclasses.replace(config.data, sources=str(source), sequence=sequence)
    return dataclasses.replace(config, data=data, model=dataclasses.replace(config.model, task=task))


def run_on_table(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, task: str, family: str | None = None, **pp: object
) -> Config:
    """Write the table of a task and a model for it, by default of the type in TABLES; return a run."""
    default, options, header, row = TABLES[task]
    path = tmp_path / f"{task}.tsv"
    rows = [row.format(n=n, label=n % 3, double=2 * n) for n in range(1, 50)]
    path.write_text("\n".join([header, *rows]))
    model = save_model(tmp_path / "models" / task, tokenizer, family or default, task, **options)
    return with_shared_cache(run_of(model, tmp_path / task, path, task, 16, micro=2, **pp))


def losses_of_whole(config: Config) -> list[float]:
    """Train the whole model of transformers; return the losses."""
    task = MODEL_CLASSES[config.model.task]
    model = task.auto_class.from_pretrained(config.model.name, dtype=torch.float32)
    if config.adapter.spec == PROMPT:
        described = PromptTuningConfig(num_virtual_tokens=VIRTUAL_TOKENS, task_type=PEFT[task.name])
        model = Prompted(get_peft_model(model, described))
        (tokens,) = (param for param in model.parameters() if param.requires_grad)
        (initial,) = initial_adapter(config).values()
        with torch.no_grad():
            tokens[:VIRTUAL_TOKENS] = initial  # PEFT has as many again for the decoder, and does not use them
    elif config.adapter.spec is not None:
        model = get_peft_model(
            model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type=PEFT[task.name])
        )
        params = dict(model.named_parameters())
        with torch.no_grad():
            for key, tensor in initial_adapter(config).items():
                params[f"base_model.model.{key}"].copy_(tensor)
    model.train()
    return train_whole(model, config.optim, whole_batches(config), loss=lambda x, labels: task.loss(x, labels, 0.0))


class Prompted(nn.Module):
    """PEFT's encoder-decoder with virtual tokens, called with placeholders for them as in the batches of a run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **options: Tensor) -> Any:
        assert bool((attention_mask[:, :VIRTUAL_TOKENS] == 1).all())
        cut = {"input_ids": input_ids[:, VIRTUAL_TOKENS:], "attention_mask": attention_mask[:, VIRTUAL_TOKENS:]}
        return self.model(**cut, **options)


LORA = "lora:r=4,alpha=8"
FEW = [("classification", None), ("seq2seq", LORA)]
OTHERS = [("regression", None), ("seq2seq", None), ("classification", LORA), ("seq2seq", PROMPT)]


@pytest.mark.parametrize("runs", [FEW, pytest.param(OTHERS, marks=pytest.mark.soak)], ids=["few", "others"])
def test_each_task_trains_in_stages(
    runs: list[tuple[str, str | None]], special: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    plain = {task: run_on_table(tmp_path, special, task, stages=2) for task in {task for task, _ in runs}}
    configs = [dataclasses.replace(plain[task], adapter=AdapterConfig(adapter)) for task, adapter in runs]
    assert_same_training(configs, 2, tmp_path, losses_of_whole)


@pytest.mark.parametrize(("task", "family", "spec"), EXPORTED)
def test_an_exported_adapter_has_the_held_out_loss_of_its_run(
    special: PreTrainedTokenizerFast, tmp_path: Path, task: str, family: str, spec: str
) -> None:
    """In PEFT on the base model, and merged into it."""
    config = run_on_table(tmp_path, special, task, family)
    data, optim = dataclasses.replace(config.data, eval_fraction=0.25), dataclasses.replace(config.optim, lr=1e-2)
    config = dataclasses.replace(config, data=data, optim=optim, adapter=AdapterConfig(spec))
    train_ranks(0, 1, tmp_path / "store", [config])
    (*_, last) = (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()
    expected = pytest.approx(json.loads(last)["eval_loss"], rel=RELATIVE)

    peft, merged, hf = directories = [tmp_path / name for name in ("peft", "merged", "hf")]
    for directory in directories:
        directory.mkdir()
    checkpoint = checkpoint_of(config, config.optim.num_steps)
    to_peft(checkpoint, peft)
    merge(checkpoint, merged)
    to_hf(merged, hf)
    base = MODEL_CLASSES[task].auto_class.from_pretrained(config.model.name, dtype=torch.float32)
    assert held_out_loss(config, base) != expected
    assert held_out_loss(config, PeftModel.from_pretrained(base, peft)) == expected
    assert held_out_loss(config, MODEL_CLASSES[task].auto_class.from_pretrained(hf, dtype=torch.float32)) == expected


def test_virtual_tokens_of_an_encoder_load_in_peft_and_generate(
    special: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = run_on_table(tmp_path, special, "seq2seq")
    data, optim = dataclasses.replace(config.data, eval_fraction=0.25), dataclasses.replace(config.optim, lr=0.3)
    config = dataclasses.replace(config, data=data, optim=optim, adapter=AdapterConfig(PROMPT))
    train_ranks(0, 1, tmp_path / "store", [config])
    (*_, last) = (Path(config.log.dir) / "metrics.jsonl").read_text().splitlines()
    checkpoint, peft = checkpoint_of(config, config.optim.num_steps), tmp_path / "peft"
    peft.mkdir()
    to_peft(checkpoint, peft)
    base = MODEL_CLASSES["seq2seq"].auto_class.from_pretrained(config.model.name, dtype=torch.float32)
    table = base.get_input_embeddings().weight
    (initial,) = initial_adapter(config).values()
    assert torch.equal(initial, table[special("numbers, doubled", add_special_tokens=True)["input_ids"]][:3])
    model = PeftModel.from_pretrained(base, peft).eval()
    assert held_out_loss(config, Prompted(model)) == pytest.approx(json.loads(last)["eval_loss"], rel=RELATIVE)

    prompt = special("double 4", return_tensors="pt")
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1}
    expected = special.decode(model.generate(**prompt, **options)[0], skip_special_tokens=True)
    (tmp_path / "in.jsonl").write_text('{"prompt": "double 4"}\n')
    for arguments in ([checkpoint], [config.model.name, "--adapter", peft]):
        files = ("--file", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--max-new-tokens", 6)
        assert acsgd("generate", *arguments, *files)[0] == 0
        assert json.loads((tmp_path / "out.jsonl").read_text())["generated_text"] == expected


@pytest.mark.soak  # the tokens of decoders in test_adapters.py are those of replicas and resumed in make test
def test_virtual_tokens_of_an_encoder_train_in_stages_and_replicas_and_resume(
    special: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = run_on_table(tmp_path, special, "seq2seq", "t5", stages=2)
    config = dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, steps=STEPS),
        checkpoint=dataclasses.replace(config.checkpoint, every=str(HALF)),
        adapter=AdapterConfig(PROMPT),
    )
    expected = pytest.approx(losses_of_whole(config), rel=RELATIVE)
    on_ranks(4, train_ranks, tmp_path / "store", [config])
    assert losses_of(config) == expected
    resumed = stopped_half_way(config, tmp_path / "resumed", stages=1)
    train_ranks(0, 1, tmp_path / "store-resumed", [resumed])
    assert losses_of(resumed) == expected


@pytest.mark.parametrize("scaled", [True, False])
def test_prompts_of_an_encoder_that_scales_embeddings_itself_are_refused(scaled: bool) -> None:
    """PEFT gives it embeddings, which it does not scale; BART scales in the module of the embedding."""
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    for family in ("marian", "bart"):
        config = AutoConfig.for_model(
            family, vocab_size=64, d_model=16, scale_embedding=scaled, pad_token_id=0, **sizes
        )
        model = MODEL_CLASSES["seq2seq"].build(config)
        if scaled and family == "marian":
            with pytest.raises(ValueError, match="multiplies its embeddings by 4, but not those that PEFT"):
                inject_prompt(model, PromptTuning())
        else:
            inject_prompt(model, PromptTuning())


@torch.no_grad()
def held_out_loss(config: Config, model: nn.Module) -> float:
    """Return the mean loss of a model over the held-out labels of a run."""
    task, job = MODEL_CLASSES[config.model.task], prepare(config, Launch())
    held_out, total, targets = open_data(job).held_out, 0.0, 0
    assert held_out is not None
    for batch in held_out.batches(len(job.micro_ids)):
        assert batch.inputs is not None
        assert batch.labels is not None
        for index, labels in enumerate(batch.labels):
            logits = model.eval()(**{name: tensor[index] for name, tensor in batch.inputs.items()}).logits
            total += task.loss(logits, labels, 0.0).item()
            targets += int((labels != IGNORED).sum())
    return total / targets


def test_pairs_have_types_of_tokens_in_stages(special: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The second of two texts has type 1, as the tokenizer writes it, and the types change the losses."""
    typed = PreTrainedTokenizerFast(
        tokenizer_object=special.backend_tokenizer,
        **special.special_tokens_map,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    path = tmp_path / "pairs.tsv"
    rows = [f"it is {n}\tnot {n % 3}\t{n % 2}" for n in range(1, 50)]
    path.write_text("\n".join(["sentence1\tsentence2\tlabel", *rows]))
    configs = [
        with_shared_cache(
            run_of(
                save_model(tmp_path / name / "bert", each, "bert", "classification", num_labels=2),
                tmp_path / name, path, "classification", 24, stages=2, micro=2,
            )
        )
        for name, each in (("typed", typed), ("plain", special))
    ]  # fmt: skip
    assert_same_training(configs[:1], 2, tmp_path, losses_of_whole)
    first, other = (whole_batches(config)[0].inputs or {} for config in configs)
    assert torch.equal(first["input_ids"], other["input_ids"])
    ends = (first["input_ids"] == typed.sep_token_id).cumsum(-1) - (first["input_ids"] == typed.sep_token_id).int()
    assert torch.equal(first["token_type_ids"], (ends == 1).long())
    assert not other["token_type_ids"].any()


@pytest.mark.skipif(not GLUE.is_dir(), reason=f"no {GLUE}")
def test_cola_trains_and_is_evaluated_in_stages(special: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """All sentences of the files are read; the loss of dev.tsv is that of transformers, each sentence once."""
    train_file, dev_file = (GLUE / "CoLA" / f"{name}.tsv" for name in ("train", "dev"))
    model = save_model(tmp_path / "models" / "bert", special, "bert", "classification", num_labels=2)
    config = run_of(model, tmp_path, f"glue:cola:{train_file}", "classification", 32, stages=2, micro=8)
    data = dataclasses.replace(config.data, eval_sources=f"glue:cola:{dev_file}", batch=48)
    config = with_shared_cache(dataclasses.replace(config, data=data))
    by_rank = on_ranks(2, losses_of_rank, tmp_path / "store", config)
    assert by_rank[0] == by_rank[1]
    losses, eval_loss = by_rank[0]
    assert losses == pytest.approx(losses_of_whole(config), rel=RELATIVE)
    assert eval_loss == pytest.approx(loss_of_cola(model, special, dev_file), rel=RELATIVE)


def losses_of_rank(rank: int, world_size: int, store: Path, config: Config) -> tuple[list[float], float]:
    """Return the loss of the held-out examples with the initial weights, and the losses of training."""
    torch.set_num_threads(1)
    job = prepare(config, Launch(rank, rank, world_size))
    file_store = dist.FileStore(str(store), world_size)
    with connect(job.topology, timeout=TIMEOUT, store=file_store) as groups:
        session = build_session(job, open_weight_source(job), groups)
        held_out = open_data(job).held_out
        assert held_out is not None
        eval_loss = session.evaluate(held_out.batches(len(job.micro_ids)), 0)["eval_loss"]
        return train(session, batches_of(job)), eval_loss


def loss_of_cola(model: Path, tokenizer: PreTrainedTokenizerFast, path: Path) -> float:
    """Return the mean loss of transformers' model over the sentences of a file."""
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    options = {"padding": True, "truncation": True, "max_length": 32, "return_tensors": "pt"}
    texts, labels = tokenizer([row[3] for row in rows], **options), torch.tensor([int(row[1]) for row in rows])
    whole = AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        found = whole(input_ids=texts["input_ids"], attention_mask=texts["attention_mask"], labels=labels)
    return float(found.loss)
