"""Right answers to the exercises of notebook 03, besides the references."""

import torch
import torch.distributed as dist


def average_in_hook__torchs_own_average(parameter):
    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def average_in_hook__divides_first(parameter):
    parameter.grad.div_(dist.get_world_size())
    dist.all_reduce(parameter.grad)


def average_in_hook__reduced_then_broadcast(parameter):
    dist.reduce(parameter.grad, 0)
    parameter.grad /= dist.get_world_size()
    dist.broadcast(parameter.grad, src=0)


def average_in_hook__another_tensor_in_its_place(parameter):
    total = parameter.grad.clone()
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    parameter.grad = total / dist.get_world_size()


def in_buckets__closed_before_it_would_be_too_full(model, bucket_bytes):
    bucket = []

    def ready(parameter):
        held = sum(each.grad.nbytes for each in bucket)
        if bucket and held + parameter.grad.nbytes > bucket_bytes:
            send()
        bucket.append(parameter)

    def send():
        flat = torch._utils._flatten_dense_tensors([each.grad for each in bucket])
        dist.all_reduce(flat.div_(dist.get_world_size()))
        parts = torch._utils._unflatten_dense_tensors(flat, [each.grad for each in bucket])
        for each, part in zip(bucket, parts):
            each.grad = part
        bucket.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    return send


def in_buckets__asynchronous(model, bucket_bytes):
    bucket, under_way = [], []

    def ready(parameter):
        bucket.append(parameter)
        if sum(each.grad.nbytes for each in bucket) >= bucket_bytes:
            send()

    def send():
        if bucket:
            joined = torch.cat([each.grad.flatten() for each in bucket])
            under_way.append((list(bucket), joined, dist.all_reduce(joined, async_op=True)))
            bucket.clear()

    def finish():
        send()
        for members, joined, work in under_way:
            work.wait()
            joined /= dist.get_world_size()
            for each, piece in zip(members, joined.split([each.numel() for each in members])):
                each.grad.copy_(piece.view_as(each))
        under_way.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    return finish
