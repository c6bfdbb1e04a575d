"""Options of other tools are answered with what to type, and all that is to be typed is valid."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from test_docs import generate
from test_docs_blocks import REQUIRED, ROOT, check_shell

from acsgd import cli
from acsgd.config.checks import check
from acsgd.config.other_tools import NEEDED, TITLES, TRAIN, OtherToolError, programs, refuse_others
from acsgd.config.run_file import parse
from acsgd.config.spec import from_spec
from acsgd.config.typed_options import Option
from acsgd.dp import MODES
from acsgd.failures.report import message_of
from acsgd.launch import Launch
from acsgd.optim import OPTIMIZERS
from acsgd.pp.wire.delta import Delta

SHARED = """--batch-size --checkpoint-path --checkpoint-steps --data-group-size --dist-url --dp-backend --dp-mode
        --embedding-dim --fp16 --gradient-accumulate-step --load-pretrained-model --lr
        --micro-batch-size --model-name --model-type --net-interface --num-layers --optimizer
        --pipeline-group-size --pp-mode --profiling --seq-length --task-name --tokenizer-name
        --total-steps --warmup-steps --world-size GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME"""
READMES = {
    "ac-sgd": """--backward-bits --backward-compress-method --batch-size --cuda-id --data-group-size --dist-url
        --do-evaluation --embedding-dim --forward-bits --forward-bits-act --forward-compress-method
        --load-pretrained-model --lr --model-name --max-activation-cache-size --micro-batch-size
        --n-epochs --num-heads --num-iters --num-layers --pipeline-group-size --pp-mode --profiling
        --rank --save-dir --seq-length --task-name --tokenizer-name --warmup-epochs --warmup-steps
        --world-size GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME convert_gpt2_checkpoint
        convert_deberta_checkpoint dist_lm_runner.py dist_deberta_runner.py""",
    "cocktailsgd": SHARED,
    "together": f"""{SHARED} --ckpt-path --cuda-id --n-layer-per-stage --n-stages --rank --save-dir --save-path
        WANDB_NAME
        convert_from_hf_gptj.py convert_from_hf_gptneox.py convert_to_hf_gptj.py
        convert_to_hf_gptneox.py dist_clm_train.py""",
    "openchatkit": f"{SHARED} --train-log-backend WANDB_NAME",
    "finetuner": """--aim_repo --batch_size --batch_size_per_gpu --beta1 --beta2 --contiguous_gradients --cpu_offload
        --data_class --data_config --data_path --data_sampling_proportion --do_sample --dtype --eps
        --eval_and_save_interval --load_path --experiment_name --gradient_accumulation_steps
        --input_format --learning_rate --logdir --lr_schedule --model_class --max_input_tokens
        --max_new_tokens --max_output_tokens --model_name --no_eval --num_training_steps --output_file
        --num_virtual_tokens --output_format --overlap_comm --prompt_tuning_init
        --prompt_tuning_init_text --save_path --seed --stage --steps_per_print --temperature --top_k
        --top_p --training_inference_type --warmup_steps --weight_decay""",
}
"""Arguments, variables and programs that the READMEs of the five tools name."""
VALUES = """pp_mode=gpipe dp_mode=allreduce optimizer=adamw scheduler=cosine lr_scheduler=cosine
        lr_scheduler_type=cosine lr=1e-4 learning_rate=1e-4 optimizer.lr=1e-4 optimizer.params.lr=1e-4
        optimizer.params.betas=0.9+0.95
        scheduler.params.warmup_max_lr=1e-4 eps=1e-8 optimizer.eps=1e-8 optimizer.params.eps=1e-8
        adam_epsilon=1e-8 beta1=0.9 optimizer.beta1=0.9 adam_beta1=0.9 forward_compress_method=fixpoint
        backward_compress_method=fixpoint forward_bits=4 dp_bits=4 backward_bits=8
        input_format=__input__ output_format=__output__ val_set_size=0.1 label_smoothing_factor=0.1
        top_p=0.9 lr_scheduler.decay_ratio=0.1 lr_scheduler.min_lr_factor=0.1 TOPK_RATIO=0.2
        RANDOMP_RATIO=0.1 metric_for_best_model=eval_loss initial_loss_scale=65536 task_name=demo
        training.dataset_path=demo seq_length=64 max_input_tokens=64 training.seq_len=64 sequence_len=64
        block_size=64 max_seq_length=64"""
VALUE = dict(pair.split("=") for pair in VALUES.split())
"""Values of options for which 8 is none."""
KNOWN = {*REQUIRED}


def answer(options: list[Option], command: str = TRAIN) -> str:
    with pytest.raises(OtherToolError) as error:
        refuse_others(options, KNOWN, command)
    return str(error.value)


@pytest.mark.parametrize("tool", READMES)
def test_the_table_has_what_the_readmes_name(tool: str) -> None:
    names = {
        row.old for program in programs() if program.tool == tool for rows in program.rows.values() for row in rows
    }
    assert not {*READMES[tool].split()} - names


(SEARCH,) = (each["search"] for each in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["plugins"][:1])
ASK = """
class Worker { postMessage({data}) { console.log(data) } }
eval(require("fs").readFileSync(process.argv[1], "utf8"))
for (const data of process.argv.slice(2)) new Worker().postMessage({type: 2, data})
"""
"""What the page of the site sends to its search for each word of the command line, in JavaScript."""


def test_the_search_of_the_site_finds_each_option_on_the_page_of_its_tool() -> None:
    """Law, by the separator of mkdocs.yml and docs/search.js: the page has all parts of each old word."""
    node = shutil.which("node") or pytest.skip("no node, which runs docs/search.js")
    pages = {tool: {*re.split(f"`|{SEARCH['separator']}", generate.other_tool(tool).lower())} for tool in TITLES}
    olds = [(each.tool, row.old) for each in programs() for rows in each.rows.values() for row in rows]
    command = [node, "-e", ASK, str(ROOT / "docs/search.js"), *(old for _, old in olds)]
    queries = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for (tool, old), query in zip(olds, queries, strict=True):
        assert query[0] != "-", old
        words = [word.lstrip("+").removeprefix("text:").rstrip("*") for word in query.lower().split()]
        assert {part for word in words for part in re.split(SEARCH["separator"], word)} <= pages[tool], old


def test_the_search_of_the_site_finds_the_last_part_of_a_name() -> None:
    """Of names such as parallelism.pipeline_parallel_degree, the part that users remember."""
    dotted = [row.old for program in programs() for rows in program.rows.values() for row in rows if "." in row.old]
    assert len(dotted) > 50
    for old in dotted:
        name = old.split()[0]
        if not name.endswith((".py", ".sh")):
            assert name.rpartition(".")[2] in re.split(SEARCH["separator"], name), old


def test_no_mode_is_said_to_divide_the_optimizer_state() -> None:
    """Each replica keeps the moments of all weights of its stage, in all modes."""
    rows = [row for program in programs() for rows in program.rows.values() for row in rows]
    assert not [row for row in rows if "optimizer state" in row.note and "dp.mode" in row.new + row.note]


def test_each_option_is_answered_and_what_it_says_to_type_is_valid() -> None:
    """Law: each row alone, and lines of all that rows say to type, as few as options need different values."""
    lines = list[dict[str, list[str]]]()
    for program in programs():
        for key, row in ((key, row) for key, rows in program.rows.items() if key not in KNOWN for row in rows):
            option = Option(row.old, (row.value or VALUE.get(key, "8")).split("+"))
            text = answer([option], program.command)
            assert row.old in text
            assert row.note in text or not row.value  # for all values, another tool may have another note
            new = text.partition("; here: ")[2].partition("; others: ")[0].partition(" (")[0]
            if program.command == TRAIN and new[:2] == "--":
                words = {flag[0]: flag for flag in map(shlex.split, ("--" + each for each in new[2:].split(" --")))}
                if "--model.quantize" in words:
                    words.setdefault("--adapter.spec", ["--adapter.spec", "lora"])
                if "--optim.masters" in words:  # not with masters in host memory
                    words.setdefault("--optim.offload", ["--optim.offload", "none"])
                line = next((line for line in lines if not words.keys() & line.keys()), None)
                lines += [line := {}] if line is None else []
                line.update(words)
    assert 10 < len(lines) < 40
    needed = {
        "data.eval_fraction": "0.1",
        "checkpoint.every": "5",
        "adapter.spec": "lora",
        "optim.steps": "8",
        "data.sequence": "64",
    }
    for line in lines:
        line.pop("--optim.steps" if "--optim.epochs" in line else "", None)
        given = {flag[2:] for flag in line} | ({"optim.steps"} if "--optim.epochs" in line else set())
        rest = [f"--{name}={value}" for name, value in {**REQUIRED, **needed}.items() if name not in given]
        config = parse([*rest, *(word for flag in line.values() for word in flag)])
        check(config)
        for spec, table in ((config.dp.mode, MODES), (config.optim.name, OPTIMIZERS)):
            from_spec(spec, table, key="spec")


LINES = {
    "cocktailsgd": """--model-name opt --tokenizer-name opt --model-type opt --num-layers 12 --embedding-dim
        2048 --dist-url
        tcp://127.0.0.1:7033 --world-size 8 --pipeline-group-size 2 --data-group-size 4 --net-interface
        lo --optimizer 8bit-adam --load-pretrained-model true --task-name cot:0.1,a.jsonl:1.0
        --checkpoint-path out --checkpoint-steps 100 --total-steps 1000 --warmup-steps 10 --lr 1e-4
        --seq-length 2048 --batch-size 16 --micro-batch-size 1 --gradient-accumulate-step 2 --dp-backend
        gloo --dp-mode cocktail_sgd --fp16 --pp-mode gpipe --profiling no-profiling --rank 0""",
    "ac-sgd": """--model-name checkpoints/gpt2-xl --tokenizer-name gpt2-xl --load-pretrained-model true --task-name
        wikitext --n-epochs 10 --warmup-epochs 1 --num-layers 6 --num-heads 25 --embedding-dim 1600
        --num-iters 10000000 --lr 5e-5 --seq-length 1024 --batch-size 32 --micro-batch-size 1
        --forward-compress-method delta --forward-bits 4 --backward-compress-method fixpoint
        --backward-bits 8 --dist-url tcp://10.0.0.1:9000 --world-size 8 --pipeline-group-size 8
        --pp-mode gpipe --profiling no-profiling --do-evaluation true --optim.clip 2""",
    "finetuner": """--model_name google/flan-t5-xl --model_class AutoModelForSeq2SeqLM --data_path a b --stage 3
        --data_sampling_proportion 1 2 --training_inference_type prompt_tuning --prompt_tuning_init TEXT
        --prompt_tuning_init_text "Classify this, please" --num_virtual_tokens 8 --num_training_steps
        100 --batch_size_per_gpu 8 --gradient_accumulation_steps 2 --dtype torch.bfloat16
        --max_input_tokens 100 --max_output_tokens 28 --eval_and_save_interval 50 --learning_rate 1e-3
        --beta1 0.8 --save_path out --lr_schedule LearningRateScheduler.cosine""",
}
NEW = {
    "cocktailsgd": "torchrun --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:7033 --nproc-per-node 8 -m acsgd "
    "--model.name opt --model.tokenizer opt --pp.stages 2 --optim.name adamw8bit --data.sources "
    "cot:data/mmlu-cot.json:0.1,a.jsonl:1.0 --checkpoint.dir out "
    "--checkpoint.every 50 --optim.steps 500 --optim.warmup 10 --optim.lr 1e-4 --data.sequence 2048 --data.batch 128 "
    "--pp.micro 1 --dp.mode cocktail --model.dtype fp16 --pp.schedule gpipe",
    "ac-sgd": "torchrun --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:9000 --nproc-per-node 8 -m acsgd --model.name "
    "checkpoints/gpt2-xl --model.tokenizer gpt2-xl --data.sources "
    "hf:Salesforce/wikitext:wikitext-2-raw-v1 --optim.epochs 10 --pp.exact_steps 1epochs --optim.lr 5e-5 "
    "--data.sequence 1024 --data.batch 32 --pp.micro 1 --pp.forward delta:bits=4 --model.dropout_mask sample "
    "--pp.backward fixpoint:bits=8 --pp.stages 8 --pp.schedule gpipe --data.eval_fraction 0.05 --optim.clip 2",
    "finetuner": "torchrun -m acsgd --model.name google/flan-t5-xl --model.task seq2seq "
    "--data.sources a/train:1,b/train:2 --data.eval_sources a/val,b/val --dp.shard weights --adapter.spec "
    "'prompt_tuning:tokens=8,init=text,text=Classify this, please' "
    "--optim.steps 100 --data.batch 16 --pp.micro 8 --model.dtype bf16 --data.sequence 128 "
    "--data.max_prompt 100 --data.max_answer 28 --eval.every 50 "
    "--checkpoint.every 50 --optim.lr 1e-3 --optim.betas 0.8 0.95 --log.dir out --optim.schedule cosine",
}


PROGRAMS = {"cocktailsgd": "dist_lm_train.py", "ac-sgd": "dist_lm_runner.py", "finetuner": "src.train"}


@pytest.mark.parametrize("tool", LINES)
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_whole_line_is_answered_with_the_new_line(tool: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    start = ["-m", PROGRAMS[tool]] if is_whole else []
    argv = shlex.split(LINES[tool])
    with pytest.raises(OtherToolError) as error:
        parse([*start, *argv])
    head, *lines, kind, new = message_of(error.value, Launch(), None, checks_input=True).splitlines()
    assert TITLES[tool] in head
    assert len(lines) == is_whole + sum(word[:2] == "--" and "." not in word for word in argv)
    assert (kind, new) == ("type:", NEW[tool])
    monkeypatch.setattr("os.environ", {"COLUMNS": "200"})
    check_shell(new)


PARTS = {
    "--model_name m --no_eval --data_path d --num_virtual_tokens 2": "--data.eval_sources None --eval.every None",
    "--model_name m --data_path d --num_virtual_tokens 2 --no_eval": "--data.sources d/train --data.eval_sources None",
    **{
        f"--model_name m --data_path d {line}": "--eval.every None"
        for line in ("--no_eval --eval_and_save_interval 3", "--eval_and_save_interval 3 --no_eval")
    },
    "--load_path m --temperature 0.7 --do_sample --top_k 4 --max_new_tokens 5 --max_output_tokens 9": (
        "acsgd generate m --temperature 0.7 --top-k 4 --max-new-tokens 5"
    ),
    "--load_path m --temperature 0.7 --top_k 4 --max_new_tokens 5 --output_file o": "m --max-new-tokens 5 --out o",
    "--max_input_tokens 9 20 --max_output_tokens 8 4 --num_training_steps 2": (
        "--data.sequence 28 --data.max_prompt 9 20 --data.max_answer 8 4"
    ),
    "--num_processes 16 --num_machines 2 --mixed_precision bf16": "torchrun --nproc-per-node 8 --nnodes 2 -m acsgd",
    "--num_processes 16 --machine_rank 0 --mixed_precision bf16": "torchrun --nproc-per-node 16 --node-rank 0 -m acsgd",
}
"""Lines of other tools whose options determine a word together, or programs alone, with a part of the answer."""


@pytest.mark.parametrize("line", PARTS)
def test_options_that_belong_together_make_one_word(line: str) -> None:
    with pytest.raises(OtherToolError) as error:
        parse(line.split())
    new = str(error.value).splitlines()[-1]
    assert PARTS[line] in new
    flags = [word for word in new.split() if word.startswith("--")]
    assert len(flags) == len({*flags})


PASTES = {
    "python dist_lm_runner.py --model-name m --n-epochs 10 --world-size N --cuda-id 0 --rank i": (
        "torchrun --nproc-per-node N -m acsgd --model.name m --optim.epochs 10"
    ),
    "python convert_gpt2_checkpoint --model-name gpt2-xl --save-dir dir/": "acsgd convert from-hf gpt2-xl dir/",
    "bash run_lm.sh": "torchrun --nproc-per-node 8 -m acsgd examples/gpt2-delta.toml",
    "TOPK_RATIO=0.2 QUANT_BITS=4 python dist_lm_train.py --dp-mode cocktail_sgd --train-warmup-steps 7": (
        "torchrun -m acsgd --dp.mode cocktail:exact_steps=7,topk=0.2,bits=4"
    ),
    "python dist_clm_train.py ... --cuda-id 0 --rank ${GLOBAL_RANK}": "torchrun -m acsgd",
    "python convert_to_hf_gptj.py --ckpt-path a/2000 --save-path b --n-stages 2 --n-layer-per-stage 14": (
        "acsgd convert from-legacy a/2000 SHARDS && acsgd convert to-hf SHARDS b"
    ),
    "FINETUNE_TOTAL_STEPS=10 bash training/finetune_RedPajama-INCITE-Chat-3B-v1.sh": (
        "torchrun --nproc-per-node 8 -m acsgd examples/neox-oig.toml --optim.steps 10"
    ),
    "python inference/bot.py --model togethercomputer/m": "acsgd generate togethercomputer/m --chat",
    "torchrun --nnodes=2 --nproc_per_node=4 -m src.train --model_name m --batch_size_per_gpu 8 --data_path d": (
        "torchrun --nnodes 2 --nproc-per-node 4 -m acsgd --model.name m --data.batch 64 --pp.micro 8 "
        "--data.sources d/train --data.eval_sources d/val"
    ),
    "jbsub -q x86_24h -mem 128G blaunch.sh sh scripts/full_finetuning/train_ccc.sh": (
        "torchrun --nproc-per-node 4 -m acsgd examples/t5-folder.toml"
    ),
    "python -m src.generate --load_path run --batch_size 8 --data_path d": "acsgd generate run --batch 8 --file d/test",
    "aim up --host 0.0.0.0 --port 8080": "acsgd report RUN_DIR",
    "NGPU=8 CONFIG_FILE=titan.toml ./run_train.sh --training.seq_len 16": (
        "torchrun --nproc-per-node 8 -m acsgd --optim.steps 10 --data.sources demo --data.sequence 16"
    ),
    "axolotl train axolotl.yml --num-epochs 3": (
        "torchrun -m acsgd --model.name m --data.sources hf:a/b --adapter.spec lora:r=8,targets=q_proj+k_proj "
        "--optim.epochs 3"
    ),
    "accelerate launch -m axolotl.cli.inference axolotl.yml --lora_model_dir=./out": "acsgd generate ./out --chat",
    "axolotl merge-lora axolotl.yml --lora-model-dir=./out": "acsgd convert merge ./out MODEL",
    "deepspeed --num_nodes=2 --num_gpus=4 train.py --mine 3 --deepspeed --deepspeed_config ds.json": (
        "torchrun --nnodes 2 --nproc-per-node 4 -m acsgd --data.batch 8 --dp.shard optimizer"
    ),
    "accelerate launch --num_processes 2 run_clm.py --dataset_name w --dataset_config_name c --do_eval": (
        "torchrun --nproc-per-node 2 -m acsgd --data.sources hf:w:c"
    ),
    "accelerate config": "acsgd doctor",
    "--model-name gpt2 --lr 1e-4 --cuda-id 0": "torchrun -m acsgd --model.name gpt2 --optim.lr 1e-4",
}
"""Lines of the READMEs of other tools, shortened, with the line to type."""


@pytest.mark.parametrize("line", PASTES)
def test_a_line_pasted_after_acsgd_is_answered_with_the_new_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "titan.toml").write_text('[training]\nsteps = 10\ndataset = "c4_test"\nseq_len = 8')
    (tmp_path / "axolotl.yml").write_text(
        "base_model: m\ndatasets:\n- path: a/b\nadapter: lora\nlora_r: 8\nlora_target_modules: [q_proj, k_proj]\n"
        "num_epochs: 1\nfsdp:"
    )
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": true}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.run(line.split())
    *lines, kind, new = capsys.readouterr().err.rstrip().splitlines()
    assert new == PASTES[line]
    monkeypatch.chdir(ROOT)
    assert "fsdp" not in str(lines)
    missing = [each.partition(" or ")[0] for each in kind.rstrip(":").partition(", and add ")[2].split(", ") if each]
    monkeypatch.setattr("os.environ", {"COLUMNS": "200"})
    check_shell(" ".join([new.replace(" N ", " 8 "), *(f"{flag} {REQUIRED[flag[2:]]}" for flag in missing)]))


def test_options_without_which_no_run_starts_are_asked_for() -> None:
    assert {name.partition(" or ")[0] for name in NEEDED} == {f"--{name}" for name in REQUIRED}


FILES = {
    "degrees.toml": (
        "[training]\nlocal_batch_size = 2\nglobal_batch_size = -1\nseq_len = 8\n"
        "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 4",
        "torchrun -m acsgd --data.batch 16 --data.sequence 8",
    ),
    "all.toml": (
        "[training]\nlocal_batch_size = 2\nseq_len = 8\n[parallelism]\ndata_parallel_shard_degree = -1",
        "torchrun -m acsgd --data.batch 2 --data.sequence 8",
    ),
    "both.toml": (
        "[training]\nlocal_batch_size = 2\nglobal_batch_size = 64\nseq_len = 8",
        "torchrun -m acsgd --data.batch 64 --data.sequence 8",
    ),
    "auto.json": (
        json.dumps({"train_batch_size": 8, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}),
        "torchrun -m acsgd --data.batch 8",
    ),
    "auto.yml": (
        "base_model: m\nbf16: auto\nmicro_batch_size: 2",
        "torchrun -m acsgd --model.name m --data.batch 2 --pp.micro 2",
    ),
    "ds.json": (
        json.dumps(
            {
                "train_batch_size": 64,
                "train_micro_batch_size_per_gpu": "auto",
                "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}},
                "fp16": {"enabled": False},
                "bf16": {"enabled": True},
                "optimizer": {"type": "OneBitAdam", "params": {"betas": [0.9, 0.95], "freeze_step": 400}},
            }
        ),
        "torchrun -m acsgd --data.batch 64 --optim.offload cpu --model.dtype bf16 "
        "--dp.mode quantized:bits=1,exact_steps=400 --optim.betas 0.9 0.95",
    ),
    "axolotl.yml": (
        "base_model: m\ndatasets:\n- path: a.jsonl\n  type: alpaca\n- path: b.jsonl\nadapter: qlora\nlora_r: 32\n"
        "load_in_4bit: true\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nspecial_tokens:\n  pad_token: x",
        "torchrun -m acsgd --model.name m --data.sources a.jsonl,b.jsonl --data.format alpaca --adapter.spec lora:r=32 "
        "--model.quantize nf4 --data.batch 8 --pp.micro 2",
    ),
    "titan.toml": (
        '[model]\nname = "llama3"\n[optimizer]\nlr = 3e-4\n[training]\nlocal_batch_size = 8\nsteps = 10\n'
        'dataset = "c4"\n'
        "[data]\nsequence = 8\nisolate = true\n[pp]\nexact_eval = false",
        "torchrun -m acsgd --optim.lr 0.0003 --data.batch 8 --optim.steps 10 --data.sources stream:hf:allenai/c4:en "
        "--data.sequence 8 --data.isolate --pp.no-exact_eval",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_tool_is_answered_with_the_new_line(name: str, tmp_path: Path) -> None:
    text, new = FILES[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(OtherToolError) as error:
        parse([str(path)])
    assert str(error.value).splitlines()[-1] == new
    check_required = [f"--{key}={value}" for key, value in REQUIRED.items() if f"--{key} " not in new]
    parse([*shlex.split(new)[3:], *check_required])


BASE = [word for name, value in REQUIRED.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (
            "--dist_url tcp://h:1",
            "tcp://h:1 is an option of AC-SGD, CocktailSGD, Together finetuning and OpenCh",
        ),
        ("--zero_optimization.stage=3", "here: --dp.shard weights"),
        ("--zero_optimization.stage=2", "here: --dp.shard gradients"),
        ("--zero_stage 3", "here: --dp.shard weights"),
        ("--fsdp_sharding_strategy FULL_SHARD", "here: --dp.shard weights"),
        ("--optim.learning_rate 3", "here: --optim.lr 3; others: docs/migrate/finetuner.md"),
        ("--pp.stage 2", "(did you mean --pp.stages?)"),
        ("--model.dtype bfloat16", '("bfloat16" of the DeepSpeed finetuner is "bf16"); all options'),
        ("--stage 3 --fp16", "--stage 3 -> --dp.shard weights"),
        ("--stage 1 --fp16", "--stage 1 -> --dp.shard optimizer"),
    ],
)
def test_an_option_in_a_line_is_answered(flags: str, part: str) -> None:
    with pytest.raises(ValueError) as error:
        parse([*BASE, *flags.split()])
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "[data]\ntask_name = 'a'",
            "data.task_name a is an option of AC-SGD, CocktailSGD, Together",
        ),
        (
            "[bf16]\nenabled = 'auto'",
            "here: nothing (chosen by the Trainer's options there; here it is fp32 without --model",
        ),
        ("bf16 = 'auto'\nbase_model = 'm'", "nothing (chosen by the hardware there; here it is fp32 without --model"),
        ("[zero_optimization]\nstage = 2", "zero_optimization.stage 2 is an option of DeepSpeed, accelerate or"),
        (
            "[model]\ndtype = 'torch.float16'",
            'or "fp16" ("torch.float16" of the DeepSpeed finetuner',
        ),
    ],
)
def test_an_option_in_a_run_file_is_answered(text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        parse([str(path)])
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("key", "table", "spec", "part"),
    [
        ("dp.mode", MODES, "cocktail_sgd", '("cocktail_sgd" of CocktailSGD is "cocktail")'),
        ("optim.name", OPTIMIZERS, "8bit-adam", '("8bit-adam" of CocktailSGD is "adamw8bit")'),
        ("optim.name", OPTIMIZERS, "adam", '("adam" of CocktailSGD: adamw, the default; eps there is 1e-6'),
        ("pp.forward", {"delta": Delta}, "delta-lowbits", '("delta-lowbits" of AC-SGD is "delta:cache_bits=8")'),
    ],
)
def test_a_value_names_the_new_one(key: str, table: dict[str, type], spec: str, part: str) -> None:
    with pytest.raises(ValueError) as error:
        from_spec(spec, table, key=key)
    assert part in str(error.value)


def test_options_of_inference_and_conversion_name_the_new_command(capsys: pytest.CaptureFixture[str]) -> None:
    for line, new in (
        ("generate m --do_sample", "here: --temperature 1 ("),
        (
            "generate --load_path m --data_path d --do_sample --top_k 5 --output_file o",
            "acsgd generate m --file d/test ",
        ),
        ("convert --model-name gpt2-xl --save-dir out", "\nacsgd convert from-hf gpt2-xl out\n"),
        ("convert --ckpt-path a --save-path b --n-stages 2", "from-legacy a SHARDS && acsgd convert to-hf SHARDS b\n"),
    ):
        with pytest.raises(SystemExit):
            cli.run(line.split())
        assert new in capsys.readouterr().err
