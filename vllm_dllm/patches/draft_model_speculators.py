"""A draft model may bring its own speculator, and a plugin methods of speculation
(``patches/008-draft-model-speculators.diff``).

vLLM runs every separate draft model with one speculator, which drafts token by token, and knows all methods by name. A
diffusion model drafts a whole block in one forward, with more rows and K/V slots than that.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.seam import SeamMovedError, mentions, seam

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu.states import RequestState

REGISTRY = "SPECULATIVE_METHODS"
"""In ``vllm.config.speculative``: by name, what makes a ``SpeculativeConfig`` of what was asked for."""


def apply() -> bool:
    """Change how vLLM sets up draft models; False where it has the change."""
    from vllm.config import SpeculativeConfig, VllmConfig, speculative
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu import model_runner, spec_decode

    create = seam(EngineArgs, "create_speculative_config", ("self", "target_model_config", "target_parallel_config"))
    if mentions(create, REGISTRY):
        return False
    setattr(speculative, REGISTRY, {})
    EngineArgs.create_speculative_config = _with_registry(create)
    equal_vocabularies = seam(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", ("self",))
    slots = _getter(SpeculativeConfig, "max_num_new_slots_for_drafting")
    lookahead = _getter(VllmConfig, "num_lookahead_tokens")
    init = seam(spec_decode, "init_speculator", ("vllm_config", "device", "req_states"))

    @functools.wraps(equal_vocabularies)
    def verify_equal_vocab_size_if_draft_model(self: "SpeculativeConfig") -> None:
        if _drafter(self, "draft_slots") is None:  # else the speculator knows which tokens are the same
            equal_vocabularies(self)

    def max_num_new_slots_for_drafting(self: "SpeculativeConfig") -> int:
        own = _drafter(self, "draft_slots")
        return slots(self) if own is None else own(self.num_speculative_tokens)

    def num_lookahead_tokens(self: "VllmConfig") -> int:
        own = _drafter(self.speculative_config, "draft_lookahead")
        return lookahead(self) if own is None else own(self.num_speculative_tokens)

    @functools.wraps(init)
    def init_speculator(vllm_config: "VllmConfig", device: "torch.device", req_states: "RequestState") -> Any:
        from vllm.model_executor.model_loader.utils import get_model_cls

        config = vllm_config.speculative_config
        if config is not None and config.uses_draft_model():
            get_speculator_cls = getattr(get_model_cls(config.draft_model_config), "get_speculator_cls", None)
            if get_speculator_cls is not None:
                return get_speculator_cls()(vllm_config, device, req_states)
        return init(vllm_config, device, req_states)

    SpeculativeConfig.verify_equal_vocab_size_if_draft_model = verify_equal_vocab_size_if_draft_model
    SpeculativeConfig.max_num_new_slots_for_drafting = property(max_num_new_slots_for_drafting)
    VllmConfig.num_lookahead_tokens = property(num_lookahead_tokens)
    # The runner has the function by name.
    spec_decode.init_speculator = model_runner.init_speculator = init_speculator
    return True


def _with_registry(create: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.config import speculative

    from vllm_dllm.patches.speculative_methods import MARKER, asked_of

    @functools.wraps(create)
    def create_speculative_config(
        self: "EngineArgs", target_model_config: "ModelConfig", target_parallel_config: "ParallelConfig"
    ) -> "SpeculativeConfig | None":
        if isinstance(self.speculative_config, str):
            self.speculative_config = {"method": self.speculative_config}
        asked = asked_of(self)
        make = getattr(speculative, REGISTRY).get((asked or {}).get("method"))
        if make is None or hasattr(target_model_config.hf_config, MARKER):
            return create(self, target_model_config, target_parallel_config)
        config = make(asked, target_model_config, target_parallel_config)
        scheduler_cls = _drafter(config, "draft_scheduler_cls")
        if self.scheduler_cls is None:
            self.scheduler_cls = scheduler_cls
        return config

    return create_speculative_config


def _drafter(config: "SpeculativeConfig | None", name: str) -> Any:
    """What a draft model's configuration says of itself, if there is one and it does."""
    if config is None or not config.uses_draft_model() or config.draft_model_config is None:
        return None
    return getattr(config.draft_model_config.hf_config, name, None)


def _getter(owner: type, name: str) -> Callable[[Any], int]:
    found = vars(owner).get(name)
    if not isinstance(found, property) or found.fget is None:
        raise SeamMovedError(
            f"vllm-dllm changes {owner.__qualname__}.{name}, which is no property in the installed vLLM"
        )
    return found.fget
