"""Which LoRA adapters the requests of an engine may have at a time."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_dllm.runtime.scheduling.asked import AskedScheduler


class AdapterScheduler(AskedScheduler):
    """Keeps requests waiting whose adapter has no slot.

    vLLM 0.32 counts the adapters of the requests that a step has rows for. Here a running request may have none in a
    step, as requests take turns. Another adapter would take the slot meanwhile, and vLLM does not survive a step with
    more adapters than slots. vLLM 0.33 counts those of all running requests itself.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of running requests and those that this step lets in; None: not known yet.
        self._adapters: set[int] | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._adapters = None
        return super().schedule(*args, **kwargs)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            return False
        if self.lora_config is None or request.lora_request is None:
            return True
        if self._adapters is None:
            self._adapters = {each.lora_request.lora_int_id for each in self.running if each.lora_request}
        adapter = request.lora_request.lora_int_id
        if adapter not in self._adapters and len(self._adapters) >= self.lora_config.max_loras:
            return False
        self._adapters.add(adapter)
        return True
