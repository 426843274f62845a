"""CPU stand-in for Triton."""


def activate() -> None:
    """Entry point ``vllm.platform_plugins``: never a platform of its own."""
    return None
