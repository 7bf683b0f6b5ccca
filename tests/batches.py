"""Batches of questions for the numerical tests: mixed figure sizes, mixed prompt lengths."""

import torch
from PIL import Image, ImageDraw

import grpo
from geoqa import Question


def figure(size, seed):
    """A drawing in RGBA on transparent ground, different for each seed."""
    image = Image.new("RGBA", size, (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        x, y, u, v = torch.rand(4, generator=generator).tolist()
        draw.line((x * size[0], y * size[1], u * size[0], v * size[1]), fill="black", width=3)
    return image


SIZES = ((70, 64), (130, 96), (70, 64))
SUBJECTS = ("AB=3", "求角的度数，其中AB平行于CD。", "如图，三角形ABC中")


def questions(seed=0, sizes=SIZES, subjects=SUBJECTS):
    return [Question(f"q{i}", figure(size, 10 * seed + i), subject, ("1", "2", "3", "4"), "ABCD"[i % 4])
            for i, (size, subject) in enumerate(zip(sizes, subjects))]


def prompts_of(policy, questions):
    return grpo.encode_prompts(policy.tokenizer, policy.image_processor, questions)


def uneven_rollouts(policy, prompts, group_size=4, max_tokens=40, temperature=1.0, seed=3):
    """Rollouts of which at least one stops at its first token and one goes on to `max_tokens`.

    Random models stop rarely, so tokens that four of the rows drew become stop tokens before the same draws again.
    """
    policy.stop_ids = torch.tensor([-1])
    torch.manual_seed(seed)
    free = grpo.sample(policy, prompts, group_size, 21, temperature).tokens
    policy.stop_ids = free[[1, 4, 6, 9], [0, 5, 10, 20]]
    torch.manual_seed(seed)
    rollouts = grpo.sample(policy, prompts, group_size, max_tokens, temperature)
    lengths = rollouts.lengths.tolist()
    assert min(lengths) == 1 and max(lengths) == max_tokens and len(set(lengths)) > 3, lengths
    return rollouts
