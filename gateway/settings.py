"""Settings of one gateway process."""

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class GatewaySettings(BaseModel):
    """Where the gateway listens, which model it speaks for, and what bounds it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_dir: Path = Field(description="model folder with tokenizer.json; weights are not read")
    engines: tuple[str, ...] = Field(min_length=1, description="base URLs of SGLang servers")
    family: str | None = Field(default=None, description="template family; None: recognised")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8080, ge=0, le=65535, description="port to listen on; 0 lets the system choose")
    admin_key: str | None = Field(default=None, min_length=8, description="bearer key of the admin routes")
    public_url: str | None = Field(default=None, description="base URL for clients; None: as asked")
    journal: Path | None = Field(default=None, description="SQLite file; None: gone with the process")
    context_length: int | None = Field(default=None, ge=2, description="tokens; None: what the engines say")
    max_sessions: int = Field(default=16384, ge=1, description="most sessions held at once")
    max_turns: int = Field(default=10_000, ge=1, description="most turns held of one session")
    max_bytes: int = Field(default=8 * 2**30, ge=2**20, description="most memory of all sessions in use")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="what goes to the log, as JSON lines on stderr"
    )
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024, description="largest request body")
    ttl_seconds: float = Field(default=86400.0, gt=0, description="unused sessions are deleted after this")
    idle_seconds: float = Field(default=600.0, gt=0, description="unused sessions leave memory after this")

    @model_validator(mode="after")
    def _open_only_with_key(self) -> "GatewaySettings":
        if self.admin_key is None and not _loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines: set admin_key, or use 127.0.0.1"
            )
        return self


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
