"""Text and figure -> prompt: RGB on white, visual token counts, visual features, rotary positions.

A prompt holds one `<|image_pad|>` for each feature that the vision tower returns for its figure. Three numbers must
agree for every figure: the count from the image processor's formula, the placeholders in the prompt, and the features.
Everything behind the figure is shifted if they do not, so `encode_figures` checks them and stops.

Only the tokenizer and the image processor are used: `AutoProcessor` would need torchvision for its video half.
"""

import functools
import json
import struct
from dataclasses import dataclass

import numpy as np
import torch
from jinja2 import TemplateError
from PIL import Image, ImageOps

from support.errors import UserError, describe

IMAGE_TOKEN = "<|image_pad|>"  # the same string in the Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 families
PATCHES_AT_ONCE = 16384  # of figures that go through the vision tower together
TEXT_SLOT = "\ue000"  # private-use character: marks where the question goes in the rendered chat template


@dataclass(eq=False)
class Encoded:
    """A prompt before the vision tower has run, on the CPU."""

    name: str  # the question, for messages
    ids: list[int]  # one placeholder for each visual token
    pixels: torch.Tensor | None = None  # (patches, patch width); None: a question without a figure
    grid: torch.Tensor | None = None  # (1, 3) patches in time, height, width
    visual_tokens: int = 0  # by the image processor's formula
    note: str = ""  # says that the figure was downsized


def on_white(image):
    """Any PIL mode -> RGB, transparency laid on white and EXIF rotation applied.

    Geometry figures are often black lines on transparent black, which `convert("RGB")` makes a black square.
    """
    try:
        image = ImageOps.exif_transpose(image)
    except (SyntaxError, ValueError, TypeError, LookupError, OSError, struct.error):
        pass  # broken metadata around a good figure
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _to_8_bit(image)
    if image.mode in ("RGBA", "LA", "La", "PA", "RGBa") or "transparency" in image.info:
        if image.mode == "La":
            image = image.convert("LA")  # Pillow has no direct way from premultiplied grey to RGBA
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _to_8_bit(image):
    """16- and 32-bit grey -> 8-bit L. Pillow's own convert clips at 255, which turns nearly all of it white."""
    values = np.asarray(image).astype(np.float64)
    opaque = values != image.info.get("transparency", np.nan)
    sixteen_bit = image.mode.startswith("I;16") or np.nanmax(values, initial=0) > 255
    values = np.nan_to_num(values) / (257 if sixteen_bit else 1)
    return Image.fromarray(np.where(opaque, values.clip(0, 255), 255).astype(np.uint8))


def vision_token_count(image_processor, image, max_image_tokens=0):
    """Visual tokens that `image` becomes, by the image processor's own formula; above 0, at most `max_image_tokens`."""
    limits = _pixel_limits(image_processor, max_image_tokens)
    try:
        patches = image_processor.get_number_of_image_patches(image.height, image.width, limits)
    except ValueError as error:  # the processor refuses aspect ratios over 200
        raise UserError(f"a figure of {image.width}x{image.height} pixels cannot be used: {error}") from error
    return patches // image_processor.merge_size**2


def _pixel_limits(image_processor, max_image_tokens):
    """The processor's smallest and largest area, in pixels, the largest cut to `max_image_tokens` (0: not cut)."""
    low, high = image_processor.size["shortest_edge"], image_processor.size["longest_edge"]
    if max_image_tokens:
        high = min(high, max_image_tokens * (image_processor.patch_size * image_processor.merge_size) ** 2)
    return {"min_pixels": min(low, high), "max_pixels": high}


def encode(tokenizer, image_processor, text, image, max_image_tokens=1024, name="the question"):
    """One user turn, text first, then the figure, thinking switched off -> `Encoded`, on the CPU.

    A figure above `max_image_tokens` visual tokens (0: no limit) is downsized. Raises UserError where the chat template
    does not place one text and one figure, or where the text would become one of the tokenizer's added tokens.
    """
    head, tail = template_ids(tokenizer, with_figure=image is not None)
    ids = head + _plain_text_ids(tokenizer, text, name) + tail
    if image is None:
        return Encoded(name, ids)
    image = on_white(image)
    count, full = (vision_token_count(image_processor, image, limit) for limit in (max_image_tokens, 0))
    limits = _pixel_limits(image_processor, max_image_tokens)
    pixels = image_processor(images=[image], return_tensors="pt",
                             size={"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]})
    place = len(ids) - len(tail) + tail.index(tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
    note = f"the figure of {name} ({image.width}x{image.height} pixels) is downsized from {full:,} to {count:,} visual"
    note = f"{note} tokens (--max-image-tokens)" if full > count else ""
    return Encoded(name, ids[:place] + [ids[place]] * count + ids[place + 1:], pixels["pixel_values"],
                   pixels["image_grid_thw"], count, note)


@functools.lru_cache(maxsize=8)
def template_ids(tokenizer, with_figure=True):
    """Token ids of the chat template before and behind the text of a user turn; the figure is in the second part."""
    if not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {tokenizer.name_or_path} has no chat template: take an instruction-tuned "
                        "model")
    content = [{"type": "text", "text": TEXT_SLOT}] + [{"type": "image"}] * with_figure
    try:
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False,
                                                 add_generation_prompt=True, enable_thinking=False)
    except TemplateError as error:
        raise UserError(f"the chat template of {tokenizer.name_or_path} fails: {describe(error)}") from error
    head, _, tail = rendered.partition(TEXT_SLOT)
    if rendered.count(TEXT_SLOT) != 1 or tail.count(IMAGE_TOKEN) != with_figure or IMAGE_TOKEN in head:
        raise UserError(f"the chat template of {tokenizer.name_or_path} does not place one text followed by one "
                        f"{IMAGE_TOKEN}: take a Qwen vision-language model")
    return [tokenizer(part, add_special_tokens=False).input_ids for part in (head, tail)]


def _plain_text_ids(tokenizer, text, name):
    """Ids of `text` in which nothing is an added token, even where it spells one, such as `<|im_end|>` or `<think>`."""
    ids = _without_added_tokens(tokenizer).encode(text, add_special_tokens=False).ids
    if added := set(ids) & set(tokenizer.added_tokens_decoder):
        raise UserError(f"{name}: its text would become the token "
                        f"{tokenizer.convert_ids_to_tokens(added.pop())!r}; change the text or leave the row out")
    return ids


@functools.lru_cache(maxsize=4)
def _without_added_tokens(tokenizer):
    """The same tokenizer knowing no added token. `split_special_tokens=True` would leave those not marked special."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return Tokenizer.from_str(json.dumps(state | {"added_tokens": [], "post_processor": None}))


@torch.no_grad()
def encode_figures(model, prompts):
    """Runs the vision tower once over the figures of `prompts`, a list of `Encoded` -> for each its features, or None.

    `model` is the transformers model without PEFT around it. Features are the tower's output object for one figure:
    `pooler_output` holds one (tokens, hidden) tensor, Qwen3-VL's `deepstack_features` one such tensor a layer. Raises
    UserError, with the three numbers, where formula, placeholders and features disagree.
    """
    image_id = model.config.image_token_id
    features = {}
    for part in figures_at_once(prompts):
        output = model.get_image_features(torch.cat([prompt.pixels for prompt in part]).to(model.device),
                                          torch.cat([prompt.grid for prompt in part]).to(model.device),
                                          return_dict=True)
        features |= {id(prompt): select_figure(output, i) for i, prompt in enumerate(part)}
    for prompt in prompts:
        if prompt.pixels is not None:
            numbers = prompt.visual_tokens, prompt.ids.count(image_id), len(features[id(prompt)].pooler_output[0])
            if len(set(numbers)) != 1:
                raise UserError("{}: the formula gives {} visual tokens, the prompt has {} placeholders, the vision "
                                "tower returns {} features: preprocessor_config.json does not fit the model".format(
                                    prompt.name, *numbers))
    return [features.get(id(prompt)) for prompt in prompts]


def figures_at_once(prompts):
    """Yields lists of prompts with figures of at most PATCHES_AT_ONCE patches together, or of one that has more."""
    together = []
    for prompt in prompts:
        if prompt.pixels is None:
            continue
        if together and sum(len(other.pixels) for other in [*together, prompt]) > PATCHES_AT_ONCE:
            yield together
            together = []
        together.append(prompt)
    if together:
        yield together


def select_figure(output, i):
    """The tower's output for several figures -> its output for figure `i` alone."""
    one = type(output)(pooler_output=(output.pooler_output[i],))
    if getattr(output, "deepstack_features", None) is not None:
        one.deepstack_features = [(layer[i],) for layer in output.deepstack_features]
    return one


def figure_inputs(figures):
    """The figures of a batch's rows, None where a row has none -> keyword arguments of the model's forward pass."""
    figures = [figure for figure in figures if figure is not None]
    if not figures:
        return {}
    joined = type(figures[0])(pooler_output=tuple(figure.pooler_output[0] for figure in figures))
    if getattr(figures[0], "deepstack_features", None) is not None:
        joined.deepstack_features = [tuple(part for layer in layers for part in layer) for layers in
                                     zip(*(figure.deepstack_features for figure in figures))]
    return {"mm_encoder_outputs": {"image": joined}}


def rotary_positions(model, prompt):
    """`Encoded` -> (3, P) rotary positions in time, height and width, on the CPU."""
    ids = torch.tensor([prompt.ids])
    is_figure = (ids == model.config.image_token_id).int() if prompt.pixels is not None else torch.zeros_like(ids)
    return model.model.get_rope_index(input_ids=ids, mm_token_type_ids=is_figure, image_grid_thw=prompt.grid,
                                      attention_mask=torch.ones_like(ids))[0][:, 0]
