"""Choices without effect, or that defeat their purpose, are reported at the start; plain runs report none."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from lib.saved import small_run

from acsgd.config.options import Config, PipelineConfig
from acsgd.io.data.formats.formats import FORMATS
from acsgd.launch import Launch
from acsgd.run.plan.job import prepare
from acsgd.run.setup.choices import describe_choices
from acsgd.run.setup.directories import SHARED_DISKS, open_disks
from acsgd.tasks import check_options

TinyModel = Callable[..., Path]
QUIET = {"resid_pdrop": 0.0}
DROPOUT = {"resid_pdrop": 0.1}


def config_of(model: Path, directory: Path, sections: dict[str, dict[str, Any]]) -> Config:
    """Return a run of 100 steps with further options."""
    config = small_run(model, directory / "run", steps=100)
    config = dataclasses.replace(config, pp=PipelineConfig())
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


NO_EVALUATION = {"eval_fraction": 0.0}
WRONG: list[tuple[dict[str, dict[str, Any]], float, str]] = [
    ({"pp": {"forward": "fixpoint:bits=8"}}, 2, "pp.forward=fixpoint:bits=8 and pp.backward=none have no effect"),
    ({"pp": {"stages": 2, "exact_steps": 5}}, 2, "pp.exact_steps=5 has no effect: nothing is sent with a codec"),
    (
        {"pp": {"stages": 2, "forward": "hadamard", "exact_eval": False}, "data": NO_EVALUATION},
        2,
        "pp.exact_eval=False has no effect: no evaluation sends anything",
    ),
    ({"pp": {"stages": 2, "forward": "hadamard", "exact_steps": 100}}, 2, "pp.exact_steps=100 sends everything"),
    ({"pp": {"stages": 2, "forward": "delta"}, "model": {"dropout_mask": "sample"}}, 0.5, "trained on twice in 0.50"),
    ({"pp": {"stages": 2, "backward": "delta"}, "model": {"dropout_mask": "sample"}}, 1, "pp.backward=delta sends a"),
    ({"pp": {"stages": 2, "backward": "delta"}}, 2, "pp.backward=delta needs gradients that change little"),
    (
        {"pp": {"stages": 2, "backward": "delta"}, "model": {"dtype": "fp16", "name": QUIET}},
        3,
        "pp.backward=delta caches gradients times the loss scale",
    ),
    (
        {"pp": {"stages": 2, "compress": "auto", "backward": "0=delta"}, "model": {"dtype": "fp16", "name": QUIET}},
        9,
        "pp.backward=0=delta caches gradients times the loss scale",
    ),
    ({"pp": {"stages": 2, "forward": "delta"}}, 2, "draws new dropout masks in every step; give --model.dropout_mask"),
    ({"model": {"dropout_mask": "sample", "name": QUIET}}, 2, "but the model has no dropout"),
    ({"optim": {"name": "sgd", "betas": (0.8, 0.9)}}, 2, "optim.betas=(0.8, 0.9) has no effect: optim.name=sgd has"),
    ({"model": {"name": {"dtype": "float16"}}}, 2, "config.json of the model says float16, but"),
    ({"data": NO_EVALUATION, "eval": {"metrics": "perplexity"}}, 2, "eval.metrics=perplexity has no effect"),
    ({"eval": {"every": 100}}, 2, "eval.every=100 has no effect: the run has 100 steps, and the last one is always"),
    ({"checkpoint": {"every": "100"}}, 2, "checkpoint.every=100 has no effect: the run has 100 steps"),
    ({"checkpoint": {"every": None, "keep_every": 10}}, 2, "give --checkpoint.every 10, or remove it"),
    (
        {"checkpoint": {"every": None, "keep": 3}},
        2,
        "checkpoint.keep=3 has no effect: only the last step is saved unless",
    ),
    ({"checkpoint": {"every": "30", "keep_every": 7}}, 2, "checkpoint.keep_every=7 has no effect: no step that is"),
    ({"checkpoint": {"every": "10", "keep_every": 5, "keep": 1}}, 2, "checkpoint.keep_every=5 keeps all checkpoints"),
    ({"checkpoint": {"best": "eval_loss"}}, 2, "only the last step is evaluated; give a smaller --eval.every"),
    ({"optim": {"steps": 16, "spike": 2.0}}, 2, "optim.spike=2.0 has no effect: it compares with the last 16 losses"),
    ({"log": {"trace": "101:105"}}, 2, "log.trace=101:105 has no effect: the run has 100 steps"),
    ({"optim": {"warmup": 100}}, 2, "the learning rate rises in all 100 steps and does not reach optim.lr"),
    ({"optim": {"schedule": "wsd:decay=0.001"}}, 2, "the learning rate does not fall in any step"),
    ({"pp": {"schedule": "interleaved:chunks=2"}}, 2, "pp.schedule=interleaved:chunks=2 has no effect: there is one"),
    ({"pp": {"schedule": "auto"}}, 2, "pp.schedule=auto has no effect: there is one stage; remove it"),
    ({"pp": {"hosts": "auto"}}, 2, "pp.hosts=auto has no effect: there is one stage; give --pp.stages 2, or remove it"),
    ({"pp": {"stages": 2, "micro": 2}}, 2, "fewer micro-batches than its 2 stages, which wait for each other"),
    (
        {
            "pp": {"stages": 2, "backward": "fixpoint:bits=8", "layers": (1, 1)},
            "model": {"freeze": "transformer.w*,transformer.h.0.*"},
        },
        2,
        "pp.backward=fixpoint:bits=8 has no effect: all trained parameters are in the last stage",
    ),
    (
        {
            "pp": {"stages": 2, "backward": "delta", "layers": (1, 1)},
            "model": {"freeze": "transformer.w*,transformer.h.0.*"},
        },
        2,
        "pp.backward=delta has no effect: all trained parameters are in the last stage",
    ),
    (
        {
            "pp": {"stages": 4, "compress": "auto", "backward": "0=none 2=none"},
            "model": {"freeze": "transformer.w*,transformer.h.0.*,transformer.h.1.*", "name": {"n_layer": 4}},
        },
        2,
        'pp.backward="0=none 2=none" gives codecs of links without effect: before the first stage',
    ),
    ({"model": {"dropout_mask": "sample"}}, 0.5, "but no sequence is trained on twice in 0.50 epochs"),
    ({"model": {"init": "scratch", "freeze": "transformer.h.*"}}, 2, "gives frozen parameters random values"),
    ({"data": {"deal": "speed"}, "dp": {"replicas": 2}}, 2, "data.deal=speed has no effect: there is one micro-batch"),
    ({"dp": {"replicas": 2, "mode": "powersgd:exact_steps=100"}}, 2, "which are all of the 100 steps; give fewer"),
    ({"optim": {"offload": "cpu"}}, 2, "optim.offload=cpu saves no memory on a CPU, whose memory holds masters"),
    (
        {"model": {"offload": "cpu", "freeze": "transformer.h.*"}},
        2,
        "and copies those of each layer in each pass; give --model.offload disk, or remove it",
    ),
    ({"adapter": {"spec": "lora:r=64"}}, 2, "of rank 64 have more parameters than 8 of the 8 matrices"),
    (
        {"adapter": {"spec": "lora:r=16,targets=c_attn+c_fc"}, "model": {"name": {"n_inner": 16}}},
        2,
        "2 of the 4 matrices that they adapt, such as transformer.h.0.mlp.c_fc with 32 inputs and 16 outputs; give r=8",
    ),
    ({"dp": {"replicas": 2, "mode": "local", "transport": "gloo"}}, 2, "replicas of dp.mode=local exchange nothing"),
    ({"dp": {"replicas": 2, "mode": "local", "local": "none"}}, 2, "dp.local=none has no effect: with dp.mode=local"),
    ({"dp": {"replicas": 2, "mode": "diloco:inner=101"}}, 2, "replicas are never the same model; give a smaller inner"),
    (
        {"dp": {"replicas": 2, "mode": "diloco:inner=30"}},
        2,
        "the run of 100 steps ends between two exchanges of weights",
    ),
    ({"dp": {"replicas": 2, "mode": "diloco:inner=10,delay=2"}}, 2, "nothing of the steps after the last one; give an"),
    (
        {"dp": {"replicas": 2, "mode": "sparseloco:inner=5,redundant_steps=100"}},
        2,
        "several are no faster than one; give",
    ),
    (
        {
            "pp": {"stages": 2, "forward": "delta:cache_gib=1"},
            "dp": {"replicas": 2, "mode": "diloco:inner=10,redundant_steps=10"},
            "model": {"name": QUIET},
        },
        2,
        "in redundant steps each replica caches the sequences of all",
    ),
    ({"dp": {"replicas": 2, "mode": "sparseloco:inner=30"}}, 2, "with which the last step is followed by an exchange"),
]
"""Options of a run, its number of epochs, and a part of the sentence. dp.replicas: number of replicas."""
GOOD: list[tuple[dict[str, dict[str, Any]], float]] = [
    ({}, 0.5),
    ({}, 3),
    ({"pp": {"stages": 2, "forward": "fixpoint:bits=8", "backward": "fixpoint:bits=8", "exact_steps": 10}}, 0.5),
    ({"pp": {"stages": 2, "forward": "delta:bits=4"}, "model": {"dropout_mask": "sample"}}, 3),
    ({"pp": {"stages": 2, "forward": "delta:bits=4"}, "model": {"name": QUIET}}, 3),
    ({"data": {"eval_fraction": 0.1}, "eval": {"metrics": "perplexity"}}, 3),
    ({"checkpoint": {"every": "5", "keep_every": 10}}, 3),
    ({"dp": {"replicas": 2, "mode": "diloco:inner=50"}}, 3),
    ({"dp": {"replicas": 2, "mode": "diloco:inner=30,redundant_steps=10"}}, 3),
    (
        {
            "dp": {"replicas": 2, "mode": "diloco:inner=10,fragments=2,delay=2", "transport": "gloo"},
            "optim": {"steps": 92},
        },
        3,
    ),
    ({"data": {"batch": 3, "deal": "speed"}, "dp": {"replicas": 2}, "optim": {"warmup": 99}}, 3),
    ({"dp": {"replicas": 2, "mode": "diloco:inner=100"}, "log": {"trace": "100:105"}}, 3),
    ({"dp": {"replicas": 2, "mode": "cocktail_grad", "transport": "gloo"}}, 3),
    ({"adapter": {"spec": "lora:r=31"}}, 3),
    ({"adapter": {"spec": "lora:r=16,targets=c_attn"}, "model": {"name": {"n_inner": 16}}}, 3),
    ({"optim": {"steps": 17, "spike": 2.0}, "checkpoint": {"best": "eval_loss"}, "eval": {"every": 16}}, 3),
]


def sentences(sections: dict[str, dict[str, Any]], epochs: float, tiny_model: TinyModel, directory: Path) -> list[str]:
    """Return the sentences on a run. model.name: options of the model; dp.replicas: number of replicas."""
    sections = {name: dict(values) for name, values in sections.items()}
    model = tiny_model("gpt2", **{"n_layer": 2, **sections.get("model", {}).pop("name", DROPOUT)})
    replicas = sections.get("dp", {}).pop("replicas", 1)
    config = config_of(model, directory, sections)
    processes = replicas * config.pp.stages
    return describe_choices(prepare(config, Launch(0, 0, processes, processes)), [epochs])


@pytest.mark.parametrize("row", range(len(WRONG)))
def test_a_choice_without_effect_is_one_sentence(row: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    sections, epochs, part = WRONG[row]
    (sentence,) = sentences(sections, epochs, tiny_model, tmp_path)
    assert part in sentence


@pytest.mark.parametrize(("sections", "epochs"), GOOD)
def test_a_good_run_has_none(
    sections: dict[str, dict[str, Any]], epochs: float, tiny_model: TinyModel, tmp_path: Path
) -> None:
    assert sentences(sections, epochs, tiny_model, tmp_path) == []


def test_a_best_value_of_a_checkpoint_is_one_to_compare_with(tiny_model: TinyModel, tmp_path: Path) -> None:
    job = prepare(config_of(tiny_model("gpt2", n_layer=2), tmp_path, {"checkpoint": {"best": "eval_loss"}}), Launch())
    counts = [len(describe_choices(job, [2.0], best)) for best in ((), ["perplexity"], ["eval_loss"])]
    assert counts == [1, 1, 0]


EFFECTIVE = {
    *(f"model.{name}" for name in ("name", "task", "init", "dtype", "recompute", "freeze", "dropout_mask")),
    *("model.attention", "model.compile"),
    *(f"data.{name}" for name in ("sources", "sequence", "batch", "objective", "rows", "seed", "format", "fields")),
    *(f"data.{name}" for name in ("on_error", "eval_sources", "eval_fraction", "max_prompt", "max_answer")),
    *(f"pp.{name}" for name in ("stages", "micro")),
    *(f"optim.{name}" for name in ("lr", "steps", "epochs", "name", "warmup", "schedule", "clip", "weight_decay")),
    *(f"optim.{name}" for name in ("betas", "eps", "label_smoothing", "on_nan")),
    *(f"checkpoint.{name}" for name in ("dir", "every", "resume", "upload")),
    *("model.tokenizer", "adapter.spec", "log.dir", "log.to", "log.every", "log.trace", "run.device", "run.memory"),
}
"""Options that change a run of one process of which no other option is given: see `PLAIN`."""
REFUSED: dict[str, Any] = {
    "model.quantize": "int8",
    "model.offload": "cpu",
    "data.long": "skip",
    "data.isolate": True,
    "eval.every": 5,
    "optim.spike": 2.0,
    "optim.masters": "none",
    "checkpoint.best": "eval_loss",
    "checkpoint.upload_rate": 1.0,
}
"""Options that need another one, and a value."""
UNUSED: dict[str, Any] = {
    "data.deal": "speed",
    "data.sentinels": "<x{}>",
    "data.modes": "[A],[B],[C]",
    "data.weights": "tokens",
    "data.window": 8,
    "eval.metrics": "perplexity",
    "pp.schedule": "interleaved:chunks=2",
    "pp.forward": "hadamard",
    "pp.backward": "hadamard",
    "pp.compress": "auto",
    "pp.tied": "dense",
    "pp.exact_steps": 5,
    "pp.exact_eval": False,
    "pp.layers": (2,),
    "pp.hosts": (0,),
    "dp.mode": "cocktail",
    "dp.compress": "auto",
    "dp.local": "none",
    "dp.domain": "rack-1",
    "dp.shard": "optimizer",
    "optim.offload": "cpu",
    "model.offload_activations": True,
    "optim.loss_scale": 1024.0,
    "checkpoint.keep": 3,
    "checkpoint.keep_every": 2,
    "checkpoint.on_error": "continue",
    "log.name": "x",
    "run.timeout": 7.0,
    "run.transport": "gloo",
    "run.connections": 2,
    "run.congestion": "bbr",
    "pp.transport": "gloo",
    "dp.transport": "gloo",
    "elastic.min_replicas": 2,
    "elastic.max_replicas": 4,
    "elastic.below_min": "end",
    "elastic.force": True,
    "elastic.replan": True,
    "elastic.snapshot": "5",
    "elastic.silence": 3.0,
    "elastic.join_budget": 3.0,
    "elastic.join_rate": 3.0,
    "elastic.join_moments": "rounded",
    "elastic.hang": 3.0,
}
"""Options without effect, and a value."""
HANGS = ["elastic.hang=60.0 is not below run.timeout=7.0"]
OF_RECORDS = {option for form in FORMATS.values() for option in form.options_read}
OF_DISKS = {"copies", "rate"}
PLAIN: dict[str, dict[str, Any]] = {"data": NO_EVALUATION, "checkpoint": {"every": None}}


def test_every_option_has_an_effect_on_a_plain_run_or_is_reported_or_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    sections = get_type_hints(Config)
    options = {f"{name}.{option.name}" for name, section in sections.items() for option in fields(section)}
    elsewhere = {f"data.{name}" for name in OF_RECORDS} | {f"checkpoint.{name}" for name in OF_DISKS}
    assert sorted([*EFFECTIVE, *REFUSED, *UNUSED, *elsewhere]) == sorted(options)

    job = prepare(config_of(tiny_model("gpt2", n_layer=2, **DROPOUT), tmp_path, PLAIN), Launch())
    assert describe_choices(job, [2.0]) == []

    def changed(name: str, value: Any) -> Config:
        section, option = name.split(".")
        values = dataclasses.replace(getattr(job.config, section), **{option: value})
        return dataclasses.replace(job.config, **{section: values})

    for name, value in REFUSED.items():
        with pytest.raises(ValueError, match=name):
            check_options(changed(name, value))
    for name, value in UNUSED.items():
        (sentence,) = describe_choices(dataclasses.replace(job, config=changed(name, value)), [2.0])
        assert f"{name}={value} " in sentence
        assert re.search(r"(ha(s|ve) no effect: |saves no memory on a CPU, ).*remove (it|them)$", sentence)
    of_hosts = (name for name in UNUSED if name.startswith("elastic.") and name != "elastic.replan")
    for name in ("dp.mode", "data.deal", "run.timeout", *of_hosts):
        elastic = dataclasses.replace(job, config=changed(name, UNUSED[name]), is_elastic=True)
        found = describe_choices(elastic, [2.0])
        assert [text.partition(",")[0] for text in found] == HANGS * (name == "run.timeout"), "hosts may join"
    for option in OF_DISKS:
        shared = dataclasses.replace(job, config=changed(f"checkpoint.{option}", 1))
        (sentence,) = open_disks(shared, Any, SHARED_DISKS)  # type: ignore[arg-type]
        assert sentence.startswith(f"checkpoint.{option}=1 has no effect: ")
        alone = dataclasses.replace(shared, is_elastic=True)
        (sentence,) = open_disks(alone, Any, SHARED_DISKS)  # type: ignore[arg-type]
        assert sentence == f"checkpoint.{option}=1 has no effect until a host with a disk of its own joins"
