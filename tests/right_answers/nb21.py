"""Right answers to the exercises of notebook 21, besides the references."""

import heapq

import torch
import torch.distributed as dist

from fsdplab.engine.core.owners import newton_schulz_flops as flops


def owners__a_heap(shapes, ranks):
    heap, found = [(0.0, rank) for rank in range(ranks)], {}
    for cost, number in sorted(((flops(shape), number) for number, shape in enumerate(shapes)), reverse=True):
        load, rank = heapq.heappop(heap)
        found[number] = rank
        heapq.heappush(heap, (load + cost, rank))
    return tuple(found[number] for number in range(len(shapes)))


def owners__swaps_afterwards(shapes, ranks):
    cost = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    load, found = [0] * ranks, [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=cost.__getitem__, reverse=True):
        found[number] = load.index(min(load))
        load[found[number]] += cost[number]
    for number in range(len(shapes)):
        most, least = load.index(max(load)), load.index(min(load))
        if found[number] == most and load[least] + cost[number] < load[most]:
            load[most] -= cost[number]
            load[least] += cost[number]
            found[number] = least
    return found


def to_owners__sends_and_receives(parts, owners):
    n, rank = dist.get_world_size(), dist.get_rank()
    work, wholes = [], []
    for part, owner in zip(parts, owners):
        if owner != rank:
            work.append(dist.isend(part.contiguous(), owner))
            continue
        wholes.append([part if other == rank else torch.empty_like(part) for other in range(n)])
        work += [dist.irecv(wholes[-1][other], other) for other in range(n) if other != rank]
    for each in work:
        each.wait()
    return [torch.cat(pieces) for pieces in wholes]


def to_owners__a_gather_each(parts, owners):
    found = []
    for part, owner in zip(parts, owners):
        mine = owner == dist.get_rank()
        pieces = [torch.empty_like(part) for _ in range(dist.get_world_size())] if mine else None
        dist.gather(part.contiguous(), pieces, dst=owner)
        found += [torch.cat(pieces)] if mine else []
    return found


def back__a_scatter_each(updates, parts, owners):
    mine, rows = iter(updates), []
    for part, owner in zip(parts, owners):
        own = owner == dist.get_rank()
        rows.append(torch.empty_like(part))
        pieces = [each.contiguous() for each in next(mine).chunk(dist.get_world_size())] if own else None
        dist.scatter(rows[-1], pieces, src=owner)
    return tuple(rows)


def back__places_in_what_came(updates, parts, owners):
    n = dist.get_world_size()
    send = [[each.chunk(n)[rank].flatten() for each in updates] for rank in range(n)]
    comes, starts = [0] * n, []
    for part, owner in zip(parts, owners):
        starts.append(comes[owner])
        comes[owner] += part.numel()
    flat = torch.cat([piece for pieces in send for piece in pieces]) if updates else parts[0].new_empty(0)
    got = parts[0].new_empty(sum(comes))
    dist.all_to_all_single(got, flat, comes, [sum(map(len, pieces)) for pieces in send])
    places = [sum(comes[:owner]) + start for owner, start in zip(owners, starts)]
    return [got[at : at + part.numel()].reshape(part.shape) for part, at in zip(parts, places)]
