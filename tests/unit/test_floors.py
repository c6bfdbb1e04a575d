"""The architecture as tables: which file may import which, and which may name torch.distributed or torch.cuda."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The order in which the package is read: a file imports only files above it.
ORDER = """
    errors
    atomic
    notes
    progress
    launch
    fields
    seeds
    waits
    connections
    meter
    streams
    read_ahead
    config.ranges
    checksum
    config.spec
    adapters.spec
    config.options
    config.checks
    config.run_file
    codecs.base
    codecs.bits
    codecs.entropy
    codecs.identity
    codecs.byte_planes
    codecs.layout
    codecs.positions
    codecs.cache_update
    codecs.message
    codecs.log_levels
    codecs.scales
    codecs.kernels
    codecs.fixpoint
    codecs.lloyd
    codecs.hadamard
    codecs.topk
    codecs
    layers.description
    layers.lengths
    layers.capture
    layers.skeleton
    layers.lookup_table
    layers.relative_bias
    layers.recorders
    layers.known_values
    layers.trace
    layers.limits
    layers.derive
    layers.masks
    layers.composed
    layers.compare
    layers.padding
    layers.small_config
    layers.verify
    metrics
    tasks
    adapters.quantize
    adapters.prompt
    adapters.prefix
    adapters.inject
    adapters
    shards.weights
    shards
    shards.layer_tensors
    shards.files
    shards.torch_files
    shards.writer
    shards.config
    shards.check
    shards.manifest
    shards.disk
    shards.load
    adapters.base
    adapters.initial
    shards.plan
    shards.stored
    shards.names
    shards.journal
    shards.initial
    shards.hf_model
    shards.locate
    shards.convert
    adapters.export
    shards.model_card
    shards.export
    shards.legacy.layouts
    shards.legacy.files
    shards.legacy.model
    shards.legacy.convert
    shards.legacy
    shards.written
    shards.hub
    shards.tokenizer
    optim.base
    optim.replay
    optim.schedule
    optim.clipping
    optim.loss_scale
    optim.torch_optimizer
    optim.adamw
    optim.adamw8bit
    optim.adafactor
    optim.lion
    optim.muon
    optim.sgd
    optim
    store
    liveness
    process_groups
    topology
    run.stdio
    run.processes
    run.signals
    run.error_report
    run.failures
    pp.schedules.placement
    pp.schedules.actions
    pp.schedules.dependencies
    pp.schedules.lowering
    pp.schedules.validation
    pp.schedules.schedules
    pp.schedules.programs
    pp.schedules.rows
    pp.schedules.simulate
    pp
    pp.wire.frame
    pp.wire.coder
    pp.wire.row_coder
    pp.wire.channel
    pp.wire.cache
    pp.wire.cache_disk
    pp.wire.cache_sync
    pp.wire.delta
    pp.wire.cache_plan
    pp.wire.mailbox
    pp.wire.link
    pp.tied.plan
    pp.tied.dense
    pp.tied.groups
    pp.tied.rows
    pp.tied.ties
    pp.tied
    dp.exchange.peers
    dp.resize
    dp.sync
    dp.exchange.single_replica
    dp.exchange.flat
    dp.exchange.averaging
    dp.exchange.masks
    dp.exchange.error_feedback
    dp.exchange.buckets
    dp.exchange.second_moments
    dp.exchange.local_weights
    dp.exchange.reduced_updates
    dp.modes.allreduce
    dp.modes.sharded_ps
    dp.modes.central_ps
    dp.modes.powersgd
    dp.modes.local
    dp.modes.cocktail
    dp.modes.diloco
    dp.modes.sparseloco
    dp.modes.quantized
    dp.modes.cocktail_grad
    dp.modes
    dp
    dp.hooks.pending
    dp.hooks.param_buffer
    dp.hooks.hooks
    dp.hooks
    pp.nonfinite
    pp.stage
    pp.nan_probe
    pp.micro_shapes
    pp.runtime
    io.cache
    io.entry
    io.sources.text
    io.sources.base
    io.sources.pieces
    io.sources.fingerprint
    io.sources.json_records
    io.sources.plain_text
    io.sources.tables
    io.sources.files
    io.sources.url
    io.sources.hub
    io.sources.remote
    io.sources.seekable
    io.sources.streamed
    io.sources.sets
    io.sources.wikitext
    io.sources.natural_instructions
    io.sources.split_files
    io.sources.glue
    io.sources.sources
    io.formats.base
    io.formats.text
    io.formats.prompts
    io.formats.chat
    io.formats.labelled
    io.formats.labels
    io.formats.formats
    io
    io.sampling.sampler
    io.sampling.arrays
    io.sampling.targets
    io.sampling.plain_specials
    io.sampling.encode
    io.sampling.encode_examples
    io.sampling.pipeline
    io.sampling.corpus_writer
    io.sampling.tokens
    io.sampling.segments
    io.sampling.segment_files
    io.sampling.segment_cache
    io.rows.base
    io.rows.described
    io.rows.concat
    io.rows.best_fit
    io.rows.objectives
    io.rows.ul2r
    io.rows.layout
    io.rows.cuts
    io.rows.documents
    io.rows.labelled
    io.rows.streamed
    io.sampling.batches
    io.sampling.held_out
    io.checkpoint.source_identity
    io.checkpoint.progress
    io.checkpoint.directory
    io.checkpoint.constants
    io.checkpoint.written
    io.checkpoint.saver
    io.checkpoint.resume
    io.checkpoint.contents
    io.checkpoint.inspect
    io.telemetry.text_log
    io.telemetry.record
    io.telemetry.config_file
    io.telemetry.json_lines
    io.telemetry.terminal
    io.telemetry.wandb_log
    io.telemetry.metrics
    run.control
    run.evaluation
    run.limits
    run.plugins
    run.layers_cache
    run.model
    run.streams
    run.cut
    run.job
    run.lease
    run.lock
    run.rows
    run.data
    run.padding
    run.inputs
    run.session
    run.dealing
    run.stragglers
    run.pace
    run.loop_state
    run.nan_diagnosis
    run.build
    run.tied
    run.state
    run.text_log
    run.checkpointing
    run.after_step
    run.spike_guard
    train
    elastic.assignment
    elastic.plan
    elastic.messages
    elastic.effects
    elastic.presence
    elastic.candidate
    elastic.member
    elastic.preparation
    elastic.promises
    elastic.views
    elastic.register
    elastic.run_directory
    elastic.refusal
    elastic.transport
    elastic.processes
    elastic.joining
    elastic.local_workers
    elastic.daemon
    elastic.addresses
    elastic.rendezvous
    elastic.control
    elastic.transfer
    elastic.snapshot_cost
    elastic.snapshot_store
    elastic.packed
    elastic.snapshots
    elastic.state_channel
    elastic.joins
    elastic.handover
    elastic.setup
    elastic.stores
    elastic.events
    elastic.view_lock
    elastic.view_metrics
    elastic.worker
    elastic.chaos
    elastic
    main
    generation.options
    generation.adapter
    generation.model
    generation.prompts
    generation.decode
    generation.records
    generation.output
    generation.chat
    generation.command
    evaluation.options
    evaluation.model
    evaluation.job
    evaluation.report
    evaluation.answers
    evaluation.harness
    evaluation.command
    __main__
    data.findings
    data.label_counts
    data.opened
    data.show
    data.show_rows
    data.check
    data.dedup
    data.command
    cli
"""
POSITION = {f"acsgd.{name}": position for position, name in enumerate(ORDER.split())}

# Names that only some files may use.
RESERVED = {
    "torch.distributed": (
        "acsgd.comm.store",
        "acsgd.comm.process_groups",
        "acsgd.topology",
        "acsgd.pp.wire",
        "acsgd.dp",
        "acsgd.io.checkpoint",
        "acsgd.run.setup.report",
        "acsgd.elastic",
        "acsgd.main",
        "acsgd.commands.evaluation.command",
    ),
    "torch.cuda": ("acsgd.streams", "acsgd.codecs"),
    "os.environ": ("acsgd.launch",),
    "os._exit": ("acsgd.__main__",),
}
TORCH_FREE = (
    "acsgd.errors",
    "acsgd.comm.waits",
    "acsgd.comm.connections",
    "acsgd.launch",
    "acsgd.failures.stdio",
    "acsgd.failures.processes",
    "acsgd.failures.signals",
    "acsgd.failures.report",
    "acsgd.config.ranges",
    "acsgd.config.spec",
    "acsgd.config.options",
    "acsgd.config.checks",
    "acsgd.config.run_file",
    "acsgd.commands.generation.options",
    "acsgd.commands.evaluation.options",
    "acsgd.commands.data.command",
    "acsgd.pp.schedules.actions",
    "acsgd.pp.schedules.actions",
    "acsgd.pp.schedules.dependencies",
    "acsgd.pp.schedules.lowering",
    "acsgd.pp.schedules.validation",
    "acsgd.pp.schedules.schedules",
    "acsgd.pp.schedules.rows",
    "acsgd.pp.schedules.simulate",
)
NEVER_AT_MODULE_LEVEL = (
    "cupy",
    "bitsandbytes",
    "wandb",
    "aim",
    "datasets",
    "pandas",
    "pyarrow",
    "sklearn",
    "scipy",
    "torchmetrics",
    "lm_eval",
)


def _files() -> dict[str, Path]:
    files = {}
    for path in sorted((ROOT / "acsgd").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


FILES = _files()


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            assert not node.level
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else node.module


def _names(tree: ast.AST) -> Iterator[str]:
    """Every dotted name and import, e.g. torch.cuda.Stream."""
    yield from _imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_every_file_is_in_the_order() -> None:
    assert not {module for module in FILES if module not in POSITION and not _is_bare_package(module)}
    assert not POSITION.keys() - FILES.keys()


def test_a_file_imports_only_files_above_it() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in FILES.items()
        for imported in _imports(ast.parse(path.read_text()))
        if _within(imported, "acsgd") and POSITION.get(imported, -1) >= POSITION.get(module, 0)
    ]
    assert not wrong


def _is_bare_package(module: str) -> bool:
    """Whether a module is an __init__ that imports nothing of the project."""
    path = FILES[module]
    return path.name == "__init__.py" and not any(
        _within(name, "acsgd") for name in _imports(ast.parse(path.read_text()))
    )


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names_are_used_only_where_allowed(name: str) -> None:
    for module, path in FILES.items():
        if any(_within(module, owner) for owner in RESERVED[name]):
            continue
        used = [used for used in _names(ast.parse(path.read_text())) if _within(used, name)]
        assert not used, f"{module} names {used[0]}; only {RESERVED[name]} may"


# Calls without arguments of a method `wait`, which are no waits for an operation of torch, by file.
OTHER_WAITS = {
    "acsgd.comm.waits": {"work"},
    "acsgd.dp.exchange.local_weights": {"self._exact"},
    "acsgd.dp.modes.cocktail": {"super()"},
    "acsgd.dp.modes.powersgd": {"super()"},
    "acsgd.elastic.host.daemon": {"self._ended"},
    "acsgd.pp.runtime": {"stage.sync"},
    "acsgd.pp.wire.cache_sync": {"exchange"},
    "acsgd.pp.wire.channel": {"exchange"},
    "acsgd.run.step.checkpointing": {"self._saver"},
}
BLOCKING = {"send", "recv", "barrier", "broadcast", "reduce", "gather", "scatter", "monitored_barrier"}


def test_all_waits_for_other_ranks_are_those_of_acsgd_waits() -> None:
    """So that they can be interrupted: no file waits for an operation itself, or calls a blocking one."""
    for module, path in FILES.items():
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            if not isinstance(call.func, ast.Attribute):
                continue
            owner, name = ast.unparse(call.func.value), call.func.attr
            if name == "wait" and not call.args:
                assert owner in OTHER_WAITS.get(module, ()), f"{module} calls {owner}.wait(); use Waits.wait"
            if owner == "dist" and (name in BLOCKING or name.startswith(("all_", "reduce_", "batch_"))):
                is_async = any(k.arg == "async_op" and ast.unparse(k.value) == "True" for k in call.keywords)
                assert is_async, f"{module} calls dist.{name}, which blocks; pass async_op=True, and use Waits.wait"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_pure_files_need_no_torch(module: str) -> None:
    assert not [name for name in _imports(ast.parse(FILES[module].read_text())) if _within(name, "torch")]


def _executed_on_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not for_types and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _executed_on_import(child)


def test_optional_packages_are_not_imported_by_the_core() -> None:
    for module, path in FILES.items():
        nodes = _executed_on_import(ast.parse(path.read_text()))
        imports = ast.Module([node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)], [])
        imported = [name for name in _imports(imports) if name.partition(".")[0] in NEVER_AT_MODULE_LEVEL]
        assert not imported, f"{module} imports {imported[0]}"


def test_the_training_loop_is_short() -> None:
    assert len(FILES["acsgd.train"].read_text().splitlines()) < 200


def test_nothing_is_pickled_by_hand() -> None:
    """No object collective and no unpickling but of tensors alone, in tests and benchmarks either."""
    for folder in ("acsgd", "benchmarks", "examples", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            used = [n for n in _names(tree) if n.endswith(("_object", "_object_list")) or _within(n, "pickle")]
            assert not used, path
            loads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_torch_load(node)]
            assert len(loads) == sum(_loads_only_tensors(node) for node in ast.walk(tree)), path


def _is_torch_load(node: ast.AST) -> bool:
    return ast.unparse(node) == "torch.load"


def _loads_only_tensors(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and _is_torch_load(node.func)
        and any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
    )
