"""Law: a task of one's own, made of public parts alone, is the same training in stages and replicas as in one process.

The task is direct preference optimization (DPO; Rafailov et al. 2023, arXiv:2305.18290) of an adapter. An example is a
pair of rows: a prompt with the answer that is preferred, and with the one that is not. The log-probabilities of the
reference, the model without the adapter, come from an evaluation before training and are a part of the labels.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lib.adapters import initial_adapter
from lib.ranks import on_ranks
from lib.training import TIMEOUT, losses_of_rank, make_config, whole_batches
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.config.options import AdapterConfig, Config
from acsgd.groups import connect
from acsgd.io.data.formats.base import Example, Format, TextSegment, string_of
from acsgd.io.data.formats.formats import FORMATS
from acsgd.io.data.rows.base import INPUT_IDS, LABELS, LENGTHS, Row, read_window
from acsgd.io.data.rows.layout import RowLayout
from acsgd.io.data.sources.base import SourceRecord
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.encode import Encoded, EncoderState, flatten
from acsgd.io.data.tokens.ends import TextEnds
from acsgd.launch import Launch
from acsgd.layers.composed import Head
from acsgd.model_classes import IGNORED, MODEL_CLASSES
from acsgd.optim.schedule import learning_rate
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.setup.build import build_session
from acsgd.run.setup.data import open_held_out
from acsgd.tasks import TASKS
from acsgd.tasks.base import RowContext, ShownText, Task

BETA = 0.1
BOUND = 1e-5
"""Relative difference of losses of the law."""
STEPS, PAIRS, SEQUENCE = 6, 10, 48

# ---- the task


class PreferenceFormat(Format):
    """A "prompt", the answer "chosen", and the answer "rejected"."""

    required = ("prompt", "chosen", "rejected")

    def example(self, record: SourceRecord) -> Example:
        prompt, *answers = (string_of(record.fields, name) for name in self.required)
        return Example((TextSegment(prompt, is_target=False), *map(TextSegment, answers)))


class PreferenceEncoder:
    """Encodes each example as two documents: the prompt with either answer."""

    state: EncoderState = None
    overlap, note, key = 0, None, "preferences"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def tokenize(self, examples: Sequence[Example]) -> Sequence[list[list[int]]]:
        """Return the tokens of the prompt and of the two answers of each example."""
        return [[self._tokenizer(segment.text)["input_ids"] for segment in each.segments] for each in examples]

    def encode(self, examples: Sequence[Example], tokenized: Sequence[list[list[int]]]) -> Encoded:
        """Return the tokens of the examples, with those of the answers as targets."""
        end = [self._tokenizer.eos_token_id]
        documents = [(prompt, [*answer, *end]) for prompt, *answers in tokenized for answer in answers]
        tokens = flatten([part for document in documents for part in document])
        targets = np.concatenate([np.arange(2).repeat([*map(len, document)]) == 1 for document in documents])
        ends = np.cumsum([sum(map(len, document)) for document in documents])
        return Encoded(tokens, targets, ends, len(tokens))


class PreferenceRows:
    """Rows of a document each. Labels [T, 2]: the next token, and the log-probability of the document's answer."""

    is_streamed = False
    notes = ()
    mean_targets = 0.5
    ends = TextEnds()
    format = "preference"

    def num_empty(self, rows: range) -> int:
        return 0

    def __init__(self, corpus: Corpus, sequence: int, padding: int, reference: Path) -> None:
        self._corpus, self._sequence, self._padding = corpus, sequence, padding
        self._reference = np.load(reference) if reference.exists() else np.zeros(len(self))

    def __len__(self) -> int:
        return len(self._corpus.offsets) - 1

    def fingerprint(self) -> tuple[object, ...]:
        return (*self._corpus.fingerprint(), self._reference.tolist())

    def read(self, index: int, epoch: int = 0) -> Row:
        start, stop = self._corpus.offsets[index : index + 2].tolist()
        tokens, following = read_window(self._corpus, start, stop - 1)
        inputs = np.full(self._sequence, self._padding)
        labels = np.full((self._sequence, 2), float(IGNORED))
        inputs[: len(tokens)], labels[: len(tokens), 0] = tokens, following
        labels[:, 1] = self._reference[index]
        return {INPUT_IDS: inputs, LABELS: labels, LENGTHS: np.array([len(tokens), 0])}


class Preferences(Task):
    """Prefers one of two answers to a prompt to the other. reference: file with the log-probabilities of all rows."""

    name = "preferences"
    model_class = MODEL_CLASSES["lm"]
    predictions: ClassVar[None] = None
    rows_per_example = 2

    def __init__(self, reference: Path) -> None:
        self._reference = reference

    def encoder(self, context: RowContext) -> PreferenceEncoder:
        return PreferenceEncoder(context.tokenizer)

    def rows(self, corpus: Corpus, context: RowContext, layout: RowLayout | None = None) -> PreferenceRows:
        return PreferenceRows(corpus, context.spec.text_length, context.spec.padding, self._reference)

    def show(self, row: Row, model: PreTrainedConfig) -> tuple[str, Sequence[ShownText]]:
        length = int(row[LENGTHS][0])
        return f"{length} tokens", [ShownText(row[INPUT_IDS][:length], row[LABELS][:length, 0] != IGNORED)]

    def loss(self, hidden: Tensor, head: Head, labels: Tensor, label_smoothing: float) -> Tensor:
        gains = _log_probabilities(hidden, head, labels) - labels[:, 0, 1].float()
        chosen, rejected = gains.unflatten(0, (-1, 2)).unbind(1)
        is_counted = _has_answer(labels).unflatten(0, (-1, 2)).all(1)
        return -functional.logsigmoid(BETA * (chosen - rejected))[is_counted].sum()

    def num_targets(self, labels: Tensor) -> int:
        return int(_has_answer(labels).sum()) // 2

    def predict(self, hidden: Tensor, head: Head, labels: Tensor) -> Tensor:
        """Return the log-probability of each answer."""
        return _log_probabilities(hidden, head, labels).double()


def _has_answer(labels: Tensor) -> Tensor:
    return (labels[..., 0] != IGNORED).any(-1)


def _log_probabilities(hidden: Tensor, head: Head, labels: Tensor) -> Tensor:
    """Return the log-probability of each row's answer, a few positions at a time: no logits exist whole."""
    parts = zip(hidden.split(8, dim=1), labels[..., 0].long().split(8, dim=1), strict=True)
    return torch.stack([_of_part(head(part), tokens) for part, tokens in parts]).sum(0)


def _of_part(logits: Tensor, tokens: Tensor) -> Tensor:
    found = logits.float().log_softmax(-1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    return found.masked_fill(tokens == IGNORED, 0.0).sum(-1)


def register(reference: Path) -> None:
    """Add the task and its format to the tables."""
    FORMATS["preference"], TASKS["preferences"] = PreferenceFormat, Preferences(reference)


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Register the task for one test, and return the file of its reference, which does not exist yet."""
    monkeypatch.setitem(FORMATS, "preference", PreferenceFormat)
    monkeypatch.setitem(TASKS, "preferences", Preferences(tmp_path / "reference.npy"))
    return tmp_path / "reference.npy"


# ---- the law


def train_on_rank(
    rank: int, world_size: int, store: Path, reference: Path, configs: Sequence[Config]
) -> list[list[float]]:
    """Evaluate the reference, then train each config; return the losses of each."""
    torch.set_num_threads(1)
    register(reference)
    evaluate_reference(rank, world_size, store, reference, configs[0])
    return losses_of_rank(rank, world_size, store, configs)


def evaluate_reference(rank: int, world_size: int, store: Path, reference: Path, config: Config) -> None:
    """Write the log-probabilities of all rows under the model of a run without its adapter."""
    data = dataclasses.replace(config.data, eval_sources=config.data.sources)
    job = prepare(dataclasses.replace(config, data=data, adapter=AdapterConfig()), Launch(rank, rank, world_size))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(f"{store}-reference", world_size)) as groups:
        session, held_out = build_session(job, open_weight_source(job), groups), open_held_out(job, groups)
        found = [session.pipeline.evaluate(batch, 0).predictions for batch in held_out.batches(len(job.micro_ids))]
        if found[0] is not None:
            flat = torch.cat([part.flatten() for part in found if part is not None])
            np.save(reference, flat[: len(held_out)].numpy())
        groups.wait_for_all("writing the reference", timeout_s=60)


def oracle_losses(config: Config) -> list[float]:
    """Train PEFT's model in one process with DPO's loss; the reference is the model with its adapter disabled."""
    base = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    names = dict(model.named_parameters())
    with torch.no_grad():
        for key, tensor in initial_adapter(config).items():
            names[f"base_model.model.{key}"].copy_(tensor)
    trained = [param for param in model.parameters() if param.requires_grad]
    optim = config.optim
    optimizer = torch.optim.AdamW(trained, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    losses = []
    for step, batch in enumerate(whole_batches(config)):
        assert batch.inputs is not None
        assert batch.labels is not None
        ids, tokens = batch.inputs["input_ids"].flatten(0, 1), batch.labels[..., 0].long().flatten(0, 1)

        def score(ids: Tensor = ids, tokens: Tensor = tokens) -> Tensor:
            log_probs = model(input_ids=ids).logits.log_softmax(-1)
            is_answer = tokens != IGNORED
            return torch.stack(
                [
                    log_probs[row, is_answer[row]].gather(-1, tokens[row, is_answer[row], None]).sum()
                    for row in range(len(tokens))
                ]
            )

        with torch.no_grad(), model.disable_adapter():
            before = score()
        gains = score() - before
        loss = -functional.logsigmoid(BETA * (gains[::2] - gains[1::2])).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, optim.clip)
        optimizer.param_groups[0]["lr"] = learning_rate(step, optim)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def write_pairs(path: Path) -> Path:
    """Write records with answers of different lengths."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    records = [
        {
            "prompt": f"Question {number}: {' '.join(words[: 1 + number % 3])}",
            "chosen": " " + " ".join(words[number % 4 : 4 + number % 5]),
            "rejected": " " + " ".join(reversed(words[number % 5 : 6])),
        }
        for number in range(PAIRS)
    ]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_preferences_are_learned_as_in_one_process(
    reference: Path, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl")

    def configure(**pp: object) -> Config:
        config = make_config(tiny_model("gpt2", n_layer=2), tmp_path, steps=STEPS, micro=4, **pp)
        return dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, task="preferences"),
            data=dataclasses.replace(config.data, sources=str(pairs), sequence=SEQUENCE, batch=8),
            optim=dataclasses.replace(config.optim, lr=1e-2, warmup=0),
            adapter=AdapterConfig("lora:r=4,alpha=8"),
        )

    configs = [configure(stages=2, layers=(1, 1)), configure(stages=2, schedule="gpipe"), configure(stages=1)]
    by_rank = on_ranks(2, train_on_rank, tmp_path / "store", reference, configs)
    register(reference)
    expected = oracle_losses(configs[-1])
    for losses in by_rank[0]:
        assert losses == pytest.approx(expected, rel=BOUND)
        assert losses[-1] < losses[0] == pytest.approx(np.log(2), rel=BOUND)


def test_pairs_stay_together(reference: Path, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    config = make_config(tiny_model("gpt2", n_layer=2), tmp_path, steps=5, micro=2)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, task="preferences"),
        data=dataclasses.replace(config.data, sources=str(pairs), sequence=SEQUENCE, batch=8),
    )
    ids = torch.stack([batch.sample_ids for batch in whole_batches(config)])
    assert bool((ids[..., 1] == ids[..., 0] + 1).all())
    assert bool((ids[..., 0] % 2 == 0).all())
    assert ids.flatten().unique(return_counts=True)[1].tolist() == [2] * 2 * PAIRS
    with pytest.raises(ValueError, match=r"^pp\.micro=1 divides an example of preferences"):
        prepare(dataclasses.replace(config, pp=dataclasses.replace(config.pp, micro=1)), Launch())
