"""Figures to RGB, token counts, prompts: the three numbers that must agree, and text that stays text."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from batches import figure, grouped, prompts_of, questions
from conftest import FAMILIES
from PIL import Image
from tiny import NOT_SPECIAL, SPECIAL, make_tokenizer

import grpo
from geoqa import format_question, load_geoqa
from support.errors import UserError
from support.padding import micro_batches
from vision_tokens import (PATCHES_AT_ONCE, Encoded, encode, encode_figures, figure_inputs, figures_at_once, on_white,
                           rotary_positions, vision_token_count)


def encoded(policy, questions, limit=1024):
    """[Encoded] of questions, as the core makes them."""
    return [encode(policy.tokenizer, policy.image_processor, format_question(question), question.image, limit,
                   f"question {question.id}") for question in questions]


def text_only(question):
    return dataclasses.replace(question, image=None)


def png(image, **options):
    """Through a PNG file, as a data set holds it."""
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return Image.open(io.BytesIO(file.getvalue()))


def cross():
    """A black cross on nothing, 40x30; it passes (20, 15)."""
    image = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    for x in range(40):
        image.putpixel((x, 15), (0, 0, 0, 255))
    for y in range(30):
        image.putpixel((20, y), (0, 0, 0, 255))
    return image


def grey():
    """The cross on white."""
    image = Image.new("L", (40, 30), 255)
    image.paste(0, mask=cross().getchannel("A"))
    return image


def levels(line, ground, dtype):
    """The cross in numbers of one channel."""
    return Image.fromarray(np.where(np.asarray(grey()) == 0, line, ground).astype(dtype))


def palette(second=(), ground=0):
    """The cross of colour 0, black, on `ground`."""
    image = Image.new("P", (40, 30), ground)
    image.putpalette([0, 0, 0, *second])
    image.paste(0, mask=cross().getchannel("A"))
    return image


def palette_with_alpha():
    image = palette()
    image.putalpha(cross().getchannel("A"))
    return image


DRAWINGS = {  # mode -> the cross in it, on nothing where it has transparency
    "RGBA": cross, "LA": lambda: cross().convert("LA"), "La": lambda: cross().convert("LA").convert("La"),
    "RGBa": lambda: cross().convert("RGBa"), "PA": palette_with_alpha,
    "P transparent": lambda: png(palette((0, 0, 0), ground=1), transparency=1),  # two blacks, one transparent
    "L transparent": lambda: png(levels(0, 7, np.uint8), transparency=7),
    "RGB transparent": lambda: png(Image.merge("RGB", [levels(0, 7, np.uint8)] * 3), transparency=(7, 7, 7)),
    "I;16": lambda: png(levels(0, 65535, np.uint16)),
    "I;16 transparent": lambda: png(levels(0, 7, np.uint16), transparency=7),
    "I of 16 bits": lambda: levels(0, 65535, np.int32), "F": lambda: levels(0, 255, np.float32),
    **{mode: lambda mode=mode: grey().convert(mode) for mode in ("P", "1", "L", "I", "RGB", "CMYK", "YCbCr")}}


@pytest.mark.parametrize("mode", DRAWINGS)
def test_on_white(mode):
    image = DRAWINGS[mode]()
    assert image.mode == mode.split()[0]
    white = on_white(image)
    assert white.mode == "RGB" and white.size == (40, 30)
    pixels = np.asarray(white).astype(int)
    assert (pixels[15, 20] < 8).all() and (pixels[15, 3] < 8).all(), "the lines are not black"
    assert (pixels[3, 3] > 247).all(), "the ground is not white"


def test_16_bit_grey_keeps_its_shades():
    shades = on_white(png(Image.fromarray(np.array([[0, 0x4000, 0x8000, 0xFFFF]], dtype=np.uint16))))
    assert [shades.getpixel((x, 0))[0] for x in range(4)] == [0, 63, 127, 255]


def test_half_transparent_is_mixed_with_white():
    assert on_white(Image.new("RGBA", (1, 1), (0, 0, 0, 128))).getpixel((0, 0)) == (127, 127, 127)


def test_exif_rotation_is_applied():
    image = Image.new("RGB", (40, 20), "white")
    image.putpixel((0, 0), (0, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    turned = on_white(png(image, exif=exif.tobytes()))
    assert turned.size == (20, 40) and turned.getpixel((19, 0)) == (0, 0, 0)


def test_broken_exif_is_no_error():
    for exif in (b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"\0"):
        assert on_white(png(Image.new("RGB", (4, 4)), exif=exif)).size == (4, 4)


# The three numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_count_is_what_the_processor_and_the_tower_make(shared, family):
    policy = shared(family)
    sizes = [(70, 64), (130, 96), (28, 300), (1, 1), (1, 200), (333, 47), (500, 400)]
    batch = questions(sizes=sizes, subjects=[f"q{i}" for i in range(len(sizes))])
    prompts = encoded(policy, batch)
    features = encode_figures(policy.base, prompts)  # raises where the three numbers disagree
    for question, prompt, feature in zip(batch, prompts, features, strict=True):
        count = vision_token_count(policy.image_processor, on_white(question.image))
        pixels = policy.image_processor(images=[on_white(question.image)], return_tensors="pt")
        assert count == int(pixels["image_grid_thw"].prod()) // 4 == len(feature.pooler_output[0])
        assert count == prompt.visual_tokens == prompt.ids.count(policy.base.config.image_token_id)
        kept = {name for name, value in feature.items() if value is not None}
        assert kept == {"pooler_output"} | ({"deepstack_features"} if family == "qwen3_vl" else set())


def test_real_figures(shared, geolaux):
    policy = shared()
    prompts = prompts_of(policy, list(load_geoqa(str(geolaux), "train"))[:12])
    assert all(prompt.figure.pooler_output[0].isfinite().all() for prompt in prompts)


@pytest.mark.parametrize("change, numbers", [
    (lambda prompt, image_id: {"visual_tokens": 5}, (5, 4, 4)),
    (lambda prompt, image_id: {"ids": [*prompt.ids, image_id]}, (4, 5, 4)),
    (lambda prompt, image_id: {"pixels": prompt.pixels.repeat(2, 1), "grid": prompt.grid * torch.tensor([1, 2, 1])},
     (4, 4, 8))])
def test_a_disagreement_names_the_three_numbers_and_the_question(shared, change, numbers):
    policy = shared()
    good, bad = encoded(policy, questions()[:2])
    bad = dataclasses.replace(good, name="question q9", **change(good, policy.base.config.image_token_id))
    with pytest.raises(UserError) as error:
        encode_figures(policy.base, [good, bad])
    assert str(error.value).startswith("question q9: the formula gives {} visual tokens, the prompt has {} placeholders"
                                       ", the vision tower returns {} features".format(*numbers))


def test_too_long_a_shape_is_a_user_error(shared):
    policy = shared()
    with pytest.raises(UserError, match="300x1"):
        prompts_of(policy, [dataclasses.replace(questions()[0], image=figure((300, 1), 0))])


def test_large_figures_are_downsized_and_named(shared):
    policy = shared()
    small, large = encoded(policy, questions(sizes=((70, 64), (1400, 1000)), subjects=("a", "b")))
    assert small.visual_tokens == 4 and 900 < large.visual_tokens <= 1024 and not small.note
    assert "question q1 (1400x1000 pixels) is downsized from 1,364 to" in large.note
    encode_figures(policy.base, [small, large])
    (whole,) = encoded(policy, questions(sizes=((1400, 1000),), subjects="b"), limit=0)
    assert whole.visual_tokens == 44 * 31 and not whole.note


def test_the_note_reaches_the_prompt(shared):
    policy = shared()
    notes = [prompt.note for prompt in grpo.encode_prompts(policy, questions(), grpo.GEOQA, max_image_tokens=5)]
    assert [bool(note) for note in notes] == [False, True, False] and "question q1" in notes[1]


@pytest.mark.parametrize("limit", [1, 4, 7])
def test_a_limit_below_the_processors_smallest_figure(shared, limit):
    policy = shared()
    prompts = encoded(policy, questions(), limit)
    assert max(prompt.visual_tokens for prompt in prompts) <= limit
    encode_figures(policy.base, prompts)


# Prompts


def rendered(tokenizer, text, with_figure):
    """What the chat template makes of one turn, thinking switched off."""
    content = [{"type": "text", "text": text}] + [{"type": "image"}] * with_figure
    return tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False,
                                         add_generation_prompt=True, enable_thinking=False)


@pytest.mark.parametrize("with_solution", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_the_rendered_chat_template(shared, family, with_solution):
    policy = shared(family)
    batch = [dataclasses.replace(question, answer=f"解：{question.id}") for question in questions()]
    batch += [text_only(batch[1])]
    prompts = grpo.encode_prompts(policy, batch, grpo.GEOQA, with_solution=with_solution)
    for question, prompt in zip(batch, prompts, strict=True):
        has_figure = question.image is not None
        text = rendered(policy.tokenizer, format_question(question, with_solution), has_figure)
        assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert (question.answer in text) == with_solution and text.count("<|image_pad|>") == has_figure
        if has_figure:
            count = vision_token_count(policy.image_processor, on_white(question.image))
            text = text.replace("<|image_pad|>", "<|image_pad|>" * count)
        assert prompt.ids.tolist() == policy.tokenizer(text, add_special_tokens=False).input_ids
        assert prompt.question is question and (prompt.figure is not None) == has_figure


@pytest.mark.parametrize("token", [*SPECIAL, *NOT_SPECIAL])
def test_text_that_looks_like_a_token_stays_text(shared, token):
    policy = shared()
    question = dataclasses.replace(questions()[0], subject=f"求{token}的值", choices=(token, "2", f"x{token}", "4"))
    plain = dataclasses.replace(question, subject="求的值", choices=("1", "2", "x", "4"))
    added = set(policy.tokenizer.added_tokens_decoder)
    for change in (lambda question: question, text_only):
        rows = [prompt.ids.tolist() for prompt in prompts_of(policy, [change(question), change(plain)])]
        drawn, expected = ([token for token in row if token in added] for row in rows)
        assert drawn == expected
        assert policy.tokenizer.decode(rows[0]).count(f"求{token}的值") == 1


def test_a_tokenizer_without_chat_template(shared):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    for image in (None, questions()[0].image):
        with pytest.raises(UserError, match="no chat template"):
            encode(tokenizer, shared().image_processor, "?", image)


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}"])
def test_a_chat_template_that_fails(shared, template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    for image in (None, questions()[0].image):
        with pytest.raises(UserError, match="chat template"):
            encode(tokenizer, shared().image_processor, "?", image)


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_positions(shared, family):
    """Text counts on in all three; a figure has one time, and a row and a column for each of its tokens."""
    policy = shared(family)
    batch = questions()[:2] + [text_only(questions()[2])]
    for question, prompt in zip(batch, encoded(policy, batch), strict=True):
        expected, next_position, image_id = [], 0, policy.base.config.image_token_id
        width = int(prompt.grid[0, 2]) // 2 if question.image else 0
        for i, token in enumerate(prompt.ids):
            if token == image_id:
                row, column = divmod(i - prompt.ids.index(image_id), width)
                expected.append([next_position, next_position + row, next_position + column])
                if i - prompt.ids.index(image_id) + 1 == prompt.visual_tokens:
                    next_position += max(row + 1, width)
            else:
                expected.append([next_position] * 3)
                next_position += 1
        positions = rotary_positions(policy.base, prompt)
        assert positions.T.tolist() == expected
        assert grpo.Prompt(torch.tensor(prompt.ids), positions, None, question).next_position == next_position


# Features


def test_figures_that_go_through_the_tower_together():
    def prompt(patches):
        return Encoded("q", [], None if patches is None else torch.empty(patches, 0))

    prompts = [prompt(n) for n in (9_000, None, PATCHES_AT_ONCE - 9_000, 1, 20_000, 5, None, 7)]
    assert [[prompts.index(each) for each in part] for part in figures_at_once(prompts)] == [[0, 2], [3], [4], [5, 7]]
    assert not list(figures_at_once([prompt(None)]))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_figures_in_parts_give_the_same_features(shared, family):
    """More figures than go through the tower together, and one alone, against the tower as it is."""
    policy = shared(family)
    batch = questions(sizes=[(70, 64)] + [(480, 480)] * 19, subjects=["q"] * 20)
    prompts = encoded(policy, [text_only(batch[0]), *batch])
    assert [len(part) for part in figures_at_once(prompts)] == [19, 1]
    none, *features = encode_figures(policy.base, prompts)
    assert none is None
    for i in (0, 1, 18, 19):
        with torch.no_grad():
            alone = policy.base.get_image_features(prompts[i + 1].pixels, prompts[i + 1].grid, return_dict=True)
        layers = zip(getattr(alone, "deepstack_features", None) or [],
                     getattr(features[i], "deepstack_features", None) or [], strict=True)
        pairs = [(alone.pooler_output[0], features[i].pooler_output[0])] + [(a[0], b[0]) for a, b in layers]
        assert len(pairs) == (3 if family == "qwen3_vl" else 1)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def test_figures_of_a_batch_are_joined_in_order(shared):
    policy = shared("qwen3_vl")
    first, second, _ = encode_figures(policy.base, encoded(policy, questions()))
    joined = figure_inputs([None, first, None, second])["mm_encoder_outputs"]["image"]
    assert list(map(id, joined.pooler_output)) == [id(each.pooler_output[0]) for each in (first, second)]
    assert [list(map(id, layer)) for layer in joined.deepstack_features] == [
        [id(each.deepstack_features[layer][0]) for each in (first, second)] for layer in (0, 1)]
    assert figure_inputs([None, None]) == {}


def test_the_tower_runs_once_for_each_figure(shared):
    policy, seen = shared(), []
    hook = policy.base.model.visual.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs["grid_thw"]), with_kwargs=True)
    prompts = prompts_of(policy, [*questions(), text_only(questions()[0])])
    rows = grpo.sample(policy, grouped(prompts, 2), 8)
    for row in rows:
        row.advantage = 1.0
    micros = micro_batches(rows, 10)  # one row each
    assert len(micros) == len(rows)
    grpo.accumulate_gradients(policy, micros, grpo.Config())
    hook.remove()
    assert sum(len(grid) for grid in seen) == 3
