"""Models with full attention (LLaDA, Dream) and their decoding, written for the eye.

The sequence is the prompt and a window of masks, all there from the first forward on. Blocks begin where the prompt
ends and are finished one after the other. What a forward computes anew is the cache's business:

==========  =====================================  ===========================================================
cache       a forward that refreshes               any other forward of the block
==========  =====================================  ===========================================================
``none``    every one, on the whole sequence
``prefix``  the block's first, on the whole one    the block and all behind it, with the K/V of what is before
``dual``    the block's first, on the whole one    the block, with the K/V of what is before and behind it
==========  =====================================  ===========================================================

A forward that refreshes also unmasks. The one exception are the cached blocks of a family with shifted logits: the
logits of a block's first position lie before the block, so the refresh decides this position and nothing else.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from .decode import Commit

Cache = list[tuple[Tensor, Tensor]]
"""K and V of each layer, [B, T, key/value heads, head_dim], keys rotated."""

LLADA_NAMES = {
    "embedding": "model.transformer.wte",
    "norm": "model.transformer.ln_f",
    "head": "model.transformer.ff_out",
    "layer": "model.transformer.blocks.",
    "attention_norm": "attn_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "output": "attn_out",
    "mlp_norm": "ff_norm",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}
DREAM_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class BidirectionalModel:
    """LLaDA or Dream in plain fp32 torch, from a checkpoint in its released layout.

    Both are pre-norm transformers with SwiGLU MLPs and rotary positions; Dream has biases of q, k and v, and fewer
    heads of k and v. Dimensions: B states of the sequence, N positions that a forward computes, T all positions.
    """

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.weights.update({name: tensor.float() for name, tensor in load_file(file).items()})
        llada = self.config["model_type"] == "llada"
        self.names = LLADA_NAMES if llada else DREAM_NAMES
        self.layers = self.config["n_layers" if llada else "num_hidden_layers"]
        self.heads = self.config["n_heads" if llada else "num_attention_heads"]
        self.kv_heads = self.config["n_kv_heads" if llada else "num_key_value_heads"]
        self.head_dim = self.config["d_model" if llada else "hidden_size"] // self.heads

    @torch.inference_mode()
    def __call__(
        self, ids: Tensor, start: int | Tensor = 0, cache: Cache | None = None, places: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """Logits [B, N, V] and K/V of ``ids`` [B, N] int64 at the positions from ``start`` on, or at those [N].

        With ``cache`` (one sequence, B = 1) they attend to its other positions too; where it holds their own, theirs
        take the place. Without, ``ids`` is all there is. ``places`` [N] are theirs in the cache; None: their positions.
        """
        x = self.weights[f"{self.names['embedding']}.weight"][ids]
        positions = start if isinstance(start, Tensor) else torch.arange(start, start + ids.shape[1])
        turn = self.turn(positions)
        places = positions if places is None else places
        own = []
        for layer in range(self.layers):
            prefix = f"{self.names['layer']}{layer}."
            normed = self.rms_norm(x, prefix + self.names["attention_norm"])
            q, k, v = (
                self.linear(normed, prefix + self.names[name]).unflatten(-1, (-1, self.head_dim)) for name in "qkv"
            )
            q, k = rotate(q, *turn), rotate(k, *turn)
            own.append((k, v))
            if cache is not None:
                k, v = (replaced(old, new, places) for old, new in zip(cache[layer], (k, v), strict=True))
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=2) for t in (k, v))
            weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / self.head_dim**0.5).softmax(dim=-1)
            mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)
            x = x + self.linear(mixed, prefix + self.names["output"])
            normed = self.rms_norm(x, prefix + self.names["mlp_norm"])
            gate, up = (self.linear(normed, prefix + self.names[name]) for name in ("gate", "up"))
            x = x + self.linear(F.silu(gate) * up, prefix + self.names["down"])
        return self.linear(self.rms_norm(x, self.names["norm"]), self.names["head"]), own

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [N, 1, head_dim / 2] of the rotary embedding's angles."""
        frequency = self.config["rope_theta"] ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = (positions.unsqueeze(1) * frequency).unsqueeze(1)
        return angles.cos(), angles.sin()

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.square().mean(dim=-1, keepdim=True)
        return self.weights[f"{name}.weight"] * x * (variance + self.config["rms_norm_eps"]).rsqrt()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (half-split) of [B, N, heads, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def replaced(old: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    """``old`` [1, T, ...] for each of the B rows of ``new`` [B, N, ...], which takes the ``positions`` [N].

    Positions behind those of ``old`` are added to them.
    """
    missing = max(int(positions.max()) + 1 - old.shape[1], 0)
    more = old.new_zeros(1, missing, *old.shape[2:])
    return torch.cat([old, more], dim=1).expand(len(new), -1, -1, -1).index_copy(1, positions, new)


Policy = Literal["static", "threshold", "factor", "maskgit_plus", "topk_margin", "entropy", "paced"]

TIMED = ("maskgit_plus", "topk_margin", "entropy")
"""Policies with Dream's schedule of timesteps."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to decode. Names and meanings are those of ``vllm_dllm.options.schema`` and ``vllm_dllm.traits``."""

    mask_id: int
    gen_length: int
    """The window: positions after the prompt, in whole blocks."""
    block_length: int
    shifted: bool = False
    """The logits of a position predict the token of the next one."""
    cache: Literal["none", "prefix", "dual"] = "dual"
    refresh_interval: int | None = None
    """A forward refreshes the cache whenever the block's denoising steps are a multiple of it; None: the first only."""
    generation_window: int | None = None
    """Positions, from the current block's first, that are part of the sequence; None: all."""
    policy: Policy = "static"
    steps: int | None = None
    """Denoising steps over the window (``static``, ``paced`` and the timed policies); None: one per position."""
    threshold: float = 0.9
    factor: float = 1.0
    top_k: int | None = None
    """Only the most probable tokens share the distribution; None: all."""
    verify: Literal["none", "freedave"] = "none"
    drafts: int = 1
    """FreeDave's d: it counts the block as it stands."""
    match: Literal["exact", "subset"] = "exact"
    finished_drafts: bool = False
    """A draft without masks can be confirmed too, as in the official code. That changes nothing with exact match."""
    early_exit: frozenset[int] = frozenset()
    """After a block that holds nothing but one of these tokens, all that follows becomes this token."""
    always_two_forwards: bool = False
    """Of FreeDave's baseline and the first Fast-dLLM: a forward follows the refresh even if that finished the block."""

    def __post_init__(self) -> None:
        if self.gen_length % self.block_length or (self.generation_window or self.block_length) < self.block_length:
            raise ValueError("the window is a number of blocks, and no less than one is part of the sequence")
        if self.steps is not None and self.steps % (self.gen_length // self.block_length):
            raise ValueError("every block takes as many steps")

    @property
    def steps_per_block(self) -> int:
        return self.block_length if self.steps is None else self.steps * self.block_length // self.gen_length

    @property
    def refresh_decides_first(self) -> bool:
        """The refresh at the start of a block decides its first position and nothing else."""
        return self.shifted and self.cache != "none"


class Prediction(NamedTuple):
    """What a forward says of a position."""

    token: int
    """The most probable one; never the mask token."""
    score: float
    """The more, the earlier the policy unmasks it."""


Predictions = dict[int, Prediction]
"""By absolute position."""


class Block(NamedTuple):
    """Positions of a block, and where the sequence ends while it is decoded."""

    start: int
    stop: int
    end: int


@dataclass
class Decoded:
    """What decoding gave.

    Attributes:
        tokens: the window.
        nfe: forwards; a forward on several drafts is one.
        wasted: those of them whose result is known to be of no use before they run, as the block is already finished.
        steps: what was written, by absolute position: by each forward, but for ``decode_as_released`` whenever a draft
            was accepted.
    """

    tokens: list[int] = field(default_factory=list)
    nfe: int = 0
    wasted: int = 0
    steps: list[list[Commit]] = field(default_factory=list)


class Eyes:
    """The forwards of one block."""

    def __init__(self, model: BidirectionalModel, block: Block, options: Options):
        self.model, self.block, self.options = model, block, options
        self.cache: Cache | None = None

    def refresh(self, canvas: list[int]) -> Predictions:
        """A forward on the whole sequence, whose K/V are kept."""
        logits, cache = self.model(torch.tensor([canvas[: self.block.end]]))
        if self.options.cache == "prefix":
            cache = [(k[:, : self.block.start], v[:, : self.block.start]) for k, v in cache]
        if self.options.cache != "none":
            self.cache = cache
        return self.read(logits, 0)[0]

    def look(self, canvases: list[list[int]]) -> list[Predictions]:
        """One forward on several states of the block."""
        start = 0 if self.options.cache == "none" else self.block.start
        stop = self.block.stop if self.options.cache == "dual" else self.block.end
        logits, _ = self.model(torch.tensor([canvas[start:stop] for canvas in canvases]), start, self.cache)
        return self.read(logits, start)

    @torch.inference_mode()
    def read(self, logits: Tensor, start: int) -> list[Predictions]:
        """Predictions of the block's positions from logits [B, N, V] of the positions from ``start`` on.

        Where logits are shifted, the first position computed has nothing to be predicted from. It takes its own
        logits, which matters for position 0 alone: in a slice it is the block's first, which is never masked then.
        """
        shift = 1 if self.options.shifted else 0
        positions = range(self.block.start, self.block.stop)
        rows = [max(position - shift - start, 0) for position in positions]
        tokens, scores = predict(logits[:, rows], self.options)
        return [
            dict(zip(positions, map(Prediction, *of_state), strict=True))
            for of_state in zip(tokens.tolist(), scores.tolist(), strict=True)
        ]


def predict(logits: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Tokens and scores [...] from logits [..., V]."""
    logits = logits.double()
    if options.top_k is not None:
        least = logits.topk(options.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, torch.finfo(logits.dtype).min)
    probabilities = logits.softmax(dim=-1)
    choosable = probabilities.clone()
    choosable[..., options.mask_id] = 0.0  # it is never chosen, but keeps its share of the distribution
    best = choosable.topk(2)
    token, first, second = best.indices[..., 0], best.values[..., 0], best.values[..., 1]
    if options.policy == "entropy":
        return token, (probabilities * (probabilities + 1e-10).log()).sum(dim=-1)
    return token, first - second if options.policy == "topk_margin" else first


def decode(model: BidirectionalModel, prompt: list[int], options: Options) -> Decoded:
    """Decode step by step, without drafts."""

    def denoise(canvas: list[int], block: Block, result: Decoded) -> None:
        eyes, step = Eyes(model, block, options), 0
        while masks(canvas, block, options):
            predictions = eyes.refresh(canvas) if refreshes(step, options) else eyes.look([canvas])[0]
            after = advance(canvas, predictions, step, block, options)
            result.nfe += 1
            result.steps.append(written(canvas, after))
            canvas[:] = after
            step += 1
        if options.always_two_forwards and step == 1:
            result.nfe += 1
            result.wasted += 1

    return blockwise(prompt, options, denoise)


def decode_with_drafts(model: BidirectionalModel, prompt: list[int], options: Options) -> Decoded:
    """FreeDave (arXiv 2510.00294, Algorithm 2) with one forward per round.

    A forward sees the block as it stands, the root, and drafts of later states. The drafts that it confirms are
    followed, and a denoising step from the last of them gives the new root. The same forward's predictions give the
    new drafts. A draft without masks is never part of a forward, as nothing is left to predict.

    With ``finished_drafts`` such a draft, if it is the next state of another, ends the block. Else verification may
    go on with the subset rule, to a draft that lacks a token, and that draft's own prediction fills the gap.
    """

    def denoise(canvas: list[int], block: Block, result: Decoded) -> None:
        eyes, step = Eyes(model, block, options), 0
        drafts: list[list[int]] = []
        while masks(canvas, block, options):
            branches = [canvas, *drafts]
            forwarded = [branch for branch in branches if masks(branch, block, options)]
            looks = [eyes.refresh(canvas)] if refreshes(step, options) else eyes.look(forwarded)
            accepted, hops = follow(branches, looks, step, block, options)
            after, drafts = branches[accepted], []
            step += hops
            if accepted < len(looks):
                first_round = step == 0
                after = advance(after, looks[accepted], step, block, options)
                step += 1
                drafts = extensions(after, looks[accepted], step, block, options)
                if not options.finished_drafts or (first_round and options.refresh_decides_first):
                    drafts = [draft for draft in drafts if masks(draft, block, options)]
            result.nfe += 1
            result.steps.append(written(canvas, after))
            canvas[:] = after

    return blockwise(prompt, options, denoise)


def decode_as_released(model: BidirectionalModel, prompt: list[int], options: Options) -> Decoded:
    """FreeDave in the rounds of the official code: the block becomes the last draft that was accepted, and the next
    draft 1 is the denoising step from it. So a forward is spent on drafts even if the first of them has no masks."""

    def denoise(canvas: list[int], block: Block, result: Decoded) -> None:
        eyes, step = Eyes(model, block, options), 0
        predictions = eyes.refresh(canvas)
        result.nfe += 1
        before = list(canvas)
        if options.refresh_decides_first:
            canvas[:] = advance(canvas, predictions, step, block, options)
        while masked := masks(canvas, block, options):
            # Where the refresh decided the first position, this is the first round's draft 1.
            root = canvas
            if step > 0 or not options.refresh_decides_first:
                root = advance(canvas, predictions, step, block, options)
            step += 1
            accepted, drafts = 0, [root]
            if len(masked) > 1:
                drafts += extensions(root, predictions, step, block, options)
                drafts = drafts[: len(masked)]
                looks = eyes.look(drafts)
                accepted, hops = follow(drafts, looks, step, block, options)
                predictions = looks[accepted]
                step += hops
                result.nfe += 1
                result.wasted += not masks(root, block, options)
            if drafts[accepted] != canvas:  # in the first round draft 1 is nothing new
                result.steps.append(written(before, drafts[accepted]))
                before = list(drafts[accepted])
            canvas[:] = drafts[accepted]

    return blockwise(prompt, options, denoise)


def blockwise(prompt: list[int], options: Options, denoise: Callable[[list[int], Block, Decoded], None]) -> Decoded:
    """Finish the blocks of the window one after the other; ``denoise`` does so in place."""
    result = Decoded()
    canvas = prompt + [options.mask_id] * options.gen_length
    for start in range(len(prompt), len(canvas), options.block_length):
        stop, end = start + options.block_length, len(canvas)
        if options.generation_window is not None:
            end = min(end, start + options.generation_window)
        denoise(canvas, Block(start, stop, end), result)
        tokens = set(canvas[start:stop])
        if len(tokens) == 1 and tokens <= options.early_exit:
            canvas[stop:] = [*tokens] * (len(canvas) - stop)
            break
    result.tokens = canvas[len(prompt) :]
    return result


def refreshes(step: int, options: Options) -> bool:
    """Whether the block's cache is computed anew after ``step`` denoising steps."""
    return step == 0 or (options.refresh_interval is not None and step % options.refresh_interval == 0)


def masks(canvas: list[int], block: Block, options: Options) -> list[int]:
    return [i for i in range(block.start, block.stop) if canvas[i] == options.mask_id]


def written(before: list[int], after: list[int]) -> list[Commit]:
    return [(i, new) for i, (old, new) in enumerate(zip(before, after, strict=True)) if new != old]


def follow(
    branches: list[list[int]], looks: list[Predictions], step: int, block: Block, options: Options
) -> tuple[int, int]:
    """The branch that verification ends at, and the denoising steps to it from branch 0, which has had ``step``.

    ``looks`` are what the forward says of the branches, but for a last one without masks.
    """
    accepted = hops = 0
    while accepted < len(looks):
        after = advance(branches[accepted], looks[accepted], step + hops, block, options)
        confirmed = [k for k in range(accepted + 1, len(branches)) if confirms(after, branches[k], options)]
        if not confirmed:
            break
        accepted, hops = confirmed[-1], hops + 1
    return accepted, hops


def confirms(after: list[int], draft: list[int], options: Options) -> bool:
    """Whether ``draft`` is the next state ``after``; with the subset rule, whether its tokens are all in that."""
    if options.match == "exact":
        return draft == after
    return all(token in (options.mask_id, after[i]) for i, token in enumerate(draft))


def extensions(root: list[int], predictions: Predictions, step: int, block: Block, options: Options) -> list[list[int]]:
    """Drafts of what comes after ``root``, which has had ``step`` denoising steps: each fills in what one more would
    at least, were the predictions to stay as they are. The last one may fill in all."""
    order = ranked(masks(root, block, options), predictions)
    most = options.drafts - 1
    if options.refresh_interval is not None:  # none of them skips a refresh
        most = min(most, -step % options.refresh_interval - 1)
    drafts: list[list[int]] = []
    filled = 0
    while len(drafts) < most and filled < len(order):
        filled += max(1, quota(len(order) - filled, step + len(drafts), options))
        drafts.append(fill(root, predictions, order[:filled]))
    return drafts


def advance(canvas: list[int], predictions: Predictions, step: int, block: Block, options: Options) -> list[int]:
    """``canvas`` after one more denoising step than the ``step`` that it has had."""
    if step == 0 and options.refresh_decides_first:
        return fill(canvas, predictions, [block.start])
    return fill(
        canvas, predictions, choose(ranked(masks(canvas, block, options), predictions), predictions, step, options)
    )


def fill(canvas: list[int], predictions: Predictions, positions: list[int]) -> list[int]:
    filled = list(canvas)
    for i in positions:
        filled[i] = predictions[i].token
    return filled


def ranked(masked: list[int], predictions: Predictions) -> list[int]:
    return sorted(masked, key=lambda i: -predictions[i].score)


def choose(order: list[int], predictions: Predictions, step: int, options: Options) -> list[int]:
    """Which of the masked positions, best first, a denoising step unmasks: the policies."""
    scores = [predictions[i].score for i in order]

    if options.policy == "threshold":
        return [i for i, score in zip(order, scores, strict=True) if i == order[0] or score >= options.threshold]

    if options.policy == "factor":
        # Rank n stands while its confidence is no less than 1 - factor / (n + 1). The last rank is not asked.
        for n in range(2, len(order)):
            if scores[n - 1] < 1 - options.factor / (n + 1):
                return order[: n - 1]
        return order

    if options.policy == "paced":
        # The schedule's positions, those that it has failed to unmask so far included.
        due = options.block_length * min(step + 1, options.steps_per_block) // options.steps_per_block
        considered = order[: due - (options.block_length - len(order))]
        return [i for i in considered if i == order[0] or predictions[i].score >= options.threshold]

    return order[: quota(len(order), step, options)]


def quota(masked: int, step: int, options: Options) -> int:
    """Positions that the schedule has a denoising step unmask; the policies without a schedule: at least."""
    steps = options.steps_per_block
    if options.policy in TIMED:
        if step >= steps - 1:
            return masked
        t, s = torch.linspace(1, 1e-3, steps + 1)[step : step + 2]
        return int(masked * (1 - s / t))
    if options.policy == "static":
        length = options.block_length
        if options.refresh_decides_first:  # the first position has the first step to itself
            length, steps, step = length - 1, max(steps - 1, 1), step - 1
        per_step, remainder = divmod(length, steps)
        return per_step + 1 if step < remainder else per_step
    return 1
