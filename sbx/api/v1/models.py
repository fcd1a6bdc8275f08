"""Replies that several resources share."""

from typing import Literal

from pydantic import BaseModel


class OkBody(BaseModel):
    status: Literal["ok"] = "ok"
