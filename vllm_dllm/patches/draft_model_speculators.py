"""A draft model may bring its own speculator, and a plugin methods of speculation
(``patches/008-draft-model-speculators.diff``).

vLLM runs every separate draft model with one speculator, which drafts token by token, and knows all methods by name. A
diffusion model drafts a whole block in one forward, with more rows and K/V slots than that.
"""

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import mentions, of_vllm, property_of_vllm
from vllm_dllm.patches.speculative_methods import MARKER, REGISTRY, asked_of

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.states import RequestState


def apply() -> bool:
    """Change how vLLM sets up draft models; False where it has the change."""
    from vllm.config import SpeculativeConfig, VllmConfig, speculative
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu import spec_decode

    create = of_vllm(EngineArgs, "create_speculative_config", ("self", "target_model_config", "target_parallel_config"))
    if mentions(create, REGISTRY):
        return False
    equal_vocabularies = of_vllm(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", ("self",))
    slots = property_of_vllm(SpeculativeConfig, "max_num_new_slots_for_drafting")
    lookahead = property_of_vllm(VllmConfig, "num_lookahead_tokens")
    validate = of_vllm(SamplingParams, "_validate_spec_decode", ("self", "speculative_config"))
    init = of_vllm(spec_decode, "init_speculator", ("vllm_config", "device", "req_states"))

    @functools.wraps(create)
    def create_speculative_config(
        self: "EngineArgs", target_model_config: "ModelConfig", target_parallel_config: "ParallelConfig"
    ) -> "SpeculativeConfig | None":
        asked = asked_of(self)
        method = None if asked is None else asked.get("method")
        make: Callable[..., SpeculativeConfig] | None = getattr(speculative, REGISTRY).get(method)
        if make is None or hasattr(target_model_config.hf_config, MARKER):
            config = create(self, target_model_config, target_parallel_config)
        else:
            config = make(asked, target_model_config, target_parallel_config)
        if self.scheduler_cls is None:
            self.scheduler_cls = _hook(config, "draft_scheduler_cls")
        return config

    @functools.wraps(equal_vocabularies)
    def verify_equal_vocab_size_if_draft_model(self: "SpeculativeConfig") -> None:
        if _hook(self, "draft_slots") is None:  # else the speculator knows which tokens are the same
            equal_vocabularies(self)

    def max_num_new_slots_for_drafting(self: "SpeculativeConfig") -> int:
        own = _hook(self, "draft_slots")
        return slots(self) if own is None else own(self.num_speculative_tokens)

    def num_lookahead_tokens(self: "VllmConfig") -> int:
        own = _hook(self.speculative_config, "draft_lookahead")
        return lookahead(self) if own is None else own(self.num_speculative_tokens)

    @functools.wraps(validate)
    def validate_spec_decode(self: "SamplingParams", speculative_config: "SpeculativeConfig | None") -> None:
        validate(self, speculative_config)
        own = _hook(speculative_config, "validate_drafted_params")
        if own is not None:
            own(self)

    @functools.wraps(init)
    def init_speculator(vllm_config: "VllmConfig", device: "torch.device", req_states: "RequestState") -> Any:
        from vllm.model_executor.model_loader.utils import get_model_cls

        config = vllm_config.speculative_config
        if config is not None and config.uses_draft_model():
            draft_model_cls = get_model_cls(config.draft_model_config)
            if hasattr(draft_model_cls, "get_speculator_cls"):
                return draft_model_cls.get_speculator_cls()(vllm_config, device, req_states)
        return init(vllm_config, device, req_states)

    setattr(speculative, REGISTRY, {})
    EngineArgs.create_speculative_config = create_speculative_config
    SpeculativeConfig.verify_equal_vocab_size_if_draft_model = verify_equal_vocab_size_if_draft_model
    SpeculativeConfig.max_num_new_slots_for_drafting = property(max_num_new_slots_for_drafting)
    if (shares := getattr(SpeculativeConfig, "draft_shares_target_positions", None)) is not None:
        # From vLLM 0.33 on, a drafter's context limits the target's unless it is said to be as long.
        SpeculativeConfig.draft_shares_target_positions = _or_has_its_own_speculator(shares)
    VllmConfig.num_lookahead_tokens = property(num_lookahead_tokens)
    SamplingParams._validate_spec_decode = validate_spec_decode
    spec_decode.init_speculator = init_speculator
    # The runner takes the function by name. It takes seconds to import, and most processes never do.
    runner = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None:
        of_vllm(runner, "init_speculator", ("vllm_config", "device", "req_states"))
        runner.init_speculator = init_speculator  # type: ignore[attr-defined]
    return True


def _or_has_its_own_speculator(shares: Callable[["SpeculativeConfig"], bool]) -> Callable[["SpeculativeConfig"], bool]:
    @functools.wraps(shares)
    def draft_shares_target_positions(self: "SpeculativeConfig") -> bool:
        return _hook(self, "draft_slots") is not None or shares(self)

    return draft_shares_target_positions


def _hook(config: "SpeculativeConfig | None", name: str) -> Any:
    """What the configuration of a draft model says of a speculator of its own; ``None``: nothing."""
    if config is None or not config.uses_draft_model() or config.draft_model_config is None:
        return None
    return getattr(config.draft_model_config.hf_config, name, None)
