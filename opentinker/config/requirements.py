"""What an environment's code needs where it runs: packages, by PEP 508 requirements, and secrets, by name."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from opentinker.errors import ConfigError

REQUIREMENTS_FILE = "requirements.txt"
"""Beside the environment's file; it counts when the config lists no requirements."""
MAX_FILE_BYTES = 64 * 2**10
MAX_REQUIREMENTS = 100
MAX_REQUIREMENT = 200
"""Characters of one."""
MAX_SECRETS = 10
SECRET_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_USERINFO = re.compile(r"://[^/\s]*@")
_RESERVED = ("OPENTINKER_", "RAY_", "LD_", "PYTHON")
"""What these variables mean to the driver's process is not a job's to change."""
_FOR_JOBS = ("OPENTINKER_ENV_TOKEN",)
"""Except these: the token of the environment servers that a job uses."""


def check_requirements(lines: Sequence[str]) -> tuple[str, ...]:
    """The requirements, each in one line without spaces around it.

    Raises:
        ValueError: not PEP 508 (pip's options and bare paths are not), a URL with credentials, or too many. No credentials are
            in the message.
    """
    if len(lines) > MAX_REQUIREMENTS:
        raise ValueError(f"{len(lines)} requirements; at most {MAX_REQUIREMENTS} are possible")
    for line in lines:
        shown = _USERINFO.sub("://***@", line)
        if len(line) > MAX_REQUIREMENT:
            raise ValueError(f"{shown[:40]!r}... is longer than {MAX_REQUIREMENT} characters")
        if line.lstrip().startswith("-"):
            raise ValueError(
                f"{shown!r} is an option of pip, not a requirement; which indexes are used is the cluster's to say"
            )
        try:
            url = Requirement(line).url or ""
        except InvalidRequirement as error:
            why = _USERINFO.sub("://***@", str(error).splitlines()[0])
            raise ValueError(f"{shown!r} is not a requirement (PEP 508), such as 'sympy>=1.13': {why}") from None
        if not line.isprintable():
            raise ValueError(f"{shown!r} holds a character that cannot be printed")
        if _has_credentials(url):
            raise ValueError(
                f"{shown!r} holds credentials, which would be stored and logged; those of a package's host belong into the "
                "cluster's pip.conf or .netrc, which its operator keeps"
            )
    return tuple(line.strip() for line in lines)


def _has_credentials(url: str) -> bool:
    """A user's name alone is a token for many hosts; for ssh it is a name."""
    try:
        parts = urlsplit(url)
        return "@" in parts.netloc and not (parts.scheme.endswith("ssh") and parts.password is None)
    except ValueError:
        return "@" in url


def check_secrets(secrets: Mapping[str, str]) -> dict[str, str]:
    """{environment variable: secret's name}, as it was given.

    Raises:
        ValueError: a name that cannot be one, a variable with a meaning of its own, or too many.
    """
    if len(secrets) > MAX_SECRETS:
        raise ValueError(f"{len(secrets)} secrets; at most {MAX_SECRETS} are possible")
    for variable, name in secrets.items():
        if not _VARIABLE.fullmatch(variable):
            raise ValueError(f"{variable[:80]!r} cannot be an environment variable's name")
        if (variable.upper().startswith(_RESERVED) and variable not in _FOR_JOBS) or variable == "PATH":
            raise ValueError(f"{variable} has a meaning of its own for the driver; call the variable something else")
        if not re.fullmatch(SECRET_NAME, name):
            # It may be the value itself, so it is not repeated.
            raise ValueError(f"{variable}: that cannot be a secret's name; write the name here, never the value")
    return dict(secrets)


def check_variables(named: Mapping[str, Mapping[str, str]]) -> None:
    """Raises: ValueError when two parts of a config bring different secrets in one environment variable. `named` is
    {part: {environment variable: secret's name}}."""
    found: dict[str, tuple[str, str]] = {}
    for part, secrets in named.items():
        for variable, name in secrets.items():
            other, known = found.setdefault(variable, (part, name))
            if known != name:
                raise ValueError(f"{other} and {part} both bring a secret as {variable}, and it is not the same one")


def parse_requirements(text: str) -> tuple[str, ...]:
    """The requirements of a requirements.txt: comments, empty lines and continued lines are understood, pip's options are not.

    Raises:
        ConfigError: an option, or a line that is no requirement.
    """
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines()]
    try:
        return check_requirements([line for line in lines if line])
    except ValueError as error:
        raise ConfigError(
            f"{REQUIREMENTS_FILE}: {error}",
            hint="correct the file beside the environment's, or list environment.requirements in the config, which then rules",
        ) from None


def listed_requirements(listed: tuple[str, ...] | None, environment_file: Path | None) -> tuple[str, ...]:
    """What an environment requires: the config's list, or else that of the requirements.txt beside the environment's file.

    Raises:
        ConfigError: the file is no list of requirements.
    """
    if listed is not None or environment_file is None:
        return listed or ()
    file = environment_file.with_name(REQUIREMENTS_FILE)
    if not file.is_file():
        return ()
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{REQUIREMENTS_FILE} is larger than {MAX_FILE_BYTES >> 10} KiB")
    try:
        return parse_requirements(file.read_text())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{REQUIREMENTS_FILE} is not text") from error


def missing_requirements(requirements: Iterable[str]) -> list[str]:
    """Those that the packages of this process do not meet. Only distributions' versions are looked at, nothing is imported."""
    missing = []
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(canonicalize_name(requirement.name))
        except metadata.PackageNotFoundError:
            missing.append(line)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{line} (here: {version})")
    return missing


def missing_variables(secrets: Mapping[str, str]) -> list[str]:
    """Variables of `environment.secrets` that this process's environment lacks."""
    return [variable for variable in secrets if not os.environ.get(variable)]
