"""The optimizer of the tiny models."""

from typing import Any

import torch

from vllm_dllm.training.network import Network


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the layers' matrices, which needs about half of AdamW's steps here, and AdamW for the rest."""

    def __init__(self, network: Network, learning_rate: float, matrix_learning_rate: float):
        matrices = [p for p in network.model.layers.parameters() if p.dim() == 2]
        in_layers = {id(p) for p in matrices}
        rest = [p for p in network.parameters() if id(p) not in in_layers]
        self.both: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=matrix_learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]
        super().__init__([group for each in self.both for group in each.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Both update their own parameters; ``closure`` is not supported."""
        for each in self.both:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        """Both states."""
        return {"both": [each.state_dict() for each in self.both]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both states; schedules then change the restored groups."""
        for each, state in zip(self.both, state_dict["both"], strict=True):
            each.load_state_dict(state)
        self.param_groups = [group for each in self.both for group in each.param_groups]
