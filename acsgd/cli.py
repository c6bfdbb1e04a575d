"""The `acsgd` command: train, evaluate, convert, inspect, generate text, check data and hosts, inject faults.

Each subcommand imports what it needs when it runs: --help does not load torch, which takes seconds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from acsgd.__main__ import EVAL, GENERATE, end_process
from acsgd.__main__ import main as start
from acsgd.commands.chaos import Chaos
from acsgd.commands.data.command import DataCommand
from acsgd.commands.doctor.command import DoctorCommand
from acsgd.commands.evaluation.options import EvalOptions
from acsgd.commands.fetch import FetchCommand
from acsgd.commands.generation.options import GenerateOptions
from acsgd.commands.invite import HostCommand, JoinCommand, NetCommand
from acsgd.commands.launch.command import LaunchCommand
from acsgd.commands.plan import PlanCommand
from acsgd.commands.report.command import ReportCommand
from acsgd.commands.top import TopCommand
from acsgd.commands.typed import as_typed
from acsgd.config.ranges import parse_size
from acsgd.config.run_file import parse_flags, refuse_pasted
from acsgd.config.spec import suggest
from acsgd.errors import ReportedError, missing
from acsgd.failures.report import report_startup_error
from acsgd.failures.signals import build_until_stopped, reporting_stop
from acsgd.failures.stdio import protect_streams
from acsgd.io.files.atomic import describe_stopped_build
from acsgd.launch import Launch, refuse_several_processes
from acsgd.notes import print_note, progress_bar


@dataclass(frozen=True)
class Train:
    """Train in this process: acsgd train RUN.toml. For several processes: torchrun ... -m acsgd RUN.toml."""

    def run(self) -> None:
        """Do nothing: `main` passes the arguments to the training loop."""


@dataclass(frozen=True)
class Eval(EvalOptions):
    __doc__ = EvalOptions.__doc__

    def run(self) -> None:
        """Do nothing: `main` passes the arguments on, since the command also runs under torchrun."""


@dataclass(frozen=True)
class FromHF:
    """Convert a Hugging Face model into layer shards, one safetensors file per layer.

    An interrupted conversion continues when the same command is started again.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Hugging Face id, or directory with config.json and *.safetensors or, without any, pytorch_model*.bin."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Directory to create; must not exist."""
    task: str = "lm"
    """What the model is trained for, which determines its head, as model.task of a run."""
    resize_embeddings: bool = False
    """Whether embedding and head get rows for tokens of the tokenizer that the model lacks, with the values that
    resize_token_embeddings of transformers gives them."""

    def run(self) -> None:
        """Run the conversion."""
        from acsgd.shards.hub import find_model
        from acsgd.shards.manifest import MANIFEST

        source = find_model(self.source, option="source")
        if os.path.lexists(source / MANIFEST):
            raise ValueError(
                f"{source} has layer shards already; use it as it is, or: acsgd convert to-hf {source} MODEL"
            )
        from acsgd.shards.convert import describe_shards, from_hf  # takes seconds

        with progress_bar() as report:
            _create(
                self.target,
                lambda path: from_hf(
                    source,
                    path,
                    task=self.task,
                    verify=True,
                    resize_embeddings=self.resize_embeddings,
                    report=report,
                ),
                resumable=True,
            )
        print(describe_shards(self.target))


@dataclass(frozen=True)
class ToHF:
    """Convert layer shards, such as a checkpoint of a run, into a Hugging Face directory."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Layer-shard directory, checkpoint, or run directory (its newest checkpoint)."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Directory to create; must not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to cast parameters to. Default: no cast, bit for bit."""
    shard_size: str = "5GB"
    """Maximum size of a file: "500MB", "5GB"."""
    best: bool = False
    """Convert the best checkpoint of a run with checkpoint.best, not its newest."""
    push: str | None = None
    """Repository of the Hugging Face Hub to which the directory is uploaded, with its model card: hf://owner/name. A
    new one is private. Default: none."""

    def run(self) -> None:
        """Run the conversion."""
        from acsgd.io.checkpoint.directory import best_checkpoint
        from acsgd.shards.hub import create_repository, push

        limit = parse_size(self.shard_size, option="--shard-size", example='"5GB" or "500MB"')
        source = best_checkpoint(self.source) if self.best else _checkpoint(self.source)
        repository = None if self.push is None else create_repository(self.push)  # before work that takes long
        from acsgd.shards.convert import describe_hf  # takes seconds
        from acsgd.shards.export import to_hf

        with progress_bar() as report:
            _create(
                self.target,
                lambda path: to_hf(source, path, dtype=self.dtype, shard_bytes=limit, report=report),
            )
        print(describe_hf(source, self.target))
        if repository is not None:
            print(f"pushed to {push(repository, self.target)}")


@dataclass(frozen=True)
class FromLegacy:
    """Convert a model or training checkpoint of AC-SGD, CocktailSGD or OpenChatKit into layer shards.

    An interrupted conversion continues when the same command is started again.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Directory with pytorch_*.pt files (a model) or prank_*_checkpoint.pt files (a training checkpoint)."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Directory to create; must not exist."""
    config: Path | None = None
    """Directory with config.json and tokenizer of the model. Default: the source."""

    def run(self) -> None:
        """Run the conversion."""
        if not self.source.exists():
            raise ValueError(
                f"{self.source} {missing(self.source)}; give a directory with pytorch_*.pt or prank_*.pt files"
            )
        from acsgd.shards.convert import describe_shards  # takes seconds
        from acsgd.shards.legacy.convert import from_legacy

        with progress_bar() as report:
            _create(
                self.target,
                lambda path: from_legacy(self.source, path, config=self.config, report=report),
                resumable=True,
            )
        print(describe_shards(self.target))


@dataclass(frozen=True)
class ToLegacy:
    """Convert layer shards into a model of AC-SGD, CocktailSGD or OpenChatKit, one pytorch_*.pt file per layer."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Layer-shard directory, checkpoint, or run directory (its newest checkpoint)."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Directory to create; must not exist."""

    def run(self) -> None:
        """Run the conversion."""
        source = _checkpoint(self.source)
        from acsgd.shards.convert import describe_legacy  # takes seconds
        from acsgd.shards.legacy.convert import to_legacy

        with progress_bar() as report:
            _create(self.target, lambda path: to_legacy(source, path, report=report))
        print(describe_legacy(source, self.target))


@dataclass(frozen=True)
class ToPEFT:
    """Convert the adapter of a checkpoint into a directory for PEFT: PeftModel.from_pretrained(model, DIRECTORY)."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Checkpoint, or run directory (its newest checkpoint), of a run with adapter.spec."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Directory to create; must not exist."""

    def run(self) -> None:
        """Run the conversion."""
        source = _checkpoint(self.source)
        from acsgd.adapters.export import to_peft  # takes seconds

        _create(self.target, lambda path: to_peft(source, path))
        directory = repr(str(self.target))
        print(f"wrote {self.target}; load it with PeftModel.from_pretrained(model, {directory})")
        if (self.target / "generation_config.json").exists():  # which PEFT does not read
            print(f"and its options: model.generation_config = GenerationConfig.from_pretrained({directory})")


@dataclass(frozen=True)
class MergeCommand:
    """Convert a checkpoint with an adapter, or an adapter directory of PEFT, into layer shards of a model with it."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Checkpoint, or run directory (its newest checkpoint), of a run with adapter.spec; adapter directory of PEFT."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Directory to create; must not exist."""
    model: str | None = None
    """Model that an adapter directory of PEFT was trained on. Default: the one that its adapter_config.json names."""

    def run(self) -> None:
        """Run the conversion."""
        from acsgd.shards.files import ADAPTER_CONFIG
        from acsgd.shards.manifest import MANIFEST

        if (self.source / ADAPTER_CONFIG).exists() and not (self.source / MANIFEST).exists():
            from acsgd.commands.merge import merge_peft  # takes seconds
            from acsgd.shards.convert import describe_shards

            _create(self.target, lambda path: merge_peft(self.source, self.model, path))
            print(describe_shards(self.target))
            return
        if not os.path.lexists(self.source):
            raise ValueError(
                f"{self.source} {missing(self.source)}; give a checkpoint, a run directory or an adapter directory of "
                "PEFT"
            )
        source = _checkpoint(self.source)
        if self.model is not None:
            raise ValueError(f"--model is for adapter directories of PEFT, but {source} holds its base; remove --model")
        from acsgd.adapters.export import merge  # takes seconds
        from acsgd.shards.convert import describe_shards

        with progress_bar() as report:
            _create(self.target, lambda path: merge(source, path, report=report))
        print(describe_shards(self.target))


Direction = (
    Annotated[FromHF, tyro.conf.subcommand("from-hf")]
    | Annotated[ToHF, tyro.conf.subcommand("to-hf")]
    | Annotated[FromLegacy, tyro.conf.subcommand("from-legacy")]
    | Annotated[ToLegacy, tyro.conf.subcommand("to-legacy")]
    | Annotated[ToPEFT, tyro.conf.subcommand("to-peft")]
    | Annotated[MergeCommand, tyro.conf.subcommand("merge")]
)


@dataclass(frozen=True)
class Convert:
    """Hugging Face checkpoint <-> layer shards, without loss, one layer in memory at a time."""

    direction: tyro.conf.OmitSubcommandPrefixes[Direction]

    def run(self) -> None:
        """Run the subcommand."""
        target = self.direction.target
        if os.path.lexists(target):
            raise ValueError(f"{target} exists already; give a directory that does not, or remove it")
        with as_typed(type(self.direction)), reporting_stop(lambda: describe_stopped_build(target)):
            self.direction.run()


@dataclass(frozen=True)
class Inspect:
    """Show the contents of checkpoints and verify every byte; exit with 1 if any file is corrupt."""

    path: tyro.conf.Positional[Path]
    """Checkpoint, layer-shard directory, or run directory (all of its checkpoints)."""
    json: bool = False
    """Print JSON, a list of checkpoints, instead of a table."""

    def run(self) -> None:
        """Print the report."""
        from rich.console import Console

        from acsgd.io.checkpoint.directory import directories_at

        directories_at(self.path)  # what is none is refused before the next line, which takes seconds
        from acsgd.io.checkpoint.inspect import as_tables, inspect

        reports = inspect(self.path)
        if self.json:
            print(json.dumps([report.to_dict() for report in reports], indent=2))
        else:
            Console(soft_wrap=True).print(as_tables(reports))
        if any(report.errors for report in reports):
            sys.exit(1)


@dataclass(frozen=True)
class Generate(GenerateOptions):
    """Generate text with a trained model: for --prompt, for each record of --file, or in a chat in the terminal."""

    def run(self) -> None:
        """Check the options, then generate."""
        self.check()
        self.check_model()
        from acsgd.commands.generation.command import generate  # takes seconds

        with as_typed(Generate):
            generate(self)


def main() -> None:
    """Run the command that sys.argv names."""
    if sys.argv[1:2] == ["train"]:
        start(sys.argv[2:], prog="acsgd train")
        return
    if sys.argv[1:2] == [EVAL] or (sys.argv[1:2] == [GENERATE] and Launch.from_env().world_size > 1):
        start(sys.argv[1:], prog="acsgd")
        return
    protect_streams()
    try:
        run(sys.argv[1:])
    except ReportedError as error:
        end_process(error.exit_code)


COMMANDS: dict[str, Any] = {
    "train": Train,
    EVAL: Eval,
    "convert": Convert,
    "inspect": Inspect,
    "plan": PlanCommand,
    GENERATE: Generate,
    "data": DataCommand,
    "chaos": Chaos,
    "doctor": DoctorCommand,
    "launch": LaunchCommand,
    "host": HostCommand,
    "join": JoinCommand,
    "net": NetCommand,
    "report": ReportCommand,
    "top": TopCommand,
    "fetch": FetchCommand,
}

ONE_PROCESS = ("convert", "data")
"""Commands that write, and whose processes would not share the work."""


def run(argv: list[str]) -> None:
    """Run a subcommand other than train and eval. Raises SystemExit if it fails."""
    if not argv or argv[0] in ("-h", "--help"):
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="acsgd", args=["--help"])
    if argv == ["--version"]:
        print(f"acsgd {version('acsgd')}")
        return
    with report_startup_error(Launch()), reporting_stop():
        name, *rest = argv
        if name not in COMMANDS:
            refuse_pasted(argv)
            raise ValueError(f'acsgd has no command "{name}"{suggest(name, COMMANDS)}; all commands: acsgd --help')
        if name in ONE_PROCESS:
            refuse_several_processes(f"acsgd {name}")
        kind = COMMANDS[name]
        takes_overrides = kind in (PlanCommand, LaunchCommand)
        command = kind.parse(rest) if takes_overrides else parse_flags(kind, rest, prog=f"acsgd {name}")
        command.run()


def _checkpoint(path: Path) -> Path:
    """Return the newest checkpoint of a run directory; another path itself. Raises ValueError if it is not one."""
    from acsgd.io.checkpoint.directory import newest_checkpoint
    from acsgd.shards.manifest import find_manifest

    if (found := newest_checkpoint(path)) != path:
        print_note(f"the newest checkpoint of {path} is {found}")
    find_manifest(found)
    return found


def _create(target: Path, build: Callable[[Path], None], *, resumable: bool = False) -> None:
    """Build a directory at `target`. Raises ValueError if the name is taken. resumable: as in `build_atomically`."""

    def make(directory: Path) -> None:
        directory.mkdir(exist_ok=resumable)
        build(directory)

    if not build_until_stopped(target, make, resumable=resumable):
        raise ValueError(f"{target} was created by another process meanwhile and is kept; nothing else was written")


if __name__ == "__main__":
    main()
