"""The built-in environments by name."""

BUILT_IN = {
    "arithmetic": "opentinker.environments.arithmetic:Arithmetic",
    "gomoku": "opentinker.environments.gomoku:Gomoku",
    "guess_number": "opentinker.environments.guess_number:GuessNumber",
}
