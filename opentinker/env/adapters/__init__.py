"""Environments of other ecosystems, named `<adapter>:<name>`; one module each, loaded when it is asked for.

`python -m opentinker.env.adapters` prints which of their packages are installed here.
"""
