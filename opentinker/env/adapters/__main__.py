"""Prints the adapters, the packages that they need and the versions that are installed: `python -m opentinker.env.adapters`."""

from importlib import metadata

from opentinker.env.adapters.common import ADAPTERS, Adapter


def installed(adapter: Adapter) -> str:
    """The version of the adapter's package here, or a dash."""
    try:
        return metadata.version(adapter.package)
    except metadata.PackageNotFoundError:
        return "-"


def table(*, here: bool) -> list[str]:
    """The adapters as a Markdown table; with `here`, what is installed too."""
    columns = ["adapter", "package", "run with", "adapts"] + ["installed"] * here
    rows = [
        [f"`{a.name}:`", a.package, ", ".join(a.tested), a.adapts] + [installed(a)] * here
        for a in sorted(ADAPTERS.values(), key=lambda a: a.name)
    ]
    return [f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows]]


if __name__ == "__main__":
    print("\n".join(table(here=True)))
