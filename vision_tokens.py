"""Figures -> RGB on white, visual token counts, padded prompt batches, visual features.

A prompt holds one `<|image_pad|>` for each feature that the vision tower returns for its figure. Three numbers must
agree for every figure: the count from the image processor's formula, the placeholders in the prompt, and the features.
Everything behind the figure is shifted if they do not, so `encode_figures` checks them and stops.

Only the tokenizer and the image processor are used: `AutoProcessor` would need torchvision for its video half.
"""

import functools
import itertools
import json
import struct
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

from geoqa import format_question
from support.errors import UserError

IMAGE_TOKEN = "<|image_pad|>"  # the same string in the Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 families
PATCHES_AT_ONCE = 16384  # of figures that go through the vision tower together
TEXT_SLOT = "\ue000"  # private-use character: marks where the question goes in the rendered chat template


@dataclass
class Prompts:
    """B left-padded prompts, each with one figure."""

    input_ids: torch.Tensor  # (B, P)
    attention_mask: torch.Tensor  # (B, P), 0 on the padding at the left
    pixel_values: torch.Tensor  # (patches of all figures, patch dim), on the CPU
    image_grid_thw: torch.Tensor  # (B, 3) patches in time, height, width
    mm_token_type_ids: torch.Tensor  # (B, P), 1 on image placeholders
    ids: list  # the questions' row ids, for messages
    image_tokens: list[int]  # visual tokens of each figure by the formula
    downsized: list[str] = field(default_factory=list)  # one line for each figure above max_image_tokens
    features: object = None  # what encode_figures gave, kept so that the tower runs once
    position_ids: torch.Tensor | None = None  # (3, B, P), what prompt_positions gave

    def to(self, device):
        """Moves what encode_prompts made; returns self. But for the pixels: encode_figures needs them once, in parts."""
        for name in ("input_ids", "attention_mask", "image_grid_thw", "mm_token_type_ids"):
            setattr(self, name, getattr(self, name).to(device))
        return self


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


def encode_prompts(tokenizer, image_processor, questions, max_image_tokens=1024, with_solution=False):
    """Questions -> `Prompts` on the CPU: one user turn each, text first, then the figure, thinking switched off.

    `with_solution` is for a teacher: the worked solution stands in the prompt. Figures above `max_image_tokens` visual
    tokens (0: no limit) are downsized and named in `downsized`. Raises UserError where the chat template does not place
    one text and one figure.
    """
    rows, patches, grids, counts, downsized = [], [], [], [], []
    image_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    for question in questions:
        image = on_white(question.image)
        count = vision_token_count(image_processor, image, max_image_tokens)
        full = vision_token_count(image_processor, image)
        if full > count:
            downsized.append(f"the figure of question {question.id} ({image.width}x{image.height} pixels) is "
                             f"downsized from {full:,} to {count:,} visual tokens (--max-image-tokens)")
        limits = _pixel_limits(image_processor, max_image_tokens)
        pixels = image_processor(images=[image], return_tensors="pt",
                                 size={"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]})
        head, tail = template_ids(tokenizer)
        place = tail.index(image_id)
        text = _plain_text_ids(tokenizer, format_question(question, with_solution), question.id)
        rows.append(head + text + tail[:place] + [image_id] * count + tail[place + 1:])
        patches.append(pixels["pixel_values"])
        grids.append(pixels["image_grid_thw"])
        counts.append(count)

    input_ids = left_padded([torch.tensor(row) for row in rows], tokenizer.pad_token_id)
    attention_mask = left_padded([torch.ones(len(row), dtype=torch.long) for row in rows], 0)
    return Prompts(input_ids, attention_mask, torch.cat(patches), torch.cat(grids), (input_ids == image_id).int(),
                   [question.id for question in questions], counts, downsized)


def left_padded(rows, value):
    """Tensors (..., P_i) -> one (rows, ..., max P_i), padded at the left with `value`."""
    width = max(row.shape[-1] for row in rows)
    return torch.stack([F.pad(row, (width - row.shape[-1], 0), value=value) for row in rows])


def join_prompts(waves):
    """Several sampled Prompts -> one, features and positions with them, so that no figure is encoded again."""
    def rows(name, dim=0):
        return [row for wave in waves for row in getattr(wave, name).unbind(dim)]

    def flat(name):
        return [item for wave in waves for item in getattr(wave, name)]

    if len(waves) == 1:
        return waves[0]
    features = join_features([wave.features for wave in waves])
    return Prompts(left_padded(rows("input_ids"), 0), left_padded(rows("attention_mask"), 0),
                   torch.cat([wave.pixel_values for wave in waves]), torch.cat([wave.image_grid_thw for wave in waves]),
                   left_padded(rows("mm_token_type_ids"), 0), flat("ids"), flat("image_tokens"), flat("downsized"),
                   features, left_padded(rows("position_ids", 1), 0).transpose(0, 1))


@functools.lru_cache(maxsize=4)
def template_ids(tokenizer):
    """Token ids of the chat template before and behind the question's text; the figure is in the second part."""
    if not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {tokenizer.name_or_path} has no chat template: take an instruction-tuned "
                        "model")
    content = [{"type": "text", "text": TEXT_SLOT}, {"type": "image"}]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False,
                                             add_generation_prompt=True, enable_thinking=False)
    if rendered.count(TEXT_SLOT) != 1 or rendered.partition(TEXT_SLOT)[2].count(IMAGE_TOKEN) != 1:
        raise UserError(f"the chat template of {tokenizer.name_or_path} does not place one text followed by one "
                        f"{IMAGE_TOKEN}: take a Qwen vision-language model")
    head, _, tail = rendered.partition(TEXT_SLOT)
    return [tokenizer(part, add_special_tokens=False).input_ids for part in (head, tail)]


def _plain_text_ids(tokenizer, text, row_id):
    """Ids of `text` in which nothing is an added token, even where it spells one, such as `<|im_end|>` or `<think>`."""
    ids = _without_added_tokens(tokenizer).encode(text, add_special_tokens=False).ids
    if added := set(ids) & set(tokenizer.added_tokens_decoder):
        raise UserError(f"question {row_id}: its text would become the token "
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
    """Runs the vision tower once over the figures of `prompts` and keeps the result in `prompts.features`.

    `model` is the transformers model without PEFT around it. Gives its output object: `pooler_output` has one
    (tokens, hidden) tensor a figure, Qwen3-VL's `deepstack_features` one such tuple a layer. Raises UserError with the
    three numbers and the row id where formula, placeholders and features disagree.
    """
    if prompts.features is None:
        prompts.features = join_features([
            model.get_image_features(torch.cat(pixels).to(model.device), torch.stack(grids), return_dict=True)
            for pixels, grids in (zip(*figures) for figures in figures_at_once(prompts))])
        placeholders = prompts.mm_token_type_ids.sum(-1).tolist()
        for i, row_id in enumerate(prompts.ids):
            numbers = prompts.image_tokens[i], placeholders[i], len(prompts.features.pooler_output[i])
            if len(set(numbers)) != 1:
                raise UserError("question {}: the formula gives {} visual tokens, the prompt has {} placeholders, the "
                                "vision tower returns {} features: preprocessor_config.json does not fit the model"
                                .format(row_id, *numbers))
    return prompts.features


def figures_at_once(prompts):
    """Yields [(pixels, grid), ...] of figures that have PATCHES_AT_ONCE patches together, or of one that has more."""
    together = []
    for pixels, grid in zip(prompts.pixel_values.split(prompts.image_grid_thw.prod(-1).tolist()),
                            prompts.image_grid_thw):
        if together and sum(len(other) for other, _ in together) + len(pixels) > PATCHES_AT_ONCE:
            yield together
            together = []
        together.append((pixels, grid))
    yield together


def join_features(parts):
    """The vision tower's outputs for several figures -> one output for all."""
    joined = type(parts[0])(pooler_output=tuple(figure for part in parts for figure in part.pooler_output))
    if getattr(parts[0], "deepstack_features", None) is not None:
        layers = zip(*(part.deepstack_features for part in parts))
        joined.deepstack_features = [tuple(itertools.chain(*layer)) for layer in layers]
    return joined


def select_figures(features, rows):
    """The features of figures `rows` (ints, repeats allowed), in the form of `mm_encoder_outputs`."""
    chosen = type(features)(pooler_output=tuple(features.pooler_output[r] for r in rows))
    if getattr(features, "deepstack_features", None) is not None:
        chosen.deepstack_features = [tuple(layer[r] for r in rows) for layer in features.deepstack_features]
    return {"image": chosen}


def prompt_positions(model, prompts):
    """(3, B, P) rotary positions in time, height and width; kept in `prompts.position_ids`."""
    if prompts.position_ids is None:
        prompts.position_ids = model.model.get_rope_index(
            input_ids=prompts.input_ids, mm_token_type_ids=prompts.mm_token_type_ids,
            image_grid_thw=prompts.image_grid_thw, attention_mask=prompts.attention_mask)[0]
    return prompts.position_ids
