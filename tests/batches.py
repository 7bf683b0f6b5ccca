"""Batches of questions for the numerical tests: mixed figure sizes, mixed prompt lengths."""

import torch
from PIL import Image, ImageDraw

import grpo
from geoqa import Question
from support.padding import rectangle


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
    return grpo.encode_prompts(policy, questions, grpo.GEOQA)


def grouped(prompts, group_size):
    """Each prompt `group_size` times, one behind the other, as the sampler takes groups."""
    return [prompt for prompt in prompts for _ in range(group_size)]


def columns(rows, name="tokens"):
    """(n, T) of a tensor of each row, 0 behind a row's end."""
    return rectangle(rows, name)


def uneven_rows(policy, prompts, group_size=4, max_tokens=40, temperature=1.0, seed=3):
    """Completions of which at least one stops at its first token and one goes on to `max_tokens`.

    Random models stop rarely, so tokens that four of the rows drew become stop tokens before the same draws again.
    """
    uniforms = torch.rand(len(prompts) * group_size, max_tokens, generator=torch.Generator().manual_seed(seed))
    policy.stop_ids = torch.tensor([-1])
    free = columns(grpo.sample(policy, grouped(prompts, group_size), 21, temperature, uniforms=uniforms[:, :21]))
    policy.stop_ids = free[[1, 4, 6, 9], [0, 5, 10, 20]]
    rows = grpo.sample(policy, grouped(prompts, group_size), max_tokens, temperature, uniforms=uniforms)
    lengths = [len(row.tokens) for row in rows]
    assert min(lengths) == 1 and max(lengths) == max_tokens and len(set(lengths)) > 3, lengths
    return rows
