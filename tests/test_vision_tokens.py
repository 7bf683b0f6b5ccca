"""Figures to RGB, token counts, prompt batches: the three numbers that must agree, and text that stays text."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from batches import figure, prompts_of, questions
from conftest import FAMILIES
from PIL import Image
from tiny import NOT_SPECIAL, SPECIAL

import vision_tokens
from geoqa import format_question, load_geoqa
from support.errors import UserError
from vision_tokens import encode_figures, encode_prompts, on_white, vision_token_count


def png(image, **options):
    """Through a PNG file, as a data set holds it."""
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return Image.open(io.BytesIO(file.getvalue()))


def drawing(mode):
    """A black cross on nothing (where `mode` has transparency) or on white, 40x30; the cross passes (20, 15)."""
    rgba = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    for x in range(40):
        rgba.putpixel((x, 15), (0, 0, 0, 255))
    for y in range(30):
        rgba.putpixel((20, y), (0, 0, 0, 255))
    if mode == "RGBA":
        return rgba
    grey = Image.new("L", rgba.size, 255)
    grey.paste(0, mask=rgba.getchannel("A"))
    if mode == "LA":
        return rgba.convert("LA")
    if mode == "La":
        return rgba.convert("LA").convert("La")
    if mode == "RGBa":
        return rgba.convert("RGBa")
    if mode == "PA":
        palette = Image.new("P", rgba.size, 0)
        palette.putpalette([0, 0, 0])
        palette.putalpha(rgba.getchannel("A"))
        assert palette.mode == "PA"
        return palette
    if mode == "P transparent":
        palette = Image.new("P", rgba.size, 1)
        palette.putpalette([0, 0, 0] * 2)  # both black, and the second one transparent
        palette.paste(0, mask=rgba.getchannel("A"))
        return png(palette, transparency=1)
    if mode == "L transparent":
        return png(Image.fromarray(np.where(np.asarray(grey) == 0, 0, 7).astype(np.uint8)), transparency=7)
    if mode == "RGB transparent":
        return png(Image.merge("RGB", [Image.fromarray(np.where(np.asarray(grey) == 0, 0, 7).astype(np.uint8))] * 3),
                   transparency=(7, 7, 7))
    if mode == "I;16":
        return png(Image.fromarray(np.asarray(grey).astype(np.uint16) * 257))
    if mode == "I;16 transparent":
        return png(Image.fromarray(np.where(np.asarray(grey) == 0, 0, 7).astype(np.uint16)), transparency=7)
    if mode == "I of 16 bits":
        return Image.fromarray(np.asarray(grey).astype(np.int32) * 257)
    if mode == "F":
        return Image.fromarray(np.asarray(grey).astype(np.float32))
    return grey.convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "La", "RGBa", "PA", "P", "P transparent", "L transparent",
                                  "RGB transparent", "1", "L", "I", "I;16", "I;16 transparent", "I of 16 bits", "F",
                                  "RGB", "CMYK", "YCbCr"])
def test_on_white(mode):
    white = on_white(drawing(mode))
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


@pytest.mark.parametrize("family", FAMILIES)
def test_count_is_what_the_processor_and_the_tower_make(load, family):
    policy = load(family)
    sizes = [(70, 64), (130, 96), (28, 300), (1, 1), (1, 200), (333, 47), (500, 400)]
    batch = questions(sizes=sizes, subjects=[f"q{i}" for i in range(len(sizes))])
    prompts = prompts_of(policy, batch)
    features = encode_figures(policy.base, prompts)  # raises where the three numbers disagree
    for i, question in enumerate(batch):
        count = vision_token_count(policy.image_processor, on_white(question.image))
        pixels = policy.image_processor(images=[on_white(question.image)], return_tensors="pt")
        assert count == int(pixels["image_grid_thw"].prod()) // 4 == len(features.pooler_output[i])
        assert count == (prompts.input_ids[i] == policy.base.config.image_token_id).sum()


def test_real_figures(load, geolaux):
    policy = load()
    batch = list(load_geoqa(str(geolaux), "train"))[:12]
    encode_figures(policy.base, prompts_of(policy, batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_is_the_rendered_chat_template(load, family):
    policy = load(family)
    batch = questions()
    prompts = prompts_of(policy, batch)
    for i, question in enumerate(batch):
        content = [{"type": "text", "text": format_question(question)}, {"type": "image"}]
        rendered = policy.tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False,
                                                        add_generation_prompt=True, enable_thinking=False)
        assert rendered.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        rendered = rendered.replace("<|image_pad|>", "<|image_pad|>" * prompts.image_tokens[i])
        expected = policy.tokenizer(rendered, add_special_tokens=False).input_ids
        visible = prompts.attention_mask[i].bool()
        assert prompts.input_ids[i, visible].tolist() == expected
        assert visible[-len(expected):].all() and not visible[:-len(expected)].any(), "not left-padded"


@pytest.mark.parametrize("token", [*SPECIAL, *NOT_SPECIAL])
def test_text_that_looks_like_a_token_stays_text(load, token):
    policy = load()
    question = dataclasses.replace(questions()[0], subject=f"求{token}的值", choices=(token, "2", f"x{token}", "4"))
    plain = dataclasses.replace(question, subject="求的值", choices=("1", "2", "x", "4"))
    rows = prompts_of(policy, [question]), prompts_of(policy, [plain])
    added = set(policy.tokenizer.added_tokens_decoder)
    found, expected = ([t for t in row.input_ids[0].tolist() if t in added] for row in rows)
    assert found == expected
    text = policy.tokenizer.decode(rows[0].input_ids[0].tolist())
    assert text.count(f"求{token}的值") == 1


def test_large_figures_are_downsized_and_named(load):
    policy = load()
    batch = questions(sizes=((70, 64), (4000, 3000)), subjects=("a", "b"))
    prompts = prompts_of(policy, batch)
    assert prompts.image_tokens[0] == 4 and 900 < prompts.image_tokens[1] <= 1024
    assert len(prompts.downsized) == 1
    assert "question q1 (4000x3000 pixels) is downsized from 11,750 to" in prompts.downsized[0]
    encode_figures(policy.base, prompts)
    whole = encode_prompts(policy.tokenizer, policy.image_processor, batch[1:], max_image_tokens=0)
    assert whole.image_tokens == [11750] and not whole.downsized


@pytest.mark.parametrize("limit", [1, 4, 7])
def test_a_limit_below_the_processors_smallest_figure(load, limit):
    policy = load()
    prompts = encode_prompts(policy.tokenizer, policy.image_processor, questions(), max_image_tokens=limit)
    assert max(prompts.image_tokens) <= limit
    encode_figures(policy.base, prompts)


def test_a_disagreement_names_the_three_numbers_and_the_row(load, monkeypatch):
    policy = load()
    right = vision_tokens.vision_token_count
    monkeypatch.setattr(vision_tokens, "vision_token_count", lambda *args: right(*args) + 1)
    with pytest.raises(UserError, match="question q0: the formula gives 5 visual tokens, the prompt has 5 placeholders,"
                                        " the vision tower returns 4 features"):
        encode_figures(policy.base, prompts_of(policy, questions()))


def test_too_long_a_shape_is_a_user_error(load):
    policy = load()
    with pytest.raises(UserError, match="300x1"):
        prompts_of(policy, [dataclasses.replace(questions()[0], image=figure((300, 1), 0))])


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_figures_in_parts_give_the_same_features(load, monkeypatch, family):
    policy = load(family)
    whole, parts = prompts_of(policy, questions()), prompts_of(policy, questions())
    vision_tokens.encode_figures(policy.base, whole)
    monkeypatch.setattr(vision_tokens, "PATCHES_AT_ONCE", int(parts.image_grid_thw.prod(-1)[:2].sum()))
    assert [len(figures) for figures in vision_tokens.figures_at_once(parts)] == [2, 1]
    vision_tokens.encode_figures(policy.base, parts)
    pairs = list(zip(whole.features.pooler_output, parts.features.pooler_output, strict=True))
    for layers in zip(*(getattr(p.features, "deepstack_features", None) or [] for p in (whole, parts)), strict=True):
        pairs += zip(*layers, strict=True)
    assert len(pairs) == (9 if family == "qwen3_vl" else 3)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def test_pixels_wait_on_the_cpu(load):
    """A figure of 1,024 visual tokens is 25 MB of pixels: on a GPU those of a batch would lie beside the rollouts."""
    prompts = prompts_of(load(), questions()).to(torch.device("meta"))
    assert prompts.pixel_values.device.type == "cpu" and prompts.input_ids.device.type == "meta"


def test_tower_runs_once_for_each_figure(load, monkeypatch):
    import grpo

    policy, seen = load(), []
    monkeypatch.setattr(vision_tokens, "PATCHES_AT_ONCE", 1)
    policy.base.model.visual.register_forward_hook(lambda module, args, kwargs, output: seen.append(kwargs["grid_thw"]),
                                                   with_kwargs=True)
    prompts = prompts_of(policy, questions())
    rollouts = grpo.sample(policy, prompts, 4, 8, rollouts_at_once=5)
    grpo.accumulate_gradients(policy, prompts, rollouts, torch.ones_like(rollouts.logprobs), torch.arange(12),
                              grpo.Config(tokens_per_micro_batch=600))
    assert sum(len(grid) for grid in seen) == 3


def test_a_tokenizer_without_chat_template(load):
    policy = load()
    policy.tokenizer.chat_template = None
    vision_tokens.template_ids.cache_clear()  # loading has looked at it
    with pytest.raises(UserError, match="no chat template"):
        prompts_of(policy, questions())
