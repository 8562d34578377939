"""The end of a unit's backward by its parameters' own hooks; a frozen unit's by its input's gradient."""


def sharded(owner, name, parameter, unit):
    item = SimpleNamespace(
        owner=owner, name=name, shape=parameter.shape, stride=parameter.stride(), numel=parameter.numel(),
        each=-(-parameter.shape[0] // unit.n) * (parameter.numel() // parameter.shape[0]),
        train=parameter.requires_grad,
    )  # fmt: skip
    item.shard = nn.Parameter(as_dtensor(rows_of(parameter.detach(), unit.n), item, unit), requires_grad=item.train)
    item.full = nn.Parameter(torch.zeros(parameter.shape), requires_grad=item.train)
    if item.train:
        item.full.register_post_accumulate_grad_hook(lambda full: one_gradient_more(unit))
    free(item)
    return item


def one_gradient_more(unit):
    if not unit.root and all(item.full.grad is not None for item in unit.items if item.train):
        after_backward(unit)


def before_forward(unit, args):
    finish_gather(unit)
    if unit.shared.now_backward:
        return
    ahead(unit, unit.shared.forward)
    if unit not in unit.shared.forward:
        unit.shared.forward.append(unit)
    if not any(item.train for item in unit.items):
        args[0].register_hook(lambda gradient: after_backward(unit))
