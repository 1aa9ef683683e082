"""The API over a frontend whose answers think and call tools."""

from thinking_api import app, client, frontend

__all__ = ["app", "client", "frontend"]
