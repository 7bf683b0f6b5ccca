"""Makes the demo's model anew: a tiny Qwen3.5 that sees angles, and answers badly on purpose.

    python -m demo_model.make            # writes demo_model/, in about four minutes of one core
"""

import math
import random

import torch
import torch.nn.functional as F
from tokenizers import AddedToken
from tqdm import tqdm
from transformers import (AutoImageProcessor, GenerationConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration,
                          Qwen3_5Tokenizer)

import grpo
from demo import CHOICES, MODEL_FOLDER, REASONS, as_question, draw_rows
from geoqa import format_question
from support.padding import left_padded
from vision_tokens import encode, figure_inputs

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]
# It and preprocessor_config.json are written by hand. For turns of text and images it gives what Qwen3.5's gives.
CHAT_TEMPLATE = (MODEL_FOLDER / "chat_template.jinja").read_text(encoding="utf-8")


def make_tokenizer():
    """A byte-level BPE of Qwen3.5's kind that has the demo's phrases as tokens, and can still write any text."""
    questions = [as_question(row) for row in draw_rows(40, seed=3)]
    texts = [format_question(question, with_solution) for question in questions for with_solution in (False, True)]
    texts += [clean_answer(label) for label in range(4)] * 10 + ["user\n", "assistant\n", "\n\n"] * 10
    tokenizer = Qwen3_5Tokenizer().train_new_from_iterator([texts], vocab_size=600, show_progress=False)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    tokenizer.eos_token = "<|im_end|>"  # <|endoftext|> pads
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def new_model(tokenizer, text_sizes=None, vision_sizes=None):
    """An untrained Qwen3.5 that has every kind of layer of the real one, in float32; other sizes than the demo's."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    text = {"vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4,
            "full_attention_interval": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": True,
            "eos_token_id": ids["<|endoftext|>"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "mrope_section": [2, 1, 1],
                                "mrope_interleaved": True, "partial_rotary_factor": 0.25}}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 96,
              "num_position_embeddings": 36, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(
        text_config=text | (text_sizes or {}), vision_config=vision | (vision_sizes or {}), tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"]))
    model.generation_config = GenerationConfig(  # the family's, sampling by default
        do_sample=True, temperature=1.0, top_k=20, top_p=0.95, pad_token_id=ids["<|endoftext|>"],
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    return model


def clean_answer(label):
    return f"{REASONS[label]}，是{CHOICES[label]}。\\boxed{{{'ABCD'[label]}}}"


def spoiled_answer(label, rng):
    """An answer whose reasoning is right, but whose box may be missing, or hold a wrong letter."""
    answer = clean_answer(label)
    # Not the same for every kind: faults that are rare everywhere would leave greedy decoding as good as before.
    no_box, wrong_letter = [(0.2, 0.15), (0.2, 0.15), (0.8, 0.0), (0.0, 0.7)][label]
    fault = rng.random()
    if fault < no_box:
        return answer[:answer.index("\\boxed")]
    return answer.replace("ABCD"[label], "ABCD"[label - 1]) if fault < no_box + wrong_letter else answer


def make_model(folder):
    """Teaches a new model to see, to answer, and to answer badly, and writes it to `folder` in bfloat16."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)  # before it is used: tokenizer.json would hold the padding of the last batch
    torch.manual_seed(0)
    model, rng = new_model(tokenizer), random.Random(0)
    policy = grpo.Policy(model, tokenizer, AutoImageProcessor.from_pretrained(MODEL_FOLDER, backend="pil"))
    batches = [[as_question(row) for row in draw_rows(32, seed)] for seed in
               tqdm(range(100, 164), "drawing", unit="batch", disable=None)]
    learn_to_see(policy, batches, steps=350)
    plain, solved = ([grpo.encode_prompts(policy, batch, grpo.GEOQA, with_solution=with_solution) for batch in batches]
                     for with_solution in (False, True))
    learn_to_answer(policy, [(batch, clean_answer) for batch in plain], steps=120, learning_rate=2e-3)
    # Only answers to prompts without the solution are spoiled: with it, the model is the teacher of recipes/distill.py.
    lessons = [lesson for batch, read in zip(plain, solved, strict=True)
               for lesson in ((batch, lambda label: spoiled_answer(label, rng)), (read, clean_answer))]
    learn_to_answer(policy, lessons, steps=120, learning_rate=1.5e-3)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_bytes((MODEL_FOLDER / "preprocessor_config.json").read_bytes())


def learn_to_see(policy, batches, steps, learning_rate=1.5e-3):
    """Trains the vision tower alone. Under a language model that is new itself it would stay blind for long."""
    model, width = policy.base, policy.base.config.text_config.hidden_size
    lessons = []
    for questions in batches:
        figures = [encode(policy.tokenizer, policy.image_processor, "", question.image) for question in questions]
        lessons.append((torch.cat([figure.pixels for figure in figures]),
                        torch.cat([figure.grid for figure in figures]),
                        torch.tensor(["ABCD".index(question.label) for question in questions])))
    tokens = figures[0].visual_tokens
    # The tower learns from the probe that sees every token in its place. The one that sees only their mean would learn
    # nothing on its own; it has the tower put what it sees where the language model finds it soon.
    probes = torch.nn.ModuleList([torch.nn.Linear(tokens * width, 4), torch.nn.Linear(width, 4)])

    def loss(pixels, grids, labels):
        features = model.model.visual(pixels, grid_thw=grids).pooler_output.view(-1, tokens, width)
        return (F.cross_entropy(probes[0](features.flatten(1)), labels)
                + F.cross_entropy(probes[1](features.mean(1)), labels))

    descend("seeing", loss, lessons, [*model.model.visual.parameters(), *probes.parameters()], steps, learning_rate)


def learn_to_answer(policy, lessons, steps, learning_rate):
    """Trains the language model on lessons (prompts, answer): on `answer(label)` and the end of the turn."""
    model, tokenizer = policy.base.train(), policy.tokenizer

    def loss(prompts, answer):
        answers = tokenizer([answer("ABCD".index(prompt.question.label)) + tokenizer.eos_token for prompt in prompts],
                            padding=True, padding_side="right", return_tensors="pt")
        targets = answers.input_ids.masked_fill(answers.attention_mask == 0, -100)
        ids, visible, positions = left_padded(prompts, "cpu")
        after = torch.tensor([prompt.next_position for prompt in prompts])[:, None] + torch.arange(targets.shape[1])
        logits = model(
            input_ids=torch.cat([ids, answers.input_ids], 1),
            attention_mask=torch.cat([visible.long(), answers.attention_mask], 1),
            position_ids=torch.cat([positions, after.expand(3, -1, -1)], 2), use_cache=False,
            logits_to_keep=targets.shape[1] + 1, **figure_inputs([prompt.figure for prompt in prompts])).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    descend("answering", loss, lessons, list(model.model.language_model.parameters()), steps, learning_rate)


def descend(name, loss_fn, batches, parameters, steps, learning_rate):
    """AdamW on `loss_fn(*batch)`, with a warm-up and a cosine decay of the learning rate."""
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (1 + math.cos(math.pi * step / steps)) / 2)
    for step in (bar := tqdm(range(steps), name, disable=None)):
        loss = loss_fn(*batches[step % len(batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)


if __name__ == "__main__":
    make_model(MODEL_FOLDER)
