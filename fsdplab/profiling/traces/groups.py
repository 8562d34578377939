"""The process group of a collective: its members, which are its identity across ranks.

A trace of NCCL tells the members with each call, newer profilers tell all groups of a rank (`pg_config`), and gloo's
events tell nothing: then the group follows from the mesh's axis, as fully_shard uses it, or is not known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsdplab.common.collectives import PAIRED, kind_of
from fsdplab.common.names import IN_GROUPS

_SHARD, _REPLICATE = "shard", "replicate"  # in the names of a mesh's axes
_WHOLE_AND_SHARD = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")  # operators that are given both
_CUT_OFF = "..."  # PyTorch writes no more than 30 members of a large group


class Group(NamedTuple):
    """A process group: its name for readers, how many ranks it has, and the text that identifies it on every rank; None
    and "" for what is not known.

    `0,1,2,3 #7` are these ranks in the group that PyTorch calls 7; a message between two of them has `0>1 of` before
    it. `named 7` has no known members: its name and the ranks that use it must do.
    """

    name: str = ""
    size: int | None = None
    members: str = ""


UNKNOWN = Group()
NAMED = "named "  # begins the identity of a group of which only the name is known
ONE_OF_SEVERAL = "one of several"  # the rank has several groups, and nothing tells which of them


def members_text(ranks: Sequence[int]) -> str:
    """The identity of a group of these ranks: `members_text([2, 0])` is `0,2`."""
    return ",".join(map(str, sorted(ranks)))


class Groups:
    """The process groups of one rank, from its trace's `distributedInfo`."""

    def __init__(self, distributed: Mapping[str, Any]) -> None:
        configured, world = distributed.get("pg_config"), distributed.get("world_size")
        self._world = world if type(world) is int else None
        self._rank = rank if type(rank := distributed.get("rank")) is int else None
        self._by_name: dict[str, Group] = {}
        for each in configured if isinstance(configured, list) else ():
            ranks = each.get("ranks") if isinstance(each, dict) else None
            if isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks):
                group = Group(str(each.get("pg_desc") or ""), len(ranks), members_text(ranks))
                self._by_name[str(each.get("pg_name"))] = group

    @property
    def only(self) -> Group:
        """The group of a call that does not name one: that of the whole rank, where all its groups are the same."""
        return self._one(list(self._by_name.values()))

    def of_unit(self, kind: str) -> Group:
        """The group that an engine's unit uses for a collective: on a mesh of two dimensions, gradients are summed over
        the replicas, and everything else is exchanged among the shards.
        """
        if self.only.members != ONE_OF_SEVERAL:
            return self.only
        axis = _REPLICATE if kind == "all_reduce" else _SHARD
        return self._one([group for group in self._by_name.values() if axis in group.name]) or self.only

    def of_operator(self, name: str, given: Mapping[str, Any]) -> Group:
        """The group that a c10d operator's shapes tell, where one group only has so many ranks: an all_gather fills as
        many times what each rank gives. Of a message, the two ranks between which it goes.
        """
        shapes, numbers = given.get("Input Dims"), given.get("Concrete Inputs")
        if kind_of(name) == PAIRED:
            return self._of_message(name, numbers)
        if name not in _WHOLE_AND_SHARD or not isinstance(shapes, list) or len(shapes) < 2:
            return UNKNOWN
        whole, shard = sorted((_numel(dims) for dims in shapes[:2]), reverse=True)
        size = whole // shard if shard and whole % shard == 0 else 0
        found = self._one([group for group in self._by_name.values() if group.size == size])
        return UNKNOWN if found.members == ONE_OF_SEVERAL else found

    def _of_message(self, name: str, numbers: Any) -> Group:
        """A send or a receive: its third argument is the other rank."""
        group, peer = self.only, numbers[2] if isinstance(numbers, list) and len(numbers) > 2 else ""
        if self._rank is None or group.size is None or not str(peer).isdecimal():
            return UNKNOWN
        ends = (self._rank, int(peer)) if "send" in name else (int(peer), self._rank)
        return Group(group.name, group.size, f"{ends[0]}>{ends[1]} of {group.members}")

    def of_call(self, evidence: Sequence[Mapping[str, Any]]) -> Group:
        """The group that the arguments of a call tell, the first one that tells it."""
        found = (self._of(details) for details in evidence)
        return next((group for group in found if group != UNKNOWN), UNKNOWN)

    def _of(self, details: Mapping[str, Any]) -> Group:
        name, description = (details.get(f"Process Group {part}") for part in ("Name", "Description"))
        shown = next((text for text in (description, name) if isinstance(text, str) and text), "")
        size = details.get("Group size")
        size = size if type(size) is int and size > 0 else None
        members = self._members(name, details.get("Process Group Ranks"), size)
        if not members and not shown:
            return Group(shown, size)
        identity = f"{members or NAMED + shown} #{name}" if isinstance(name, str) and name else members or NAMED + shown
        return Group(shown, size, _pair(details) + identity)

    def _members(self, name: Any, ranks: Any, size: int | None) -> str:
        listed = [int(rank) for rank in re.findall(r"\d{1,9}", str(ranks))] if ranks else []
        if listed and _CUT_OFF in str(ranks):
            return f"{members_text(listed)},{_CUT_OFF}"
        if listed:
            return members_text(listed)
        if (known := self._by_name.get(str(name))) is not None:
            return known.members
        return members_text(range(size)) if size is not None and size == self._world else ""

    @staticmethod
    def _one(groups: Sequence[Group]) -> Group:
        """The group, where all of these have the same members; ONE_OF_SEVERAL where they have not."""
        if len({group.members for group in groups}) > 1:
            return Group("", None, ONE_OF_SEVERAL)
        return groups[0] if groups else UNKNOWN


def _numel(dims: Any) -> int:
    plain = isinstance(dims, list) and dims and all(type(each) is int and each >= 0 for each in dims)
    return math.prod(dims) if plain else 0


def _pair(details: Mapping[str, Any]) -> str:
    """Between which two members a message goes, such as `0>1 of `; "" for what is no such message."""
    source, target = (details.get(name) for name in ("Src Rank", "Dst Rank"))
    if type(source) is not int or type(target) is not int or source == target or min(source, target) < 0:
        return ""
    sends = kind_of(str(details.get("Collective name") or "")) == PAIRED
    return f"{source}>{target} of " if sends else ""


def of_axis(spec: Mapping[str, Any], rank: int, kind: str) -> Group:
    """The group of a run's own collective, by the mesh's axis that its strategy uses for this kind.

    >>> of_axis({"strategy": "hybrid_shard", "world_size": 4, "shard_size": 2}, 1, "all_reduce")
    Group(name='replicate', size=2, members='1,3')
    """
    ranks, shards = int(spec.get("world_size") or 0), spec.get("shard_size")
    if spec.get("strategy") not in IN_GROUPS or not shards or not 0 < shards <= ranks:
        return Group("", ranks, members_text(range(ranks))) if ranks else UNKNOWN
    if kind == "all_reduce":
        return Group(_REPLICATE, ranks // shards, members_text(range(rank % shards, ranks, shards)))
    first = rank // shards * shards
    return Group(_SHARD, shards, members_text(range(first, first + shards)))
