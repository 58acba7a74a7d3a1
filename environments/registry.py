"""The built-in environments by name."""

BUILT_IN = {
    "arithmetic": "opentinker.environments.arithmetic:Arithmetic",
    "guess_number": "opentinker.environments.guess_number:GuessNumber",
    "math": "opentinker.environments.math:Math",
    "math_code": "opentinker.environments.math_code:MathCode",
}
