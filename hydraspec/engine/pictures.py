"""Pictures of messages as images of prompts: decoded within limits of time and memory, and put in
place of their placeholders."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hydraspec.engine.bounded import OutOfBoundsError, bounded
from hydraspec.models.pictures import decoding
from hydraspec.models.pictures.format import PictureFormat
from hydraspec.models.pictures.patches import digest, to_image
from hydraspec.types import IMAGE, Image, Picture, Request, Span, WorkloadError

GROUP = 16  # pictures of a decoding process, whose pixels are on the disk together


@dataclass(slots=True, frozen=True)
class ReadPicture:
    """A picture as the target reads it, and the digest of its content."""

    image: Image
    digest: str


def read_pictures(
    requests: Sequence[Request], form: PictureFormat
) -> dict[int, tuple[ReadPicture, ...]]:
    """The pictures of each request by its index. A request of which one cannot be used has its
    `error` set instead. Equal pictures are decoded once and share their patches.

    Raises:
        ConfigurationError: there are pictures, and Pillow is not installed.
    """
    pictures = [picture for request in requests for picture in request.pictures]
    if not pictures:
        return {}
    decoding.check_installed()
    contents = {_name(p): p.content for p in pictures if p.error is None}
    found = dict(zip(contents, _read(list(contents.values()), form), strict=True))
    result: dict[int, tuple[ReadPicture, ...]] = {}
    for request in requests:
        read = [found[_name(p)] if p.error is None else p.error for p in request.pictures]
        for i, (picture, one) in enumerate(zip(request.pictures, read, strict=True), 1):
            if isinstance(one, str) and request.error is None:
                request.error = f"picture {i} of its messages ({picture.name}): {one}"
        if request.error is None:
            result[request.index] = tuple(one for one in read if isinstance(one, ReadPicture))
    return result


def _name(picture: Picture) -> bytes:
    return hashlib.sha256(picture.content).digest()


def _read(contents: Sequence[bytes], form: PictureFormat) -> Iterator[ReadPicture | str]:
    """Yields each picture, or the reason why it cannot be used."""
    known: dict[str, ReadPicture] = {}
    for pixels in _decoded(contents):
        if isinstance(pixels, str):
            yield pixels
            continue
        name = digest(pixels, form)
        try:
            if name not in known:
                known[name] = ReadPicture(to_image(pixels, form), name)
            yield known[name]
        except WorkloadError as error:
            yield str(error)


def _decoded(contents: Sequence[bytes]) -> Iterator[np.ndarray | str]:
    """Yields the pixels [height, width, 3] uint8 of each file, or why there are none. Decoders run
    in a process of their own, which a damaged file may end."""
    at = 0
    while at < len(contents):
        with tempfile.TemporaryFile() as pixels:
            work = partial(_decode_into, pixels.fileno())
            with closing(bounded(work, contents[at : at + GROUP])) as outcomes:
                for _ in contents[at : at + GROUP]:
                    at += 1
                    try:
                        outcome = next(outcomes)
                    except OutOfBoundsError as error:
                        yield f"it cannot be decoded: {error}; save it again"
                        break  # that process has ended
                    if isinstance(outcome, str):
                        yield outcome
                        continue
                    first, shape = outcome
                    content = os.pread(pixels.fileno(), int(np.prod(shape)), first)
                    yield np.frombuffer(content, np.uint8).reshape(shape)


def _decode_into(file: int, content: bytes) -> Any:
    """Writes the pixels at the end of an open file; returns where they begin, and their shape. The
    text of the error, if they cannot be decoded."""
    try:
        pixels = decoding.decode(content)
    except WorkloadError as error:
        return str(error)
    first, rest = os.lseek(file, 0, os.SEEK_END), np.ascontiguousarray(pixels).data.cast("B")
    while rest:
        rest = rest[os.write(file, rest) :]
    return first, pixels.shape


def put_images(
    request: Request, ids: Sequence[int], pictures: Sequence[ReadPicture], form: PictureFormat
) -> None:
    """Set token ids, spans and images of a request whose text has the `ids`: a placeholder of each
    picture becomes the token of its beginning, one token for each row of the image, and the token
    of its end.

    Raises:
        WorkloadError: the chat template has written fewer placeholders than there are pictures. If
            there are more, the text itself has some, which is this request's error.
    """
    num_places = sum(token == form.image_id for token in ids)
    if num_places < len(pictures):
        raise WorkloadError(
            f"request {request.id}: the chat template of this checkpoint writes {num_places} "
            f"placeholders for {len(pictures)} pictures; give messages of text alone, or a target "
            "whose template has a place for pictures",
            request_id=request.id,
        )
    if num_places > len(pictures):
        request.error = (
            f"its text has {num_places - len(pictures)} of the tokens that stand for pictures "
            f"(id {form.image_id}): write the picture as a part of the message, or leave them out"
        )
        return
    found: list[int] = []
    spans: list[Span] = []
    for token in ids:
        if token != form.image_id:
            found.append(token)
            continue
        picture = pictures[len(spans)]
        length = picture.image.num_tokens
        spans.append(
            Span(
                kind=IMAGE,
                start=len(found) + 1,
                length=length,
                digest=picture.digest,
                may_be_cut=form.may_be_cut,
            )
        )
        found += [form.begin_id, *[form.image_id] * length, form.end_id]
    request.prompt_token_ids, request.spans = found, tuple(spans)
    request.images = tuple(picture.image for picture in pictures)
