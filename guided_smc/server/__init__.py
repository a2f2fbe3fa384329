"""The HTTP server: OpenAI's API over one engine that all requests share.

Requires the `server` extra. `guided-smc serve MODEL` runs it; `create_app` makes the ASGI
application for another server or a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from guided_smc.lazy import lazily

if TYPE_CHECKING:
    from guided_smc.server.app import create_app
    from guided_smc.server.settings import Settings

__all__ = ["Settings", "create_app"]

__getattr__, __dir__ = lazily(globals(), {"create_app": "app", "Settings": "settings"})
