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
        """`pg_config` lists the groups that the rank is in, in traces of newer profilers."""
        self._world = _whole_number(distributed.get("world_size"))
        self._rank = _whole_number(distributed.get("rank"))
        self._by_name: dict[str, Group] = {}
        configured = distributed.get("pg_config")
        if not isinstance(configured, list):
            configured = []
        for entry in configured:
            ranks = entry.get("ranks") if isinstance(entry, dict) else None
            if not isinstance(ranks, list) or not ranks:
                continue
            if all(type(rank) is int for rank in ranks):
                description = str(entry.get("pg_desc") or "")
                name = str(entry.get("pg_name"))
                self._by_name[name] = Group(description, len(ranks), members_text(ranks))

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
        of_this_axis = [group for group in self._by_name.values() if axis in group.name]
        return self._one(of_this_axis) or self.only

    def of_operator(self, name: str, given: Mapping[str, Any]) -> Group:
        """The group that a c10d operator's shapes tell, where one group only has so many ranks: an all_gather fills as
        many times what each rank gives. Of a message, the two ranks between which it goes.
        """
        if kind_of(name) == PAIRED:
            return self._of_message(name, given.get("Concrete Inputs"))
        shapes = given.get("Input Dims")
        if name not in _WHOLE_AND_SHARD or not isinstance(shapes, list) or len(shapes) < 2:
            return UNKNOWN
        # the operator is given the whole tensor and one rank's slice, in one order or the other
        shard, whole = sorted(_numel(dims) for dims in shapes[:2])
        if not shard or whole % shard:
            return UNKNOWN
        # 8 elements of which each rank gives 2: a group of 4
        size = whole // shard
        group = self._one([group for group in self._by_name.values() if group.size == size])
        if group.members == ONE_OF_SEVERAL:
            return UNKNOWN
        return group

    def _of_message(self, name: str, numbers: Any) -> Group:
        """The group of a send or a receive, whose third argument is the other rank."""
        group = self.only
        peer = str(numbers[2]) if isinstance(numbers, list) and len(numbers) > 2 else ""
        if self._rank is None or group.size is None or not peer.isdecimal():
            return UNKNOWN
        # both ranks write the message alike, so that they meet in it
        sender, receiver = self._rank, int(peer)
        if "send" not in name:
            sender, receiver = receiver, sender
        return Group(group.name, group.size, f"{sender}>{receiver} of {group.members}")

    def of_call(self, evidence: Sequence[Mapping[str, Any]]) -> Group:
        """The group that the arguments of a call tell, the first one that tells it."""
        for details in evidence:
            group = self._of(details)
            if group != UNKNOWN:
                return group
        return UNKNOWN

    def _of(self, details: Mapping[str, Any]) -> Group:
        """The group as NCCL's arguments name it, with the number that PyTorch gives it as a part of its identity."""
        # the name for readers: the description where there is one, else PyTorch's number
        number = details.get("Process Group Name")
        description = details.get("Process Group Description")
        shown = ""
        for text in (description, number):
            if isinstance(text, str) and text:
                shown = text
                break
        size = _whole_number(details.get("Group size"))
        if size is not None and size <= 0:
            size = None
        members = self._members(number, details.get("Process Group Ranks"), size)
        if not members and not shown:
            return Group(shown, size)
        identity = members or NAMED + shown
        if isinstance(number, str) and number:
            identity = f"{identity} #{number}"
        return Group(shown, size, _pair(details) + identity)

    def _members(self, name: Any, ranks: Any, size: int | None) -> str:
        """The members as the call lists them, as the configuration does, or all ranks where the size says so."""
        # as the call lists them, text such as "[0, 1, 2, 3]"
        listed: list[int] = []
        if ranks:
            listed = [int(rank) for rank in re.findall(r"\d{1,9}", str(ranks))]
        if listed:
            members = members_text(listed)
            if _CUT_OFF in str(ranks):
                members = f"{members},{_CUT_OFF}"
            return members
        configured = self._by_name.get(str(name))
        if configured is not None:
            return configured.members
        if size is None or size != self._world:
            return ""
        return members_text(range(size))

    @staticmethod
    def _one(groups: Sequence[Group]) -> Group:
        """The group, where all of these have the same members; ONE_OF_SEVERAL where they have not."""
        if not groups:
            return UNKNOWN
        different = {group.members for group in groups}
        if len(different) > 1:
            return Group("", None, ONE_OF_SEVERAL)
        return groups[0]


def _whole_number(value: Any) -> int | None:
    """A value of a trace if it is a whole number, and no bool."""
    return value if type(value) is int else None


def _numel(dims: Any) -> int:
    """The elements of a tensor of these dimensions; 0 for what is no list of them."""
    if not isinstance(dims, list) or not dims:
        return 0
    if not all(type(length) is int and length >= 0 for length in dims):
        return 0
    return math.prod(dims)


def _pair(details: Mapping[str, Any]) -> str:
    """Between which two members a message goes, such as `0>1 of `; "" for what is no such message."""
    source = _whole_number(details.get("Src Rank"))
    target = _whole_number(details.get("Dst Rank"))
    if source is None or target is None or source == target or min(source, target) < 0:
        return ""
    name = str(details.get("Collective name") or "")
    if kind_of(name) != PAIRED:
        return ""
    return f"{source}>{target} of "


def of_axis(spec: Mapping[str, Any], rank: int, kind: str) -> Group:
    """The group of a run's own collective, by the mesh's axis that its strategy uses for this kind.

    >>> of_axis({"strategy": "hybrid_shard", "world_size": 4, "shard_size": 2}, 1, "all_reduce")
    Group(name='replicate', size=2, members='1,3')
    """
    ranks = int(spec.get("world_size") or 0)
    shards = spec.get("shard_size")
    if not ranks:
        return UNKNOWN
    if spec.get("strategy") not in IN_GROUPS or not shards or not 0 < shards <= ranks:
        return Group("", ranks, members_text(range(ranks)))
    if kind == "all_reduce":
        return Group(_REPLICATE, ranks // shards, members_text(range(rank % shards, ranks, shards)))
    first = rank // shards * shards  # ranks that shard lie next to each other
    return Group(_SHARD, shards, members_text(range(first, first + shards)))
