"""What the papers on step-skipping report, for tables in their layout. Nothing here is measured by this project."""

from typing import NamedTuple


class Sampled(NamedTuple):
    """One row of FreeDave's tables 1 to 3."""

    accuracy: float
    """Per cent."""
    tokens_per_second: float
    tokens_per_forward: float


class Sampling(NamedTuple):
    """One model on one data set in FreeDave's tables 1 to 3."""

    static: Sampled
    dynamic: Sampled
    freedave: Sampled


FREEDAVE: dict[tuple[str, str], Sampling] = {
    ("Dream-7B-Instruct", "MATH500"): Sampling(
        Sampled(40.00, 23.02, 0.91), Sampled(37.00, 16.73, 1.88), Sampled(40.20, 30.00, 2.63)
    ),
    ("TraDo-4B-Instruct", "MATH500"): Sampling(
        Sampled(74.20, 7.26, 0.26), Sampled(68.80, 18.94, 0.61), Sampled(76.40, 16.36, 0.67)
    ),
    ("TraDo-8B-Instruct", "MATH500"): Sampling(
        Sampled(76.40, 7.10, 0.28), Sampled(74.00, 16.11, 0.60), Sampled(77.60, 15.99, 0.66)
    ),
    ("Dream-7B-Instruct", "GSM8K"): Sampling(
        Sampled(79.61, 20.99, 0.83), Sampled(68.16, 16.61, 1.81), Sampled(80.21, 27.39, 2.34)
    ),
    ("TraDo-4B-Instruct", "GSM8K"): Sampling(
        Sampled(91.58, 4.41, 0.15), Sampled(89.08, 9.82, 0.35), Sampled(91.05, 10.03, 0.39)
    ),
    ("TraDo-8B-Instruct", "GSM8K"): Sampling(
        Sampled(92.72, 3.41, 0.12), Sampled(92.34, 6.17, 0.23), Sampled(92.80, 6.92, 0.28)
    ),
}
"""By model and data set. Dream with d=4, TraDo with d=8; dynamic sampling has a threshold of 0.95 and 0.9."""


class Accelerated(NamedTuple):
    """One cell of Spiffy's table 1."""

    nfe: float
    """Times fewer forwards than one token per step."""
    speed: float
    """Times the tokens per second of one token per step."""
    accuracy: float


SPIFFY_TASKS = ("GSM8K", "HumanEval", "MATH500", "MBPP")

SPIFFY: dict[str, tuple[tuple[Accelerated, ...], tuple[Accelerated, ...]]] = {
    "LLaDA-8B-Instruct": (
        (
            Accelerated(3.31, 3.20, 0.79),
            Accelerated(3.51, 2.89, 0.41),
            Accelerated(2.52, 2.63, 0.35),
            Accelerated(5.73, 5.01, 0.36),
        ),
        (
            Accelerated(4.97, 3.55, 0.79),
            Accelerated(5.80, 3.22, 0.38),
            Accelerated(4.11, 3.00, 0.35),
            Accelerated(8.58, 5.23, 0.36),
        ),
    ),
    "Dream-7B-Instruct": (
        (
            Accelerated(2.35, 2.28, 0.78),
            Accelerated(2.68, 2.73, 0.52),
            Accelerated(2.17, 2.16, 0.42),
            Accelerated(2.45, 2.63, 0.50),
        ),
        (
            Accelerated(3.76, 2.56, 0.79),
            Accelerated(4.42, 2.90, 0.55),
            Accelerated(3.57, 2.57, 0.42),
            Accelerated(4.00, 2.97, 0.49),
        ),
    ),
    "SDAR-8B-Chat-b32": (
        (
            Accelerated(6.71, 5.67, 0.88),
            Accelerated(5.54, 4.24, 0.71),
            Accelerated(4.38, 4.11, 0.47),
            Accelerated(3.99, 3.45, 0.24),
        ),
        (
            Accelerated(8.25, 6.28, 0.88),
            Accelerated(6.96, 4.77, 0.71),
            Accelerated(5.46, 4.60, 0.47),
            Accelerated(5.29, 4.21, 0.25),
        ),
    ),
}
"""Table 1, by model: with dynamic unmasking and with Spiffy (D = 10, D* = 3) on top, one cell per task of
``SPIFFY_TASKS``."""

SPIFFY_CALIBRATION: dict[str, tuple[float, float]] = {
    "GSM8K": (4.96 / 3.31, 4.97 / 3.31),
    "HumanEval": (5.85 / 3.53, 5.85 / 3.53),
    "MATH500": (4.11 / 2.52, 4.12 / 2.52),
    "MBPP": (8.58 / 5.73, 8.61 / 5.73),
}
"""Table 4: LLaDA-8B-Instruct, forwards with dynamic unmasking over those with Spiffy, by task: calibrated on MATH500
and MBPP, and on ShareGPT."""

SPIFFY_OVERHEADS = {
    "Model": 124.85,
    "Draft Graph Construction": 0.71,
    "Draft Pruning": 1.77,
    "Draft Sequence Construction": 0.76,
    "Attention Mask Construction": 0.16,
    "Position IDs Construction": 0.05,
    "Draft Acceptance": 6.18,
}
"""Table 3: per cent of the forward without drafts, for three drafts."""

PSD: dict[str, dict[int, tuple[float, float | None]]] = {
    "Dream, MBPP, Confidence": {0: (3.5, None), 1: (4.1, None), 3: (4.6, None), 7: (4.9, 53.4)},
    "LLaDA-1.5, GSM8K, Confidence": {7: (4.0, 78.9)},
    "LLaDA-1.5, MBPP, Confidence": {7: (3.4, None)},
}
"""Tokens per forward and accuracy in per cent, by d (0: the policy alone), as far as section 4 gives them in words; its
figures give no numbers."""

FAST_DLLM: dict[str, tuple[float, float, float]] = {
    "LLaDA-8B, GSM8K, 256 tokens": (6.73, 1.0, 79.3),
    "... with cache": (21.5, 3.2, 79.5),
    "... with parallel decoding": (16.8, 2.5, 79.2),
    "... with both": (54.5, 8.1, 78.5),
}
"""Fast-dLLM (arXiv 2505.22618), table 1: tokens/s (the last three from the factors), factor, accuracy in per cent."""

FEF: dict[str, tuple[float, float]] = {
    "LLaDA": (46.75, 1.0),
    "LLaDA/2": (42.30, 1.98),
    "SSD": (48.58, 2.09),
    "FeF, step=2": (51.79, 3.86),
    "FeF, step=4": (52.06, 2.33),
}
"""FeF-DLLM, table 1: mean accuracy in per cent and speed over GSM8K, MATH, HumanEval and MBPP."""
