"""What a `RunSpec` tells those who check it: they cannot import it, since it imports them."""

from __future__ import annotations

from typing import Protocol


class Asked(Protocol):
    """The fields and properties of a RunSpec that say where ranks run and what is between them."""

    @property
    def strategy(self) -> str: ...

    @property
    def engine(self) -> str: ...

    @property
    def transport(self) -> str: ...

    @property
    def place(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    @property
    def processes(self) -> int: ...

    @property
    def profile(self) -> int: ...

    @property
    def shard_size(self) -> int | None: ...

    @property
    def shares_a_gpu(self) -> bool: ...

    @property
    def linked(self) -> bool: ...

    @property
    def link(self) -> str | None: ...

    @property
    def link_across(self) -> str | None: ...

    @property
    def link_queues(self) -> int: ...

    @property
    def emulate(self) -> str | None: ...

    @property
    def as_model(self) -> str | None: ...
