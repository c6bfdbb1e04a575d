"""Checkpoints with changed files, with and without the hashes that belong to them."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from acsgd.config.run_file import parse
from acsgd.io.files.checksum import file_checksum
from acsgd.shards.manifest import MANIFEST, _with_checksum
from tests.lib.forks import finish
from tests.soak.area import ACCEPTED, Case, Outcome
from tests.soak.configs import replaced
from tests.soak.mutate import changed_file, changed_json, changed_json_file, read_tensors, shown, write_tensors
from tests.soak.oracle import Ended, refusal
from tests.soak.runs import (
    LIMIT_S,
    STEPS,
    check_finite,
    checkpoints,
    command,
    copy_into,
    flags,
    result,
    train_here,
    write_inputs,
)

RUN = Path("runs/run")
VARIANTS: dict[str, dict[str, object]] = {
    "fp32": {},
    "fp16": {"model__dtype": "fp16"},
    "bf16": {"model__dtype": "bf16"},
    "cocktail of 2 replicas": {"dp__mode": "cocktail"},
    "diloco of 2 replicas": {"dp__mode": "diloco:inner=2"},
}
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)
VALUES = (torch.nan, torch.inf, -torch.inf)

Results = list[dict[str, str]]
"""Files of finished runs, as `runs.result` returns them."""


class Change(NamedTuple):
    """What a case changed."""

    text: str
    law: str
    """"refused": no run may use the checkpoint; "any": the values are possible; "detected": bytes differ from the
    hashes."""


class Checkpoints:
    """Runs that resume from a changed checkpoint, and commands that read it.

    The undisturbed run saves after each step; its last checkpoint is removed, and the case resumes from the one before,
    or, if that is corrupt, from the first. The case has one process; the undisturbed run may have had two replicas.
    """

    deadline_s: ClassVar[float] = 4 * LIMIT_S
    memory_bytes: ClassVar[int] = 3 * 2**30

    @classmethod
    def prepare(cls, directory: Path) -> None:
        """Do nothing: the undisturbed run of a variant is trained by the first case of the variant."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def run(self, case: Case) -> Outcome:
        """Change the newest checkpoint, or sometimes an older one, and resume, inspect, export or train from it."""
        draw = case.draw
        variant = draw.choice([*VARIANTS, "fp32", "fp32"])
        source = _undisturbed(variant, self._directory)
        copy_into(["model", "text.txt", "runs"], source, case.directory)
        checkpoint = checkpoints(RUN).of(STEPS - 1 if draw.random() < 0.85 else STEPS - 2)
        change = _changed(draw, checkpoint)
        use = draw.choice(
            [self._resume, self._resume, self._resume_path, self._inspect, self._export, self._train_from]
        )
        case.describe(f"{variant} {checkpoint.name}/{change.text}; {use.__name__.strip('_')}")
        return use(checkpoint, change, VARIANTS[variant], partial(_expected, source, VARIANTS[variant]))

    def _resume(
        self, checkpoint: Path, change: Change, options: dict[str, object], expected: Callable[[], Results]
    ) -> Outcome:
        """Resume from the newest valid checkpoint: the result must be that of the undisturbed run."""
        ended = train_here(flags(**options))
        outcome = ended.outcome(_names(checkpoint))
        if outcome.verdict == "accepted":
            _check_result(change, expected)
        return outcome

    def _resume_path(
        self, checkpoint: Path, change: Change, options: dict[str, object], expected: Callable[[], Results]
    ) -> Outcome:
        """Resume from the changed checkpoint itself."""
        ended = train_here(flags(checkpoint__resume=checkpoint, log__dir="runs/other", **options))
        outcome = ended.outcome(_names(checkpoint))
        if outcome.verdict == "accepted":
            assert change.law == "any", "a checkpoint that no run may use was accepted"
            check_finite(Path("runs/other"))
        return outcome

    def _inspect(self, checkpoint: Path, change: Change, *_: object) -> Outcome:
        """Inspect the run: it must report what no run may use."""
        ended = command("inspect", str(checkpoint))
        if ended.code == 0:
            assert change.law == "any", f"`acsgd inspect` reports as valid: {change.text}"
            return ACCEPTED
        if ended.errors:
            return ended.outcome(_names(checkpoint))
        return _inspected(ended, checkpoint)

    def _export(self, checkpoint: Path, change: Change, *_: object) -> Outcome:
        """Export to a Hugging Face directory: the weights must be valid."""
        of_tensor = change.text.partition(": ")[2].partition(" ")[0]
        is_of_weights = ".replica-" not in change.text and (change.law == "detected" or "/" not in of_tensor)
        ended = command("convert", "to-hf", str(checkpoint), "hf")
        outcome = ended.outcome(_names(checkpoint))
        assert sorted(path.name for path in Path().iterdir() if "hf" in path.name) in (
            [["hf"]] if outcome.verdict == "accepted" else [[]]
        ), "an export left something behind"
        if outcome.verdict == "accepted":
            assert change.law == "any" or not is_of_weights, "a checkpoint with invalid weights was exported"
            assert not any(path.is_symlink() for path in Path("hf").iterdir()), "a link was exported"
        return outcome

    def _train_from(self, checkpoint: Path, change: Change, options: dict[str, object], *_: object) -> Outcome:
        """Train a new run from the weights of the checkpoint."""
        argv = flags(model__name=checkpoint, log__dir="runs/new", optim__steps=1, **options)
        outcome = train_here(argv).outcome(_names(checkpoint))
        if outcome.verdict == "accepted":
            check_finite(Path("runs/new"), 1)
        return outcome


def _check_result(change: Change, expected: Callable[[], Results]) -> None:
    """Check the result of a run that resumed from whichever checkpoint was valid."""
    if change.law == "any":
        check_finite(RUN)
    else:
        assert result(RUN) in expected(), "resumed to another result than the undisturbed run"


def _train(options: dict[str, object]) -> None:
    """Train in the current directory to the last step."""
    ended = train_here(flags(**options))
    assert ended.code == 0, ended.stderr


def _undisturbed(variant: str, directory: Path) -> Path:
    """Return the directory of the undisturbed run of a variant; train it if no case has yet."""
    path = directory / variant
    if not path.exists():
        unfinished = Path(tempfile.mkdtemp(dir=directory))
        with contextlib.chdir(unfinished):
            write_inputs(Path())
            if "replicas" in variant:
                finish(parse(flags(**VARIANTS[variant])), 2)
            else:
                _train(VARIANTS[variant])
            shutil.rmtree(checkpoints(RUN).of(STEPS))
        unfinished.rename(path)
    return path


def _expected(source: Path, options: dict[str, object]) -> Results:
    """Return the results of runs that resume from each checkpoint of a variant; run them if no case has yet."""
    path = source / "expected.json"
    if not path.exists():
        with contextlib.chdir(source):
            path.write_text(json.dumps([_result_from(step, options) for step in (STEPS - 1, STEPS - 2)]))
    results: Results = json.loads(path.read_text())
    return results


def _result_from(step: int, options: dict[str, object]) -> dict[str, str]:
    """Return the result of a run that resumes after a step; leave the checkpoints as they are."""
    shutil.copytree("runs", "kept")
    for later in range(step + 1, STEPS):
        shutil.rmtree(checkpoints(RUN).of(later))
    _train(options)
    expected = result(RUN)
    shutil.rmtree("runs")
    Path("kept").rename("runs")
    return expected


def _names(checkpoint: Path) -> list[str]:
    return [str(checkpoint), checkpoint.name, "config.json", "optim.", "model."]


def _inspected(ended: Ended, checkpoint: Path) -> Outcome:
    """Return the outcome of an inspection that reports errors."""
    assert ended.code == 1, f"exit code {ended.code}: {ended.stderr[-400:]}"
    assert "Traceback" not in ended.stderr, ended.stderr[-400:]
    corrupt = [line for line in ended.stdout.splitlines() if line.startswith("CORRUPT: ")]
    assert corrupt, f"exit code 1 without a word: {ended.stdout[-400:]}"
    for line in corrupt:
        refusal(line, _names(checkpoint))
    return Outcome("refused", corrupt[0])


def _changed(draw: random.Random, checkpoint: Path) -> Change:
    """Change a checkpoint in place."""
    kinds: list[Callable[[random.Random, Path], Change]] = [_bytes, _bytes, _file, _tensor, _tensor, _tensor, _manifest,
                                                          _model_file, _layer_bytes]  # fmt: skip
    return draw.choice(kinds)(draw, checkpoint)


def _bytes(draw: random.Random, checkpoint: Path) -> Change:
    """Change bytes of a file, and not its hash."""
    path = draw.choice(sorted(checkpoint.iterdir()))
    before = path.read_bytes()
    text = changed_file(draw, path, sorted(checkpoint.iterdir()))
    return Change(text, "any" if path.read_bytes() == before else "detected")


def _file(draw: random.Random, checkpoint: Path) -> Change:
    """Remove a file, or put something that is no file in its place."""
    path = draw.choice(sorted(checkpoint.iterdir()))
    if draw.random() < 0.3:
        path.unlink()
        return Change(f"{path.name}: removed", "detected")
    return Change(replaced(draw, path), "detected")


def _tensor(draw: random.Random, checkpoint: Path) -> Change:
    """Change a tensor of a layer file, and the hash of the file."""
    path = draw.choice(sorted(checkpoint.glob("*.safetensors")))
    tensors = read_tensors(path)
    key = draw.choice(sorted(tensors))
    changed, text, law = _changed_tensor(draw, tensors[key])
    if changed is None:
        del tensors[key]
    else:
        tensors[key] = changed
    if draw.random() < 0.08:
        other = draw.choice(["new", "exp_avg/new", "other/" + key, key + "x"])
        tensors[other] = torch.zeros(2)
        text, law = f"{text}, and {other} added", "refused"
    write_tensors(path, tensors)
    _repair(checkpoint, path)
    return Change(f"{path.name}: {key} {text}", law)


def _changed_tensor(draw: random.Random, x: Tensor) -> tuple[Tensor | None, str, str]:
    """Return a changed tensor, or None to remove it; what has changed; the law."""
    flat = x.reshape(-1)
    shapes: list[Callable[[], Tensor]] = [
        lambda: flat[: max(1, len(flat) // 2)].clone(),
        lambda: flat[:1].clone(),
        lambda: torch.cat([flat, flat]),
        lambda: x.unsqueeze(0).clone(),
        lambda: x.t().contiguous() if x.dim() == 2 else torch.stack([x, x]),
        lambda: flat.clone() if x.dim() != 1 else x.view(-1, 1).clone(),
        lambda: torch.empty(0),
        lambda: x[:-1].clone() if x.dim() else torch.zeros(2),
    ]
    action = draw.random()
    if action < 0.1:
        return None, "removed", "refused"
    if action < 0.4:
        changed = draw.choice(shapes)()
        return changed, f"{list(x.shape)} as {list(changed.shape)}", "any" if changed.shape == x.shape else "refused"
    if action < 0.6:
        changed = x.to(draw.choice(DTYPES))
        return changed, f"{x.dtype} as {changed.dtype}", "any" if changed.is_floating_point() else "refused"
    changed = flat.clone()
    at = draw.randrange(len(changed))
    if action < 0.85 and x.is_floating_point():
        changed[at] = draw.choice(VALUES)
        return changed.view_as(x), f"is {changed[at].item()} at {at}", "refused"
    if x.is_floating_point():
        changed[at] = draw.choice([0.0, -0.0, 1e-45, -1.0, 2.0, 1e3])
    return changed.view_as(x), f"is {changed[at].item()} at {at}", "any"


def _manifest(draw: random.Random, checkpoint: Path) -> Change:
    """Change a field of the manifest, and its hash."""
    path = checkpoint / MANIFEST
    fields: dict[str, Any] = json.loads(path.read_text())
    fields.pop("checksum")
    if draw.random() < 0.2:
        names = draw.choice(["../secret.safetensors", "/etc/passwd", "", ".", "a/../head.safetensors", "x" * 300, "\0"])
        layer = draw.choice(sorted(fields["layers"]))
        fields["layers"][layer]["file"] = names
        text, law = f"file={shown(names)}", "refused"
        shutil.copyfile(checkpoint / "head.safetensors", checkpoint.parent / "secret.safetensors")
    else:
        fields, text = changed_json(draw, fields)
        law = "any"
    if not isinstance(fields, dict):
        fields = {"format": fields}
    path.write_bytes(_with_checksum(fields))
    return Change(f"{path.name}: {text}", law)


def _model_file(draw: random.Random, checkpoint: Path) -> Change:
    """Change config.json or a tokenizer file, and sometimes its hash."""
    path = draw.choice(sorted(path for path in checkpoint.glob("*.json") if path.name != MANIFEST))
    before = path.read_bytes()
    text = changed_json_file(draw, path)
    if path.read_bytes() == before:
        return Change(f"{text} (the same bytes)", "any")
    if draw.random() < 0.5:
        _repair(checkpoint, path)
        return Change(f"{text}, with its hash", "any")
    return Change(text, "detected")


def _layer_bytes(draw: random.Random, checkpoint: Path) -> Change:
    """Change bytes of a layer file, and its hash."""
    path = draw.choice(sorted(checkpoint.glob("*.safetensors")))
    text = changed_file(draw, path)
    _repair(checkpoint, path)
    return Change(f"{text}, with its hash", "any")


def _repair(checkpoint: Path, path: Path) -> None:
    """Write size and hash of a changed file into the manifest."""
    manifest = checkpoint / MANIFEST
    fields = json.loads(manifest.read_text())
    fields.pop("checksum")
    entries = [*fields["layers"].values(), *fields["model_files"]]
    entries += [entry for files in fields["replicas"].values() for entry in files]
    for entry in entries:
        if entry["file"] == path.name:
            entry |= {"bytes": path.stat().st_size, "checksum": file_checksum(path)}
    manifest.write_bytes(_with_checksum(fields))
