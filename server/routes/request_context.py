"""What endpoints find by a request: what is served, and how."""

from __future__ import annotations

from fastapi import Request

from server.access.request_state import KEY
from server.frontend.frontend import Frontend
from server.frontend.many_models import ManyModels
from server.options.server_flags import ServerConfig


def frontend_of(request: Request) -> Frontend:
    """The frontend of the model that a request is for."""
    return request.scope[KEY].frontend


def server_of(request: Request) -> Frontend | ManyModels:
    """All that is served: one model, or several."""
    return request.scope["app"].state.frontend


def frontends_of(request: Request) -> list[Frontend]:
    """The frontends of all models that are loaded."""
    server = server_of(request)
    return server.loaded if isinstance(server, ManyModels) else [server]


def config_of(request: Request) -> ServerConfig:
    """The configuration of the model that a request is for, or of the whole server."""
    return request.scope[KEY].frontend.config
