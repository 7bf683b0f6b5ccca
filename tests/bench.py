"""Times one GRPO step of grpo.py against one of TRL's GRPOTrainer: same model, same questions, same work, on a CPU.

    python -m venv runs/trl                                    # TRL lives in its own environment
    runs/trl/bin/pip install torch==2.13.0                     # first, and the version that is here
    runs/trl/bin/pip install transformers==5.24.0 trl peft datasets accelerate pillow
    python tests/bench.py                                      # about 10 minutes; --quick: one step each

pytest does not collect this file. The parent makes a model folder, then starts one process for each row of the table
and lets them take steps in turn, never two at once. Both sides do this work in a step:
 1. A randomly initialised Qwen3.5 of about 7 M parameters (three delta-net layers to one of attention, as the real one)
    in float32, LoRA of rank 32 on the same linear layers, AdamW at the same learning rate.
 2. The same 8 questions, 8 completions each, temperature 1, at most 256 tokens. A fixed bias on the stop token's logit,
    in the output head that both load, makes lengths geometric with mean about 60.
 3. In each group half of the completions are rewarded, whatever they say: all 64 rows have a gradient on both sides.
    Advantage is reward - mean, the loss a mean over all tokens, no KL term, one optimiser step.
 4. No activation checkpointing, no logging, no evaluation, no checkpoints. Threads: --threads (2), by OMP_NUM_THREADS
    and torch.set_num_threads. OpenMP threads sleep while they wait, so that the idle process disturbs nothing.

What is not the same, and whom it helps:
 - `sampling` is the call that turns encoded prompts into tokens; ours also decodes them to text, and finds the
   log-probability and the entropy of each token there. TRL computes the entropy in its learner.
 - Ours shares prefill and figures within a group, drops rows that have finished, sorts rows by length before it cuts
   micro-batches, and takes the loss from the sampler's log-probabilities. These are the differences to be measured.
   Stock TRL pads every micro-batch to the longest completion of the step.
 - TRL's fetch of decoded figures from its data set happens between two steps and is not counted. Ours has them decoded
   in memory beforehand.
 - Qwen3.5's video processor needs torchvision, so TRL gets the family's processor without it. No question has a video.
 - vLLM, Liger and the flash-attention kernels need a GPU; TRL's continuous batching takes no images.
 - Memory is resident memory of the process: its peak in the measured steps, and that above what was there before the
   first step.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
REAL_QUESTIONS = ROOT.parent / "shared" / "geolaux"
QUESTIONS, GROUP, MAX_TOKENS, MEAN_LENGTH, LORA_RANK, LEARNING_RATE = 8, 8, 256, 60, 32, 4e-5
ROWS = QUESTIONS * GROUP

# ------------------------------------------------------------------------------------------------ Model and questions


def make_model(folder, questions):
    """Writes a random Qwen3.5 of about 7 M parameters, with the real image processor's sizes, to `folder`."""
    import torch
    from tokenizers import AddedToken
    from transformers import GenerationConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5Tokenizer

    from demo import CHAT_TEMPLATE, SPECIAL
    from geoqa import format_question

    texts = [text for question in questions for text in (format_question(question), question.answer)]
    tokenizer = Qwen3_5Tokenizer().train_new_from_iterator([texts], vocab_size=2000, show_progress=False)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    text = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 8,
            "full_attention_interval": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
            "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 3,
            "linear_num_value_heads": 6, "max_position_embeddings": 4096, "tie_word_embeddings": True,
            "eos_token_id": ids["<|endoftext|>"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [3, 3, 2],
                                "mrope_interleaved": True, "partial_rotary_factor": 0.25}}
    vision = {"depth": 2, "hidden_size": 128, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 256,
              "num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(
        text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"]))
    model.generation_config = GenerationConfig(do_sample=True, top_k=20, top_p=0.95, pad_token_id=ids["<|endoftext|>"],
                                               eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]])
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3}))
    return sum(weight.numel() for weight in model.parameters())


def bias_output_head(model, tokenizer):
    """Gives the output head a bias: the stop token has probability 1/MEAN_LENGTH, other special tokens almost none.

    Without the second part TRL, which forbids the image token alone, would draw other tokens than ours.
    """
    import torch

    head = model.get_output_embeddings()
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special and token != stop]
    bias = torch.zeros(head.out_features)
    bias[special] = -30.0
    spread = 0.02 ** 2 * head.in_features  # variance of a logit: rows of std 0.02, states of norm sqrt(width)
    bias[stop] = torch.tensor((head.out_features - len(special)) / (MEAN_LENGTH - 1)).log() + spread / 2
    with torch.no_grad():
        head.weight[stop] = 0.0  # its logit is the bias alone
    head.bias = torch.nn.Parameter(bias, requires_grad=False)


def load_questions(dataset):
    """The training questions, figures decoded and on white."""
    from geoqa import Question, load_geoqa
    from vision_tokens import on_white

    return [Question(q.id, on_white(q.image), q.subject, q.choices, q.label, q.answer)
            for q in load_geoqa(dataset, "train")]


# ------------------------------------------------------------------------------------------------------ Both workers


class Meter:
    """Seconds in wrapped calls, figures through the vision tower, resident memory. Reads `/proc`: Linux only."""

    def __init__(self, model):
        self.seconds, self.figures, self.lengths = {}, 0, []
        model.model.visual.register_forward_pre_hook(self.count_figures, with_kwargs=True)

    def count_figures(self, module, arguments, keywords):
        self.figures += len(keywords["grid_thw"] if "grid_thw" in keywords else arguments[1])

    def timed(self, name, function):
        def wrapper(*arguments, **keywords):
            started = time.perf_counter()
            result = function(*arguments, **keywords)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            return result
        return wrapper

    def start(self):
        self.seconds, self.figures, self.lengths = {}, 0, []
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at the present size
        self.started = time.perf_counter()

    def stop(self, sampling, learning):
        return {"step": time.perf_counter() - self.started, "sampling": sampling, "learning": learning,
                "tokens": sum(self.lengths), "mean length": sum(self.lengths) / len(self.lengths),
                "figures": self.figures, "peak": resident("VmHWM")}


def resident(name):
    """"VmRSS" (now) or "VmHWM" (peak) of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


class Turns:
    """The worker's end of the two pipes: waits to be called, answers in JSON. All other output goes to stderr."""

    def __init__(self):
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self):
        """True when the next step is due, False at the end."""
        return sys.stdin.readline().strip() == "step"

    def send(self, message):
        print(json.dumps(message), file=self.out, flush=True)


def our_worker(options, turns):
    """Steps of grpo.py, `options.rows` rows in a micro-batch."""
    import torch

    import grpo
    from settings import check_config

    config = grpo.Config(base_model=options.model, device="cpu", batch_size=QUESTIONS, group_size=GROUP,
                         max_tokens=MAX_TOKENS, lora_rank=LORA_RANK, learning_rate=LEARNING_RATE,
                         micro_batch_size=options.rows)  # THE ONE PLACE that sets the rows of our micro-batch
    check_config(config, grpo.LOSS_FNS)
    policy = grpo.load_policy(config)
    bias_output_head(policy.base, policy.tokenizer)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    order, rewards = itertools.cycle(load_questions(options.dataset)), itertools.cycle([1.0, 0.0])
    grpo.grade = lambda text, label: next(rewards)
    meter = Meter(policy.base)
    turns.send({"loaded": resident("VmRSS"), "trained": sum(p.numel() for p in policy.parameters())})
    while turns.wait():
        meter.start()
        metrics, batch, _ = grpo.train_step(policy, optimizer, lambda n: list(itertools.islice(order, n)), config)
        meter.lengths = batch.rollouts.lengths.tolist()
        turns.send(meter.stop(metrics["time/sampling"], metrics["time/learning"])
                   | {"prompt": float(batch.prompts.attention_mask.sum(1).float().mean()), "rows": len(meter.lengths)})


def trl_worker(options, turns):
    """Steps of trl.GRPOTrainer, `options.rows` rows in a micro-batch."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import (AutoImageProcessor, AutoTokenizer, Qwen3_5ForConditionalGeneration, Qwen3VLProcessor,
                              TrainerCallback)
    from trl import GRPOConfig, GRPOTrainer

    from geoqa import format_question
    from loading import LORA_MODULES

    class FigureProcessor(Qwen3VLProcessor):  # the family's, without the video half, which needs torchvision
        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    image_processor = AutoImageProcessor.from_pretrained(options.model, backend="pil")
    processor = FigureProcessor(image_processor, tokenizer, chat_template=tokenizer.chat_template)
    model = Qwen3_5ForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32)
    bias_output_head(model, tokenizer)
    meter, prompt_lengths = Meter(model), []
    questions = load_questions(options.dataset)
    dataset = Dataset.from_list([{"image": question.image, "prompt": [{"role": "user", "content": [
        {"type": "text", "text": format_question(question)}, {"type": "image"}]}]} for question in questions])

    class InTurn(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if not turns.wait():
                os._exit(0)
            meter.start()

        def on_step_end(self, args, state, control, **_):
            whole = meter.stop(meter.seconds["generate"], 0.0)
            turns.send(whole | {"learning": whole["step"] - meter.seconds["generate and score"],
                                "prompt": statistics.mean(prompt_lengths), "rows": len(meter.lengths)})

    accumulate = ROWS // options.rows
    trainer = GRPOTrainer(
        model=model, processing_class=processor, train_dataset=dataset, callbacks=[InTurn()],
        reward_funcs=lambda completions, **_: [float(i % 2 == 0) for i in range(len(completions))],
        peft_config=LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, lora_dropout=0.0, target_modules=LORA_MODULES),
        args=GRPOConfig(
            output_dir=str(Path(options.model) / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False,
            per_device_train_batch_size=options.rows, gradient_accumulation_steps=accumulate,
            steps_per_generation=accumulate, num_generations=GROUP, num_iterations=1, beta=0.0, loss_type="dapo",
            scale_rewards="none", max_completion_length=MAX_TOKENS, temperature=1.0, top_p=1.0, top_k=0,
            chat_template_kwargs={"enable_thinking": False}, shuffle_dataset=False, max_steps=10_000,
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0,
            max_grad_norm=1.0, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True))
    generate = trainer._generate_single_turn

    def single_turn(prompt_ids, *arguments, **keywords):
        completions, logprobs = meter.timed("generate", generate)(prompt_ids, *arguments, **keywords)
        prompt_lengths[:] = map(len, prompt_ids)
        meter.lengths = [len(completion) for completion in completions]
        return completions, logprobs

    trainer._generate_single_turn = single_turn
    trainer._generate_and_score_completions = meter.timed(
        "generate and score", trainer._generate_and_score_completions)
    turns.send({"loaded": resident("VmRSS"),
                "trained": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)})
    trainer.train()


# ------------------------------------------------------------------------------------------------------------ Parent


class Worker:
    """A process that takes steps when asked; `side` is "ours" or "trl"."""

    def __init__(self, name, side, python, rows, model, dataset, threads):
        self.name, self.steps = name, []
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE",
                                    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [python, __file__, "--worker", side, "--rows", str(rows), "--model", model, "--dataset", dataset,
             "--threads", str(threads)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.start = self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"error: the worker {self.name} stopped, see above")
        return json.loads(line)

    def step(self):
        print("step", file=self.process.stdin, flush=True)
        self.steps.append(self.read())
        return self.steps[-1]

    def close(self):
        self.process.stdin.close()
        self.process.wait()

    def median(self, key):
        return statistics.median(step[key] for step in self.steps)


def row(worker, ours):
    step, sampling = worker.median("step"), worker.median("sampling")
    rates = [statistics.median(s["tokens"] / s[part] for s in worker.steps) for part in ("step", "sampling")]
    peak = max(s["peak"] for s in worker.steps)
    return [worker.name, f"{step:.2f}", f"{sampling:.2f}", f"{worker.median('learning'):.2f}", f"{rates[0]:.0f}",
            f"{rates[1]:.0f}", f"{peak:.0f}", f"{peak - worker.start['loaded']:.0f}",
            f"{worker.median('figures'):.0f}", f"{statistics.mean(s['mean length'] for s in worker.steps):.1f}",
            *(f"{worker.median(part) / ours.median(part):.2f}" for part in ("step", "sampling", "learning"))]


HEADER = ["", "s/step", "sampling", "learning", "tokens/s", "tok/s sampling", "peak MiB", "above start", "figures",
          "mean length", "step x", "sampling x", "learning x"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--quick", action="store_true", help="one measured step, no warm-up: does it still run?")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side")
    parser.add_argument("--rows", type=int, default=8, help="completions in a micro-batch, the same on both sides")
    parser.add_argument("--trl-rows", type=int, nargs="*", default=[ROWS], help="further TRL rows of the table")
    parser.add_argument("--trl-python", default=str(ROOT / "runs/trl/bin/python"), help="python of TRL's environment")
    parser.add_argument("--worker", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--dataset", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        import torch

        turns = Turns()
        torch.set_num_threads(options.threads)
        return (our_worker if options.worker == "ours" else trl_worker)(options, turns)
    if options.quick:
        options.steps, options.warmup = 1, 0
    with tempfile.TemporaryDirectory() as folder:
        compare(options, Path(folder))


def compare(options, folder):
    dataset = str(REAL_QUESTIONS)
    if not REAL_QUESTIONS.is_dir():
        from demo import write_dataset

        dataset = str(folder / "data")
        write_dataset(Path(dataset))
    (folder / "model").mkdir()
    model = str(folder / "model")
    size = make_model(folder / "model", load_questions(dataset))
    ours = Worker(f"ours, {options.rows} rows", "ours", sys.executable, options.rows, model, dataset, options.threads)
    others = [Worker(f"TRL, {rows} rows", "trl", options.trl_python, rows, model, dataset, options.threads)
              for rows in (options.rows, *options.trl_rows)]
    workers = [ours, *others]
    adapters = ", ".join(f"{worker.start['trained']:,}" for worker in workers)
    print(f"{size:,} parameters, adapters of {adapters}; "
          f"{options.threads} threads; questions: {dataset}")
    for t in range(options.warmup + options.steps):
        for worker in workers:
            step = worker.step()
            print(f"{'warm-up' if t < options.warmup else 'step'} {t + 1} {worker.name}: {step['step']:.2f} s, sampling "
                  f"{step['sampling']:.2f}, {step['rows']} rows, {step['tokens']} tokens, prompts of "
                  f"{step['prompt']:.1f}", flush=True)
        if t < options.warmup:
            for worker in workers:
                worker.steps.clear()
    table = [HEADER, ["-"] * len(HEADER), *(row(worker, ours) for worker in workers)]
    print(f"\nmedians of {options.steps} alternating steps; x: that row's seconds over ours")
    for line in table:
        print("| " + " | ".join(line) + " |")
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main()
