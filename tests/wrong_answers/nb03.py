"""Wrong answers to the exercises of notebook 03, written from their statements alone."""

import torch
import torch.distributed as dist


def average_in_hook__throws_the_quotient_away(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad / dist.get_world_size()


def average_in_hook__sums_a_temporary(parameter):
    dist.all_reduce(parameter.grad / dist.get_world_size())


def average_in_hook__floor_division(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad //= dist.get_world_size()


def average_in_hook__divides_by_its_rank(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_rank()


def average_in_hook__in_double_precision(parameter):
    total = parameter.grad.double()
    dist.all_reduce(total)
    parameter.grad.copy_(total / dist.get_world_size())


def small_together__matrices_twice_and_the_small_ones_not(model):
    small, n = [], dist.get_world_size()

    def ready(parameter):
        if parameter.dim() == 1:
            small.append(parameter)
        else:
            dist.all_reduce(parameter.grad)
            parameter.grad /= n
            parameter.grad /= n

    def finish():
        joined = torch.cat([parameter.grad for parameter in small])
        dist.all_reduce(joined)
        for parameter, piece in zip(small, joined.split([len(each) for each in small])):
            parameter.grad.copy_(piece)
        small.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    return finish


def in_buckets__counts_on_after_it_has_sent(model, bucket_bytes):
    bucket, held = [], 0

    def ready(parameter):
        nonlocal held
        bucket.append(parameter)
        held += parameter.grad.nbytes
        if held >= bucket_bytes:
            send()

    def send():
        if bucket:
            joined = torch.cat([each.grad.flatten() for each in bucket])
            dist.all_reduce(joined)
            joined /= dist.get_world_size()
            for each, piece in zip(bucket, joined.split([each.numel() for each in bucket])):
                each.grad.copy_(piece.view_as(each))
            bucket.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    return send


def average_in_hook__a_quotient_that_nothing_reads(parameter):
    grad = parameter.grad
    dist.all_reduce(grad)
    grad = grad / dist.get_world_size()


def average_in_hook__three_written_down(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= 3


def small_together__three_written_down(model):
    small, n = [], dist.get_world_size()

    def ready(parameter):
        if parameter.dim() == 1:
            small.append(parameter)
        else:
            dist.all_reduce(parameter.grad)
            parameter.grad /= n

    def finish():
        joined = torch.cat([parameter.grad for parameter in small])
        dist.all_reduce(joined)
        joined = joined / 3.0
        for parameter, piece in zip(small, joined.split([len(each) for each in small])):
            parameter.grad.copy_(piece)
        small.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    return finish


def in_buckets__three_written_down(model, bucket_bytes):
    bucket, world_size = [], 3

    def ready(parameter):
        bucket.append(parameter)
        if sum(each.grad.nbytes for each in bucket) >= bucket_bytes:
            send()

    def send():
        if bucket:
            joined = torch.cat([each.grad.flatten() for each in bucket])
            dist.all_reduce(joined)
            joined /= world_size
            for each, piece in zip(bucket, joined.split([each.numel() for each in bucket])):
                each.grad.copy_(piece.view_as(each))
            bucket.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    return send
