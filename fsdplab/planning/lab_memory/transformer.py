"""The lab's two families of models on a tape, in the order of `workloads/gpt.py`, `workloads/llama.py` and
`workloads/attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from fsdplab.workloads.shapes import ModelShape

from .held import Held
from .tape import WHAT, Given, Tape, Value


def block(tape: Tape, x: Value, shape: ModelShape, sequence: int, prefix: str) -> Value:
    """One block: attention, then feed-forward, each added to what it reads. `prefix`: `blocks.3.`"""
    norm = tape.layer_norm if shape.norm_bias else tape.rms_norm
    x = tape.add(x, _attention(tape, norm(x, f"{prefix}attention_norm"), shape, sequence, prefix))
    feed = _gpt_feed_forward if not shape.gated else _llama_feed_forward
    return tape.add(x, feed(tape, norm(x, f"{prefix}feed_forward_norm"), shape, prefix), last=True)


def _attention(tape: Tape, x: Value, shape: ModelShape, sequence: int, prefix: str) -> Value:
    bias, turns = shape.qkv_bias, shape.positions == 0
    q = tape.linear(x, shape.query_width, f"{prefix}query", bias)
    k = tape.linear(x, shape.kv_width, f"{prefix}key", bias)
    v = tape.linear(x, shape.kv_width, f"{prefix}value", bias)
    if turns:
        q, k = tape.rotary(tape.reordered(q)), tape.rotary(tape.reordered(k))
    y = tape.attention(q, k, v, shape.heads, sequence, shape.head_width)
    if turns:  # its result lies head by head, as what it reads
        y = tape.clone(y)
    return tape.linear(y, shape.width, f"{prefix}output", shape.output_bias)


def _gpt_feed_forward(tape: Tape, x: Value, shape: ModelShape, prefix: str) -> Value:
    up = tape.linear(x, shape.ffn, f"{prefix}up", shape.ffn_bias)
    return tape.linear(tape.pointwise(up), shape.width, f"{prefix}down", shape.ffn_bias, last=True)


def _llama_feed_forward(tape: Tape, x: Value, shape: ModelShape, prefix: str) -> Value:
    gated = tape.times(
        tape.pointwise(tape.linear(x, shape.ffn, f"{prefix}gate", False)),
        tape.linear(x, shape.ffn, f"{prefix}up", False),
    )
    return tape.linear(gated, shape.width, f"{prefix}down", False, last=True)


def embedded(tape: Tape, shape: ModelShape, sequence: int) -> Value:
    """The embeddings of the tokens, and of their positions where those are learnt."""
    tokens, C, b = tape.value(shape.width), shape.width, tape.itemsize
    tape.note(tokens, _gradient_of_table(tape, "token_embedding.weight", shape.vocabulary * C * b))
    if not shape.positions:
        return tokens
    positions = Value(tape.book.hold(sequence * C * b, WHAT), C)
    indices = tape.book.hold(8 * sequence, WHAT)
    tape.note(positions, _gradient_of_table(tape, "position_embedding.weight", shape.positions * C * b), indices)
    y, first, second = tape.value(C), tokens.edge, positions.edge
    summed = sequence * C * b
    tape.note(y, lambda gradient: [(first, gradient, False), (second, tape.book.hold(summed, WHAT), True)])
    return y


def _gradient_of_table(tape: Tape, name: str, nbytes: int) -> Callable[[Held], Given]:
    def run(_: Held) -> Given:
        tape.on_gradient(name, nbytes)
        return []

    return run


def loss(tape: Tape, logits: Value) -> None:
    """Cross entropy in float32, and its backward as far as the logits' gradient."""
    wide = tape.cast(logits, 4)
    log_softmax = tape.value(logits.width, 4)
    edge, width = wide.edge, logits.width

    def run(_: Held) -> Given:
        picked = tape.hold(width, 4)
        gradient = tape.hold(width, 4)
        del picked
        return [(edge, gradient, True)]

    tape.note(log_softmax, run, log_softmax.held)
    log_softmax.edge.add(tape.book.hold(4, WHAT), True, tape.book)
