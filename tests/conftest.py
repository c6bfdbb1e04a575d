"""Fixtures of every test.

torch and transformers are imported where they are used: the process that starts the workers of pytest-xdist needs
neither.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from lib.patience import TEST_S, stretched
from lib.processes import DIRECTORY, start_shared_server
from lib.stores import STORES, open_store, s3_server

from acsgd.failures.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STARTS_PROCESSES = {
    *("subprocess", "tests.soak.oracle", "tests.soak.campaign"),
    *(f"tests.lib.{name}" for name in ("processes", "ranks", "forks", "launched", "daemons", "hosts", "replicas")),
}
"""Modules of which a test file imports a name if its tests start processes."""


def _listed(name: str) -> set[tuple[str, ...]]:
    """Read a list of files, tests and rows of tests: (file,), (file, test) or (file, test[row])."""
    lines = Path(__file__).with_name(name).read_text().splitlines()
    return {tuple(line.split("::", 1)) for line in lines if line[0] != "#"}


SLOW = _listed("slow.txt")
SOAK = _listed("soak.txt")
UNKNOWN = pytest.StashKey[list[str]]()
"""Names of the lists that no collected test has."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist starts its workers
def pytest_sessionstart(session: pytest.Session) -> None:
    """Choose the directory that all tests share and, for workers of pytest-xdist, start the server of their processes.

    It imports while they collect, in an environment that no test has changed.
    """
    options = session.config.option
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[DIRECTORY] = str(session.config._tmp_path_factory.getbasetemp() / "shared")
    if getattr(options, "numprocesses", None) and "not processes" not in options.markexpr:
        start_shared_server()


def pytest_collection(session: pytest.Session) -> None:
    """Let each worker of pytest-xdist begin with other files: in a new clone each is rewritten and compiled by one.

    All workers collect all files. In the same order, they would all rewrite the same ones at the same time.
    """
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is None:
        return
    files = [file for arg in session.config.args if Path(arg).is_dir() for file in sorted(Path(arg).rglob("test_*.py"))]
    for file in files[int(worker.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        if str(file.parent.resolve()) not in sys.path:
            sys.path.insert(0, str(file.parent.resolve()))
        with contextlib.suppress(Exception, pytest.skip.Exception):  # is raised again where pytest imports the file
            importlib.import_module(file.stem)


@pytest.hookimpl(tryfirst=True)  # before those that are not selected are removed
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Name the tests that one process runs, for --dist loadgroup: those of a file that share what a fixture makes.

    All others of `dist` and `run` may run anywhere, so that none of the workers is left with a long file at the end.
    """
    config.stash[UNKNOWN] = _unknown(items)
    for item in items:
        if _modules_used(item.module) & STARTS_PROCESSES:
            item.add_marker(pytest.mark.processes)
        names = _names_of(item)
        if names & SLOW:
            item.add_marker(pytest.mark.slow)
        if names & SOAK:
            item.add_marker(pytest.mark.soak)
        file, _, name = item.nodeid.partition("::")
        shares = any(fixtures[-1].scope == "module" for fixtures in _fixtures_of(item).values())
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(file if shares or "/unit/" in file else f"{file} {name}"))


def _unknown(items: list[pytest.Item]) -> list[str]:
    """Return the files, tests and rows of the lists that do not exist, of the files that were collected."""
    collected = {name for item in items for name in _names_of(item)}
    files = {path.name for path in Path(__file__).parent.glob("*/test_*.py")}
    unknown = [
        name for name in SLOW | SOAK if name[0] not in files or (name[:1] in collected and name not in collected)
    ]
    return sorted("::".join(name) for name in unknown)


def _names_of(item: pytest.Item) -> set[tuple[str, ...]]:
    """Return the names of the lists that mean a test: its file, the test with all of its rows, its row."""
    file = item.path.name
    return {(file,), (file, item.name.partition("[")[0]), (file, item.name)}


@functools.cache
def _modules_used(file: ModuleType) -> set[str]:
    """Return the modules from which the file of a test imports names."""
    names = [getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(file).values()]
    return {f"tests.{name}" if str(name).startswith("lib.") else str(name) for name in names}


def _fixtures_of(item: pytest.Item) -> dict[str, Sequence[pytest.FixtureDef[object]]]:
    """Return the definitions of all fixtures of a test, by name."""
    found: dict[str, Sequence[pytest.FixtureDef[object]]] = item._fixtureinfo.name2fixturedefs
    return found


def pytest_collection_finish() -> None:
    """Let no collection of garbage visit the objects of all modules and tests, of which there are millions."""
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give each test a time limit that a busy machine stretches, for which pytest-timeout looks after this."""
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(2 * stretched(TEST_S)))
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def _shared_caches() -> None:
    """Let all tests share layers of models and tokens of demo texts, also those of other workers of pytest-xdist."""
    from lib.shared import share_caches

    share_caches()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """OpenMP's threads do not survive a fork, and a process that is forked would wait for them."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _kept_options() -> None:
    """Let tyro look at each dataclass once, not in each call, of which that takes half. A command calls it once."""
    from tyro import _unsafe_cache

    _unsafe_cache.clear_cache = lambda: None


@pytest.fixture(autouse=True)
def _former_signals() -> Iterator[None]:
    """Restore how stop signals are handled after each test: a command that fails leaves them to its process, which
    ends with the report of the failure."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if (fd := signal.set_wakeup_fd(-1)) != -1:
        os.close(fd)  # the thread that reads the other end of this pipe ends


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> Callable[[str], set[Any]]:
    """Return a function that gives the values of a parameter in the tests of a module that are run, as by -m or -k.

    So that a fixture runs what these tests need, and no more.
    """
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return lambda parameter: {spec.params[parameter] for spec in specs if spec is not None and parameter in spec.params}


@pytest.fixture
def unknown_tests(pytestconfig: pytest.Config) -> list[str]:
    """Names in slow.txt and soak.txt that no collected test has. An error while collecting would end the workers of
    pytest-xdist without a word."""
    return pytestconfig.stash[UNKNOWN]


@pytest.fixture
def own_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine models as outside of tests, where that is what is tested."""
    from lib.shared import use_own_caches

    use_own_caches(monkeypatch.setattr)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of an empty directory, without a slash at its end."""
    with open_store(request.param) as address:
        yield address


@pytest.fixture
def s3() -> Iterator[Any]:
    """A server that speaks S3, with a bucket "bucket"."""
    with s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 512 tokens, trained on the text of the "demo" source."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sorted(topics.values()), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>")


@pytest.fixture(scope="session")
def tiny_model(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that gives the directory of a small Hugging Face model with new weights and the tokenizer.

    family: a key of TINY; options override the config.
    """
    from lib.models import save_tiny_model

    made: dict[str, Path] = {}

    def make(family: str = "gpt2", **options: Any) -> Path:
        name = " ".join([family, *(f"{key}={value}" for key, value in sorted(options.items()))])
        if name not in made:
            made[name] = tmp_path_factory.mktemp("models") / family
            save_tiny_model(made[name], tokenizer, family, **options)
        return made[name]

    return make
