"""Entry points: what this plugin registers with vLLM."""


def register() -> None:
    """Entry point ``vllm.general_plugins``; runs once in every process of vLLM."""
