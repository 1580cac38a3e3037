"""The target that reads pictures and its drafters: files, the definition beside transformers', and
what it answers."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoTokenizer,
    Gemma4AssistantForCausalLM,
    Gemma4ForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.pictures.format import read_picture_format
from hydraspec.models.pictures.patches import to_image
from hydraspec.workloads import drawn
from hydraspec.zoo.recipe import (
    draft_files,
    make_pictured,
    modeling,
    pictured,
    pictured_texts,
    train_drafter,
    train_pictured,
)
from hydraspec.zoo.recipe.pictured_recipes import EAGLE3, FORM, IMAGE_ID, NAME, TEXT, VISION
from hydraspec.zoo.recipe.pictured_texts import LENGTHS, SLOTS, PicturedTexts
from hydraspec.zoo.recipe.recipes import CHECKPOINTS

FOLDERS = [CHECKPOINTS / f"{NAME}{suffix}" for suffix in ("", "-assistant", "-eagle3")]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # sums of float32 products in another order
LEAST_RIGHT = {"colour": 0.95, "count": 0.8, "more": 0.9, "place": 0.6}  # by chance 1/6 1/5 1/2 1/9


@cache
def wrapper() -> Any:
    return pictured.load(FOLDERS[0])


@cache
def tokens() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(FOLDERS[0]))


def questions(count: int) -> list[drawn.Question]:
    return list(itertools.islice(pictured_texts.questions(3, held_out=True), count))


def texts(count: int, num_pictures: int) -> PicturedTexts:
    found = [one for one in questions(20 * count) if len(one.pictures) == num_pictures][:count]
    made = pictured_texts.make_texts(tokens(), found, LENGTHS[num_pictures])
    return made.rows(torch.arange(count))


def test_sizes_and_types() -> None:
    files = [path for folder in FOLDERS for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) <= 4_000_000
    for folder in FOLDERS:
        with safe_open(folder / "model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                assert tensor.dtype == torch.bfloat16 or name in ("d2t", "t2d"), name
                assert tensor.isfinite().all()


def test_the_recipe_is_the_shipped_shape() -> None:
    config = json.loads((FOLDERS[0] / "config.json").read_text())
    assert {k: config["vision_config"][k] for k in VISION} == VISION
    assert {k: config["text_config"][k] for k in TEXT if k != "eos_token_id"} == {
        k: v for k, v in TEXT.items() if k != "eos_token_id"
    }
    assert read_picture_format(open_checkpoint(str(FOLDERS[0])), None) == FORM


def test_transformers_loads_the_files() -> None:
    for kind, folder in (
        (Gemma4ForConditionalGeneration, FOLDERS[0]),
        (Gemma4AssistantForCausalLM, FOLDERS[1]),
    ):
        _, report = kind.from_pretrained(str(folder), output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))


def test_the_recipe_writes_the_shipped_bytes(tmp_path: Any) -> None:
    pictured.save_tokenizer(tmp_path)
    pictured.save_target(pictured.load(FOLDERS[0]), tmp_path, make_pictured.STOP_TOKENS)
    for path in FOLDERS[0].iterdir():
        if path.name != "README.md":
            assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_prompts_are_those_of_the_chat_template() -> None:
    """A picture is one placeholder in the template's text; texts are as the other targets'."""
    found = AutoTokenizer.from_pretrained(FOLDERS[0])
    for asked in questions(8):
        parts = [{"type": "image"} for _ in asked.pictures]
        content = [*parts, {"type": "text", "text": asked.text}]
        text = found.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        prompt, _ = pictured_texts.render(tokens(), asked)
        marks = (pictured.BEGIN_ID, pictured.END_ID)
        kept = [t for t, n in zip(prompt, [None, *prompt], strict=False) if t not in marks]
        ids = found(text, add_special_tokens=False)["input_ids"]
        assert [k for k, _ in itertools.groupby(kept)] == [k for k, _ in itertools.groupby(ids)]
        assert ids.count(IMAGE_ID) == len(asked.pictures)
    plain = AutoTokenizer.from_pretrained(CHECKPOINTS / "tiny_gemma4")
    message = [{"role": "user", "content": "Sort: 31 4"}]
    given = {"add_generation_prompt": True, "tokenize": False}
    assert found.apply_chat_template(message, **given) == plain.apply_chat_template(
        message, **given
    )


@pytest.mark.parametrize("num_pictures", [1, 2])
def test_the_definition_is_transformers(num_pictures: int) -> None:
    """Catches patches in a wrong order, padding that is seen, and masks without the blocks."""
    batch = texts(3, num_pictures)
    output, _ = pictured.run(wrapper(), pictured.text_of(wrapper()), batch)
    for i in range(3):
        length = int(batch.length[i])
        found = [p for p in questions(60) if len(p.pictures) == num_pictures][i]
        images = [to_image(pixels, FORM) for pixels in found.pictures]
        most = max(len(image.patches) for image in images)
        values = torch.zeros(len(images), most, images[0].patches.shape[1])
        places = torch.full((len(images), most, 2), -1)
        for j, image in enumerate(images):
            values[j, : len(image.patches)] = torch.from_numpy(image.patches)
            places[j, : len(image.patches)] = torch.from_numpy(image.positions)
        ids = batch.tokens[i : i + 1, :length]
        with torch.no_grad():
            theirs = wrapper()(
                input_ids=ids,
                pixel_values=values,
                image_position_ids=places,
                mm_token_type_ids=(ids == IMAGE_ID).long(),
            ).logits[0]
        torch.testing.assert_close(output.logits[i, :length], theirs, **CLOSE)


def test_rows_of_rows_name_the_same_pictures() -> None:
    made = texts(6, 2)
    twice = made.rows(torch.tensor([4, 1])).rows(torch.tensor([1]))
    once = made.rows(torch.tensor([1]))
    torch.testing.assert_close(twice.places, once.places)
    torch.testing.assert_close(twice.pictures.patches, once.pictures.patches)
    assert once.places.max() < 2 * SLOTS


def test_training_sees_no_held_out_picture() -> None:
    mixture = pictured_texts.make_mixture(FOLDERS[0], 64, 1, (1, 2, 1))
    asked = itertools.islice(pictured_texts.questions(3, held_out=True), 40)
    pixels = [p for one in asked for p in one.pictures if pictured_texts.is_held_out(p)]
    held = pictured_texts.read_pictures(pixels).patches
    seen = torch.cat([part.pictures.patches for part in mixture.parts]).flatten(1)
    assert not (held.flatten(1)[:, None] == seen[None]).all(-1).any()


def test_scenes_are_what_they_say() -> None:
    scenes = pictured_texts.make_scenes(32)
    assert (scenes.counts.sum(1) == (scenes.middles > 0).sum(1)).all()
    alone = scenes.counts == 1
    assert ((scenes.places >= 0).all(-1) == alone).all()
    assert (scenes.colours[alone] >= 0).all()
    assert (scenes.colours[scenes.counts == 0] == pictured_texts.UNKNOWN).all()
    for i, kind in alone.nonzero().tolist():
        token = int((scenes.middles[i] == 1 + kind).nonzero()[0])
        assert scenes.classes[i, token] == 1 + 6 * kind + scenes.colours[i, kind]
        at = scenes.pictures.positions[i].flatten(0, 1)
        share = (scenes.pictures.positions[i, token].float().mean(0) + 0.5) / (at.amax(0) + 1)
        cell = (share.flip(0) * 3).floor().long().clamp(max=2)
        assert (scenes.places[i, kind] - cell).abs().max() <= 1
    for kind in range(len(drawn.KINDS)):
        assert (scenes.counts[:, kind] == (scenes.middles == 1 + kind).sum(1)).all()
    colours = np.array(list(drawn.COLOURS.values()))
    middle = scenes.pictures.patches.float().unflatten(-1, (-1, 3)).mean((2, 3))  # of a token
    whole = (scenes.middles > 0) & (scenes.pictures.num_tokens == SLOTS)[:, None]
    near = torch.cdist(middle[whole], torch.from_numpy(colours).float()).argmin(1)
    assert ((scenes.classes[whole] - 1) % len(colours) == near).float().mean() > 0.95


@pytest.mark.slow
def test_held_out_questions_are_answered() -> None:
    found = make_pictured.accuracy(wrapper(), FOLDERS[0])
    assert set(found) == set(LEAST_RIGHT)
    assert all(found[category] >= least for category, least in LEAST_RIGHT.items()), found


def test_answers_depend_on_the_picture() -> None:
    """With another text's pictures most answers of one picture are wrong."""
    batch = texts(24, 1)
    assert train_pictured.is_right(wrapper(), batch).float().mean() > 0.7
    other = batch.pictures.rows(torch.arange(24).roll(5))
    swapped = PicturedTexts(
        *(batch.tokens, batch.prompt_length, batch.length, batch.index, batch.places, other)
    )
    assert train_pictured.is_right(wrapper(), swapped).float().mean() < 0.4


def test_the_head_reads_the_merged_rows() -> None:
    """Step 0 of a row before a picture's reads what the target embeds there; others unscaled."""
    text = pictured.text_of(wrapper())
    batch = texts(1, 1)
    view, read = train_pictured.read_states(wrapper(), text, batch, EAGLE3.aux_layer_ids)
    rows = torch.nn.functional.embedding(read.tokens, view.table)
    embedded = pictured.embed(wrapper(), batch)
    inside = batch.places >= 0
    torch.testing.assert_close(rows[inside], embedded[inside])
    scale = text.config.hidden_size**0.5
    torch.testing.assert_close(rows[~inside] * scale, embedded[~inside], **CLOSE)
    config = json.loads((FOLDERS[2] / "config.json").read_text())
    assert config["supports_mm_inputs"] is EAGLE3.supports_mm_inputs is True


def test_a_saved_head_drafts(tmp_path: Any) -> None:
    text: Any = pictured.text_of(wrapper())
    head = draft_files.load_head(FOLDERS[2], EAGLE3, text)
    draft_files.save_head(head, EAGLE3, text, tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (FOLDERS[2] / name).read_bytes()
    batch = texts(8, 1)
    view, read = train_pictured.read_states(wrapper(), text, batch, EAGLE3.aux_layer_ids)
    with torch.no_grad():
        loss = train_drafter.unrolled_loss(head, EAGLE3, text, view, read)
    assert loss < 1.5


def test_causal_masks_are_those_of_text() -> None:
    places = torch.full((1, 40), -1)
    ours, plain = pictured.sight(places, 8), modeling.causal_masks(40, 8, torch.device("cpu"))
    assert all((ours[kind] == plain[kind]).all() for kind in plain)
