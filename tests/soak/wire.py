"""Messages between stages and between replicas, damaged on their way."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from acsgd.codecs import CODECS
from acsgd.codecs.base import Codec, unpack
from acsgd.codecs.log_levels import LogLevels
from acsgd.codecs.message import MessageCodec, PackedCodec
from acsgd.codecs.topk import TopK
from acsgd.comm.waits import DIRECT, Meter
from acsgd.dp.peers import Peers
from acsgd.pp.wire.cache import ActivationCache
from acsgd.pp.wire.cache_plan import CachePlan
from acsgd.pp.wire.coder import TensorSpec, TransferInfo
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.link import Link, LinkFactory
from acsgd.streams import Streams
from tests.soak.area import ACCEPTED, Case, Outcome
from tests.soak.loopback import Change, Loopback, loopback
from tests.soak.mutate import changed_bytes
from tests.soak.oracle import attempt

CPU = Streams(torch.device("cpu"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Wire:
    """Messages of every codec with random options, of which one is damaged."""

    deadline_s: ClassVar[float] = 20.0
    memory_bytes: ClassVar[int] = 2 * 2**30

    @classmethod
    def prepare(cls, directory: Path) -> None:
        """Do nothing."""

    def __init__(self, directory: Path) -> None:
        self._cleanup = contextlib.ExitStack()
        self._network, self._group = self._cleanup.enter_context(loopback())

    def run(self, case: Case) -> Outcome:
        """Damage a message between stages, between replicas, or of a codec alone."""
        return case.draw.choice([self._link, self._link, self._peers, _codec])(case)

    def _link(self, case: Case) -> Outcome:
        """Damage a message of a link: it must be refused, or decode to the same tensor."""
        draw = case.draw
        kind = draw.choice(["activation", "activation", "gradient", "tie"])
        forward = any_codec(draw, {**CODECS, "delta": Delta} if kind == "activation" else CODECS)
        shape = tuple(draw.choice([1, 2, 3, 5, 8, 16]) for _ in range(3))
        transfer = _Transfer(kind, forward, TensorSpec(shape, draw.choice(DTYPES)), draw.randrange(2**31), draw)
        change, description = any_change(draw)
        case.describe(f"{kind} {shape} {transfer.spec.dtype} {forward}: {description}")
        with transfer.run(self._network, self._group, None) as (expected, _):
            pass
        assert isinstance(expected, Tensor), expected
        with transfer.run(self._network, self._group, change) as (received, caches):
            for cache in caches:
                _check_finite(cache, forward, transfer.spec)
        if isinstance(received, Outcome):
            return received
        assert same(received, expected), f"a damaged message was accepted: {difference(received, expected)}"
        return ACCEPTED

    def _peers(self, case: Case) -> Outcome:
        """Damage a message between replicas: it must be refused, or be the same."""
        draw = case.draw
        codec = any_message_codec(draw)
        n = draw.choice([1, 2, 7, 64, 1000])
        message = codec.encode(torch.randn(n, generator=_generator(draw)))
        change, description = any_change(draw)
        case.describe(f"{n} elements between replicas, {codec}: {description}")
        self._network.change = change
        peers = Peers(self._group, DIRECT)
        longest = codec.max_bytes(n)
        exchange = peers.submit(lambda: peers.exchange({0: message}, {0: longest}, Meter()))
        received = attempt(exchange.wait, ["replica 0"])
        self._network.change = lambda sent: sent
        if isinstance(received, Outcome):
            return received
        body = exchange.result(Meter())[0]
        assert torch.equal(body, message), "a damaged message between replicas was accepted"
        return ACCEPTED


def _codec(case: Case) -> Outcome:
    """Decode a damaged message without the checks of the wire: it is refused, or decodes to a vector."""
    draw = case.draw
    codec = any_message_codec(draw)
    n = draw.choice([1, 2, 7, 64, 1000])
    message = codec.encode(torch.randn(n, generator=_generator(draw))).numpy().tobytes()
    change, description = any_change(draw)
    case.describe(f"{n} elements of {codec}: {description}")
    damaged = change(message)[: codec.max_bytes(n)]
    tensor = torch.frombuffer(bytearray(damaged), dtype=torch.uint8) if damaged else torch.empty(0, dtype=torch.uint8)
    decoded = attempt(lambda: codec.decode(tensor, n), ["message", "corrupt"])
    if isinstance(decoded, Outcome):
        return decoded
    assert decoded.shape == (n,), f"decodes to shape {tuple(decoded.shape)}"
    assert decoded.dtype == torch.float32, f"decodes to {decoded.dtype}"
    return ACCEPTED


@dataclasses.dataclass(frozen=True)
class _RecordedCaches(CachePlan):
    """A plan that keeps the caches that it has opened."""

    opened: list[ActivationCache] = dataclasses.field(default_factory=list)

    def open(self, *args: Any) -> ActivationCache:
        cache = super().open(*args)
        self.opened.append(cache)
        return cache


class _Transfer:
    """Micro-batches that cross a boundary; the last of them is the one to be damaged."""

    def __init__(self, kind: str, codec: Codec | Delta, spec: TensorSpec, seed: int, draw: random.Random) -> None:
        self.spec = spec
        self._kind = kind
        self._codec = codec
        self._seed = seed
        self._steps = draw.choice([1, 2, 3]) if isinstance(codec, Delta) else 1
        self._scale = draw.choice([1.0, 1.0, 1e-3, 1e3])
        self._poison = draw.choice([None] * 8 + [torch.nan, torch.inf])
        self._has_new_samples = draw.random() < 0.3

    @contextlib.contextmanager
    def run(
        self, network: Loopback, group: Any, change: Change | None
    ) -> Iterator[tuple[Tensor | Outcome, list[ActivationCache]]]:
        """Send all micro-batches, the last one changed; yield what was received last, and the caches of both ends."""
        delta = isinstance(self._codec, Delta)
        plan = _RecordedCaches([100], Path("caches"), ["block-00001"], "run", fresh=True) if delta else None
        backward = CODECS["none"]() if delta else self._codec
        factory = LinkFactory(
            group, DIRECT, CPU, [{"hidden": self.spec}], [self._codec], [backward], Meter(), Meter(), plan
        )
        generator = torch.Generator().manual_seed(self._seed)
        torch.manual_seed(self._seed)  # of stochastic rounding
        with contextlib.ExitStack() as stack:
            if self._kind == "tie":
                outbox, inbox = factory.open_tie(0, self.spec, peer=1)
                stack.callback(outbox.close)
                ends: list[Link] = []
            else:
                ends = [factory.open(0, peer=1, downstream=downstream) for downstream in (True, False)]
                for end in ends:
                    stack.callback(end.close)
                sender, receiver = ends if self._kind == "activation" else ends[::-1]
                outbox, inbox = sender.outbox, receiver.inbox
            name = "gradient" if self._kind == "tie" else "hidden"
            received: Tensor | Outcome = torch.empty(0)
            for step in range(self._steps):
                is_last = step == self._steps - 1
                x = torch.randn(self.spec.shape, generator=generator).mul_(self._scale).to(self.spec.dtype)
                if is_last and self._poison is not None:
                    x.view(-1)[0] = self._poison
                samples = tuple(range(self.spec.shape[0]))
                if is_last and self._has_new_samples:
                    samples = (*samples[1:], 77)
                for end in ends:
                    end.begin_step(samples, samples)
                info = TransferInfo(step, 0, samples=samples)
                inbox.post()
                if is_last and change is not None:
                    network.change = change
                try:
                    _finish_caches(ends)
                    outbox.send(info, {name: x})
                    outbox.drain()
                finally:
                    network.change = lambda sent: sent
                received = attempt(lambda info=info: inbox.receive(info).state[name], ["rank 1"])
            yield received, plan.opened if plan else []


def _finish_caches(ends: list[Link]) -> None:
    """Compare the caches of both ends of a link, as its first transfer of a step does."""
    for end in ends:
        end._cache_sync.finish()


def _check_finite(cache: ActivationCache, delta: Codec | Delta, spec: TensorSpec) -> None:
    """Check that all entries of a cache are finite."""
    assert isinstance(delta, Delta)
    shape = spec.shape[1:]
    for sample in cache.versions():
        fields = unpack(cache.read(sample), delta.cache_codec.wire(shape, delta.cache_dtype))
        entry = delta.cache_codec.decode(fields, shape, delta.cache_dtype)
        assert entry.isfinite().all(), f"the cache entry of sample {sample} is not finite"


def any_codec(draw: random.Random, table: dict[str, type]) -> Any:
    """Return a codec of a table with random options."""
    kind = draw.choice(list(table.values()))
    while True:
        options = {name: any_option(draw, name, hint) for name, hint in _options(kind).items() if draw.random() < 0.4}
        with contextlib.suppress(ValueError):
            return kind(**options)


def _options(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {option.name: hints[option.name] for option in dataclasses.fields(kind)}


def any_option(draw: random.Random, name: str, hint: Any) -> Any:
    """Return a value of an option's type; few are valid for every option."""
    if typing.get_origin(hint) is typing.Literal:
        choices = [choice for choice in typing.get_args(hint) if (name, choice) != ("cache", "disk")]
        return draw.choice(choices)
    if hint is bool:
        return draw.random() < 0.5
    if hint is int:
        return draw.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 128])
    return draw.choice([0.0, 0.1, 0.3, 1.0, 2.0, 2.5, 8.0, 20.0, 64.0])


def any_message_codec(draw: random.Random) -> MessageCodec:
    """Return a codec of vectors with random options."""
    kinds: list[Callable[[], MessageCodec]] = [
        lambda: PackedCodec(any_codec(draw, dict(CODECS))),
        lambda: TopK(draw.choice([0.02, 0.3, 1.0]), draw.randint(1, 8), chunk=draw.choice([0, 50])),
        LogLevels,
    ]
    return draw.choice(kinds)()


def any_change(draw: random.Random) -> tuple[Change, str]:
    """Return a change of a message, and its description. The change draws from a generator of its own."""
    seed = draw.randrange(2**63)
    return lambda message: changed_bytes(random.Random(seed), message)[0], f"mutation {seed}"


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal, NaN where the other is NaN."""
    return x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


def difference(x: Tensor, y: Tensor) -> str:
    """Describe by how much two tensors differ."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{tuple(x.shape)} {x.dtype} instead of {tuple(y.shape)} {y.dtype}"
    if not x.isfinite().all():
        return "it decodes to NaN or infinity"
    return f"it decodes to other values, by up to {(x.double() - y.double()).abs().max():.3g}"


def _generator(draw: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(draw.randrange(2**31))
