"""Batches for the numerical tests: mixed figure sizes and prompt lengths, rows of unlike lengths, and naive twins.

A naive twin gives a number by transformers alone, for one row at a time: no padding, no branches, no cached figure, no
positions of ours, whole logits.
"""

import contextlib
import math

import torch
from PIL import Image, ImageDraw

import grpo
from geoqa import Question
from support.padding import micro_batches, rectangle
from vision_tokens import encode


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
    """A size of None makes a question without a figure."""
    return [Question(f"q{i}", size and figure(size, 10 * seed + i), subject, ("1", "2", "3", "4"), "ABCD"[i % 4])
            for i, (size, subject) in enumerate(zip(sizes, subjects))]


def prompts_of(policy, questions, task=grpo.GEOQA):
    return grpo.encode_prompts(policy, questions, task)


def grouped(prompts, group_size):
    """Each prompt `group_size` times, one behind the other, as the sampler takes groups."""
    return [prompt for prompt in prompts for _ in range(group_size)]


def columns(rows, name="tokens"):
    """(n, T) of a tensor of each row, 0 behind a row's end."""
    return rectangle(rows, name)


def numbers(*shape, seed=0):
    """Uniform numbers in [0, 1), the same for a seed."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def uneven_rows(policy, prompts, group_size=4, max_tokens=34, temperature=1.0, seed=3):
    """Completions of which at least one stops at its first token, and the last one goes on to `max_tokens`.

    Random models stop rarely, so tokens that were drawn become stop tokens before the same draws again.
    """
    prompts, uniforms = grouped(prompts, group_size), numbers(len(prompts) * group_size, max_tokens, seed=seed)
    policy.stop_ids = torch.tensor([-1])
    *others, last = columns(grpo.sample(policy, prompts, max_tokens, temperature, uniforms=uniforms)).tolist()
    policy.stop_ids = torch.tensor([next(row[t] for row in others[t:] + others if row[t] not in last)
                                    for t in range(0, 21, 4)])
    rows = grpo.sample(policy, prompts, max_tokens, temperature, uniforms=uniforms)
    lengths = [len(row.tokens) for row in rows]
    assert min(lengths) == 1 and max(lengths) == max_tokens and len(set(lengths)) > 3, lengths
    return rows


def continued(row, tokens):
    """The prompt of a further turn: all that the row holds, and then `tokens`, which somebody else wrote."""
    more = torch.cat([row.tokens, tokens])
    positions = torch.arange(len(more)).expand(3, -1) + row.prompt.next_position
    return grpo.Prompt(torch.cat([row.prompt.ids, more]), torch.cat([row.prompt.positions, positions], 1),
                       row.prompt.figure, row.prompt.question)


def two_turns(policy, prompts, temperature=1.0, garbage=math.nan, tool=(70, 71, 72)):
    """Two rows a prompt: what the policy draws, 3 to 6 tokens of a tool, what it draws next, one more of the tool.

    The first row's tool ends with `tool`. What the sampler would have said of the tool's tokens is `garbage`.
    """
    policy.stop_ids, rows = torch.tensor([-1]), []
    for first in grpo.sample(policy, grouped(prompts, 2), 7, temperature, uniforms=numbers(2 * len(prompts), 7)):
        said = torch.tensor([65, 66, 67, *tool][:6 - len(rows) % 4])
        (second,) = grpo.sample(policy, [continued(first, said)], 5 + len(rows), temperature)
        tokens = [first.tokens, said, second.tokens, said[-1:]]
        drawn = [torch.cat([getattr(first, name), torch.full((len(said),), garbage), getattr(second, name),
                            torch.tensor([garbage])]) for name in ("logprobs", "entropies")]
        trained = torch.cat([torch.full((len(part),), i % 2 == 0) for i, part in enumerate(tokens)])
        rows.append(grpo.Completion(first.prompt, torch.cat(tokens), *drawn, trained, finished=True))
    return rows


def set_advantages(rows, seed=1):
    """Each token an advantage, positive or negative."""
    generator = torch.Generator().manual_seed(seed)
    for row in rows:
        row.advantage = torch.randn(len(row.tokens), generator=generator)
    return rows


def moved_away(rows, scale):
    """Lowers the old log-probabilities by up to `scale`: ratios are no longer 1, as if the policy had moved."""
    for i, row in enumerate(rows):
        row.logprobs = row.logprobs - scale * numbers(len(row.tokens), seed=i)
    return rows


# Numbers of the learner


def learned_logprobs(policy, rows, temperature=1.0, budget=2000):
    """row -> the learner's (logprobs, entropies), each (T,)."""
    found = {}
    with torch.no_grad():
        for micro in micro_batches(rows, budget):
            columns = grpo.completion_logprobs(policy, micro, temperature, with_entropies=True)
            found |= {row: [x[:len(row.tokens)] for x in each] for row, *each in zip(micro, *columns)}
    return found


def dlogp(policy, rows, temperature=1.0, **budget):
    """Largest difference between the sampler's and the learner's log-probabilities of trained tokens."""
    found = learned_logprobs(policy, rows, temperature, **budget)
    return max((found[row][0] - row.logprobs)[row.trained].abs().max().item() for row in rows)


def adapter_gradient(policy):
    """The gradient by all adapter weights as one vector; takes it from them."""
    flat = torch.cat([p.grad.flatten() for p in policy.parameters()])
    for p in policy.parameters():
        p.grad = None
    return flat


def gradient(policy, rows, budget=2000, **flags):
    """The gradient of all rows' loss, in micro-batches of at most `budget` tokens."""
    grpo.accumulate_gradients(policy, micro_batches(rows, budget), grpo.Config(**flags))
    return adapter_gradient(policy)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# Naive twins


def plain_inputs(policy, prompt):
    """A prompt as transformers takes it: with pixels, without positions."""
    ids = prompt.ids[None]
    inputs = {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids, dtype=torch.int)}
    if prompt.question.image is None:
        return inputs
    encoded = encode(policy.tokenizer, policy.image_processor, "", prompt.question.image)
    return inputs | {"mm_token_type_ids": (ids == policy.base.config.image_token_id).int(),
                     "pixel_values": encoded.pixels, "image_grid_thw": encoded.grid}


def naive_logprobs(policy, row, temperature=1.0, base=None):
    """(T,) with gradients; `base` is a copy of the policy's model in another type."""
    base, n, inputs = base or policy.base, len(row.tokens), plain_inputs(policy, row.prompt)
    inputs["input_ids"] = torch.cat([row.prompt.ids, row.tokens])[None]
    inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, n))
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(base.dtype)
    base.model.rope_deltas = None  # that of another row
    logits = base(**inputs, use_cache=False).logits[0, -n - 1:-1] / temperature
    logits[:, policy.forbidden_ids] = -math.inf
    return (logits - logits.logsumexp(-1, keepdim=True))[torch.arange(n), row.tokens]


@contextlib.contextmanager
def changed_inputs(module, change):
    """Inside, `change` gets the keyword arguments of each forward pass of `module`, a dict, and may change them."""
    hook = module.register_forward_pre_hook(lambda module, args, inputs: change(inputs), with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def chi_square_p(counts, probabilities):
    """p-value of Pearson's test, cells of expectation below 5 put together."""
    expected = probabilities.double() * counts.sum()
    small = expected < 5
    counts = torch.cat([counts[~small].double(), counts[small].sum()[None].double()])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    keep = expected > 0
    assert not counts[~keep].any(), "drawn, though its probability is 0"
    assert keep.sum() > 3, "too few draws to tell anything"
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = torch.tensor(float(keep.sum() - 1))
    return torch.special.gammaincc(freedom / 2, statistic.float() / 2).item()
