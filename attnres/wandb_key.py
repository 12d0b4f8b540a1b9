"""Whether W&B would find a key without asking for one, and keeping that key out of messages. Torch-free."""

from __future__ import annotations

import netrc
import os
from urllib.parse import urlparse

KEY_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
# One service under two names: which of them `wandb login` writes down depends on the client's version.
PUBLIC_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
REASON_LENGTH = 200


def has_key() -> bool:
    """Whether W&B would find credentials without asking: in the environment or in the netrc file."""
    if any(os.environ.get(name) for name in KEY_VARIABLES):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname or PUBLIC_HOSTS[0]
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            known = netrc.netrc(os.path.expanduser(path)) if path else None
        except (OSError, netrc.NetrcParseError):  # absent or unreadable: no key there
            continue
        hosts = PUBLIC_HOSTS if host in PUBLIC_HOSTS else (host,)
        if known and any(known.authenticators(name) for name in hosts):
            return True
    return False


def reason(error: Exception) -> str:
    """An error of the client as one line, without whatever secrets it may have put into it."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    for name in KEY_VARIABLES:
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return text[:REASON_LENGTH]
