"""A basis of the channels that both ends of a link keep, and the coder of messages in it (codecs/basis.py)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from acsgd.codecs import basis
from acsgd.codecs.base import Codec, Wire, check_finite, saturate_
from acsgd.codecs.transform import Transform
from acsgd.pp.wire.coder import StatelessCoder, TensorSpec, TransferInfo
from acsgd.streams import Streams

FEWEST, MOST = 64, 512
"""Elements sent in a basis, per element of it: a new one follows as many as were sent before, within these limits. At
the upper one, bases take 1/32 bit per element."""


class SharedBasis:
    """The basis of a tensor at one end of a link, equal at both ends; a message has a new one when it is due."""

    def __init__(self) -> None:
        self.gradients, self.values = basis.Moments(), basis.Moments()
        """Of the gradients that the sender receives while it uses the basis, and of the tensors that it has sent."""
        self.in_use = False
        """At the sender, whether the codec of its latest message uses a basis."""
        self.sent = 0
        """Number of elements sent in a basis, equal at both ends."""
        self._basis: Tensor | None = None
        self._inverse: Tensor | None = None
        """That of the basis, at the sender."""
        self._next = 0
        """Number of them after which the next basis is due."""

    @property
    def is_due(self) -> bool:
        """Whether the next message has a new basis."""
        return self.sent >= self._next

    def wire(self, shape: tuple[int, ...], *, has_basis: bool = False) -> Wire:
        """Declare the fields of a tensor. has_basis: whether there is a new basis even if none is due."""
        new = (basis.basis_field(shape),) if has_basis or self.is_due else ()
        return new + basis.wire(shape)

    def encode(
        self,
        x: Tensor,
        step: float,
        seed: int | None = None,
        *,
        balance: float = 0.0,
        gradients: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the fields of a tensor, fp32, for `take` of both ends, unless this raises NotFiniteError.

        seed, balance: see `basis.encode`; gradients: of the tensor, [..., C], or None.
        """
        self.values.add(x)
        fitted, new = self._basis, self.is_due
        if new:
            fitted = basis.fit_basis(self.gradients, self.values, x)
            self._inverse = basis.invert(fitted)
        assert fitted is not None
        assert self._inverse is not None
        parts = None if gradients is None else basis.gradients_of(gradients, fitted)
        fields = basis.encode(x, self._inverse, step, seed, balance=balance, gradients=parts)
        check_finite(fields, x)
        return (fitted, *fields) if new else fields

    def take(self, fields: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Note a message that is sent or received, and keep its basis. Return its levels, and the basis they are in."""
        levels = fields[-3:]
        if self.is_due:
            self._basis = fields[0]
            past = min(max(self.sent, FEWEST * self._basis.numel()), MOST * self._basis.numel())
            self._next = self.sent + past
        assert self._basis is not None
        self.sent += levels[0].numel()
        return levels, self._basis


class TransformCoder(StatelessCoder):
    """Coder of codecs of which some are Transform: their messages have a basis only when a new one is due."""

    def __init__(self, codecs: Sequence[Codec], spec: TensorSpec, streams: Streams) -> None:
        super().__init__(codecs, spec)
        self._shared = SharedBasis()
        self._streams = streams

    def wire(self, info: TransferInfo) -> Wire:
        return self._shared.wire(self.shape(info)) if self._step(info) else super().wire(info)

    def marks_nan(self, info: TransferInfo) -> bool:
        return not self._step(info) and super().marks_nan(info)

    def context(self, info: TransferInfo) -> bytes:
        return self._shared.sent.to_bytes(8, "little") if self._step(info) else b""

    def add_gradients(self, gradients: Tensor) -> None:
        """Note the gradients of a micro-batch that the sender of activations has received, if it uses the basis."""
        if self._shared.in_use:
            with self._streams.side_stream(gradients):
                self._shared.gradients.add(gradients)

    def encode(self, x: Tensor, info: TransferInfo) -> tuple[Tensor, ...]:
        self._shared.in_use = bool(step := self._step(info))
        if not step:
            return super().encode(x, info)
        fields = self._shared.encode(x.detach().float(), step)
        self._shared.take(fields)
        return fields

    def decode(self, fields: tuple[Tensor, ...], info: TransferInfo) -> Tensor:
        if not self._step(info):
            return super().decode(fields, info)
        shape, dtype = self.shape(info), self._spec.dtype
        return saturate_(basis.decode(*self._shared.take(fields), shape), dtype).to(dtype)

    def _step(self, info: TransferInfo) -> float:
        """Return the quantization step of a transfer in a basis, 0 of any other."""
        codec = self._codecs[info.codec]
        return codec.step if isinstance(codec, Transform) else 0.0
