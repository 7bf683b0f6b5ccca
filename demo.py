"""Vision GRPO on a tiny model and drawn figures: watch grpo.py learn on two CPU cores, with no GPU and no download.

    python demo.py                       # the shipped model
    python demo.py --steps 20 --seed 1   # takes every flag of grpo.py
    python demo.py --make-model          # makes demo_model/ anew first

What learns here is grpo.py as it is: it gets a local model folder and a local data folder, as anybody may give it
theirs, and does not know that this is a demo. What is a toy:
 1. The question is which kind of angle is drawn: acute, right, obtuse or straight. The columns are those of GeoQA.
 2. The policy is a Qwen3.5 of 0.8 M parameters with a vocabulary of its own. It was taught to see angles and to answer,
    and then spoiled on purpose: under obtuse angles it mostly leaves out the box, under straight ones it mostly names a
    wrong letter, and a little of both elsewhere. As in the real run, half of what GRPO then gains is format.
"""

import json
import math
import os
import random

# Threads that spin while they wait make this many times slower where something else keeps a core busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from tokenizers import AddedToken
from tqdm import tqdm
from transformers import (AutoImageProcessor, GenerationConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration,
                          Qwen3_5Tokenizer)

import grpo
from geoqa import Question, format_question
from support.errors import UserError
from vision_tokens import encode_figures, encode_prompts, select_figures

MODEL_FOLDER = Path(__file__).resolve().parent / "demo_model"
CHOICES = ["锐角", "直角", "钝角", "平角"]
DEGREES = [(25, 50), (90, 90), (130, 150), (180, 180)]  # apart, so that each figure has one right answer
REASONS = ["夹角小于直角", "两边互相垂直", "夹角大于直角", "两边成一条直线"]
SUBJECTS = ["如图，图中所画的角是哪一种角？", "看图判断，这是哪一种角？", "图中的角属于下列哪一种？"]


@dataclass
class DemoConfig(grpo.Config):
    base_model: str = grpo.flag(str(MODEL_FOLDER), "policy: a hub id or a local folder")
    dataset: str = grpo.flag("runs/demo-data", "questions: a hub id or a local folder; the default is drawn if missing")
    device: str = grpo.flag("cpu", "auto: the CUDA GPU; or cuda, cuda:1, cpu")
    steps: int = grpo.flag(80, "training steps, one update each")
    max_tokens: int = grpo.flag(16, "most new tokens of a completion, in training and evaluation")
    learning_rate: float = grpo.flag(1e-3, "AdamW's, constant")
    eval_batch_size: int = grpo.flag(100, "questions decoded at once in evaluation")
    make_model: bool = grpo.flag(False, "make demo_model/ anew before training")


def main(argv=None):
    grpo.run_command_line(DemoConfig, run, argv)


def run(config):
    made_here = config.base_model == str(MODEL_FOLDER)
    if config.make_model and not made_here:
        raise UserError(f"--make-model makes {MODEL_FOLDER}: leave out --base-model")
    if config.make_model or (made_here and not (MODEL_FOLDER / "model.safetensors").exists()):
        make_model(MODEL_FOLDER)
    if config.dataset == DemoConfig.dataset:
        write_dataset(Path(config.dataset))
    return grpo.main(config)


# --------------------------------------------------------------------------------------------------------- Figures


def draw_angle(degrees, rng, size=96):
    """An angle in the style of GeoQA's figures -> RGBA image, black lines on transparent ground."""
    big = 4 * size  # drawn large and shrunk: Pillow's lines have no smooth edges
    ink = Image.new("L", (big, big))
    pen = ImageDraw.Draw(ink)
    first = rng.uniform(0, 360)
    middle = math.radians(first + degrees / 2)
    shift = 0.25 * math.cos(math.radians(degrees / 2))  # the vertex away from the rays: the angle fills the figure
    x, y = (big * (0.5 - shift * turn + rng.uniform(-0.02, 0.02)) for turn in (math.cos(middle), math.sin(middle)))
    width = rng.randint(8, 20)
    for direction in (math.radians(first), math.radians(first + degrees)):
        length = big * rng.uniform(0.36, 0.46)
        pen.line([(x, y), (x + length * math.cos(direction), y + length * math.sin(direction))], fill=255, width=width)
    dot = width * rng.uniform(0.9, 1.2)  # shows the vertex of a straight angle
    pen.ellipse([x - dot, y - dot, x + dot, y + dot], fill=255)
    figure = Image.new("RGBA", (size, size))
    figure.putalpha(ink.resize((size, size), Image.Resampling.LANCZOS))
    return figure


def draw_rows(count, seed):
    """`count` rows with GeoQA's columns, each kind of angle equally often."""
    rng = random.Random(seed)
    labels = [i % 4 for i in range(count)]
    rng.shuffle(labels)
    return [{"id": i, "image": draw_angle(rng.uniform(*DEGREES[label]), rng), "subject": rng.choice(SUBJECTS),
             "choices": CHOICES, "label": label, "answer": f"{REASONS[label]}，是{CHOICES[label]}。"}
            for i, label in enumerate(labels)]


def write_dataset(folder):
    """Writes train.parquet (512 rows) and test.parquet (100 other figures), where they are not there yet."""
    from datasets import Dataset, Features, List, Value, disable_progress_bars
    from datasets import Image as ImageColumn

    columns = Features({"id": Value("int64"), "image": ImageColumn(), "subject": Value("string"),
                        "choices": List(Value("string")), "label": Value("int64"), "answer": Value("string")})
    disable_progress_bars()  # they would flash for a tenth of a second
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the demo's figures cannot be written to {folder}: {error.strerror}") from error
    # The seeds are constants: --seed changes the training, never the figures, so that runs can be compared.
    for split, count, seed in (("train", 512, 1), ("test", 100, 2)):
        path = folder / f"{split}.parquet"
        if not path.exists():
            draft = folder / f"{split}.{os.getpid()}.tmp"
            Dataset.from_list(draw_rows(count, seed), columns).to_parquet(draft)
            os.replace(draft, path)


# ----------------------------------------------------------------------------------------------------------- Model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]
# What Qwen3.5's template gives for turns of text and images.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for item in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if item.type == 'image' else item.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""


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


def as_question(row):
    return Question(row["id"], row["image"], row["subject"], tuple(row["choices"]), "ABCD"[row["label"]], row["answer"])


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


# ------------------------------------------------------------------------------------------------------ Warm start


def make_model(folder):
    """Teaches a new model to see, to answer, and to answer badly, and writes it to `folder` in bfloat16."""
    tokenizer = make_tokenizer()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").unlink(missing_ok=True)  # written last: where it is, the folder is whole
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "size": {"shortest_edge": 96 * 96, "longest_edge": 4 * 96 * 96}, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3}, indent=1) + "\n")
    torch.manual_seed(0)
    model, rng = new_model(tokenizer), random.Random(0)
    model.config.save_pretrained(folder)
    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    batches, solved = [], []
    for seed in tqdm(range(100, 164), "drawing", unit="batch", disable=None):
        questions = [as_question(row) for row in draw_rows(32, seed)]
        for prompts, with_solution in ((batches, False), (solved, True)):
            prompts.append((encode_prompts(tokenizer, image_processor, questions, with_solution=with_solution),
                            ["ABCD".index(question.label) for question in questions]))
    learn_to_see(model, batches, steps=350)
    learn_to_answer(model, tokenizer, [(*batch, clean_answer) for batch in batches], steps=120, learning_rate=2e-3)
    # Only answers to prompts without the solution are spoiled: with it, the model is the teacher of --advantage opsd.
    lessons = [lesson for batch, read in zip(batches, solved, strict=True)
               for lesson in ((*batch, lambda label: spoiled_answer(label, rng)), (*read, clean_answer))]
    learn_to_answer(model, tokenizer, lessons, steps=120, learning_rate=1.5e-3)
    model.to(torch.bfloat16).save_pretrained(folder)


def learn_to_see(model, batches, steps, learning_rate=1.5e-3):
    """Trains the vision tower alone. Under a language model that is new itself it would stay blind for long."""
    tokens, width = batches[0][0].image_tokens[0], model.config.text_config.hidden_size
    # The tower learns from the probe that sees every token in its place. The one that sees only their mean would learn
    # nothing on its own; it has the tower put what it sees where the language model finds it soon.
    probes = torch.nn.ModuleList([torch.nn.Linear(tokens * width, 4), torch.nn.Linear(width, 4)])

    def loss(prompts, labels):
        features = model.model.visual(prompts.pixel_values, grid_thw=prompts.image_grid_thw).pooler_output
        features, labels = features.view(-1, tokens, width), torch.tensor(labels)
        return (F.cross_entropy(probes[0](features.flatten(1)), labels)
                + F.cross_entropy(probes[1](features.mean(1)), labels))

    descend("seeing", loss, batches, [*model.model.visual.parameters(), *probes.parameters()], steps, learning_rate)


def learn_to_answer(model, tokenizer, lessons, steps, learning_rate):
    """Trains the language model on lessons (prompts, labels, answer): on `answer(label)` and the end of the turn."""

    def loss(prompts, labels, answer):
        answers = tokenizer([answer(label) + tokenizer.eos_token for label in labels], padding=True,
                            padding_side="right", return_tensors="pt")
        targets = answers.input_ids.masked_fill(answers.attention_mask == 0, -100)
        logits = model(
            input_ids=torch.cat([prompts.input_ids, answers.input_ids], 1),
            attention_mask=torch.cat([prompts.attention_mask, answers.attention_mask], 1),
            mm_token_type_ids=torch.cat([prompts.mm_token_type_ids, torch.zeros_like(targets)], 1),
            image_grid_thw=prompts.image_grid_thw, use_cache=False, logits_to_keep=targets.shape[1] + 1,
            mm_encoder_outputs=select_figures(encode_figures(model, prompts), range(len(labels)))).logits[:, :-1]
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
    main()
