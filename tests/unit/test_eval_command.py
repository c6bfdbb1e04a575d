"""Laws of `acsgd eval`: it finds what a run's own evaluation finds, in every form of a model, and compares answers."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lib.commands import acsgd
from lib.labelled import save_model, with_special_tokens
from lib.saved import SMALL, small_run, train_alone
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from acsgd.commands.evaluation import command
from acsgd.commands.evaluation.answers import compare, evaluate_answers, read_questions
from acsgd.commands.evaluation.job import config_of, data_of, describe_trained, find_evaluated
from acsgd.commands.evaluation.options import EvalOptions
from acsgd.commands.generation.command import open_generator
from acsgd.commands.generation.options import Decoding
from acsgd.commands.recorded import RecordedModel
from acsgd.config.options import AdapterConfig, DataConfig, EvalConfig, OptimConfig
from acsgd.config.run_file import parse_flags
from acsgd.errors import ReportedError
from acsgd.failures.failures import RunContext
from acsgd.launch import Launch
from acsgd.run.plan.job import prepare
from acsgd.run.setup.data import held_out_records, open_data, open_held_out
from acsgd.streams import Streams

TinyModel = Callable[..., Path]


def evaluate(*arguments: object) -> dict[str, object]:
    """Run the command in this process and return its JSON."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        command.main([*map(str, arguments), "--json"], Launch(), prog="acsgd eval", end=sys.exit)
    return json.loads(output.getvalue())


@pytest.fixture(scope="module")
def run(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of two steps, which evaluates on another text, and whose evaluated weights are averages."""
    directory = tmp_path_factory.mktemp("eval")
    text = directory / "text.txt"
    text.write_text("The statement of the list is a statement.\n" * 60)
    (directory / "held-out.txt").write_text("A list of statements, of which each is a statement of its own.\n" * 30)
    config = small_run(tiny_model("gpt2", **SMALL), directory / "runs" / "run")
    held_out = str(directory / "held-out.txt")
    data = dataclasses.replace(config.data, sources=str(text), eval_sources=held_out, eval_fraction=0.0)
    optim = dataclasses.replace(config.optim, name="schedule_free_adamw", schedule="constant", lr=0.1)
    train_alone(dataclasses.replace(config, data=data, optim=optim))
    return directory / "runs" / "run"


def test_it_finds_what_the_run_found_in_every_form_of_the_model(run: Path, tmp_path: Path) -> None:
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    checkpoint = run / "checkpoints" / "step-00000002"
    code, _ = acsgd("convert", "to-hf", checkpoint, tmp_path / "hf")
    assert code == 0
    code, _ = acsgd("convert", "from-hf", tmp_path / "hf", tmp_path / "shards")
    assert code == 0
    data = ("--data", run.parents[1] / "held-out.txt", "--cache", tmp_path / "runs" / "cache")
    forms = [(run,), (checkpoint, "--micro", 3), *((tmp_path / form, "--sequence", 16) for form in ("hf", "shards"))]
    for form in forms:
        found = evaluate(*form, *data)
        assert found["metrics"] == pytest.approx({name: last[name] for name in ("eval_loss", "perplexity")}, rel=1e-6)
        assert found["task"] == "lm"
        assert found["sequences"] > 10
        if form[0] in (run, tmp_path / "hf"):
            assert evaluate(*form, *data, "--offload", "disk") == found
    with pytest.raises(ReportedError):
        evaluate(run, *data, "--offload", "cpu", "--device", "cpu")
    assert evaluate(run, *data, "--metrics", "")["metrics"].keys() == {"eval_loss"}


@pytest.mark.parametrize("held_out", ["fraction", "sources"])
def test_it_evaluates_what_the_run_has_evaluated_as_the_run_did_to_the_last_bit(
    held_out: str, tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run = tmp_path / "a.jsonl", tmp_path / "runs" / "run"
    records = [{"q": f"{n} and " * (n % 4 + 1), "a": f"is {n}", "text": "no"} for n in range(14)]
    source.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    config = small_run(tiny_model("gpt2", **SMALL), run)
    data = dataclasses.replace(
        config.data,
        sources=str(source),
        eval_sources=str(source) if held_out == "sources" else None,
        eval_fraction=0.5 if held_out == "fraction" else 0.0,
        format="io",
        fields="input=q,output=a",
        input_format="Q: __input__ A:",
        output_format=" __output__!",
        targets="all",
        rows="single",
        long="truncate",
    )
    logged = dataclasses.replace(config.log, to=f"{config.log.to},text")
    train_alone(dataclasses.replace(config, data=data, eval=EvalConfig(metrics=""), log=logged))
    [log] = (run / "logs").iterdir()
    warning = f"warning: data.eval_sources: {source} has the text of a source in data.sources: held-out losses"
    assert log.read_text().count(warning) == (held_out == "sources")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for arguments in [(), *([("--data", source)] if held_out == "sources" else [])]:
        found = evaluate(run, *arguments, "--cache", tmp_path / "runs" / "cache")
        assert found["metrics"] == {"eval_loss": last["eval_loss"]}
        printed = capsys.readouterr().err
        assert 'as in the run: data.format="io", data.fields="input=q,output=a", data.targets="all", ' in printed
        assert 'data.input_format="Q: __input__ A:", ' in printed
        warning = f"warning: {source} reads {source}, which is in data.sources of the run: it has trained on this text"
        assert (warning in printed) == (held_out == "sources")
    other = evaluate(run, "--data", source, "--input-format", "__input__", "--cache", tmp_path / "runs" / "cache")
    assert other["metrics"] != {"eval_loss": last["eval_loss"]}


def test_trained_sources_that_were_removed_are_counted_and_the_others_compared(tmp_path: Path) -> None:
    kept = tmp_path / "a.txt"
    kept.write_text("text")
    model = RecordedModel("run", options={"data.sources": f"gone.txt:0.5,{kept}:0.5,memory://gone/b.txt"})
    warning, moved = describe_trained(model, {"sources": f"{kept},demo"})
    assert warning.startswith(f"warning: {kept} reads {kept}, which is in data.sources of the run")
    assert moved.startswith("1 of 3 sources that the run has trained on are no longer there")
    assert "evaluated: gone.txt:0.5" in moved
    assert describe_trained(model, {"sources": "demo", "eval_fraction": 0.5}) == []


def test_a_run_with_an_adapter_is_evaluated_in_every_form(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkpoint, merged, and as an adapter directory on its base, given or named by it."""
    model, run, peft, merged = (tmp_path / name for name in ("gpt2", "runs/run", "peft", "merged"))
    shutil.copytree(tiny_model("gpt2", **SMALL), model)
    (tmp_path / "text.txt").write_text("The statement of the list is a statement.\n" * 60)
    config = small_run(model, run)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, sources=str(tmp_path / "text.txt"), eval_fraction=0.5),
        adapter=AdapterConfig("lora:r=2"),
        optim=OptimConfig(lr=0.1, steps=2),
    )
    train_alone(config)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert acsgd("convert", "to-peft", run, peft)[0] == acsgd("convert", "merge", run, merged)[0] == 0
    cache = ("--cache", tmp_path / "runs" / "cache")
    assert evaluate(run, *cache)["metrics"]["eval_loss"] == last["eval_loss"]
    forms = [(run,), (merged,), (model, "--adapter", peft), (peft,)]
    monkeypatch.chdir(tmp_path)  # where the name of the base in the adapter directory is its path
    data = ("--data", tmp_path / "text.txt", *cache)
    losses = [evaluate(*form, *data)["metrics"]["eval_loss"] for form in forms]
    assert losses == pytest.approx([losses[0]] * len(forms), rel=1e-5)
    assert evaluate(run, *data, "--offload", "disk")["metrics"]["eval_loss"] == losses[0]
    assert evaluate(model, *data, "--sequence", 16)["metrics"]["eval_loss"] != losses[0]
    monkeypatch.chdir(run)
    with pytest.raises(ValueError, match=r"peft: base_model_name_or_path=gpt2 .*; or give .*: MODEL --adapter /"):
        find_evaluated(EvalOptions(str(peft)))


@pytest.mark.parametrize("rows", ["concat", "pack", "single"])
def test_generated_answers_are_those_of_the_records_that_the_run_held_out(
    rows: Any, tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.jsonl"
    records = [(f"{n} and" * (n % 3 + 1), f"is {n}.") for n in range(30)]
    source.write_text("".join(json.dumps({"input": q, "output": a}) + "\n" for q, a in records))
    config = small_run(tiny_model("gpt2", **SMALL), tmp_path / "run", steps=1)
    data = dataclasses.replace(config.data, sources=str(source), rows=rows, eval_fraction=0.4, sequence=24)
    job = prepare(config := dataclasses.replace(config, data=data), Launch())
    [all_rows], [held] = open_data(job).reader.rows.rows, open_held_out(job).ranges
    ids = [[row["input_ids"].tolist() for row in map(all_rows.read, part)] for part in (range(held.start), held)]
    trained, kept = ("".join(job.tokenizer.decode(row) for row in part) for part in ids)
    expected = [n for n, (q, a) in enumerate(records) if f"{q}{a}" in kept and f"{q}{a}" not in trained]
    places = held_out_records(job)
    assert places == {f"{source}, line {n + 1}" for n in expected}
    assert 3 < len(places) < 20
    train_alone(config)
    generate = [str(tmp_path / "run"), "--generate", "--max-new-tokens", "2"]
    for flags in [(), ("--sequence", "5"), ("--rows", "single"), ("--input-format", "Q: __input__")]:
        command.main([*generate, *flags], Launch(), prog="", end=sys.exit)
        assert f"what data.eval_fraction has held out of it, {len(places)} examples" in capsys.readouterr().out


def test_options_that_change_what_is_held_out_need_other_data(tiny_model: TinyModel) -> None:
    recorded = {"sources": "a", "eval_fraction": 0.5, "sequence": 8, "rows": "pack", "long": "skip", "format": "io"}
    model = RecordedModel(str(tiny_model()), "lm", {f"data.{name}": value for name, value in recorded.items()})
    options = EvalOptions(model.name)
    same = dataclasses.replace(options, sequence=8, rows="pack", format="io", task="lm", targets="all")
    assert config_of(same, model, 1).data == dataclasses.replace(config_of(options, model, 1).data, targets="all")
    for changed in ({"sequence": 9}, {"rows": "single"}, {"long": "split"}, {"input_format": "Q: __input__"}):
        other = dataclasses.replace(options, **changed)  # type: ignore[arg-type]
        flag = f"--{next(iter(changed)).replace('_', '-')}"
        with pytest.raises(ValueError, match=f"^{flag} would put records .*; remove it, or give --data SOURCES$"):
            config_of(other, model, 1)
        assert config_of(dataclasses.replace(other, data="b"), model, 1).data.sources == "b"
    with pytest.raises(ValueError, match=r"^--sequence, --task would .*; remove them"):
        config_of(dataclasses.replace(options, sequence=9, task="seq2seq"), model, 1)


def test_answers_of_a_model_with_a_head_of_its_own_are_not_generated(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    save_model(tmp_path / "bert", with_special_tokens(tokenizer), "bert", "classification", num_labels=2)
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "one\t1\n" * 8)
    config = small_run(tmp_path / "bert", tmp_path / "run", steps=1)
    data = DataConfig(str(tmp_path / "a.tsv"), sequence=8, batch=2, eval_fraction=0.5)
    model = dataclasses.replace(config.model, task="classification")
    train_alone(dataclasses.replace(config, data=data, model=model))
    with contextlib.redirect_stderr(io.StringIO()) as printed, pytest.raises(SystemExit):
        command.main([str(tmp_path / "run"), "--generate"], Launch(), prog="", end=sys.exit)
    assert "is trained for classification, which generates no text" in printed.getvalue()


def test_the_table_names_model_data_and_metrics(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = run.parents[1] / "held-out.txt"
    command.main(
        [str(run), "--data", str(source), "--cache", str(tmp_path / "runs/cache")],
        Launch(),
        prog="acsgd eval",
        end=sys.exit,
    )
    output = capsys.readouterr().out
    assert f"step-00000002 (lm) on {source}, " in output
    assert [line.split()[0] for line in output.splitlines()[1:] if line.strip()][2:] == ["eval_loss", "perplexity"]


REFUSED = [
    ("--data a.txt --generate --lm-eval x", 1, "--generate and --lm-eval exclude each other; give one of them"),
    ("--data a.txt --lm-eval x", 1, "--lm-eval brings its own data; remove --data"),
    ("--data a.txt --lm-eval-args=--limit", 1, "--lm-eval-args are for lm-eval; give --lm-eval TASKS, too"),
    ("--data a.txt --generate", 2, "--generate runs in one process; start acsgd eval without torchrun"),
    ("--lm-eval x", 2, "--lm-eval runs in one process; start acsgd eval without torchrun"),
    ("--data a.txt --micro 0", 1, "--micro=0 must be at least 1, at most 1048576"),
    ("--data a.txt --sequence 0", 1, "--sequence=0 must be at least 1, at most 16777216"),
    ("--data a.txt --stages 0", 1, "--stages=0 must be at least 1, at most 65536"),
    ("--data a.txt --timeout nan", 1, "--timeout=nan must be at least 0.1, at most 1000000"),
    ("--data a.txt --top-k 5", 1, "--top-k applies to sampling; add, for example, --temperature 1"),
    ("--data a.txt --generate --seed 1", 1, "--seed applies to sampling; add, for example, --temperature 1"),
]
"""Flags, number of processes, and the message."""


@pytest.mark.parametrize(("flags", "processes", "message"), REFUSED)
def test_invalid_options_are_refused(flags: str, processes: int, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_flags(EvalOptions, ["model", *flags.split()], prog="acsgd eval").check(processes)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--data a.txt --sequence 8 --rows pack --long skip --micro 2 --stages 2 --metrics accuracy --json", None),
        ("--data a.txt --generate --max-new-tokens 8 --format io --on-error skip --json", None),
        ("--data a.txt --max-new-tokens 8", "--max-new-tokens has no effect on the loss; add --generate, or remove it"),
        ("--generate --sequence 8 --micro 2", "--sequence, --micro have no effect on generated answers; remove them"),
        ("--lm-eval x --json --rows pack", "--rows, --json have no effect on tasks of lm-eval; remove them"),
    ],
)
def test_options_without_effect_on_what_is_evaluated_are_reported(flags: str, sentence: str | None) -> None:
    options = parse_flags(EvalOptions, ["model", *flags.split()], prog="acsgd eval")
    assert options.describe_unread() == ([sentence] if sentence else [])


def test_a_model_that_does_not_fit_the_command_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    options = EvalOptions(str(tiny_model()), data="demo")
    with pytest.raises(ValueError, match=r"does not record a sequence length; .* --sequence, such as --sequence 512$"):
        config_of(options, find_evaluated(options), 1)
    with pytest.raises(ValueError, match=r"^runs/none does not exist; give a run or a checkpoint"):
        config_of(none := dataclasses.replace(options, model="runs/none"), find_evaluated(none), 1)
    options = dataclasses.replace(options, sequence=16, stages=3)
    with pytest.raises(ValueError, match=r"^--stages 3 does not divide the number of processes, 4$"):
        config_of(options, find_evaluated(options), 4)
    with pytest.raises(ValueError, match=r"^there is nothing to evaluate on: .* give --data SOURCES, or --lm-eval TAS"):
        config_of(dataclasses.replace(options, data=None), find_evaluated(options), 1)


WRONG = [
    (["--data", "none.jsonl", "--sequence", "8"], r"^--data=\"none\.jsonl\": "),
    (["--data", "demo", "--sequence", "1000"], r"^--sequence=1000 exceeds .*; use --sequence=64 or less$"),
    (["--data", "demo", "--sequence", "8", "--format", "jsom"], r'^--format="jsom": unknown format'),
    (["--data", "demo", "--sequence", "8", "--metrics", "none"], r"^--metrics"),
]
"""Flags, and the message."""


def test_options_of_each_source_of_the_run_are_given_anew_for_other_sources() -> None:
    options = {"data.format": ["io", "text"], "data.input_format": ["Q:__input__"] * 2, "data.max_prompt": [8, 0]}
    model = RecordedModel("m", "lm", options)

    def found(flags: str) -> tuple[dict[str, Any], str | None]:
        return data_of(parse_flags(EvalOptions, ["m", "--data", *flags.split()], prog="acsgd eval"), model)

    values, note = found("a.jsonl,b.jsonl")
    assert (values["format"], values["max_prompt"]) == (("io", "text"), (8, 0))
    message = (
        'its own way: data.format=["io", "text"], data.input_format=["Q:__input__", "Q:__input__"]; give --format and'
    )
    with pytest.raises(ValueError, match=re.escape(f"{message} --input-format of --data")):
        found("a.jsonl")
    values, note = found("a.jsonl --format io --input-format __input__")
    assert (values["format"], "max_prompt" in values) == ("io", False)
    assert note == "no limit for --data: the run has data.max_prompt=[8, 0], for its sources"


def test_a_given_length_rule_holds_beside_given_rows_and_prompts_are_found_whatever_the_run_has_learned() -> None:
    recorded = {"data.sources": "a", "data.eval_sources": "a", "data.long": "skip", "data.targets": "all"}
    model = RecordedModel("model", options=recorded)
    options = EvalOptions("model", rows="single")
    assert "long" not in data_of(options, model).values
    assert data_of(dataclasses.replace(options, long="truncate"), model).values["long"] == "truncate"
    assert data_of(options, model).values["targets"] == "all"
    assert "targets" not in data_of(dataclasses.replace(options, generate=True), model).values


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_errors_name_what_was_typed(flags: list[str], message: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    flags = [str(tiny_model()), *flags, "--cache", str(tmp_path / "runs" / "cache")]
    options = parse_flags(EvalOptions, flags, prog="acsgd eval")
    with contextlib.ExitStack() as stack, pytest.raises(ValueError, match=message):
        command.evaluate(options, Launch(), dist.HashStore(), RunContext(), stack)


def test_an_evaluation_needs_memory_for_weights_alone(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EvalOptions(str(tiny_model()), data="demo", sequence=8, cache=tmp_path / "runs" / "cache")
    config = config_of(options, find_evaluated(options), 1)
    size = prepare(config, Launch()).model.parameters.all
    for available, allowed in ((4 * size, True), (4 * size - 1, False)):
        monkeypatch.setattr(Streams, "memory_bytes", lambda _, available=available: available)
        with contextlib.nullcontext() if allowed else pytest.raises(ValueError, match=r"; weights need"):
            prepare(config, Launch(), trains=False)
        with pytest.raises(ValueError, match=r"; weights and gradients need"):
            prepare(config, Launch())


def test_a_classifier_without_a_head_is_not_evaluated_and_one_with_a_new_head_with_a_warning(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    special = with_special_tokens(tokenizer)
    save_model(tmp_path / "bert", special, "bert", "classification", num_labels=2)
    AutoModel.from_pretrained(tmp_path / "bert").save_pretrained(tmp_path / "bert")
    (tmp_path / "a.tsv").write_text("text\tlabel\none\t1\n")
    options = EvalOptions(
        str(tmp_path / "bert"),
        data=str(tmp_path / "a.tsv"),
        sequence=8,
        task="classification",
        cache=tmp_path / "runs" / "cache",
    )
    with contextlib.ExitStack() as stack, pytest.raises(ValueError, match="bert has no head for classification, class"):
        command.evaluate(options, Launch(), dist.HashStore(), RunContext(), stack)
    code, _ = acsgd("convert", "from-hf", tmp_path / "bert", tmp_path / "base", "--task", "classification")
    assert code == 0
    options = dataclasses.replace(options, model=str(tmp_path / "base"))
    with contextlib.ExitStack() as stack, contextlib.redirect_stderr(io.StringIO()) as printed:
        command.evaluate(options, Launch(), dist.HashStore(), RunContext(), stack)
    warning = f"warning: the head of {tmp_path / 'base'}, classifier.bias, classifier.weight, has random weights"
    assert printed.getvalue().count(warning) == 1


def test_rouge_and_exact_match_are_those_of_their_definitions() -> None:
    answers = ["the cat sat on the mat", " 42\n", "no"]
    expected = ["the cat lay on a mat", "42", "yes"]
    # of 6 and 6 words, 4 are common (the, cat, on, mat), in the same order, and 1 of 5 pairs: the cat
    assert compare(answers, expected) == pytest.approx(
        {
            "exact_match": 1 / 3,
            "rouge1": (4 / 6 + 1 + 0) / 3,
            "rouge2": (1 / 5 + 0 + 0) / 3,
            "rougeL": (4 / 6 + 1 + 0) / 3,
        }
    )


def greedy_answers(model: Path, prompts: Sequence[str], tokens: int) -> list[str]:
    """Return the texts that transformers generates after prompts, one at a time."""
    whole, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        new = whole.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("batch", [1, 3])
def test_generated_answers_are_those_of_transformers_in_any_batch(
    batch: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Half of the answers are what the model generates after the prompt, for prompts of different lengths."""
    model = tiny_model()
    prompts = ["def f(x):", "A", "the statement of the list is", "x = 3\n", "class", "and so on"]
    answers = greedy_answers(model, prompts, 6)
    assert all(answer.strip() for answer in answers)
    answers[::2] = ["something else"] * 3
    path = tmp_path / "questions.jsonl"
    records = [{"prompt": p, "completion": a} for p, a in zip(prompts, answers, strict=True)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = evaluate(model, "--data", path, "--generate", "--max-new-tokens", 6, "--batch", batch)
    assert found["metrics"]["exact_match"] == 0.5
    assert found["metrics"]["rouge1"] >= 0.0
    assert (found["examples"], found["task"]) == (6, "lm")


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_a_chat_is_continued_at_its_last_answer(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, whole = tmp_path / "chat", AutoModelForCausalLM.from_pretrained(tiny_model())
    whole.resize_token_embeddings(520)
    whole.save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.chat_template = CHATML
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(model)
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    generator = open_generator(str(model), Decoding(), dtype=None, device="cpu")
    data = DataConfig(sources=str(tmp_path / "chat.jsonl"), sequence=1, batch=1)
    [question] = read_questions(data, generator)
    assert question.prompt.ids == tokenizer.apply_chat_template(
        messages[:-1], add_generation_prompt=True, return_dict=False
    )
    assert question.answer == "d"


BAD_QUESTIONS = [
    ('{"text": "no prompt"}', "line 1 has no prompt with an answer: no prompt; use records with both"),
    ('{"prompt": "a", "completion": " "}', 'line 1 has an empty answer under "completion"; write an answer, or'),
    ('{"prompt": "a", "completion": "<|endoftext|>"}', "line 1 has an answer that is empty without special tokens"),
    ('{"prompt": "a", "completion": "b"}\nx', "line 2 is not JSON"),
]
"""Records, and a part of the message."""


@pytest.mark.parametrize(("records", "message"), BAD_QUESTIONS)
def test_an_example_without_prompt_and_answer_is_named(
    records: str, message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(records)
    options = EvalOptions(str(tiny_model()), data=str(path), generate=True)
    with pytest.raises(ValueError) as refused:
        evaluate_answers(options, find_evaluated(options), DataConfig(sources=str(path), sequence=1, batch=1))
    assert f"{path}, {message}" in str(refused.value)
    assert str(refused.value).startswith("--data: ")


FAKE_LM_EVAL = """
import json, sys
from pathlib import Path
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
directory = arguments["--model_args"].removeprefix("pretrained=").partition(",")[0]
files = sorted(path.name for path in Path(directory).iterdir())
Path("called").write_text(json.dumps([arguments, directory, files]))
sys.exit(7)
"""


def test_lm_eval_runs_on_an_export_that_is_removed_afterwards(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of its name takes its place. Its exit code is that of the command."""
    package = tmp_path / "packages" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE_LM_EVAL)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(
            [str(run), "--lm-eval", "arc", "--lm-eval-args=--limit 5"], Launch(), prog="acsgd eval", end=sys.exit
        )
    assert ended.value.code == 7
    arguments, directory, files = json.loads((tmp_path / "called").read_text())
    assert {"config.json", "model.safetensors", "tokenizer.json"} < {*files}
    assert arguments["--model_args"] == f"pretrained={directory},dtype=auto"
    assert (arguments["--model"], arguments["--tasks"], arguments["--limit"]) == ("hf", "arc", "5")
    assert not Path(directory).exists()
