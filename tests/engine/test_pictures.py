"""Prompts with pictures have the token ids and the patches that transformers' processor makes; what
is wrong with one picture is its request's error alone."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import make_info
from picture_folders import (
    BEGIN_ID,
    END_ID,
    IMAGE_ID,
    VOCAB_SIZE,
    drawn,
    encoded,
    processor,
    shown,
    wrapper_config,
    write_tokenizer,
)
from PIL import Image as Pillow

from hydraspec.engine import bounded
from hydraspec.engine.finish import OfferedRequest
from hydraspec.engine.prompts import tokenize
from hydraspec.engine.turns import History
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.pictures import decoding
from hydraspec.models.pictures.format import PictureFormat, read_picture_format
from hydraspec.models.tokenizer import Tokenizer, load_tokenizer
from hydraspec.types import (
    CheckpointError,
    Completion,
    ConfigurationError,
    Picture,
    Prompt,
    Request,
    SamplingParams,
    WorkloadError,
)

__all__ = ["processor"]

SMALL, WIDE, FITTING = drawn(20, 30), drawn(30, 400), drawn(336, 480)
INFO = make_info(vocab_size=VOCAB_SIZE, max_model_len=1024)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    found = load_tokenizer(folder)
    assert found is not None
    return found


def form_of(folder: Path = Path("folder"), **how: Any) -> PictureFormat:
    found = read_picture_format(Checkpoint(folder, wrapper_config(**how), {}), 70)
    assert found is not None
    return found


FORM = form_of()


def tokenized(tokenizer: Tokenizer, *requests: Request, form: PictureFormat | None = FORM) -> None:
    tokenize(requests, tokenizer, INFO, "zoo:tiny", form)


# ------------------------------------------------------------------ prompts


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(["What colour is it?", SMALL], id="last"),
        pytest.param([WIDE, "How many?"], id="first"),
        pytest.param([SMALL, WIDE], id="side by side"),
        pytest.param(["Is ", FITTING, " left of", SMALL, "or of", WIDE, "?"], id="between"),
        pytest.param(["a", SMALL, "b", SMALL], id="twice"),
    ],
)
def test_ids_spans_and_patches_are_transformers(
    parts: list[Any], tokenizer: Tokenizer, processor: Any
) -> None:
    request = shown(*parts)
    text = processor.tokenizer.apply_chat_template(
        request.messages, tokenize=False, add_generation_prompt=True
    )
    pixels = [part for part in parts if not isinstance(part, str)]
    pictures = [Pillow.fromarray(each) for each in pixels]
    theirs = processor(text=[text], images=[pictures], add_special_tokens=False)
    tokenized(tokenizer, request)
    ids = request.prompt_token_ids
    assert ids is not None
    assert (ids, request.error) == (theirs["input_ids"][0], None)
    assert len(request.spans) == len(request.images) == len(pixels)
    kinds = np.zeros(len(ids), int)
    for i, (span, image) in enumerate(zip(request.spans, request.images, strict=True)):
        assert (span.kind, span.may_be_cut, span.length) == ("image", True, image.num_tokens)
        assert (ids[span.start - 1], ids[span.end]) == (BEGIN_ID, END_ID)
        kinds[span.start : span.end] = 1
        values = np.asarray(theirs["pixel_values"][i])[: len(image.patches)]
        assert np.abs(image.patches - values).mean() < 0.35 / 255
    assert kinds.tolist() == theirs["mm_token_type_ids"][0]
    assert Prompt(ids, request.spans) == request.tokens


def test_equal_pictures_share_digest_and_patches(tokenizer: Tokenizer) -> None:
    """However they are encoded; another picture and another form have other digests."""
    one, other = shown("a", SMALL, WIDE), shown("b", SMALL, index=1)
    jpeg = Picture(name="x", content=encoded("WEBP", SMALL, lossless=True))
    third, fourth = shown(jpeg, index=2), shown(SMALL, index=3)
    tokenized(tokenizer, one, other, third)
    tokenized(tokenizer, fourth, form=replace(FORM, max_tokens=140))
    digests = [span.digest for r in (one, other, third, fourth) for span in r.spans]
    assert digests[0] == digests[2] == digests[3]
    assert len({*digests}) == 3
    assert one.images[0] is other.images[0] is third.images[0]


def test_spans_stay_whole_where_a_picture_sees_both_ways(tokenizer: Tokenizer) -> None:
    request = shown("a", SMALL)
    tokenized(tokenizer, request, form=form_of(bidirectional=True))
    assert [span.may_be_cut for span in request.spans] == [False]


def test_requests_without_pictures_are_as_they_were(tokenizer: Tokenizer) -> None:
    plain = [Request(index=0, id="a", prompt="2 + 3", sampling=SamplingParams()) for _ in "ab"]
    parts = [shown("2 + 3"), Request(**{**as_fields(shown()), "messages": said("2 + 3")})]
    tokenized(tokenizer, plain[0], parts[0])
    tokenize([plain[1], parts[1]], tokenizer, INFO, "zoo:tiny")
    for one, other in (plain, parts):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert one.spans == one.images == ()


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def as_fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in Request.__slots__}


# ------------------------------------------------------------------ errors of one request

GLASS = Pillow.fromarray(np.dstack([SMALL, np.full((20, 30), 9, np.uint8)]))
BAD_FILES = {
    "unreadable": Picture(name="a/b.png", error="cannot be read: No such file"),
    "empty": Picture(name="a", content=b""),
    "text": Picture(name="a", content=b"<svg/>"),
    "gif": Picture(name="a", content=encoded("GIF", SMALL)),
    "cut short": Picture(name="a", content=encoded("JPEG", SMALL)[:-300]),
    "animated": Picture(
        name="a",
        content=encoded("PNG", SMALL, save_all=True, append_images=[Pillow.fromarray(SMALL + 1)]),
    ),
    "transparent": Picture(name="a", content=encoded("PNG", GLASS)),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_picture_is_its_requests_error_alone(name: str, tokenizer: Tokenizer) -> None:
    requests = [
        shown("a", SMALL),
        shown("b", WIDE, BAD_FILES[name], index=1),
        shown("c", BAD_FILES[name], "d", SMALL, index=2),
        shown("e", WIDE, index=3),
    ]
    tokenized(tokenizer, *requests)
    assert [bool(r.error) for r in requests] == [False, True, True, False]
    assert [len(r.images) for r in requests] == [1, 0, 0, 1]
    assert (requests[1].error or "").startswith(
        f"picture 2 of its messages ({BAD_FILES[name].name}): "
    )
    for bad in requests[1:3]:
        assert bad.spans == ()
        assert bad.prompt_token_ids
        offered = OfferedRequest.of(bad)
        assert (offered.finish_reason, offered.error) == ("error", bad.error)
    assert OfferedRequest.of(requests[0]).finish_reason is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(lambda: os._exit(7), "its process ended (status 7)", id="dies"),
        pytest.param(lambda: os.kill(os.getpid(), 9), "ended (signal 9)", id="crashes"),
        pytest.param(lambda: time.sleep(60), "it takes more than 1 seconds", id="hangs"),
        pytest.param(lambda: 1 / 0, "division by zero", id="fails"),
    ],
)
def test_a_decoder_that_ends_its_process_spares_other_pictures(
    fault: Any, message: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_decode, bad = decoding.decode, b"bad"

    def decode(content: bytes) -> np.ndarray:
        return fault() if content == bad else true_decode(content)

    monkeypatch.setattr(decoding, "decode", decode)
    monkeypatch.setattr(bounded, "SECONDS_PER_ITEM", 1)
    pictures = [drawn(9, 9, seed) for seed in range(6)]
    parts: list[Any] = [*pictures]
    parts[1] = Picture(name="bad.png", content=bad)
    requests = [shown(str(i), part, index=i) for i, part in enumerate(parts)]
    tokenized(tokenizer, *requests)
    assert [bool(r.error) for r in requests] == [i == 1 for i in range(6)]
    assert message in (requests[1].error or "")
    alone = shown("0", pictures[5])
    tokenized(tokenizer, alone)
    assert alone.spans[0].digest == requests[5].spans[0].digest


def test_placeholders_in_the_text_are_its_requests_error(tokenizer: Tokenizer) -> None:
    """They would be expanded in place of the picture."""
    requests = [
        shown("a <|image|>", SMALL),
        shown("a <|image|><|image|>", index=1),
        Request(index=2, id="c", prompt="b<|image|>", sampling=SamplingParams()),
        shown("a", SMALL, index=3),
    ]
    tokenized(tokenizer, *requests)
    counts = [(r.error or "none").split()[3:5] for r in requests[:3]]
    assert counts == [["1", "of"], ["2", "of"], ["1", "of"]]
    assert all(f"(id {IMAGE_ID})" in (r.error or "") for r in requests[:3])
    assert requests[3].error is None


# ------------------------------------------------------------------ errors of the run


def test_a_target_without_an_encoder_refuses_pictures(tokenizer: Tokenizer) -> None:
    with pytest.raises(WorkloadError) as caught:
        tokenized(tokenizer, shown("a"), shown("a", SMALL, index=1), form=None)
    assert caught.value.request_id == "r1"
    assert str(caught.value) == (
        "request r1: its messages have parts other than text, and target=tiny_fake with "
        "engine=fake reads none\n"
        "  allowed: messages of text alone\n"
        "  to do: choose a target with an image encoder (with engine=vllm also "
        "engine.vllm.images=true), or leave these parts out"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param("{{ messages[0]['content'] }} user", "takes no list of parts", id="as a list"),
        pytest.param("{{ messages[0]['content'] | tojson }} user", "no list of", id="as JSON"),
        pytest.param("user{# nothing #}", "takes no list of parts", id="dropped"),
        pytest.param(
            "user {{ messages[0]['content'][0]['text'] }}", "writes 0 placeholders for 1", id="text"
        ),
    ],
)
def test_a_template_without_a_place_for_pictures_is_refused(
    template: str, message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        tokenized(tokenizer.with_template(template), shown("What?", SMALL))
    assert caught.value.request_id == "r0"


def test_pictures_without_pillow_are_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding.importlib.util, "find_spec", lambda name: None)
    tokenized(tokenizer, shown("text alone"))
    with pytest.raises(ConfigurationError, match="pip install pillow"):
        tokenized(tokenizer, shown("a", SMALL))


# ------------------------------------------------------------------ conversations


def test_a_later_turn_has_the_images_of_earlier_ones(tokenizer: Tokenizer) -> None:
    turns = [shown("a", SMALL), shown("b", WIDE, SMALL, index=1), shown("c", index=2)]
    turns[1].after, turns[2].after = 0, 1
    tokenized(tokenizer, *turns)
    history, offered = History(turns), []
    for turn in turns:
        offered.append(history.offer(OfferedRequest, turn))
        request = offered[-1].request
        ids = request.prompt_token_ids
        assert ids is not None
        history.add(
            Completion(
                index=turn.index,
                prompt_token_ids=ids,
                output_token_ids=[9, 9],
                text=None,
                finish_reason="length",
                error=None,
                ttft_ms=None,
                latency_ms=1.0,
                spans=request.spans,
            )
        )
    for sequence, digests in zip(offered, (1, 3, 3), strict=True):
        request = sequence.request
        assert len(request.spans) == len(request.images) == digests
        for span, image in zip(request.spans, request.images, strict=True):
            assert sequence.token_ids[span.start : span.end] == [IMAGE_ID] * image.num_tokens


# ------------------------------------------------------------------ the checkpoint's form


def test_the_form_is_the_checkpoints(tmp_path: Path) -> None:
    def form(max_soft_tokens: int | None = None, **changes: Any) -> PictureFormat | None:
        config = wrapper_config() | changes
        return read_picture_format(Checkpoint(tmp_path, config, {}), max_soft_tokens)

    assert form() == replace(FORM, max_tokens=280)
    assert form(vision_soft_tokens_per_image=140) == replace(FORM, max_tokens=140)
    (tmp_path / "preprocessor_config.json").write_text('{"max_soft_tokens": 560, "resample": 3}')
    assert form(vision_soft_tokens_per_image=140) == replace(FORM, max_tokens=560)
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"max_soft_tokens": 70}}')
    assert form() == FORM
    assert form(1120) == replace(FORM, max_tokens=1120)
    unified = form(
        model_type="gemma4_unified", vision_config={"model_type": "gemma4_unified_vision"}
    )
    assert unified == replace(FORM, patch_size=48, pooling=1, max_positions=1120)
    assert form(vision_config=None) is None
    opened = Checkpoint(tmp_path, wrapper_config(), {})
    assert read_picture_format(opened, None, has_encoder=False) is None
    assert form(model_type="mistral3") is None
    with pytest.raises(ConfigurationError, match=r"target.max_soft_tokens=70 has no meaning"):
        form(70, vision_config=None)


@pytest.mark.parametrize(
    ("processor_keys", "config", "message"),
    [
        pytest.param("[", {}, "processor_config.json of .* cannot be read", id="no JSON"),
        pytest.param('{"max_soft_tokens": 100}', {}, "max_soft_tokens is 100; expected one of 70"),
        pytest.param('{"do_normalize": true}', {}, "do_normalize is True; expected False"),
        pytest.param('{"resample": 2}', {}, "resample is 2; expected 3"),
        pytest.param('{"patch_size": 14}', {}, "patch_size is 14; expected 16"),
        pytest.param("{}", {"image_token_id": VOCAB_SIZE}, "image_token_id is 774; expected an id"),
        pytest.param("{}", {"image_token_id": END_ID}, "an id other than boi_token_id"),
        pytest.param("{}", {"boi_token_id": -1}, "boi_token_id is -1"),
    ],
)
def test_forms_that_are_not_understood_are_refused(
    processor_keys: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(processor_keys)
    with pytest.raises(CheckpointError, match=message):
        read_picture_format(Checkpoint(tmp_path, wrapper_config(**config), {}), None)
