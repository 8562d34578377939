"""The same collective on several ranks: who meets whom.

A collective's identity is its process group and its number among the group's calls of the step. A group is known by its
members where traces tell them, else by its name and the ranks that use the name. Where ranks do not agree about the
order of a group's calls (one trace lacks some), calls of a kind are counted, and then those of a unit, phase and kind.
What nothing tells is met by nobody, and so nobody waits in it.

Pure: rows go in (the record's `ledger`, or `collectives`), values come out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from fsdplab.common.collectives import PAIRED, PEER_COPY
from fsdplab.common.rows import grouped
from fsdplab.profiling.traces.groups import NAMED, ONE_OF_SEVERAL

Row = Mapping[str, Any]


class Key(NamedTuple):
    """A collective of all its ranks: `number` counts those of the same step, group, unit, phase and kind from 0."""

    step: int
    unit: str
    phase: str
    kind: str
    number: int
    group: str = ""


def matched(rows: Iterable[Any]) -> dict[Key, list[Any]]:
    """Rows of the same collective, one a rank, by its identity, in the order of time. A collective that no other row
    meets stands alone.

    Of two ranks whose groups `0,1 #1` and `0,1 #2` each gather once, the rows of group 1 meet, and those of group 2,
    whichever came first on either rank.
    """
    rows = list(rows)
    name_of = _names(rows)
    users = _users(rows)
    meetings: list[list[Row]] = []
    by_step_and_group = grouped(rows, lambda row: (row["step"], name_of(row)))
    for (_, group), of_group in by_step_and_group.items():
        meetings += _met(of_group, group, users)
    meetings.sort(key=lambda members: min(row["start_ns"] for row in members))

    # number the meetings of one step, group, unit, phase and kind
    counts: Counter[tuple[Any, ...]] = Counter()
    by_key: dict[Key, list[Row]] = {}
    for members in meetings:
        first = min(members, key=itemgetter("rank"))
        group = name_of(first)
        if len(members) == 1:  # rows that stand alone have keys that no meeting has
            group = f"{group} alone on rank {first['rank']}"
        label = (first["step"], first["unit"], first["phase"], first["kind"])
        by_key[Key(*label, counts[label, group], group)] = members
        counts[label, group] += 1
    return by_key


def _names(rows: Sequence[Row]) -> Callable[[Row], str]:
    """The identity of a row's group. PyTorch's own number of a group counts where its members agree about it: two
    groups may have the same members, but each rank may count its groups from 0.
    """
    # group -> rank -> the numbers that the rank calls it by
    numbers: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        members, _, number = _members(row).partition(" #")
        numbers[_whole_group(members)][row["rank"]].add(number)
    # the groups whose numbers are the same on every rank, such as {0: {"1", "2"}, 1: {"2", "1"}}
    agreed = set()
    for group, by_rank in numbers.items():
        different = {frozenset(of_rank) for of_rank in by_rank.values()}
        if len(different) == 1:
            agreed.add(group)

    def name_of(row: Row) -> str:
        members, _, _ = _members(row).partition(" #")
        if _whole_group(members) in agreed:
            return _members(row)
        return f"{members} {row.get('group') or ''}".strip()

    return name_of


def _whole_group(members: str) -> str:
    """The group of a message between two of its members: of `0>1 of 0,1,2` it is `0,1,2`."""
    return members.rpartition(" of ")[2]


def _members(row: Row) -> str:
    """The identity of a row's group, as its rank knows it: `0,1 #7`; "" for none."""
    return str(row.get("members") or "")


def _users(rows: Iterable[Row]) -> dict[str, set[int]]:
    """The ranks that use each group of which only the name is known."""
    users: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        if _members(row).startswith(NAMED):
            users[_members(row)].add(row["rank"])
    return users


def _met(rows: Sequence[Row], group: str, users: Mapping[str, set[int]]) -> Iterator[list[Row]]:
    """The meetings of one group in one step."""
    if not group:
        yield from _met_by_name(rows)
        return
    size = group.count(",") + 1  # the members that the identity lists, where no row tells how many there are
    for row in rows:
        if row.get("group_size"):
            size = row["group_size"]
            break

    # what may be of another group stands alone
    # four ranks that use the name of a group of two: two groups go by it
    users_of_name = users.get(_members(rows[0]), ())
    is_shared = len(users_of_name) > size  # several groups go by this name
    others = []
    for row in rows:
        if is_shared or group == ONE_OF_SEVERAL or _may_be_of_others(row, group, size):
            yield [row]
        else:
            others.append(row)

    # the rest meets by its order, or by kind
    in_order = sorted(others, key=lambda row: (row["rank"], *_issued(row)))
    by_rank = grouped(in_order, itemgetter("rank"))
    orders_of_kinds = {tuple(row["kind"] for row in of_rank) for of_rank in by_rank.values()}
    if len(orders_of_kinds) == 1:  # all ranks agree: the n-th call of each is the same collective
        yield from map(list, zip(*by_rank.values()))
    else:  # one trace lacks some
        for of_kind in grouped(others, itemgetter("kind")).values():
            yield from _met_by_count(of_kind, itemgetter("unit", "phase", "kind"))


def _may_be_of_others(row: Row, group: str, size: int) -> bool:
    """Whether it is a message between two ranks of a larger group, of which the trace does not say between which."""
    if row["kind"] == PEER_COPY:
        return True
    return row["kind"] == PAIRED and ">" not in group and size != 2


def _issued(row: Row) -> tuple[int, int]:
    """A key for the order of a rank's calls."""
    start: int = row["start_ns"]
    issue: int | None = row.get("issue_ns")
    if issue is None:
        issue = start
    return issue, start


def _met_by_count(rows: Sequence[Row], closer: Callable[[Row], Any] | None = None) -> Iterator[list[Row]]:
    """The n-th of each rank, where all have equally many; else the same of those that are alike in more."""
    by_rank = grouped(sorted(rows, key=itemgetter("rank")), itemgetter("rank"))  # the lowest rank first
    in_order = [sorted(of_rank, key=_issued) for of_rank in by_rank.values()]
    counts = {len(of_rank) for of_rank in in_order}
    if len(counts) == 1:
        yield from map(list, zip(*in_order))
    elif closer is None:  # nothing tells which of them is missing on a rank
        yield from ([row] for row in rows)
    else:
        for alike in grouped(rows, closer).values():
            yield from _met_by_count(alike)


def _met_by_name(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Of a group that is not known, all ranks: the n-th of a unit, phase and kind meets the n-th of the others.

    Of two ranks a send meets a receive, in whichever phase. Of more, sends and receives of a ring meet by their number;
    where one rank has more of them than another, as in a pipeline, the rows do not say who meets whom.
    """
    ranks = {row["rank"] for row in rows}

    def name(row: Row) -> tuple[Any, ...]:
        phase = row["phase"]
        if row["kind"] == PAIRED and len(ranks) <= 2:
            phase = ""  # a send may be in another phase of its rank than the receive of its own
        return row["unit"], phase, row["kind"]

    for (_, _, kind), of_name in grouped(rows, name).items():
        counts = Counter(row["rank"] for row in of_name)
        is_uneven = len(counts) < len(ranks) or len(set(counts.values())) > 1
        if kind == PAIRED and is_uneven:
            yield from ([row] for row in of_name)
        else:
            yield from _nth(of_name)


def _nth(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The n-th of each rank, as many as any rank has."""
    by_rank = grouped(rows, itemgetter("rank"))
    in_order = [sorted(of_rank, key=itemgetter("start_ns")) for of_rank in by_rank.values()]
    for number in range(max(map(len, in_order))):
        yield [of_rank[number] for of_rank in in_order if number < len(of_rank)]
