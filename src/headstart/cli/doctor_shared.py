"""Doctor of a fleet: whether this server could use what other servers have stored, and why not."""

from __future__ import annotations

from headstart.config import Settings
from headstart.interfaces.engine import Engine
from headstart.names import as_flag
from headstart.tiers.shared.opened import open_keyed
from headstart.tiers.shared.servers import cards, differences
from headstart.tiers.shared.store import StoreError


def examine_shared(settings: Settings, engine: Engine) -> tuple[bool, list[tuple[str, str]]]:
    """Lines for people, by topic, and whether the store can be used.

    Raises:
        ConfigError: the address, the key file or a missing library.
    """
    assert settings.shared is not None
    store, keys = open_keyed(settings.shared, settings.shared_key_file, encrypt=settings.shared_encrypt)
    try:
        warnings = store.warnings(settings.shared_expire or float("inf"))
        found = cards(store, keys)
    except StoreError as error:
        return False, [("shared", f"{store.url} cannot be used ({error})")]
    finally:
        store.close()
    lines = [("shared", f"{store.url} can be used"), *(("", warning) for warning in warnings)]
    if not found:
        lines.append(("other servers", "none has used it with this key file in the last minutes"))
    for card in found:
        differs = differences(engine.identity, card.identity)
        same = card.fingerprint == engine.fingerprint.hex()
        state = "shares its cache with this one" if same else f"cannot share: {'; '.join(differs) or 'its fingerprint differs'}"
        lines.append((f"server {card.host}", as_flag(f"{card.model}, which writes as {card.writer}: {state}")))
    return True, lines
