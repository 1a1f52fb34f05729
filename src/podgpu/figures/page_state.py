"""A picture with its JSON ready to be handed out. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from podgpu.exposition.body import Body
from podgpu.figures.as_json import encode_picture
from podgpu.figures.picture import Picture


@dataclass(frozen=True, slots=True)
class PageState:
    """All a request for the page's figures needs. Immutable; replaced as a whole."""

    picture: Picture
    view: Body
    """`/api/v1/view`."""
    etag: str
    """Weak, because it stands for both encodings."""

    @classmethod
    def of(cls, picture: Picture) -> PageState:
        plain = encode_picture(picture)
        return cls(picture, Body.of(plain), etag_of(plain))


def etag_of(plain: bytes) -> str:
    return f'W/"{blake2b(plain, digest_size=12).hexdigest()}"'
