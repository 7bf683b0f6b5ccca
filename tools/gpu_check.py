"""Measures the real setting on a CUDA card: memory of each phase against the plan, seconds, tokens a second, |dlogp|.

    python -m tools.gpu_check                    # NF4, NF4 with flash-linear-attention if installed, then bf16
    python -m tools.gpu_check --only nf4         # one of nf4, nf4-fused, bf16, bf16-fused
    python -m tools.gpu_check --small            # a tiny model on the CPU: does this script still run?

pytest does not collect this file. No download: a randomly initialised model of exactly the shape of Qwen3.5-4B is made
on the GPU, saved once to a temporary folder (9 GB), and loaded through `grpo.load_policy`, so the real 4-bit path is
taken. The questions are drawn figures of 336 pixels, the setting is the article's: 8 questions x 8 completions, at most
1,024 tokens, their lengths geometric with mean about 280 by a fixed bias on the stop token. Two whole steps each; every
result is printed as soon as it is there. Memory is capped to --gib (24) of the card. Planned are completions of full
length: those that are drawn take less, those of the dry run take that.
"""

import argparse
import dataclasses
import gc
import itertools
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import demo
import grpo
from support import plan
from support.models import importable, quiet_libraries
from support.order import Order
from tiny import make_tokenizer, model_config, write_image_processor

MEAN_LENGTH = 280
CASES = {"nf4": ("nf4", False), "nf4-fused": ("nf4", True), "bf16": ("none", False), "bf16-fused": ("none", True),
         "small": ("none", False)}


def make_model(folder, device, small):
    """Writes a random model of the real shape (`small`: a tiny one), with a tokenizer of single bytes, to `folder`."""
    tokenizer = make_tokenizer()
    ids = tokenizer.get_vocab()
    if small:
        config = model_config("qwen3_5", ids, len(tokenizer))
    else:
        config = transformers.Qwen3_5Config(**plan.QWEN3_5_4B)
        for name in ("image", "video"):
            setattr(config, f"{name}_token_id", ids[f"<|{name}_pad|>"])
        config.vision_start_token_id, config.vision_end_token_id = ids["<|vision_start|>"], ids["<|vision_end|>"]
        config.text_config.eos_token_id = ids["<|endoftext|>"]
    with torch.device(device):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    model.generation_config.update(eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
                                   pad_token_id=ids["<|endoftext|>"])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_image_processor(folder)


def bias_stop_token(policy, mean_length):
    """Adds a constant to the stop token's logit, so that it is drawn about once in `mean_length` tokens."""
    head, stop = policy.base.get_output_embeddings(), policy.tokenizer.convert_tokens_to_ids("<|im_end|>")

    def biased(module, inputs, logits):
        others = logits.float().logsumexp(-1)
        target = others - torch.tensor(float(mean_length)).log()  # probability 1 / mean_length, whatever the others are
        column = torch.zeros_like(logits)
        column[..., stop] = (target - logits[..., stop].float()).to(logits.dtype)
        return logits + column

    head.register_forward_hook(biased)


class Phase:
    """Peak memory and seconds of the calls of a function."""

    def __init__(self, function, device):
        self.function, self.device, self.peak, self.seconds = function, device, 0, 0.0

    def __call__(self, *arguments, **keywords):
        self.synchronise()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        result = self.function(*arguments, **keywords)
        self.synchronise()
        self.seconds += time.perf_counter() - started
        if self.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device))
        return result

    def synchronise(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def check(case, folder, device, options):
    """The plan, the dry run and two steps in one precision and kernel path."""
    quantization, fused = CASES[case]
    config = grpo.Config(base_model=str(folder), device=str(device), quantization=quantization, fused_kernels=fused,
                         max_tokens=24 if options.small else 1024, reward="every_second", evaluate=False)
    rewards = itertools.cycle([1.0, 0.0])  # every group has both: all rows train
    task = dataclasses.replace(grpo.GEOQA, rewards={"every_second": lambda answer, question: next(rewards)})
    started = time.perf_counter()
    policy = grpo.load_policy(config)
    bias_stop_token(policy, 8 if options.small else MEAN_LENGTH)
    say(case, f"loaded in {time.perf_counter() - started:.0f} s")
    questions = [demo.as_question(row) for row in draw_rows(config.batch_size * 4, 96 if options.small else 336)]
    longest = max(len(prompt.ids) for prompt in grpo.encode_prompts(policy, questions, task))
    config = plan.fit_memory(grpo.ALGORITHM, policy, task, questions, config)
    planned, = plan.make_plans(grpo.ALGORITHM, config, policy.base.config, longest, (fused,))
    planned = planned.choose(plan.card_bytes(device))[1]
    phases = {"sampling": Phase(grpo.sample, device), "learning": Phase(grpo.update, device)}
    grpo.SAMPLERS["loop"], grpo.update = phases.values()
    try:
        take_steps(case, policy, Order(questions, config.seed), config, task, phases, planned)
    finally:
        grpo.SAMPLERS["loop"], grpo.update = (phase.function for phase in phases.values())


def take_steps(case, policy, order, config, task, phases, planned):
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for order.step in (1, 2):
        for phase in phases.values():
            phase.seconds = phase.peak = 0
        metrics, batch = grpo.train_step(policy, optimizer, order, config, task)
        prompts = [len(prompt.ids) for prompt in dict.fromkeys(row.prompt for row in batch.rows)]
        tokens, step = sum(row.length for row in batch.rows), f"step {order.step}"
        say(case, f"{step}: {tokens} tokens, mean {tokens / len(batch.rows):.0f}, prompts of at most {max(prompts)}; "
                  f"|dlogp| mean {metrics['trainer/dlogp_mean']:.1e} max {metrics['trainer/dlogp_max']:.1e}, loss "
                  f"{metrics['trainer/loss_mean']:+.4f}, gradient norm {metrics['trainer/grad_norm']:.3g}")
        for name, phase in phases.items():
            count = tokens if name == "sampling" else tokens + sum(prompts)
            taken = f"{phase.peak / plan.GIB:.2f} GiB at most, " if phase.peak else ""
            say(case, f"{step}: {name} {phase.seconds:.1f} s, {count / phase.seconds:.0f} tokens a second, "
                      f"{taken}planned {planned[name] / plan.GIB:.2f} GiB")


def draw_rows(count, size):
    rows = demo.draw_rows(count, seed=1)
    return [row | {"image": row["image"].resize((size, size))} for row in rows]


def say(case, text):
    print(f"{case:10} {text}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="one case; without it, those that can run here")
    parser.add_argument("--gib", type=float, default=24, help="memory to use of the card")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    device = torch.device("cpu" if options.small else "cuda:0")
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no CUDA GPU here (--small tries this script on a CPU)")
    quiet_libraries(torch.device("cpu"))
    say("versions", f"torch {torch.__version__}, transformers {transformers.__version__}")
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.gib * plan.GIB / card.total_memory), device)
        capped = min(int(options.gib * plan.GIB), card.total_memory)
        plan.card_bytes = lambda device=None: capped
        say("card", f"{card.name}, {card.total_memory / plan.GIB:.1f} GiB, capped to {capped / plan.GIB:.1f}")
    cases = [options.only] if options.only else ["small"] if options.small else [
        "nf4", *(["nf4-fused"] if importable("fla") else []), "bf16"]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), device, options.small)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for case in cases:
            try:
                check(case, Path(folder), device, options)
            except Exception as error:  # the next case may still run
                say(case, f"failed: {type(error).__name__}: {error}")
                if len(cases) == 1:
                    raise
            gc.collect()  # a 4-bit weight and its layer hold each other
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
