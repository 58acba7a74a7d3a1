"""The built-in environments by name."""

BUILT_IN = {
    "arithmetic": "opentinker.environments.arithmetic:Arithmetic",
    "geo3k": "opentinker.environments.geo3k:Geo3k",
    "geo3k_tools": "opentinker.environments.geo3k_tools:Geo3kTools",
    "gomoku": "opentinker.environments.gomoku:Gomoku",
    "guess_number": "opentinker.environments.guess_number:GuessNumber",
    "math": "opentinker.environments.math:Math",
    "math_code": "opentinker.environments.math_code:MathCode",
}
FOR_AGENTS = {
    "describe_guess": "opentinker.environments.describe_guess:DescribeGuess",
    "gomoku_duel": "opentinker.environments.gomoku_duel:GomokuDuel",
    "negotiation": "opentinker.environments.negotiation:Negotiation",
}
"""Those of several agents."""
