"""What the runtime remembers of every request: what it asked for, on the host, and where it stands, on the device."""

import dataclasses
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

from vllm_dllm.decoding.policies import (
    DRAWN_POLICIES,
    ROUNDING_POLICIES,
    TIMED_POLICIES,
    Policy,
)
from vllm_dllm.decoding.records import UNREACHED, Progress, RequestOptions
from vllm_dllm.decoding.s2d2 import SCORE, Routing
from vllm_dllm.decoding.schedules import share_level, timestep_ratios
from vllm_dllm.decoding.verifiers import Verifier
from vllm_dllm.geometry import Geometry
from vllm_dllm.methods import ESTIMATORS, ROUTES
from vllm_dllm.options.resolved import ResolvedOptions
from vllm_dllm.runtime.plan.arrays import to_device
from vllm_dllm.runtime.plan.rows import BlockState

INTEGERS = (
    "policy",
    "quota",
    "quota_remainder",
    "max_post_steps",
    "verifier",
    "timed",
    "last_position",
    "radius",
    "max_drafts",
    "schedule",
    "num_steps",
    "window",
    "num_passes",
    "uses_graph",
    "add_level",
    "full_level",
)
BOUNDS = (
    "threshold",
    "entropy_bound",
    "edit_threshold",
    "relaxed_threshold",
    "factor",
    "alg_temp",
    "remask",
    *Routing._fields,
)
HOST_ONLY = (
    "grid_start",
    "text_end",
    "drafts_by_policy",
    "auto_drafts",
    "draws_positions",
    "num_stop_token_ids",
    "structured",
    "keeps_window",
)
ASKED = np.dtype([(name, int) for name in (*INTEGERS, *HOST_ONLY)] + [(name, float) for name in (*BOUNDS, "cfg_scale")])
"""What a request asked for. ``BatchOptions`` has the fields ``INTEGERS`` and ``BOUNDS`` as tensors."""

MAX_STOP_TOKEN_IDS = 128
"""As many as vLLM itself takes per request."""
TIMESTEPS = 1 << 20
"""Timesteps that there is room for in all schedules together: every number of steps that blocks of up to 180 positions
may have. More take another tensor, which no compiled form fits."""
MOST_BATCHES = 64
"""Batches, and parts of batches, whose options are kept: FeF goes through a batch in parts."""


@dataclass(frozen=True)
class BatchOptions(RequestOptions):
    """Options of D requests, for the runtime; what requests asked for never changes while they live."""

    slots_np: np.ndarray
    """[D] slots of the requests, on the host."""
    slots: Tensor
    """[D] int64: the same on the device."""
    asked: np.ndarray
    """[D] ``ASKED``, on the host."""
    radius: Tensor
    """[D] int64."""
    max_drafts: Tensor
    """[D] int64: drafts beside the block itself."""
    schedule: Tensor
    """[D] int64: where the request's timesteps begin in ``DenoiseStates.schedules``; -1: its policy has none."""
    num_steps: Tensor
    """[D] int64: timesteps of a block."""
    window: Tensor
    """[D] int64: positions that a round of FeF drafts, and that a forward of S2D2 verifies."""
    num_passes: Tensor
    """[D] int64: passes of FeF over a block."""
    uses_graph: Tensor
    """[D] int64: 1 where drafts come from the engine's graph."""
    bounds: dict[str, Tensor]
    """[D] float32 each: the options ``BOUNDS``."""
    draws_positions: bool
    """Whether any of the requests chooses positions by chance."""
    estimators: Set[int]
    """Estimators that occur in requests which decode with S2D2 and verify by a score."""
    kinds: list[np.ndarray]
    """The requests grouped by how they decode, as indices [F] int64: those that only follow a policy, structured ones,
    then those of FeF, LinearSpec, S2D2 and ISD. Empty groups are left out."""
    compares_only: bool
    """No choice of positions rests on a rounded number: all policies only compare what the logits say."""


class DenoiseStates:
    """Per-request state by slot (vLLM's index of a request in the worker, below ``max_num_reqs``).

    A slot's row is written when a request enters it, so nothing of the request before can remain, whether that one
    finished, was aborted or preempted. Its drafts alone are left, and the number of drafts says that there are none.
    """

    def __init__(
        self, max_num_reqs: int, geometry: Geometry, mask_token_id: int, device: torch.device, *, host_follows: bool
    ):
        """Room for ``max_num_reqs`` requests.

        Args:
            host_follows: each step is planned after the host has seen the one before, so it may know of every request
                whether that made drafts. Not so under async scheduling.
        """
        self.block_length, self.window_length = geometry.block_length, geometry.window_length
        self.max_drafts = max_drafts = geometry.max_drafts
        self.mask_token_id = mask_token_id
        self.device = device
        self._compiles = bool(geometry.options.compile_steps)
        # Columns of the progress, the finished block, branches and levels.
        num_fields = len(dataclasses.fields(Progress))
        self.sizes = num_fields, self.block_length, (1 + max_drafts) * self.window_length, max_drafts
        # The parts of a BlockState.
        self.rows = StagedWriteTensor((max_num_reqs, sum(self.sizes)), dtype=torch.int64, device=device)
        # Shares of the masked positions that each step of a schedule unmasks; all schedules in use, end to end.
        self.schedules = torch.ones(TIMESTEPS, dtype=torch.float32, device=device)
        # Where the schedule of each number of steps begins, and where the next one will.
        self._schedule_of: dict[int, int] = {}
        self._num_timesteps = 1
        self.asked = np.zeros(max_num_reqs, dtype=ASKED)
        self.stop_token_ids_np = np.full((max_num_reqs, MAX_STOP_TOKEN_IDS), -1, dtype=np.int64)
        # Made for a batch, and kept until a request enters.
        self._options: dict[bytes, BatchOptions] = {}
        # [max_num_reqs], on the host: drafts that the last step made.
        self._drafts_made: Tensor | None = None
        self._drafts_copied: torch.Event | None = None
        if host_follows and max_drafts:
            self._drafts_made = torch.zeros(max_num_reqs, dtype=torch.int64, pin_memory=is_pin_memory_available())
            self._drafts_copied = torch.Event(device) if device.type != "cpu" else None

    def add_request(
        self,
        slot: int,
        token_ids: Sequence[int],
        options: ResolvedOptions,
        stop_token_ids: Sequence[int],
        *,
        last_position: int,
        grid_start: int,
        text_end: int,
        uses_graph: bool,
        given: tuple[int, Sequence[int]] = (0, ()),
    ) -> None:
        """Start (or resume) a request whose known tokens, prompt and output, are ``token_ids``.

        The tail of them that does not fill a block stays fixed at the head of the first block to denoise.

        Args:
            last_position: of the last token that the request may have.
            grid_start: position that blocks are counted from.
            text_end: position behind the last block (full attention).
            uses_graph: its drafts come from the engine's draft graph, not from a chain.
            given: column of the first block, and the tokens that the block is given from there on.
        """
        block_start = len(token_ids) - (len(token_ids) - grid_start) % self.block_length
        tail = list(token_ids[block_start:])
        progress = dict.fromkeys((field.name for field in dataclasses.fields(Progress)), 0)
        column, tokens = given
        progress |= {"block_start": block_start, "first": len(tail), "given": column, "num_given": len(tokens)}
        window = [self.mask_token_id] * self.window_length
        window[column : column + len(tokens)] = tokens
        window[: len(tail)] = tail
        self.rows.stage_write(slot, 0, [*progress.values(), *[0] * self.block_length, *window])

        self._options.clear()
        verifier = _verifier(options)
        has_schedule = options.kind in TIMED_POLICIES
        stop_token_ids = list(stop_token_ids)[:MAX_STOP_TOKEN_IDS] if options.eos_early_stop else []
        self.stop_token_ids_np[slot] = -1
        self.stop_token_ids_np[slot, : len(stop_token_ids)] = stop_token_ids
        asked = {
            "policy": options.kind,
            "max_post_steps": options.max_post_edit_steps,
            "verifier": verifier,
            "timed": has_schedule or options.quota_remainder > 0 or options.kind == Policy.PACED,
            "last_position": last_position if options.eos_early_stop else UNREACHED,
            "max_drafts": options.num_drafts,
            "schedule": self._schedule(options.num_steps) if has_schedule else -1,
            "route": [*ROUTES].index(options.route),
            "per_token": options.score_cost_per == "token",
            "estimator": [*ESTIMATORS].index(options.estimator),
            "num_passes": options.resample_steps,
            "grid_start": grid_start,
            "text_end": text_end,
            "drafts_by_policy": options.num_drafts > 0 and verifier not in (Verifier.FEF, Verifier.S2D2),
            "uses_graph": uses_graph,
            "add_level": share_level(options.block_add_threshold),
            "full_level": share_level(options.decoded_token_threshold),
            "draws_positions": options.kind in DRAWN_POLICIES or options.alg_temp > 0,
            "num_stop_token_ids": len(stop_token_ids),
        }
        for name in ASKED.names or ():
            self.asked[name][slot] = asked[name] if name in asked else getattr(options, name)
        if self._drafts_made is not None:
            self._wait_for_drafts_made()
            self._drafts_made[slot] = 0

    def _schedule(self, num_steps: int) -> int:
        """Where the schedule of so many timesteps begins in ``schedules``."""
        if num_steps not in self._schedule_of:
            begin = self._schedule_of[num_steps] = self._num_timesteps
            self._num_timesteps = end = begin + num_steps
            if end > len(self.schedules):
                self.schedules = pad(self.schedules, (0, max(end, 2 * begin) - len(self.schedules)))
            async_tensor_h2d(timestep_ratios(num_steps), out=self.schedules[begin:end])
        return self._schedule_of[num_steps]

    def options_of(self, slots_np: np.ndarray, slots: Tensor) -> BatchOptions:
        """Options of the requests in ``slots`` [D], integers of any width."""
        if len(self._options) > MOST_BATCHES:
            self._options.clear()
        key = slots_np.tobytes()
        if key not in self._options:
            self._options[key] = self._options_of(slots_np.copy(), slots)
        return self._options[key]

    def _options_of(self, slots_np: np.ndarray, slots: Tensor) -> BatchOptions:
        asked = self.asked[slots_np]
        num_stop_token_ids = asked["num_stop_token_ids"].max(initial=0)
        if self._compiles:
            # One compiled form serves requests with none, one and several. No token is the -1 in columns that are left.
            num_stop_token_ids = max(num_stop_token_ids, 2)
        sent = to_device(
            self.device,
            **{name: asked[name] for name in (*INTEGERS, *BOUNDS)},
            stop_token_ids=self.stop_token_ids_np[slots_np, :num_stop_token_ids],
        )
        bounds = {name: sent[name].float() for name in BOUNDS}
        scores_spans = (asked["verifier"] == Verifier.S2D2) & (asked["route"] >= SCORE)
        is_editing = (asked["edit_threshold"] != float("inf")).any()
        policies = frozenset(map(Policy, set(asked["policy"].tolist())))
        return BatchOptions(
            **{name: sent[name] for name in INTEGERS if name != "timed"},
            timed=sent["timed"].bool(),
            policies=policies,
            verifiers=frozenset(map(Verifier, set(asked["verifier"].tolist()))),
            edit_threshold=bounds["edit_threshold"] if is_editing else None,
            stop_token_ids=sent["stop_token_ids"] if num_stop_token_ids else None,
            slots_np=slots_np,
            # Copied, as vLLM may change its own.
            slots=slots.to(torch.int64, copy=True),
            asked=asked,
            bounds=bounds,
            estimators=frozenset(asked["estimator"][scores_spans].astype(int).tolist()),
            draws_positions=bool(asked["draws_positions"].any()),
            kinds=_kinds(asked),
            compares_only=policies.isdisjoint(ROUNDING_POLICIES) and not (asked["alg_temp"] > 0).any(),
        )

    def gather(self, slots: Tensor) -> BlockState:
        """Where the requests in ``slots`` [D] stand."""
        return self.unpack(self.rows.gpu[slots])

    def unpack(self, packed: Tensor) -> BlockState:
        """Views of the rows ``packed`` [D, columns]."""
        fields, finished, branches, levels = packed.split(self.sizes, dim=1)
        return BlockState(Progress(*fields.unbind(1)), levels, finished, branches, packed)

    def put(
        self,
        slots: Tensor,
        progress: Progress,
        finished: Tensor,
        window: Tensor,
        drafts: Tensor | None,
        levels: Tensor | None,
    ) -> None:
        """Write what the requests in ``slots`` [D] go on from.

        Args:
            finished, window: [D, L] and [D, W] int64.
            drafts, levels: [D, max_drafts * W] and [D, max_drafts] int64; None: what is stored stays.
        """
        fields = torch.stack([getattr(progress, field.name) for field in dataclasses.fields(progress)], dim=1)
        values = torch.cat([part for part in (fields, finished, window, drafts, levels) if part is not None], dim=1)
        self.rows.gpu[:, : values.shape[1]].index_copy_(0, slots, values)

    def put_first_token(self, slots: Tensor, tokens: Tensor) -> None:
        """Write the tokens [P] that prefills predict for the first positions of the windows of ``slots`` [P]."""
        self.rows.gpu[slots, self.sizes[0] + self.sizes[1]] = tokens

    def copy_draft_counts(self) -> None:
        """Once per step, when its drafts are in ``rows``: copy their numbers to the host, where the host may ask."""
        if self._drafts_made is not None:
            num_drafts = Progress(*self.rows.gpu[:, : self.sizes[0]].unbind(1)).num_drafts
            self._drafts_made.copy_(num_drafts, non_blocking=True)
            if self._drafts_copied is not None:
                self._drafts_copied.record()

    def may_have_drafts(self, slots_np: np.ndarray) -> np.ndarray:
        """[D] bool: which requests may have drafts in the step that is being planned, as far as the host knows.

        The number of rows does not tell. A request that commits its finished block beside the next block has 2 L rows,
        and so has a request with one draft. Only the second one needs logits of all its rows.
        """
        drafting: np.ndarray = self.asked["max_drafts"][slots_np] > 0
        if self._drafts_made is not None and drafting.any():
            self._wait_for_drafts_made()
            drafting &= self._drafts_made.numpy()[slots_np] > 0
        return drafting

    def _wait_for_drafts_made(self) -> None:
        # The engine has seen the step before, but of one rank only; all ranks must plan the same.
        if self._drafts_copied is not None:
            self._drafts_copied.synchronize()


OWN_VERIFIERS = {
    "fef": Verifier.FEF,
    "linear_spec": Verifier.LINEAR_SPEC,
    "s2d2": Verifier.S2D2,
    "isd": Verifier.ISD,
}
"""Verifiers that decode in a way of their own. Without drafts FeF goes on one position at a time."""


def _kinds(asked: np.ndarray) -> list[np.ndarray]:
    """``BatchOptions.kinds`` of requests with these ``ASKED`` [D]."""
    verifier = asked["verifier"]
    apart = [asked["structured"] > 0, *(verifier == own for own in OWN_VERIFIERS.values())]
    by_policy = ~reduce(or_, apart)
    return [np.flatnonzero(kind) for kind in (by_policy, *apart) if kind.any()]


def _verifier(options: ResolvedOptions) -> Verifier:
    if (own := OWN_VERIFIERS.get(options.verify)) is not None:
        return own
    if options.num_drafts == 0:
        return Verifier.NONE
    if options.verify == "psd":
        return Verifier.PSD
    return Verifier.SUBSET if options.subset_match else Verifier.EXACT
