"""How much arithmetic a training step is, and which part of a GPU's peak that uses (MFU).

    FLOP of a step = tokens x (6 N + 6 L C T)

N: parameters that multiply: all but the table of token embeddings (and of positions), which is looked up; the output
head counts. Each is one multiplication and one addition in the forward, twice that in the backward: 6 (Kaplan et al.
2020). L layers of width C, T tokens of a sequence: query times key and weights times value are 2 T C FLOP each, a token
and layer, of which a causal mask needs half; three times that with the backward. What checkpointing computes again is
not counted: MFU is about the work that was asked for (Chowdhery et al. 2022, appendix B).

The peak is the data sheet's, dense, in bf16 (`planning/hardware.py`).
"""

from __future__ import annotations

from fsdplab.planning.hardware import HardwareError, find_gpu
from fsdplab.workloads import ModelConfig, parameter_count

FORMULA = (
    "FLOP = tokens x (6 N + 6 L C T), N without the embedding table, causal half of attention, recomputation not"
    " counted"
)


def multiplying_parameters(config: ModelConfig) -> int:
    """Parameters that take part in a product, N; norms and biases, a few thousandths, are left in."""
    looked_up = 0 if config.tie_embeddings else config.vocabulary * config.width
    positions = config.context * config.width if config.family == "gpt" else 0
    return parameter_count(config) - looked_up - positions


def step_flops(config: ModelConfig, tokens: int, sequence_length: int) -> int:
    """FLOP of one training step on `tokens` tokens in sequences of `sequence_length`.

    A model of N = 1000, L = 2, C = 8 on 10 tokens in sequences of 5: 10 x (6,000 + 6 x 2 x 8 x 5) = 64,800.
    """
    attention = config.layers * config.width * sequence_length
    return tokens * (6 * multiplying_parameters(config) + 6 * attention)


def mfu(config: ModelConfig, tokens: int, sequence_length: int, seconds: float, peak: float | None) -> float | None:
    """The part of `peak` FLOP/s that a step of `seconds` used, 0 to 1; None where the peak is not known."""
    return None if not peak else step_flops(config, tokens, sequence_length) / seconds / peak


def peak_of(device_name: str) -> tuple[str, float] | None:
    """(row of the hardware table, dense bf16 FLOP/s) for the name that CUDA gives a device; None where the table has no
    certain answer.

    >>> peak_of("NVIDIA H200")
    ('H200 SXM 141GB', 989000000000000.0)
    >>> peak_of("NVIDIA H100 PCIe") is None
    True
    """
    words = device_name.replace("NVIDIA", "").replace("GeForce", "").replace("-", " ").split()
    if not words or {"PCIe", "NVL", "PCIE"} & set(words):  # other cards, other peaks
        return None
    for name in (" ".join(words), " ".join(words[:2]), words[0]):
        try:
            gpu = find_gpu(name)
        except HardwareError:
            continue
        return (gpu.name, gpu.bf16_flops) if gpu.bf16_flops else None
    return None
