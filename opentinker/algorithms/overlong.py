"""The price of long answers."""

from opentinker.config.algorithms import OverlongConfig


def overlong_penalty(tokens: int, config: OverlongConfig) -> float:
    """0 or less (Yu et al., 2025, "DAPO", eq. 13): falls linearly over the last `buffer_tokens` before `limit_tokens`."""
    over = tokens - (config.limit_tokens - config.buffer_tokens)
    return -config.penalty * min(max(over / config.buffer_tokens, 0.0), 1.0)
