"""`python -m opentinker`: the same as the `opentinker` command."""

from opentinker.cli.main import main

if __name__ == "__main__":
    main()
