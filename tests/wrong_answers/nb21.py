"""Wrong answers to the exercises of notebook 21, written from their statements alone; of each, what its report says."""

import torch
import torch.distributed as dist


def owners__by_elements(shapes, ranks):
    owner, load = [0] * len(shapes), [0.0] * ranks
    size = [rows * columns for rows, columns in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -size[i]):
        r = load.index(min(load))
        owner[i] = r
        load[r] += size[i]
    return owner


def back__written_into_parts(updates, parts, owners):
    n = dist.get_world_size()
    send = [torch.cat([parts[0].new_empty(0), *[u.chunk(n)[r].flatten() for u in updates]]) for r in range(n)]
    comes = [sum(p.numel() for p, o in zip(parts, owners) if o == r) for r in range(n)]
    received = parts[0].new_empty(sum(comes))
    dist.all_to_all_single(received, torch.cat(send), comes, [len(s) for s in send])
    blocks = list(received.split(comes))
    for p, o in zip(parts, owners):
        p.copy_(blocks[o][: p.numel()].view_as(p))
        blocks[o] = blocks[o][p.numel() :]
    return parts


def back__added_to_the_parts(updates, parts, owners):
    n = dist.get_world_size()
    send = [torch.cat([parts[0].new_empty(0), *[u.chunk(n)[r].flatten() for u in updates]]) for r in range(n)]
    comes = [sum(p.numel() for p, o in zip(parts, owners) if o == r) for r in range(n)]
    received = parts[0].new_empty(sum(comes))
    dist.all_to_all_single(received, torch.cat(send), comes, [len(s) for s in send])
    blocks = list(received.split(comes))
    for p, o in zip(parts, owners):
        p += blocks[o][: p.numel()].view_as(p)
        blocks[o] = blocks[o][p.numel() :]
    return parts


def to_owners__always_the_first_piece(parts, owners):
    n, rank = dist.get_world_size(), dist.get_rank()
    send = [
        torch.cat([parts[0].new_empty(0), *[p.flatten() for p, o in zip(parts, owners) if o == r]]) for r in range(n)
    ]
    mine = [p for p, o in zip(parts, owners) if o == rank]
    size = sum(p.numel() for p in mine)
    received = parts[0].new_empty(n * size)
    dist.all_to_all_single(received, torch.cat(send), [size] * n, [len(s) for s in send])
    rows = received.view(n, size)
    whole, at = [], 0
    for p in mine:
        piece = rows[:, at : at + p.numel()]
        whole.append(piece.reshape(n * p.shape[0], p.shape[1]))
    return whole


def to_owners__three_written_down(parts, owners):
    rank, send = dist.get_rank(), []
    for other in range(3):
        send.append(torch.cat([parts[0].new_empty(0), *(p.flatten() for p, of in zip(parts, owners) if of == other)]))
    own = [part for part, of in zip(parts, owners) if of == rank]
    received = send[rank].new_empty(3, len(send[rank]))
    sizes = [len(each) for each in send]
    dist.all_to_all_single(received.view(-1), torch.cat(send), [len(send[rank])] * 3, sizes)
    pieces = received.split([part.numel() for part in own], dim=1)
    return [piece.reshape(-1, part.shape[1]) for piece, part in zip(pieces, own)]


def back__three_written_down(updates, parts, owners):
    n = 3
    none = parts[0].new_empty(0)
    send = [torch.cat([none, *(each.chunk(n)[rank].flatten() for each in updates)]) for rank in range(n)]
    comes = [sum(part.numel() for part, of in zip(parts, owners) if of == owner) for owner in range(n)]
    received = parts[0].new_empty(sum(comes))
    dist.all_to_all_single(received, torch.cat(send), comes, [len(each) for each in send])
    blocks, rows = list(received.split(comes)), []
    for part, owner in zip(parts, owners):
        rows.append(blocks[owner][: part.numel()].view_as(part))
        blocks[owner] = blocks[owner][part.numel() :]
    return rows
