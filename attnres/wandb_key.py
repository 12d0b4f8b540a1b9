"""Whether W&B would find a key without asking for one, and keeping that key out of messages. Torch-free."""

from __future__ import annotations

import functools
import netrc
import os
from urllib.parse import urlparse

KEY_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
# One service under two names: which of them `wandb login` writes down depends on the client's version.
PUBLIC_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
REASON_LENGTH = 200
SHORTEST_KEY = 16  # W&B's have 40 characters or more; short words would blank out innocent text
HIDDEN = "***"


def has_key() -> bool:
    """Whether W&B would find credentials without asking: in the environment or in the netrc file."""
    if any(os.environ.get(name) for name in KEY_VARIABLES):
        return True
    return bool(_netrc_keys(*_netrc_variables()))


def hide(text: str) -> str:
    """The text with *** in the place of every W&B key that this process could find.

    Whatever is written for people or for the analysis passes here: an error of a client, or a command line,
    may hold a key.
    """
    found = [os.environ.get(name, "") for name in KEY_VARIABLES] + _netrc_keys_once(*_netrc_variables())
    for secret in found:
        if len(secret) >= SHORTEST_KEY:
            text = text.replace(secret, HIDDEN)
    return text


def _netrc_variables() -> tuple[str, ...]:
    return tuple(os.environ.get(name, "") for name in ("WANDB_BASE_URL", "NETRC", "HOME"))


def _netrc_keys(base_url: str, netrc_file: str, home: str) -> list[str]:
    """Keys of W&B's host in the netrc files. `home` is where ~ leads."""
    host = urlparse(base_url).hostname or PUBLIC_HOSTS[0]
    hosts = PUBLIC_HOSTS if host in PUBLIC_HOSTS else (host,)
    keys = []
    for path in (netrc_file, "~/.netrc", "~/_netrc"):
        try:
            known = netrc.netrc(os.path.expanduser(path)) if path else None
        except (OSError, netrc.NetrcParseError):  # absent or unreadable: no key there
            continue
        logins = [known.authenticators(name) for name in hosts] if known else []
        keys += [login[2] or "" for login in logins if login]
    return keys


# For `hide`, which is called for every line and file.
_netrc_keys_once = functools.lru_cache(maxsize=4)(_netrc_keys)


def reason(error: Exception) -> str:
    """An error of the client as one line, without whatever secrets it may have put into it."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    return hide(text)[:REASON_LENGTH]
